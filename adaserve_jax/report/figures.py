"""Drawings of figures for HTML: SVG by matplotlib, once in light and once in dark colours.

Each picture is an <img> with the SVG in its address, so that it fetches nothing, runs nothing and shares no identifier
or style with the page. The style sheet shows the picture of class `light` or `dark`. The same figure gives the same
bytes. matplotlib is imported on use.
"""

from __future__ import annotations

import io
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from importlib.util import find_spec
from itertools import pairwise
from math import isfinite
from textwrap import wrap
from typing import Any

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Figure, Panel, PlotPoint, Series, number, printable, thinned
from adaserve_jax.report.palette import Style, shades, styles_of

Colours = Mapping[str, str]
"""Shades by name, as `palette.shades` gives them."""
WIDTH, HEIGHT = 400.0, 250.0
"""Size of a panel in CSS pixels: as wide as a telephone's screen, with letters as large as the page's, so that panels
stand beside each other on a wide page and below each other on a narrow one."""
LETTER, SMALL_LETTER = 12.0, 10.5
LETTER_WIDTH = 0.6 * LETTER
"""Width of a usual letter; fonts of most machines are narrower."""
LINE = 16.0
RIGHT = 14.0
MOST_POINTS = 400
MOST_MARKERS = 24
MOST_TICKS = 9
"""Most values of x that each get a tick of their own, if their labels fit."""
TITLE_LETTERS, LABEL_LETTERS, NAME_LETTERS = 46, 54, 22
LEAST_BAR, LEAST_SLOT = 9.0, 22.0
KIND_NAMES = {"step": "Line", "stack": "Stacked bars", "scatter": "Points"}


def need_matplotlib() -> None:
    """Raise ConfigError unless figures can be drawn here."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "figures are drawn with matplotlib, which is not installed; install it with "
            "`pip install adaserve-jax[plot]`, or write the report as Markdown, which has their numbers: -o report.md"
        )


def draw(figure: Figure) -> str:
    """Return the HTML of a figure: a picture and a legend per panel, or one legend for panels that share series.

    Raises ConfigError without matplotlib, ValueError where a logarithmic axis cannot show a value.
    """
    need_matplotlib()
    figure = _cleaned(figure)
    styles = styles_of(figure)
    names = [tuple(dict.fromkeys(series.name for series in panel.series)) for panel in figure.panels]
    all_names = tuple(dict.fromkeys(name for each in names for name in each))
    common = len(names) < 2 or len(all_names) < sum(map(len, names))
    with _settings():
        panels = [_panel(figure, panel, styles) for panel in figure.panels]
        if common:
            head = _legend(figure, all_names, styles)
        else:
            head = ""
            legends = [_legend(figure, each, styles) for each in names]
            panels = [f"<div>{panel}{legend}</div>" for legend, panel in zip(legends, panels, strict=True)]
    drawn = "\n".join(panels)
    return f'{head}<div class="plots">\n{drawn}\n</div>'


def _legend(figure: Figure, names: Sequence[str], styles: Mapping[str, Style]) -> str:
    """Return a list of series names with their signs; nothing for a single name."""
    if len(names) < 2:
        return ""
    size = 'alt="" width="30" height="12"'
    entries = [
        _pictures(lambda colours, at=name: _plot_swatch(figure, styles[at], colours), "swatch", size) + escape(name)
        for name in names
    ]
    return f'<ul class="legend">{"".join(f"<li>{entry}</li>" for entry in entries)}</ul>\n'


def _panel(figure: Figure, panel: Panel, styles: Mapping[str, Style]) -> str:
    alt = f"{panel.title or figure.title}. {described(figure, panel)}"
    return _pictures(lambda colours: _plot(figure, panel, styles, colours), "plot", f'alt="{escape(alt)}"')


def _pictures(drawn: Callable[[Colours], Any], kind: str, attributes: str) -> str:
    """Return the light and the dark picture of a plot. kind: its class. attributes: further HTML attributes."""
    return "".join(
        f'<img class="{kind} {name}" {attributes} src="data:image/svg+xml;base64,{_encoded(drawn(shades(dark=dark)))}">'
        for name, dark in (("light", False), ("dark", True))
    )


def described(figure: Figure, panel: Panel) -> str:
    """Return the alternative text of a panel: its axes, and the range of every series."""
    parts = [f"{KIND_NAMES.get(figure.kind, figure.kind.capitalize())}: {panel.y_label} over {figure.x_label}."]
    for series in panel.series:
        known = [y for y in series.y if y is not None]
        span = f"{panel.format(min(known))} to {panel.format(max(known))}" if known else "no values"
        parts.append(f"{series.name or panel.y_label}: {span}.")
    return " ".join([*parts, "The numbers are in a table below the figure."])


@contextmanager
def _settings() -> Iterator[None]:
    """Use matplotlib's own defaults instead of the user's, text as text, and identifiers that are always the same.

    Warnings for letters of other scripts are ignored: the reader's fonts have them.
    """
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=".*font does not have.*")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "adaserve", "text.parse_math": False, "font.size": 12,
             "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"], "hatch.linewidth": 1.0}
        )  # fmt: skip
        yield


def _encoded(sheet: Any) -> str:
    """Return the sheet as SVG in base64, transparent and without a date."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    sheet.patch.set_visible(False)
    for axes in sheet.axes:
        axes.patch.set_visible(False)
    sheet.savefig(file, format="svg", metadata=nothing, dpi=72)
    return b64encode(file.getvalue().encode()).decode()


def _cleaned(figure: Figure) -> Figure:
    """Put each text on one line, without characters that XML does not allow, and a gap for each value that is not
    finite."""

    def text(value: str) -> str:
        return printable(" ".join(value.split()))

    def series(one: Series) -> Series:
        xs = tuple(text(x) if isinstance(x, str) else x for x in one.x)
        y, low, high = (tuple(map(_finite, column)) for column in (one.y, one.low, one.high))
        return replace(one, name=text(one.name), x=xs, y=y, low=low, high=high, labels=tuple(map(text, one.labels)))

    panels = tuple(
        replace(p, title=text(p.title), y_label=text(p.y_label), series=tuple(map(series, p.series)))
        for p in figure.panels
    )
    marks = tuple((x, text(label)) for x, label in figure.marks)
    return replace(figure, title=text(figure.title), x_label=text(figure.x_label), panels=panels, marks=marks)


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _sheet(width: float, height: float) -> tuple[Any, Any]:
    """Return an empty matplotlib figure of so many pixels, and its renderer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(width / 72, height / 72), dpi=72)
    return sheet, FigureCanvasAgg(sheet).get_renderer()


def _plot(figure: Figure, panel: Panel, styles: Mapping[str, Style], colours: Colours) -> Any:
    """Plot a panel as a matplotlib figure: title and y label on top, axes below."""
    categories = Categories.of(figure, panel, width=WIDTH - 60.0)
    titles = wrap(panel.title, TITLE_LETTERS)
    labels = wrap(panel.y_label, LABEL_LETTERS)
    height = HEIGHT + LINE * (len(titles) + len(labels) - 2)
    if categories.horizontal:
        lines = max(label.count("\n") + 1 for label in categories.labels)
        slot = max(LEAST_SLOT, LINE * lines, LEAST_BAR * len(panel.series) if figure.kind == "bars" else 0.0)
        height += max(0.0, slot * len(categories.names) - HEIGHT + 80.0)
    sheet, renderer = _sheet(WIDTH, height)
    axes: Any = sheet.add_axes((0.1, 0.1, 0.8, 0.8))
    for line, text in enumerate([*titles, *labels]):
        bold = line < len(titles)
        sheet.text(
            0, 1 - (line * LINE + LETTER) / height, text, fontsize=LETTER, va="baseline",
            weight=700 if bold else 400, color=colours["ink" if bold else "muted"],
        )  # fmt: skip
    if all(y is None for series in panel.series for y in series.y):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=colours["muted"])
        return sheet
    plot = PanelPlot(axes, figure, panel, styles, categories, colours)
    plot.draw()
    plot.set_axes(renderer, top=LINE * (len(titles) + len(labels)), height=height)
    return sheet


def _look(style: Style, colours: Colours, *, markers: bool) -> dict[str, Any]:
    colour = colours[style.colour]
    look: dict[str, Any] = {"color": colour, "linewidth": 2.0, "solid_capstyle": "round"}
    look["linestyle"] = (0, tuple(length / 2.0 for length in style.dash)) if style.dash else "solid"
    if markers:
        face = colours["panel"] if style.hollow else colour
        look |= {"marker": style.marker, "markersize": 6.5, "markerfacecolor": face, "markeredgecolor": colour}
        look |= {"markeredgewidth": 1.3, "clip_on": False}
    return look


def _fill(style: Style, colours: Colours) -> dict[str, Any]:
    return {
        "facecolor": colours[style.colour],
        "edgecolor": colours["panel"],
        "linewidth": 0.7,
        "hatch": style.hatch or None,
    }


def _plot_swatch(figure: Figure, style: Style, colours: Colours) -> Any:
    """Plot the legend's sign for a series: a piece of its line with its marker, or of its bar."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    sheet, _ = _sheet(30.0, 12.0)
    if figure.kind in ("bars", "stack"):
        sheet.add_artist(Rectangle((0.1, 0.05), 0.8, 0.9, **_fill(style, colours)))
        return sheet
    look = _look(style, colours, markers=figure.kind != "step")
    if figure.kind == "scatter":
        look["linestyle"] = "none"
    sheet.add_artist(Line2D([0.03, 0.5, 0.97], [0.5, 0.5, 0.5], markevery=[1], **look))
    return sheet


@dataclass(frozen=True)
class Categories:
    """Categories along x, numbered from 0.

    names: empty where x are numbers. horizontal: bars go to the right.
    """

    names: tuple[str, ...]
    horizontal: bool

    @classmethod
    def of(cls, figure: Figure, panel: Panel, *, width: float) -> Categories:
        """Return the categories of a panel; bars always have some. Bars go to the right where their names do not fit
        `width` pixels side by side."""
        xs = [x for series in panel.series for x in series.x]
        bars = figure.kind in ("bars", "stack")
        if not (bars or any(isinstance(x, str) for x in xs)):
            return cls((), False)
        names = tuple(dict.fromkeys(map(number, xs)))
        longest = max(map(len, names), default=0)
        return cls(names, bars and (longest + 1) * LETTER_WIDTH * len(names) > width)

    @property
    def labels(self) -> list[str]:
        """The names; long ones of horizontal bars are on several lines."""
        return ["\n".join(wrap(name, NAME_LETTERS)) for name in self.names] if self.horizontal else list(self.names)

    def place(self, x: float | str) -> float:
        return float(self.names.index(number(x))) if self.names else float(x)


@dataclass(frozen=True)
class PanelPlot:
    """A panel on matplotlib's axes."""

    axes: Any
    figure: Figure
    panel: Panel
    styles: Mapping[str, Style]
    categories: Categories
    colours: Colours

    def draw(self) -> None:
        """Draw the values; ranges, ticks and labels come after them."""
        kinds = {"line": self._lines, "step": self._lines, "scatter": self._points, "bars": self._bars}
        (kinds | {"stack": self._stack})[self.figure.kind]()

    def _lines(self) -> None:
        for order, series in enumerate(self.panel.series):
            style, points = self.styles[series.name], thinned(series.points, MOST_POINTS)
            x, y, low, high = self._arrays(points)
            known = np.isfinite(y)
            if not known.any():
                continue
            steps = self.figure.kind == "step"
            marked = len(points) <= MOST_MARKERS and not steps
            look = _look(style, self.colours, markers=not steps) | {"zorder": 3 + order}
            if not marked and not steps:
                look["markevery"] = (0.04 * order, 0.25)
            self.axes.plot(x, y, drawstyle="steps-post" if steps else "default", **look)
            alone = known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False]
            if not marked and alone.any():
                self._markers(x[alone], y[alone], style, order)
            if np.isfinite(low).any():
                self.axes.fill_between(
                    x, low, high, where=np.isfinite(low) & np.isfinite(high) & known, step="post" if steps else None,
                    color=self.colours[style.colour], alpha=0.15, linewidth=0, zorder=2,
                )  # fmt: skip
                self._whiskers(x[alone], low[alone], high[alone], style, upright=True)

    def _points(self) -> None:
        for order, series in enumerate(self.panel.series):
            style = self.styles[series.name]
            x, y, low, high = self._arrays(series.points)
            self._whiskers(x, low, high, style, upright=True)
            self._markers(x, y, style, order)

    def _markers(self, x: np.ndarray, y: np.ndarray, style: Style, order: int) -> None:
        look = _look(style, self.colours, markers=True) | {"linestyle": "none", "zorder": 3 + order}
        self.axes.plot(x, y, **look)

    def _bars(self) -> None:
        shown = [series for series in self.panel.series if series.y]
        thick = min(0.8 / len(shown), 0.5)
        for order, series in enumerate(shown):
            style = self.styles[series.name]
            x, y, low, high = self._arrays(series.points)
            x += (order - (len(shown) - 1) / 2) * thick
            self._bar(x, np.nan_to_num(y), thick, style)
            self._whiskers(x, low, high, style, upright=not self.categories.horizontal)

    def _stack(self) -> None:
        base = np.zeros(len(self.categories.names))
        for series in self.panel.series:
            heights = np.zeros(len(base))
            x, y, *_ = self._arrays(series.points)
            heights[x.astype(int)] += np.nan_to_num(y)
            self._bar(np.arange(len(base)), heights, 0.65, self.styles[series.name], base)
            base += heights

    def _bar(self, x: np.ndarray, heights: np.ndarray, thick: float, style: Style, base: Any = None) -> None:
        fill = _fill(style, self.colours)
        if self.categories.horizontal:
            self.axes.barh(x, heights, thick, left=base, zorder=2, **fill)
        else:
            self.axes.bar(x, heights, thick, bottom=base, zorder=2, **fill)

    def _arrays(self, points: list[PlotPoint]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return x, y, low, high: f64[points], NaN where there is nothing to draw."""
        table = np.array([(self.categories.place(x), *rest) for x, *rest in points], dtype=np.float64).reshape(-1, 4)
        return table[:, 0].copy(), table[:, 1], table[:, 2], table[:, 3]

    def _whiskers(self, x: np.ndarray, low: np.ndarray, high: np.ndarray, style: Style, *, upright: bool) -> None:
        """Draw intervals as lines with ends: in the series' colour beside markers, in ink upon bars."""
        known = np.isfinite(low) & np.isfinite(high)
        if not known.any():
            return
        x, low, high = x[known], low[known], high[known]
        colour = self.colours["ink" if self.axes.patches else style.colour]
        (self.axes.vlines if upright else self.axes.hlines)(x, low, high, color=colour, linewidth=1.3, zorder=3)
        for ends in (low, high):
            where = (x, ends) if upright else (ends, x)
            self.axes.plot(
                *where, linestyle="none", marker="_" if upright else "|", markersize=6, color=colour, zorder=3
            )

    def set_axes(self, renderer: Any, *, top: float, height: float) -> None:
        """Set ranges, ticks, grid and labels, and give the axes the space that labels leave.

        top, height: of the space below the titles, and of the whole picture, in pixels.
        """
        right = WIDTH - RIGHT
        self.axes.spines[["top", "right", "left"]].set_visible(False)
        self.axes.spines["bottom"].set_color(self.colours["muted"])
        self.axes.tick_params(length=0, pad=4, labelsize=LETTER - 1, labelcolor=self.colours["muted"])
        self.axes.set_axisbelow(True)
        names, values = self.axes.xaxis, self.axes.yaxis
        if self.categories.horizontal:
            names, values = values, names
        values.grid(color=self.colours["line"], linewidth=1)
        self._value_range()
        self._value_ticks(values)
        if self.categories.names:
            self._category_ticks(names)
        else:
            self._x_range()
        xs = sorted({float(x) for series in self.panel.series for x in series.x}) if not self.categories.names else []
        taken = self.axes.yaxis.get_tightbbox(renderer)
        left = max(28.0, 0.0 if taken is None else taken.width + 8.0)
        if xs:
            self._x_ticks(xs, right - left)
        rows = self._marks(left, right) if not self.categories.names else 0
        below = 20.0
        if self.figure.x_label and not self.categories.horizontal:
            self.axes.set_xlabel(self.figure.x_label, fontsize=LETTER, color=self.colours["muted"], labelpad=2)
            below += LETTER + 5.0
        start = top + 10.0 + rows * (LETTER + 2)
        self.axes.set_position(
            (left / WIDTH, below / height, (right - left) / WIDTH, (height - start - below) / height)
        )
        if any(series.labels for series in self.panel.series):
            self._label_points()

    def _value_range(self) -> None:
        bars = self.figure.kind in ("bars", "stack")
        set_range = self.axes.set_xlim if self.categories.horizontal else self.axes.set_ylim
        if self.panel.y_range is not None:
            low, high = self.panel.y_range
            margin = 0.0 if bars else 0.03 * (high - low)
            set_range(low - margin, high + (margin or 0.02 * (high - low)))
            return
        low, high = self.axes.get_xlim() if self.categories.horizontal else self.axes.get_ylim()
        known = [y for s in self.panel.series for y in (*s.y, *s.low) if y is not None]
        if known and min(known) >= 0:
            set_range(0 if bars else -0.03 * (high or 1.0), high if high > 0 else 1.0)

    def _value_ticks(self, axis: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(
            FuncFormatter(lambda y, _: f"{number(100 * y)}%" if self.panel.y_percent else number(_tidy(y)))
        )

    def _category_ticks(self, axis: Any) -> None:
        axis.set_ticks(range(len(self.categories.names)), self.categories.labels)
        ends = (-0.6, len(self.categories.names) - 0.4)
        if self.categories.horizontal:
            self.axes.set_ylim(*reversed(ends))
            self.axes.spines["bottom"].set_visible(False)
        else:
            self.axes.set_xlim(*ends)

    def _x_range(self) -> None:
        xs = [float(x) for series in self.panel.series for x in series.x] + [x for x, _ in self.figure.marks]
        xs = [x for x in xs if np.isfinite(x)] or [0.0, 1.0]
        margin = {"step": 0.0, "line": 0.03, "scatter": 0.06}[self.figure.kind]
        scale, back = (np.log, np.exp) if self.figure.log_x else (np.asarray, np.asarray)
        if self.figure.log_x and min(xs) <= 0:
            raise ValueError(f"{self.figure.key}: expected every x above 0 on a logarithmic axis, got {min(xs)}")
        if self.figure.log_x:
            self.axes.set_xscale("log")
        low, high = scale(min(xs)), scale(max(xs))
        side = (margin or (0.0 if high > low else 0.5)) * ((high - low) or 1.0)
        self.axes.set_xlim(float(back(low - side)), float(back(high + side)))

    def _x_ticks(self, xs: list[float], width: float) -> None:
        """Set a tick at each value of x where all their labels fit, else at round values."""
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

        scale = np.log if self.figure.log_x else np.asarray
        low, high = (float(scale(edge)) for edge in self.axes.get_xlim())
        at = (scale(np.array(xs)) - low) / (high - low) * width
        names = [number(x) for x in xs]
        needed = [0.31 * LETTER * (len(a) + len(b)) + 6 for a, b in pairwise(names)]
        self.axes.xaxis.set_minor_locator(NullLocator())
        if len(xs) <= MOST_TICKS and all(np.diff(at) >= needed):
            self.axes.set_xticks(xs, names)
            return
        self.axes.xaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5), numticks=8) if self.figure.log_x else MaxNLocator(6)
        )
        self.axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(_tidy(x))))

    def _marks(self, left: float, right: float) -> int:
        """Draw marks as vertical lines, with labels above the axes in as many rows as they need; return the rows."""
        taken: list[float] = []
        low, high = self.axes.get_xlim()
        scale = np.log if self.figure.log_x else np.asarray
        for x, label in sorted(self.figure.marks):
            self.axes.axvline(x, color=self.colours["muted"], linewidth=1.2, linestyle=(0, (3, 2)), zorder=1)
            share = float((scale(x) - scale(low)) / (scale(high) - scale(low)))
            width = 0.55 * LETTER * len(label) + 6
            align = "left" if share < 0.25 else "right" if share > 0.75 else "center"
            start = share * (right - left) - {"left": 0.0, "right": width, "center": width / 2}[align]
            row = next((i for i, end in enumerate(taken) if end <= start), len(taken))
            taken[row : row + 1] = [start + width]
            self.axes.annotate(
                label, (x, 1), xycoords=self.axes.get_xaxis_transform(), xytext=(0, 4 + row * (LETTER + 2)), ha=align,
                textcoords="offset pixels", fontsize=SMALL_LETTER, color=self.colours["muted"], annotation_clip=False,
            )  # fmt: skip
        return len(taken)

    def _label_points(self) -> None:
        """Write a label beside each point, on a side that is free; leave it out where none is."""
        at = {
            (order, i): tuple(self.axes.transData.transform((self.categories.place(x), y)))
            for order, series in enumerate(self.panel.series)
            for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
            if y is not None
        }
        taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at.values()]
        sheet = self.axes.figure
        for (order, i), (x, y) in at.items():
            label = self.panel.series[order].labels[i] if self.panel.series[order].labels else ""
            width, tall = 0.6 * SMALL_LETTER * len(label), SMALL_LETTER
            for dx, dy in ((7, -4), (-7 - width, -4), (-width / 2, 8), (-width / 2, -8 - tall)):
                box = (x + dx, y + dy, x + dx + width, y + dy + tall)
                inside = self.axes.bbox.x0 - 4 <= box[0] and box[2] <= WIDTH
                if label and inside and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    size = sheet.get_size_inches() * 72
                    sheet.text(
                        (box[0] if dx != -7 - width else box[2]) / size[0], (box[1] + 2) / size[1], label,
                        fontsize=SMALL_LETTER, ha="left" if dx != -7 - width else "right", color=self.colours["ink"],
                    )  # fmt: skip
                    break


def _tidy(value: float) -> float:
    """Return 0 for what rounding leaves of it."""
    return 0.0 if abs(value) < 1e-12 else value


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
