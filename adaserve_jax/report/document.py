"""Content of a report, apart from how it is written: sections of texts, tables and figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, isfinite, log10
from typing import Literal

Kind = Literal["line", "step", "scatter", "bars", "stack"]
"""Kinds of figures. line: joined points, with an interval around them where one is known; step: values that hold until
the next; scatter: points with their labels; bars: one group of bars per category; stack: bars upon each other."""
PlotPoint = tuple[float | str, float | None, float | None, float | None]
"""x, y, low, high."""
MIN_FILLED = 0.5
"""Share of cells that must be filled for series to stand side by side over a common x."""
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

INTERVALS = " Intervals of 95% are in parentheses."
"""Sentence in the caption of a table, which is left out where the table is shown without them."""


@dataclass(frozen=True)
class Series:
    """One line, or one colour of bars.

    x, y: as many of each; a y of None is a gap. low, high: an interval per point, or empty. labels: one per point, or
    empty. colour: index of one of the report's colours, the same for a policy in all figures.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    labels: tuple[str, ...] = ()
    colour: int = 0

    def __post_init__(self) -> None:
        for name in ("x", "low", "high", "labels"):
            values: Sequence[object] = getattr(self, name)
            if len(values) != len(self.y) and (values or name == "x"):
                raise ValueError(f"{self.name}: expected {len(self.y)} values of {name}, as of y, got {len(values)}")

    @property
    def points(self) -> list[PlotPoint]:
        """All points, with None for bounds that they do not have."""
        unknown = (None,) * len(self.y)
        return list(zip(self.x, self.y, self.low or unknown, self.high or unknown, strict=True))


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    y_range: fixed range, or None for one that fits the values. y_percent: values are shares, shown in percent.
    """

    title: str
    series: tuple[Series, ...]
    y_label: str
    y_range: tuple[float, float] | None = None
    y_percent: bool = False

    def __post_init__(self) -> None:
        if self.y_range is not None and not self.y_range[0] < self.y_range[1]:
            raise ValueError(f"{self.title}: expected a y_range that rises, got {self.y_range}")

    def format(self, value: float) -> str:
        """Format a value of the panel: a share in percent with one decimal, else a number."""
        return f"{100 * value:.1f}%" if self.y_percent else number(value)


@dataclass(frozen=True)
class Figure:
    """Panels side by side over the same kind of x.

    key: its name in links. caption: what the figure shows, and its conditions (workload, machine, model size, commit).
    marks: vertical lines, as (x, label).
    """

    key: str
    title: str
    caption: str
    kind: Kind
    x_label: str
    panels: tuple[Panel, ...]
    log_x: bool = False
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Table:
    """Cells as they are shown.

    key: its name in links. numeric: columns that hold numbers. strong: (row, column) of best cells.
    """

    key: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    strong: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.key}: expected {len(self.columns)} cells in every row, got {len(row)}")


@dataclass(frozen=True)
class Text:
    """A paragraph. warns: the reader must know it before believing the rest."""

    text: str
    warns: bool = False


@dataclass(frozen=True)
class Section:
    """Items under one heading, in order. key: its name in links. folded: whether a page opens it on demand only."""

    key: str
    title: str
    items: tuple[Text | Table | Figure, ...]
    folded: bool = False


@dataclass(frozen=True)
class Document:
    """A whole report. facts: names and values that hold for all of it: machine, models, workload, commit, times."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]

    @property
    def headline(self) -> Section | None:
        """The section with key "headline", else the first one."""
        named = (section for section in self.sections if section.key == "headline")
        return next(named, self.sections[0] if self.sections else None)


def printable(text: str) -> str:
    """Put U+FFFD in place of characters that XML, HTML or UTF-8 cannot hold; tabs and line breaks stay."""
    return _NOT_TEXT.sub("\ufffd", text)


def number(value: float | str | None) -> str:
    """Format a number with four significant digits, without exponent and separators, for reading and for copying. A
    text stays the same."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isfinite(value) or value == int(value):
        return f"{value:.0f}"
    text = f"{value:.{max(0, 3 - floor(log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tables_of(figure: Figure, *, most_rows: int) -> tuple[Table, ...]:
    """Return a table of numbers per panel that has points: over a common x where the series have one, else a row per
    point.

    A table of more than `most_rows` rows keeps that many at even distances, and its caption says so.
    """
    return tuple(
        _table(figure, panel, f"{figure.key}-{index}", most_rows)
        for index, panel in enumerate(figure.panels)
        if any(series.y for series in panel.series)
    )


def _table(figure: Figure, panel: Panel, key: str, most_rows: int) -> Table:
    shown = [series for series in panel.series if series.y]
    by_x = [{point[0]: point for point in series.points} for series in shown]
    xs = list(dict.fromkeys(x for points in by_x for x in points))
    if all(isinstance(x, float | int) for x in xs):
        xs.sort()  # pyright: ignore[reportCallIssue]
    doubled = any(len(points) < len(series.y) for points, series in zip(by_x, shown, strict=True))
    labelled = any(series.labels for series in shown)
    filled = sum(map(len, by_x)) / (len(xs) * len(by_x))
    if doubled or labelled or filled < MIN_FILLED:
        columns = ("series", figure.x_label, panel.y_label, *(("label",) if labelled else ()))
        rows = [
            (series.name, number(point[0]), _cell(panel, point), *labels)
            for series in shown
            for point, labels in zip(series.points, _label_cells(series, labelled), strict=True)
        ]
        numeric = {1, 2}
    else:
        columns = (figure.x_label, *(series.name or panel.y_label for series in shown))
        rows = [(number(x), *(_cell(panel, points.get(x)) for points in by_x)) for x in xs]
        numeric = set(range(0 if isinstance(xs[0], float | int) else 1, len(columns)))
    caption = panel.y_label
    if len(rows) > most_rows:
        caption = f"{caption}; {most_rows} of {len(rows)} points, at even distances"
        rows = [rows[round(i * (len(rows) - 1) / max(1, most_rows - 1))] for i in range(most_rows)]
    return Table(key, panel.title or figure.title, caption, columns, tuple(rows), frozenset(numeric))


def _cell(panel: Panel, point: PlotPoint | None) -> str:
    _, y, low, high = point or (0.0, None, None, None)
    if y is None:
        return ""
    if low is None or high is None:
        return panel.format(y)
    return f"{panel.format(y)} ({panel.format(low)} to {panel.format(high)})"


def _label_cells(series: Series, labelled: bool) -> list[tuple[str, ...]]:
    labels = series.labels or ("",) * len(series.y)
    return [(label,) if labelled else () for label in labels]


def thinned(points: list[PlotPoint], most: int) -> list[PlotPoint]:
    """Return at most about `most` points that draw the same line.

    The list is cut into `most` / 4 stretches; each keeps its first, lowest, highest and last point, and a gap.
    """
    if len(points) <= most:
        return points
    kept: list[PlotPoint] = []
    stretches = max(1, most // 4)
    for start, end in pairwise(len(points) * i // stretches for i in range(stretches + 1)):
        ys = {i: y for i in range(start, end) if (y := points[i][1]) is not None}
        gaps = [i for i in range(start, end) if i not in ys]
        chosen = {start, end - 1, *gaps[:1]}
        if ys:
            chosen |= {min(ys, key=ys.__getitem__), max(ys, key=ys.__getitem__)}
        kept += [points[i] for i in sorted(chosen)]
    return kept
