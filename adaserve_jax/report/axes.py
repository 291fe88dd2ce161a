"""The axes of a panel: categories, ranges, ticks whose labels fit, marks, and labels of points that do not collide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any

import numpy as np

from adaserve_jax.report.document import Figure, Panel
from adaserve_jax.report.figure_data import number

MOST_TICKED = 9
"""Values of x that each get a tick of their own, if their labels fit."""
SMALL = 10.5
NAME_LETTERS = 22


@dataclass(frozen=True)
class Lanes:
    """Where x lies: names, the categories from 0 on, or () where x are numbers. lying: bars go to the right."""

    names: tuple[str, ...]
    lying: bool

    @classmethod
    def of(cls, figure: Figure, panel: Panel, *, room: float, letter_width: float) -> Lanes:
        """Bars have categories always. They lie where their names do not fit `room` pixels side by side."""
        xs = [x for series in panel.series for x in series.x]
        bars = figure.kind in ("bars", "stack")
        if not (bars or any(isinstance(x, str) for x in xs)):
            return cls((), False)
        names = tuple(dict.fromkeys(map(number, xs)))
        longest = max(map(len, names), default=0)
        return cls(names, bars and (longest + 1) * letter_width * len(names) > room)

    @property
    def labels(self) -> list[str]:
        """The names, the long ones of bars that lie on several lines."""
        return ["\n".join(wrap(name, NAME_LETTERS)) for name in self.names] if self.lying else list(self.names)

    def place(self, x: float | str) -> float:
        return float(self.names.index(number(x))) if self.names else float(x)


def decorate(
    axes: Any, figure: Figure, panel: Panel, lanes: Lanes, renderer: Any, colours: Mapping[str, str], *,
    place: tuple[float, float, float], letter: float,
) -> None:  # fmt: skip
    """Ranges, ticks, grid and labels; then the axes take the room that labels leave. place: top, height, right, in
    pixels from the upper left corner."""
    top, height, right = place
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colours["muted"])
    axes.tick_params(length=0, pad=4, labelsize=letter - 1, labelcolor=colours["muted"])
    axes.set_axisbelow(True)
    values, categories = (axes.xaxis, axes.yaxis) if lanes.lying else (axes.yaxis, axes.xaxis)
    values.grid(color=colours["line"], linewidth=1)
    _value_range(axes, figure, panel, lying=lanes.lying)
    _value_ticks(values, panel)
    if lanes.names:
        _category_ticks(axes, categories, lanes)
    else:
        _x_range(axes, figure, panel)
    xs = sorted({float(x) for series in panel.series for x in series.x}) if not lanes.names else []
    taken = axes.yaxis.get_tightbbox(renderer)
    left = max(28.0, 0.0 if taken is None else taken.width + 8.0)
    if xs:
        _x_ticks(axes, figure, xs, right - left, letter)
    rows = _mark(axes, figure, left, right, letter, colours) if not lanes.names else 0
    below = 20.0
    if figure.x_label and not lanes.lying:
        axes.set_xlabel(figure.x_label, fontsize=letter, color=colours["muted"], labelpad=2)
        below += letter + 5.0
    start = top + 10.0 + rows * (letter + 2)
    axes.set_position(
        (left / _width(axes), below / height, (right - left) / _width(axes), (height - start - below) / height)
    )
    if any(series.labels for series in panel.series):
        _label_points(axes, panel, lanes, colours)


def _width(axes: Any) -> float:
    return axes.figure.get_figwidth() * 72


def _value_range(axes: Any, figure: Figure, panel: Panel, *, lying: bool) -> None:
    bars = figure.kind in ("bars", "stack", "area")
    set_range = axes.set_xlim if lying else axes.set_ylim
    if panel.log_y:
        _above_zero([y for s in panel.series for y in (*s.y, *s.low, *s.high) if y is not None], figure, "y")
        (axes.set_xscale if lying else axes.set_yscale)("log")
        if panel.y_range is not None:
            set_range(*panel.y_range)
        return
    if panel.y_range is not None:
        low, high = panel.y_range
        spare = 0.0 if bars else 0.03 * (high - low)
        set_range(low - spare, high + (spare or 0.02 * (high - low)))
        return
    low, high = axes.get_xlim() if lying else axes.get_ylim()
    known = [y for s in panel.series for y in (*s.y, *s.low) if y is not None]
    if known and min(known) >= 0:
        set_range(0 if bars else -0.03 * (high or 1.0), high if high > 0 else 1.0)


def _value_ticks(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis.set_major_locator(
        LogLocator(subs=(1, 2, 5), numticks=8) if panel.log_y else MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda y, _: f"{number(100 * y)}%" if panel.y_percent else number(_tidy(y))))


def _category_ticks(axes: Any, axis: Any, lanes: Lanes) -> None:
    axis.set_ticks(range(len(lanes.names)), lanes.labels)
    ends = (-0.6, len(lanes.names) - 0.4)
    if lanes.lying:
        axes.set_ylim(*reversed(ends))
        axes.spines["bottom"].set_visible(False)
    else:
        axes.set_xlim(*ends)


def _x_range(axes: Any, figure: Figure, panel: Panel) -> None:
    xs = [float(x) for series in panel.series for x in series.x] + [x for x, _ in figure.marks]
    xs = [x for x in xs if np.isfinite(x)] or [0.0, 1.0]
    spare = {"step": 0.0, "area": 0.0, "line": 0.03, "scatter": 0.06}[figure.kind]
    if figure.log_x:
        _above_zero(xs, figure, "x")
        axes.set_xscale("log")
        low, high = np.log(min(xs)), np.log(max(xs))
        span = (high - low) or 1.0
        axes.set_xlim(float(np.exp(low - spare * span)), float(np.exp(high + spare * span)))
    else:
        span = (max(xs) - min(xs)) or 1.0
        bare = spare or (0.0 if max(xs) > min(xs) else 0.5)
        axes.set_xlim(min(xs) - bare * span, max(xs) + bare * span)


def _above_zero(values: list[float], figure: Figure, axis: str) -> None:
    if values and min(values) <= 0:
        raise ValueError(f"{figure.key}: expected every {axis} above 0 on a logarithmic axis, got {min(values)}")


def _x_ticks(axes: Any, figure: Figure, xs: list[float], room: float, letter: float) -> None:
    """A tick at each value of x where all their labels fit; else round values."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    scale = np.log if figure.log_x else np.asarray
    low, high = (float(scale(edge)) for edge in axes.get_xlim())
    at = (scale(np.array(xs)) - low) / (high - low) * room
    names = [number(x) for x in xs]
    needed = [0.31 * letter * (len(a) + len(b)) + 6 for a, b in pairwise(names)]
    axes.xaxis.set_minor_locator(NullLocator())
    if len(xs) <= MOST_TICKED and all(np.diff(at) >= needed):
        axes.set_xticks(xs, names)
        return
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8) if figure.log_x else MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(_tidy(x))))


def _tidy(value: float) -> float:
    """Without what is left of 0 by rounding."""
    return 0.0 if abs(value) < 1e-12 else value


def _mark(axes: Any, figure: Figure, left: float, right: float, letter: float, colours: Mapping[str, str]) -> int:
    """Vertical lines with their labels above the axes, in as many rows as they need. Returns the rows."""
    taken: list[float] = []
    low, high = axes.get_xlim()
    scale = np.log if figure.log_x else np.asarray
    for x, label in sorted(figure.marks):
        axes.axvline(x, color=colours["muted"], linewidth=1.2, linestyle=(0, (3, 2)), zorder=1)
        share = float((scale(x) - scale(low)) / (scale(high) - scale(low)))
        width = 0.55 * letter * len(label) + 6
        align = "left" if share < 0.25 else "right" if share > 0.75 else "center"
        start = share * (right - left) - {"left": 0.0, "right": width, "center": width / 2}[align]
        row = next((i for i, end in enumerate(taken) if end <= start), len(taken))
        taken[row : row + 1] = [start + width]
        axes.annotate(
            label, (x, 1), xycoords=axes.get_xaxis_transform(), xytext=(0, 4 + row * (letter + 2)), ha=align,
            textcoords="offset pixels", fontsize=SMALL, color=colours["muted"], annotation_clip=False,
        )  # fmt: skip
    return len(taken)


def _label_points(axes: Any, panel: Panel, lanes: Lanes, colours: Mapping[str, str]) -> None:
    """A label beside each point, on the side that is free; none where no side is."""
    at = {
        (order, i): tuple(axes.transData.transform((lanes.place(x), y)))
        for order, series in enumerate(panel.series)
        for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
        if y is not None
    }
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at.values()]
    sheet = axes.figure
    for (order, i), (x, y) in at.items():
        label = panel.series[order].labels[i] if panel.series[order].labels else ""
        width, tall = 0.6 * SMALL * len(label), SMALL
        for dx, dy in ((7, -4), (-7 - width, -4), (-width / 2, 8), (-width / 2, -8 - tall)):
            box = (x + dx, y + dy, x + dx + width, y + dy + tall)
            inside = axes.bbox.x0 - 4 <= box[0] and box[2] <= _width(axes)
            if label and inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                size = sheet.get_size_inches() * 72
                sheet.text(
                    (box[0] if dx != -7 - width else box[2]) / size[0], (box[1] + 2) / size[1], label, fontsize=SMALL,
                    ha="left" if dx != -7 - width else "right", color=colours["ink"],
                )  # fmt: skip
                break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
