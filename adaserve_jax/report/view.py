"""What the sections of one report share: points, estimates, and which settings are shown where not all can be."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.conditions import condition_line
from adaserve_jax.report.document import Series
from adaserve_jax.report.estimates import Estimate, Estimates
from adaserve_jax.report.points import Group, Measured
from adaserve_jax.report.setting import AXES, AXIS_LABELS, Setting
from adaserve_jax.results.schema import ALL_CLASSES

MOST_PANELS = 6
MOST_SLICES = 3
WRITTEN = 5e-4
"""How far a rate may be from the one that was measured: tables write four digits of it."""
Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class View:
    """focus: the one setting of figures that show one. conditions: what every caption ends with."""

    measured: Measured
    estimates: Estimates
    focus: Setting
    conditions: str

    @classmethod
    def of(cls, measured: Measured, rate: float | None = None) -> View:
        """rate: of the focus, as it is written or nearly; None: the middle one. Raises ConfigError: no valid point has
        it."""
        rates = measured.rates
        if rate is None:
            rate = middle(rates)
        else:
            asked, rate = rate, min(rates, key=lambda each, wanted=rate: abs(each - wanted))
            if not math.isclose(asked, rate, rel_tol=WRITTEN):
                known = ", ".join(f"{each:g}" for each in rates)
                raise ConfigError(f"expected a rate that was measured ({known} requests per second), got {asked:g}")
        settings = [s for s in measured.settings if s.rate_rps == rate]
        most = max(len(measured.at(s)) for s in settings)
        focus = middle([s for s in settings if len(measured.at(s)) == most])
        return cls(measured, Estimates(), focus, condition_line(measured.valid))

    def caption(self, text: str) -> str:
        return f"{text} {self.conditions}"

    @property
    def at_focus(self) -> str:
        """Where figures of one setting stand, e.g. "At 2/s."; nothing where only one was measured."""
        return f"At {self.focus.describe(self.measured.varied)}." if self.measured.varied else ""

    @property
    def classes(self) -> tuple[str, ...]:
        """All requests, and each class where there are several; the first ones where there are many."""
        classes = self.measured.classes if len(self.measured.classes) > 1 else ()
        return (ALL_CLASSES, *classes)[:MOST_PANELS]

    @property
    def axes(self) -> tuple[str, ...]:
        """Those that vary and are numbers."""
        return tuple(axis for axis in self.measured.varied if axis in AXIS_LABELS)

    @property
    def line(self) -> tuple[Setting, ...]:
        """The settings through the focus along the first axis that varies, in the order of that axis."""
        varied = self.measured.varied
        return self.slice_through(varied[0]) if varied else (self.focus,)

    @property
    def line_titles(self) -> tuple[str, ...]:
        """Of the first cells that `along_line` gives."""
        return ("policy", *(AXES[axis][0] for axis in self.measured.varied[:1]))

    def along_line(self) -> Iterator[tuple[Group, tuple[str, ...]]]:
        """The groups of the line, each with the cells that a table's row of it begins with."""
        for setting in self.line:
            for group in self.measured.at(setting):
                yield group, (group.who, *(setting.cell(axis) for axis in self.measured.varied[:1]))

    def slice_through(self, axis: str) -> tuple[Setting, ...]:
        return tuple(s for s in self.measured.settings if s.but(axis) == self.focus.but(axis))

    def slices(self, axis: str) -> list[tuple[str, tuple[Setting, ...]]]:
        """Lines along an axis, each with what is held still on it; a few of them where there are many."""
        lines: dict[tuple[object, ...], list[Setting]] = defaultdict(list)
        for setting in self.measured.settings:
            if setting.value(axis) is not None:
                lines[setting.but(axis)].append(setting)
        others = [other for other in self.measured.varied if other != axis]
        along = [sorted(each, key=lambda s: s.number(axis)) for each in lines.values() if len(each) > 1]
        return [(each[0].describe(others), tuple(each)) for each in spread(along, MOST_SLICES)]

    def focus_groups(self) -> list[Group]:
        return self.measured.at(self.focus)

    def colour(self, who: str) -> int:
        return self.measured.colour(who)


def series_of(
    name: str, x: Sequence[float | str], estimates: Sequence[Estimate], colour: int, labels: tuple[str, ...] = ()
) -> Series:
    """A series with the intervals of its estimates."""
    return Series(
        name=name,
        x=tuple(x),
        y=tuple(each.value for each in estimates),
        low=tuple(each.low for each in estimates),
        high=tuple(each.high for each in estimates),
        labels=labels,
        colour=colour,
    )


def middle(values: Sequence[Item]) -> Item:
    """Of two in the middle the later one."""
    return values[len(values) // 2]


def spread(values: Sequence[Item], most: int) -> list[Item]:
    """At most so many, evenly chosen, first and last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
