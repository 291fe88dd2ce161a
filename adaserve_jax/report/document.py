"""What a report says, apart from how it is written: sections of texts, tables, figures. Knows no results, no HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, isfinite, log10
from typing import Literal

Kind = Literal["line", "step", "scatter", "bars", "stack", "area"]
"""line: points joined, with an interval around them where one is known; step: values that hold until the next;
scatter: points with their labels; bars: one group of bars per category; stack: bars upon each other; area: stacked
areas over x."""


@dataclass(frozen=True)
class Series:
    """One line, or one colour of bars. x, y: as many of each; y None: a gap. low, high: an interval per point or
    empty. labels: likewise. colour: which of the report's colours, the same for a policy in all figures."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    labels: tuple[str, ...] = ()
    colour: int = 0

    def __post_init__(self) -> None:
        for name in ("x", "low", "high", "labels"):
            held: Sequence[object] = getattr(self, name)
            if len(held) != len(self.y) and (held or name == "x"):
                raise ValueError(f"{self.name}: expected {len(self.y)} values of {name}, as of y, got {len(held)}")


@dataclass(frozen=True)
class Panel:
    """One pair of axes. y_range: fixed, or as the values want it; y_percent: values are shares, shown in percent.
    log_y: a logarithmic axis; every y is above 0."""

    title: str
    series: tuple[Series, ...]
    y_label: str
    y_range: tuple[float, float] | None = None
    y_percent: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        if self.y_range is not None and not self.y_range[0] < self.y_range[1]:
            raise ValueError(f"{self.title}: expected a y_range that rises, got {self.y_range}")


@dataclass(frozen=True)
class Figure:
    """Panels side by side over the same kind of x. key: its name in links. caption: what it shows and under what
    conditions (workload, machine, model size, commit). marks: vertical lines, as (x, label)."""

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
    """Cells are texts as they are shown. numeric: columns that hold numbers. strong: (row, column) of best cells."""

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
    """A paragraph. warns: something that the reader must know before believing the rest."""

    text: str
    warns: bool = False


@dataclass(frozen=True)
class Section:
    """items: in order. key: its name in links."""

    key: str
    title: str
    items: tuple[Text | Table | Figure, ...]


@dataclass(frozen=True)
class Document:
    """facts: name and value of what holds for the whole report: machine, models, workload, commit, times."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]

    @property
    def headline(self) -> Section | None:
        """The section that says what matters most: the one with key "headline", else the first."""
        named = (section for section in self.sections if section.key == "headline")
        return next(named, self.sections[0] if self.sections else None)


# Which characters a text of a report may have.

_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Text with U+FFFD in place of what neither XML nor HTML nor UTF-8 can hold; tabs and line breaks stay."""
    return _NOT_TEXT.sub("\ufffd", text)


# The numbers of a figure: as tables for people who read or copy them, and thinned for drawing.

Point = tuple[float | str, float | None, float | None, float | None]
"""x, y, low, high."""
FULL_ENOUGH = 0.5
"""Share of cells that must be filled for series to stand side by side over a common x."""


def number(value: float | str | None) -> str:
    """Four significant digits, never an exponent, no separators: for reading and for copying. A text stays as it is."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isfinite(value) or value == int(value):
        return f"{value:.0f}"
    return f"{value:.{max(0, 3 - floor(log10(abs(value))))}f}".rstrip("0").rstrip(".")


def written(panel: Panel, value: float) -> str:
    """A value of the panel: a share in percent with one decimal, else a number."""
    return f"{100 * value:.1f}%" if panel.y_percent else number(value)


def tables_of(figure: Figure, *, most_rows: int) -> tuple[Table, ...]:
    """A table per panel that has points: over a common x where the series have one, else a row per point.

    Of more than `most_rows` rows, so many at even distances are kept, and the caption says so.
    """
    made = []
    for index, panel in enumerate(figure.panels):
        if any(series.y for series in panel.series):
            made.append(_table(figure, panel, f"{figure.key}-{index}", most_rows))
    return tuple(made)


def _table(figure: Figure, panel: Panel, key: str, most_rows: int) -> Table:
    shown = [series for series in panel.series if series.y]
    by_x = [{point[0]: point for point in points_of(series)} for series in shown]
    xs = list(dict.fromkeys(x for points in by_x for x in points))
    if all(isinstance(x, float | int) for x in xs):
        xs.sort()  # pyright: ignore[reportCallIssue]
    doubled = any(len(points) < len(series.y) for points, series in zip(by_x, shown, strict=True))
    labelled = any(series.labels for series in shown)
    filled = sum(map(len, by_x)) / (len(xs) * len(by_x))
    if doubled or labelled or filled < FULL_ENOUGH:
        columns = ("series", figure.x_label, panel.y_label, *(("label",) if labelled else ()))
        rows = [
            (series.name, number(point[0]), _cell(panel, point), *((_label(series, i),) if labelled else ()))
            for series in shown
            for i, point in enumerate(points_of(series))
        ]
        numeric = frozenset({1, 2})
    else:
        columns = (figure.x_label, *(series.name or panel.y_label for series in shown))
        rows = [(number(x), *(_cell(panel, points.get(x)) for points in by_x)) for x in xs]
        numeric = frozenset(range(1, len(columns))) | ({0} if isinstance(xs[0], float | int) else frozenset())
    title = panel.title or figure.title
    caption = panel.y_label
    if len(rows) > most_rows:
        caption = f"{caption}; {most_rows} of {len(rows)} points, at even distances"
        rows = [rows[i] for i in _even(len(rows), most_rows)]
    return Table(key, title, caption, columns, tuple(rows), numeric)


def points_of(series: Series) -> list[Point]:
    """Points of a series, with None for bounds that it has not."""
    none = (None,) * len(series.y)
    return list(zip(series.x, series.y, series.low or none, series.high or none, strict=True))


def _cell(panel: Panel, point: Point | None) -> str:
    if point is None:
        return ""
    _, y, low, high = point
    if y is None:
        return ""
    if low is None or high is None:
        return written(panel, y)
    return f"{written(panel, y)} ({written(panel, low)} to {written(panel, high)})"


def _label(series: Series, index: int) -> str:
    return series.labels[index] if series.labels else ""


def thinned(points: list[Point], most: int) -> list[Point]:
    """At most about `most` points that draw the same line: of each of `most` / 4 stretches of the list, the first, the
    lowest, the highest, a gap, and the last."""
    if len(points) <= most:
        return points
    kept: list[Point] = []
    for start, end in _stretches(len(points), max(1, most // 4)):
        stretch = range(start, end)
        known = [i for i in stretch if points[i][1] is not None]
        gap = next((i for i in stretch if points[i][1] is None), None)
        wanted = {start, end - 1} | ({gap} if gap is not None else set())
        if known:
            wanted |= {min(known, key=lambda i: points[i][1] or 0.0), max(known, key=lambda i: points[i][1] or 0.0)}
        kept += [points[i] for i in sorted(wanted)]
    return kept


def averaged(xs: list[float], columns: list[list[float]], most: int) -> tuple[list[float], list[list[float]]]:
    """At most `most` points: the first x of each stretch, the mean of each column over it; sums stay sums."""
    if len(xs) <= most:
        return xs, columns
    stretches = _stretches(len(xs), most)
    means = [[sum(column[a:b]) / (b - a) for a, b in stretches] for column in columns]
    return [xs[a] for a, _ in stretches], means


def _stretches(length: int, count: int) -> list[tuple[int, int]]:
    bounds = [length * i // count for i in range(count + 1)]
    return list(pairwise(bounds))


def _even(length: int, count: int) -> list[int]:
    """`count` indices from the first to the last."""
    return [round(i * (length - 1) / max(1, count - 1)) for i in range(count)]
