"""Figures of groups of requests with their intervals, and differences between two groups, paired where they can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adaserve_jax.report.measures import JUDGED_TIMES, RATIOS, THROUGHPUT, VIOLATIONS, Measure
from adaserve_jax.report.points import Group
from adaserve_jax.results.bootstrap import ENOUGH_REPEATS, between, distributions, resamples_for, sure_share
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
        self._values: dict[tuple[Group, str, str], float | None] = {}
        self._drawn: dict[tuple[Group, str, str], np.ndarray] = {}

    def of(self, group: Group, measure: Measure, slo_class: str = ALL_CLASSES) -> Estimate:
        """Over all repeats of the group, their requests pooled. Without request records: the mean of the rows of the
        repeats, and no interval."""
        value = self.value(group, measure, slo_class)
        if value is None or not _can_be_drawn(group, measure):
            return Estimate(value)
        found = between(self._distribution(group, measure, slo_class))
        if measure.outcome is not None:
            met = getattr(group.columns, measure.outcome)[group.columns.mask(slo_class)]
            met = met[~np.isnan(met)]
            if len(met) and met.all():  # no resample has another outcome: what is known is how many there were
                return Estimate(value, value * sure_share(len(met)), value)
            if len(met) and not met.any():
                most = 1.0 if measure.unit == "share" else self.value(group, THROUGHPUT, slo_class) or 0.0
                return Estimate(value, 0.0, most * (1 - sure_share(len(met))))
        return Estimate(value, found.low, found.high)

    def value(self, group: Group, measure: Measure, slo_class: str = ALL_CLASSES) -> float | None:
        """The figure without its interval; None: nothing was measured that it is of."""
        key = group, measure.name, slo_class
        if key not in self._values:
            self._values[key] = _value(group, measure, slo_class)
        return self._values[key]

    def difference(self, one: Group, other: Group, measure: Measure, slo_class: str = ALL_CLASSES) -> Estimate:
        """one - other. Where both were given the same requests, each request is drawn for both or for none, so that
        what is hard for both falls away."""
        return self._compare(one, other, measure, slo_class, np.subtract)

    def violation_ratio(self, theirs: Group, ours: Group, slo_class: str = ALL_CLASSES) -> Estimate:
        """Violations of `theirs` over those of `ours`; unknown where ours are none."""
        return self._compare(theirs, ours, VIOLATIONS, slo_class, _over)

    def _compare(
        self, one: Group, other: Group, measure: Measure, slo_class: str,
        combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> Estimate:  # fmt: skip
        left, right = (self.value(group, measure, slo_class) for group in (one, other))
        if left is None or right is None:
            return UNKNOWN
        value = combine(np.array([left]), np.array([right])).item()
        if np.isnan(value):
            return UNKNOWN
        if not (_can_be_drawn(one, measure) and _can_be_drawn(other, measure)):
            return Estimate(value)
        ours, theirs = (self._distribution(group, measure, slo_class) for group in (one, other))
        if not one.columns.same_requests(other.columns):
            theirs = np.random.default_rng(self._seed + 1).permutation(theirs)
        drawn = min(len(ours), len(theirs))
        found = between(combine(ours[:drawn], theirs[:drawn]))
        return Estimate(value, found.low, found.high)

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


def _can_be_drawn(group: Group, measure: Measure) -> bool:
    """Of a figure of whole runs, one run tells nothing about another."""
    return group.has_records and (not measure.of_run or len(group.points) >= ENOUGH_REPEATS)


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
    return np.divide(one, other, out=np.full(np.shape(one), np.nan), where=np.asarray(other) > 0)
