"""Figures of groups of requests with their intervals, and differences between two groups, paired where they can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.report.columns import Columns
from adaserve_jax.report.measures import JUDGED_TIMES, RATIOS, THROUGHPUT, VIOLATIONS, Measure
from adaserve_jax.report.pairing import Pairing, pair_up
from adaserve_jax.report.points import Group, Point
from adaserve_jax.results.bootstrap import (
    ENOUGH_REPEATS,
    between,
    distributions,
    resamples_for,
    sure_share,
)
from adaserve_jax.results.schema import ALL_CLASSES


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; None: not known."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def is_not_zero(self) -> bool:
        """Of a difference: whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


UNKNOWN = Estimate(None)


class Estimates:
    """Computes each figure once and keeps what was drawn for it: 2,000 resamples, or fewer of many requests."""

    def __init__(self, seed: int = 0):
        self._seed = seed
        self._pairings: dict[tuple[Group, Group], Pairing] = {}
        self._groups: dict[tuple[Point, ...], Group] = {}  # so that the same repeats are drawn once, whoever asks
        self._values: dict[tuple[Group, str, str], float | None] = {}
        self._drawn: dict[tuple[Group, str, str], np.ndarray] = {}

    def of(self, group: Group, measure: Measure, slo_class: str = ALL_CLASSES) -> Estimate:
        """Over all repeats of the group, their requests pooled. Without request records: the mean of the rows of the
        repeats, and no interval."""
        value = self.value(group, measure, slo_class)
        if value is None or not _can_be_drawn(group, measure, slo_class):
            return Estimate(value)
        found = between(self._distribution(group, measure, slo_class))
        if found.low is not None and found.high is not None and _is_constant(group.columns, measure, slo_class):
            return self._widened(group, measure, slo_class, value, found.low, found.high)
        return Estimate(value, found.low, found.high)

    def _widened(
        self, group: Group, measure: Measure, slo_class: str, value: float, low: float, high: float
    ) -> Estimate:  # fmt: skip
        """No resample has another outcome than the one that all requests have: how many there were bounds its share."""
        sure = sure_share(_count(group.columns, measure, slo_class))
        if value > 0:
            return Estimate(value, min(low, value * sure), high)
        most = 1.0
        if measure.unit != "share":
            most = between(self._distribution(group, THROUGHPUT, slo_class)).high or 0.0
        return Estimate(value, low, max(high, most * (1 - sure)))

    def value(self, group: Group, measure: Measure, slo_class: str = ALL_CLASSES) -> float | None:
        """The figure without its interval; None: nothing was measured that it is of."""
        key = group, measure.name, slo_class
        if key not in self._values:
            self._values[key] = _value(group, measure, slo_class)
        return self._values[key]

    def difference(self, one: Group, other: Group, measure: Measure, slo_class: str = ALL_CLASSES) -> Estimate:
        """one - other, over the repeats in which both were given the same requests: each request is drawn for both or
        for none, so that what is hard for both falls away. Where there is no such repeat, over all of both."""
        found = self._compare(one, other, measure, slo_class, np.subtract)
        alone = self._each_if_constant(one, other, measure, slo_class)
        if found.value is None or found.low is None or found.high is None or alone is None:
            return found
        left, right = alone
        return Estimate(found.value, min(found.low, left[0] - right[1]), max(found.high, left[1] - right[0]))

    def violation_ratio(self, theirs: Group, ours: Group, slo_class: str = ALL_CLASSES) -> Estimate:
        """Violations of `theirs` over those of `ours`, over the same repeats as a difference; infinite where only ours
        are none, unknown where both are."""
        found = self._compare(theirs, ours, VIOLATIONS, slo_class, _over)
        pairing = self.pairing(theirs, ours)
        above, below = self.of(pairing.one, VIOLATIONS, slo_class), self.of(pairing.other, VIOLATIONS, slo_class)
        if found.low is None or above.low is None or not below.high or not _is_constant(
            pairing.other.columns, VIOLATIONS, slo_class
        ):  # fmt: skip
            return found
        return Estimate(found.value, min(found.low, above.low / below.high), found.high)

    def pairing(self, one: Group, other: Group) -> Pairing:
        """The repeats of both that are compared."""
        if (one, other) not in self._pairings:
            found = pair_up(one, other)
            known = [self._groups.setdefault(group.points, group) for group in (one, other, found.one, found.other)]
            self._pairings[one, other] = replace(found, one=known[2], other=known[3])
        return self._pairings[one, other]

    def _compare(
        self, one: Group, other: Group, measure: Measure, slo_class: str,
        combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> Estimate:  # fmt: skip
        pairing = self.pairing(one, other)
        pair = pairing.one, pairing.other
        left, right = (self.value(group, measure, slo_class) for group in pair)
        if left is None or right is None:
            return UNKNOWN
        value = combine(np.array([left]), np.array([right])).item()
        if np.isnan(value):
            return UNKNOWN
        if not all(_can_be_drawn(group, measure, slo_class) for group in pair):
            return Estimate(value)
        ours, theirs = (self._distribution(group, measure, slo_class) for group in pair)
        if not pairing.paired:
            theirs = np.random.default_rng(self._seed + 1).permutation(theirs)
        drawn = min(len(ours), len(theirs))
        found = between(combine(ours[:drawn], theirs[:drawn]))
        return Estimate(value, found.low, found.high)

    def _each_if_constant(
        self, one: Group, other: Group, measure: Measure, slo_class: str
    ) -> list[tuple[float, float]] | None:
        """The intervals of both where each has one outcome only: no resample of the difference differs then."""
        pairing = self.pairing(one, other)
        pair = pairing.one, pairing.other
        if not all(group.has_records and _is_constant(group.columns, measure, slo_class) for group in pair):
            return None
        found = [self.of(group, measure, slo_class) for group in pair]
        known = [(each.low, each.high) for each in found if each.low is not None and each.high is not None]
        return known if len(known) == len(pair) else None

    def _distribution(self, group: Group, measure: Measure, slo_class: str) -> np.ndarray:
        """f64[S]. All figures of a group are of the same draws, however many times it is drawn."""
        if (group, measure.name, slo_class) not in self._drawn:
            columns = group.columns
            wanted = _drawn_with(group, measure, slo_class)
            statistics = [each.of(columns, columns.mask(name)) for each, name in wanted]
            drawn = distributions(statistics, columns.sizes, samples=resamples_for(sum(columns.sizes)), seed=self._seed)
            self._drawn |= {(group, each.name, name): row for (each, name), row in zip(wanted, drawn, strict=True)}
        return self._drawn[group, measure.name, slo_class]


def _drawn_with(group: Group, measure: Measure, slo_class: str) -> list[tuple[Measure, str]]:
    """Measures and classes that are asked for together: the quick ones of every class, and the times of one."""
    times = [(each, slo_class) for each in {*JUDGED_TIMES, *({measure} - set(RATIOS))}]
    return [(each, name) for each in RATIOS for name in {slo_class, *group.points[0].rows}] + times


def _can_be_drawn(group: Group, measure: Measure, slo_class: str) -> bool:
    """Of a figure of whole runs, one run tells nothing about another; nor do a few requests about all."""
    if not group.has_records or (measure.of_run and len(group.points) < ENOUGH_REPEATS):
        return False
    return _count(group.columns, measure, slo_class) >= measure.least_requests


def _known(columns: Columns, measure: Measure, slo_class: str) -> np.ndarray:
    """Of the requests that the figure is of, what each contributes."""
    values = getattr(columns, measure.counts)[columns.mask(slo_class)]
    return values[~np.isnan(values)]


def _count(columns: Columns, measure: Measure, slo_class: str) -> int:
    return len(_known(columns, measure, slo_class))


def _is_constant(columns: Columns, measure: Measure, slo_class: str) -> bool:
    """Whether all requests have the same outcome, where it is one of two that the figure counts."""
    if not measure.of_outcome:
        return False
    met = _known(columns, measure, slo_class)
    return len(met) > 0 and bool((met == met[0]).all())


def _value(group: Group, measure: Measure, slo_class: str) -> float | None:
    if measure.needs is not None and not any(getattr(point.row, measure.needs) for point in group.points):
        return None
    if not group.has_records:
        return _mean_of_rows(group, measure, slo_class)
    columns = group.columns
    (value,) = measure.of(columns, columns.mask(slo_class))(np.ones((1, len(columns.due_s))))
    return None if np.isnan(value) else float(value)


def _mean_of_rows(group: Group, measure: Measure, slo_class: str) -> float | None:
    values = [getattr(point.rows[slo_class], measure.name) for point in group.points if slo_class in point.rows]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _over(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Infinite over nothing, and nan of nothing over nothing."""
    nothing = np.where(one > 0, np.inf, np.nan)
    return np.divide(one, other, out=nothing, where=other > 0)
