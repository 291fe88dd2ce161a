"""Draws one panel of a figure with matplotlib, in the colours it is given. matplotlib is imported on use.

A panel is as wide as a telephone's screen and its letters as large as a page's, so that panels stand beside each other
on a wide page and below each other on a narrow one. Sizes are CSS pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

import numpy as np

from adaserve_jax.report.axes import Lanes, decorate
from adaserve_jax.report.document import Figure, Panel, Series
from adaserve_jax.report.figure_data import averaged, points_of, thinned
from adaserve_jax.report.palette import Style

Colours = Mapping[str, str]
"""Shades by name, of `palette.shades`."""
WIDTH, HEIGHT = 400.0, 250.0
LETTER = 12.0
LETTER_WIDTH = 0.6 * LETTER
"""Of the usual letter; fonts of most machines are narrower."""
LINE = 16.0
RIGHT, GAP = 14.0, 8.0
MOST_POINTS = 400
MOST_AREAS = 160
MOST_MARKERS = 24
TITLE_LETTERS, LABEL_LETTERS = 46, 54
LEAST_BAR, LEAST_SLOT = 9.0, 22.0


def plotted(figure: Figure, panel: Panel, styles: Mapping[str, Style], colours: Colours) -> Any:
    """Return the panel as a matplotlib figure: title and y label on top, axes below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    lanes = Lanes.of(figure, panel, room=WIDTH - 60.0, letter_width=LETTER_WIDTH)
    titles = wrap(panel.title, TITLE_LETTERS)
    labels = wrap(panel.y_label, LABEL_LETTERS)
    height = HEIGHT + LINE * (len(titles) + len(labels) - 2)
    if lanes.lying:
        lines = max(label.count("\n") + 1 for label in lanes.labels)
        slot = max(LEAST_SLOT, LINE * lines, LEAST_BAR * len(panel.series) if figure.kind == "bars" else 0.0)
        height += max(0.0, slot * len(lanes.names) - HEIGHT + 80.0)
    sheet: Any = Sheet(figsize=(WIDTH / 72, height / 72), dpi=72)
    renderer = FigureCanvasAgg(sheet).get_renderer()
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
    _DRAW[figure.kind](axes, figure, panel, styles, lanes, colours)
    place = (LINE * (len(titles) + len(labels)), height, WIDTH - RIGHT)
    decorate(axes, figure, panel, lanes, renderer, colours, place=place, letter=LETTER)
    return sheet


def _lines(
    axes: Any, figure: Figure, panel: Panel, styles: Mapping[str, Style], lanes: Lanes, colours: Colours
) -> None:
    for order, series in enumerate(panel.series):
        style, points = styles[series.name], thinned(points_of(series), MOST_POINTS)
        x, y, low, high = _arrays(points, lanes)
        known = np.isfinite(y)
        if not known.any():
            continue
        steps = figure.kind == "step"
        marked = len(points) <= MOST_MARKERS and not steps
        look = _look(style, colours, markers=not steps) | {"zorder": 3 + order}
        if not marked and not steps:
            look["markevery"] = (0.04 * order, 0.25)
        axes.plot(x, y, drawstyle="steps-post" if steps else "default", **look)
        alone = known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False]
        if not marked and alone.any():
            axes.plot(
                x[alone], y[alone], **_look(style, colours, markers=True) | {"linestyle": "none", "zorder": 3 + order}
            )
        if np.isfinite(low).any():
            axes.fill_between(
                x, low, high, where=np.isfinite(low) & np.isfinite(high) & known, step="post" if steps else None,
                color=colours[style.colour], alpha=0.15, linewidth=0, zorder=2,
            )  # fmt: skip
            _whiskers(axes, x[alone], low[alone], high[alone], style, colours, upright=True)


def _points(
    axes: Any, figure: Figure, panel: Panel, styles: Mapping[str, Style], lanes: Lanes, colours: Colours
) -> None:
    for order, series in enumerate(panel.series):
        style = styles[series.name]
        x, y, low, high = _arrays(points_of(series), lanes)
        _whiskers(axes, x, low, high, style, colours, upright=True)
        axes.plot(x, y, **_look(style, colours, markers=True) | {"linestyle": "none", "zorder": 3 + order})


def _bars(axes: Any, figure: Figure, panel: Panel, styles: Mapping[str, Style], lanes: Lanes, colours: Colours) -> None:
    shown = [series for series in panel.series if series.y]
    thick = min(0.8 / len(shown), 0.5)
    for order, series in enumerate(shown):
        style = styles[series.name]
        x, y, low, high = _arrays(points_of(series), lanes)
        x += (order - (len(shown) - 1) / 2) * thick
        (axes.barh if lanes.lying else axes.bar)(x, np.nan_to_num(y), thick, zorder=2, **_fill(style, colours))
        _whiskers(axes, x, low, high, style, colours, upright=not lanes.lying)


def _stack(
    axes: Any, figure: Figure, panel: Panel, styles: Mapping[str, Style], lanes: Lanes, colours: Colours
) -> None:
    base = np.zeros(len(lanes.names))
    for series in panel.series:
        heights = np.zeros(len(base))
        x, y, *_ = _arrays(points_of(series), lanes)
        heights[x.astype(int)] += np.nan_to_num(y)
        places = np.arange(len(base))
        fill = _fill(styles[series.name], colours)
        if lanes.lying:
            axes.barh(places, heights, 0.7, left=base, zorder=2, **fill)
        else:
            axes.bar(places, heights, 0.6, bottom=base, zorder=2, **fill)
        base += heights


def _areas(
    axes: Any, figure: Figure, panel: Panel, styles: Mapping[str, Style], lanes: Lanes, colours: Colours
) -> None:
    xs = sorted({lanes.place(x) for series in panel.series for x in series.x})
    columns = [_column(series, xs, lanes) for series in panel.series]
    thin_xs, thin = averaged(xs, columns, MOST_AREAS)
    base = np.zeros(len(thin_xs))
    for series, heights in zip(panel.series, thin, strict=True):
        top = base + np.array(heights)
        axes.fill_between(thin_xs, base, top, zorder=2, **_fill(styles[series.name], colours))
        base = top


def _column(series: Series, xs: list[float], lanes: Lanes) -> list[float]:
    """Its values over `xs`; 0 where it has none."""
    held = {lanes.place(x): y or 0.0 for x, y in zip(series.x, series.y, strict=True)}
    return [held.get(x, 0.0) for x in xs]


_DRAW = {"line": _lines, "step": _lines, "scatter": _points, "bars": _bars, "stack": _stack, "area": _areas}


def _arrays(points: list[Any], lanes: Lanes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, y, low, high: f64[points]; NaN where there is nothing to draw."""
    table = np.array([(lanes.place(x), *rest) for x, *rest in points], dtype=np.float64).reshape(-1, 4)
    return table[:, 0].copy(), table[:, 1], table[:, 2], table[:, 3]


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


def _whiskers(
    axes: Any, x: np.ndarray, low: np.ndarray, high: np.ndarray, style: Style, colours: Colours, *, upright: bool
) -> None:
    """Intervals as lines with ends: in the series' colour beside markers, in ink upon bars."""
    known = np.isfinite(low) & np.isfinite(high)
    if not known.any():
        return
    x, low, high = x[known], low[known], high[known]
    bars = axes.patches
    colour = colours["ink" if bars else style.colour]
    (axes.vlines if upright else axes.hlines)(x, low, high, color=colour, linewidth=1.3, zorder=3)
    for ends in (low, high):
        where = (x, ends) if upright else (ends, x)
        axes.plot(*where, linestyle="none", marker="_" if upright else "|", markersize=6, color=colour, zorder=3)


def swatch(figure: Figure, style: Style, colours: Colours) -> Any:
    """Return what a legend shows for a series: a piece of its line with its marker, or of its bar."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    sheet: Any = Sheet(figsize=(30 / 72, 12 / 72), dpi=72)
    FigureCanvasAgg(sheet)
    if figure.kind in ("bars", "stack", "area"):
        sheet.add_artist(Rectangle((0.1, 0.05), 0.8, 0.9, **_fill(style, colours)))
        return sheet
    look = _look(style, colours, markers=figure.kind != "step")
    if figure.kind == "scatter":
        look["linestyle"] = "none"
    sheet.add_artist(Line2D([0.03, 0.5, 0.97], [0.5, 0.5, 0.5], markevery=[1], **look))
    return sheet
