"""What a report says, apart from how it is written: sections of texts, tables, figures. Knows no results, no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
