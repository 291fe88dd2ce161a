"""Estimates of measures and of their differences, with 95% intervals, and the formats of numbers in a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.report.measures import (
    ATTAINMENT,
    ATTAINMENT_TPOT,
    JUDGED_TIMES,
    RATIOS,
    THROUGHPUT,
    VIOLATIONS,
    Measure,
    MeasureColumns,
    Unit,
)
from adaserve_jax.report.points import MeasuredPoint, Pairing, PointGroup, pair_up
from adaserve_jax.results.bootstrap import ENOUGH_REPEATS, between, distributions, resamples_for, sure_share
from adaserve_jax.results.schema import ALL_CLASSES

UNIT_NAMES: dict[Unit, str] = {"share": "", "tokens/s": ", tokens/s", "s": ", ms", "tokens": ""}
_SCALES: dict[Unit, float] = {"share": 100.0, "tokens/s": 1.0, "s": 1e3, "tokens": 1.0}
_FORMATS: dict[Unit, str] = {"share": ",.1f", "tokens/s": ",.1f", "s": ",.1f", "tokens": ",.2f"}
_AMOUNTS: dict[Unit, str] = {"share": " percentage points", "tokens/s": " tokens/s", "s": " ms", "tokens": " tokens"}


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval; None where it is unknown."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """True if the interval excludes 0, so that a difference is beyond chance."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


UNKNOWN = Estimate(None)
SEED = 0


class Estimates:
    """Estimates by bootstrap of 2,000 resamples, or fewer of many requests; each is computed once and kept."""

    def __init__(self):
        self._pairings: dict[tuple[PointGroup, PointGroup], Pairing] = {}
        # One group per set of repeats, so that it is resampled once.
        self._groups: dict[tuple[MeasuredPoint, ...], PointGroup] = {}
        self._values: dict[tuple[PointGroup, str, str], float | None] = {}
        self._drawn: dict[tuple[PointGroup, str, str], np.ndarray] = {}

    def of(self, group: PointGroup, measure: Measure, slo_class: str = ALL_CLASSES) -> Estimate:
        """Estimate a measure over all repeats of the group, with their requests pooled.

        Without request records: the mean of the repeats' rows, without an interval.
        """
        value = self.value(group, measure, slo_class)
        if value is None or not _can_be_drawn(group, measure, slo_class):
            return Estimate(value)
        found = between(self._distribution(group, measure, slo_class))
        if found.low is not None and found.high is not None and _is_constant(group.columns, measure, slo_class):
            return self._widened(group, measure, slo_class, value, found.low, found.high)
        return Estimate(value, found.low, found.high)

    def _widened(
        self, group: PointGroup, measure: Measure, slo_class: str, value: float, low: float, high: float
    ) -> Estimate:  # fmt: skip
        """Widen the interval of an outcome that all requests share.

        No resample has another outcome; the number of requests bounds its share.
        """
        sure = sure_share(_count(group.columns, measure, slo_class))
        if value > 0:
            return Estimate(value, min(low, value * sure), high)
        most = 1.0
        if measure.unit != "share":
            most = between(self._distribution(group, THROUGHPUT, slo_class)).high or 0.0
        return Estimate(value, low, max(high, most * (1 - sure)))

    def value(self, group: PointGroup, measure: Measure, slo_class: str = ALL_CLASSES) -> float | None:
        """Return the value without its interval; None where nothing was measured."""
        key = group, measure.name, slo_class
        if key not in self._values:
            self._values[key] = _value(group, measure, slo_class)
        return self._values[key]

    def difference(
        self, one: PointGroup, other: PointGroup, measure: Measure, slo_class: str = ALL_CLASSES
    ) -> Estimate:
        """Estimate one - other over the repeats in which both got the same requests, or over all if there are none.

        Paired requests are drawn for both groups or for neither, so that requests that are hard for both cancel out.
        """
        found = self._compare(one, other, measure, slo_class, np.subtract)
        alone = self._each_if_constant(one, other, measure, slo_class)
        if found.value is None or found.low is None or found.high is None or alone is None:
            return found
        left, right = alone
        return Estimate(found.value, min(found.low, left[0] - right[1]), max(found.high, left[1] - right[0]))

    def violation_ratio(self, theirs: PointGroup, ours: PointGroup, slo_class: str = ALL_CLASSES) -> Estimate:
        """Estimate violations of `theirs` / violations of `ours`, over the same repeats as a difference.

        It is infinite where only ours are 0, and unknown where both are.
        """
        found = self._compare(theirs, ours, VIOLATIONS, slo_class, _over)
        pairing = self.pairing(theirs, ours)
        above, below = self.of(pairing.one, VIOLATIONS, slo_class), self.of(pairing.other, VIOLATIONS, slo_class)
        if found.low is None or above.low is None or not below.high or not _is_constant(
            pairing.other.columns, VIOLATIONS, slo_class
        ):  # fmt: skip
            return found
        return Estimate(found.value, min(found.low, above.low / below.high), found.high)

    def pairing(self, one: PointGroup, other: PointGroup) -> Pairing:
        """Return the repeats of two groups that are compared."""
        if (one, other) not in self._pairings:
            found = pair_up(one, other)
            known = [self._groups.setdefault(group.points, group) for group in (one, other, found.one, found.other)]
            self._pairings[one, other] = replace(found, one=known[2], other=known[3])
        return self._pairings[one, other]

    def _compare(
        self, one: PointGroup, other: PointGroup, measure: Measure, slo_class: str,
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
            theirs = np.random.default_rng(SEED + 1).permutation(theirs)
        drawn = min(len(ours), len(theirs))
        found = between(combine(ours[:drawn], theirs[:drawn]))
        return Estimate(value, found.low, found.high)

    def _each_if_constant(
        self, one: PointGroup, other: PointGroup, measure: Measure, slo_class: str
    ) -> list[tuple[float, float]] | None:
        """Return the intervals of both groups where each has one outcome only, so that no resample of their difference
        differs."""
        pairing = self.pairing(one, other)
        pair = pairing.one, pairing.other
        if not all(group.has_records and _is_constant(group.columns, measure, slo_class) for group in pair):
            return None
        found = [self.of(group, measure, slo_class) for group in pair]
        known = [(each.low, each.high) for each in found if each.low is not None and each.high is not None]
        return known if len(known) == len(pair) else None

    def _distribution(self, group: PointGroup, measure: Measure, slo_class: str) -> np.ndarray:
        """Return f64[S], the measure on each resample. All measures of a group use the same resamples."""
        if (group, measure.name, slo_class) not in self._drawn:
            columns = group.columns
            wanted = _drawn_with(group, measure, slo_class)
            statistics = [each.of(columns, columns.mask(name)) for each, name in wanted]
            drawn = distributions(statistics, columns.sizes, samples=resamples_for(sum(columns.sizes)), seed=SEED)
            self._drawn |= {(group, each.name, name): row for (each, name), row in zip(wanted, drawn, strict=True)}
        return self._drawn[group, measure.name, slo_class]


def _drawn_with(group: PointGroup, measure: Measure, slo_class: str) -> list[tuple[Measure, str]]:
    """Return the measures and classes to resample together: quick measures of every class, and times of one class."""
    times = [(each, slo_class) for each in {*JUDGED_TIMES, *({measure} - set(RATIOS))}]
    return [(each, name) for each in RATIOS for name in {slo_class, *group.points[0].rows}] + times


def _can_be_drawn(group: PointGroup, measure: Measure, slo_class: str) -> bool:
    """Return whether the measure has an interval: measures of whole runs need repeats, others enough requests."""
    if not group.has_records or (measure.of_run and len(group.points) < ENOUGH_REPEATS):
        return False
    return _count(group.columns, measure, slo_class) >= measure.min_requests


def _known(columns: MeasureColumns, measure: Measure, slo_class: str) -> np.ndarray:
    """Return the known values of the measure's column in a class."""
    values = getattr(columns, measure.counts)[columns.mask(slo_class)]
    return values[~np.isnan(values)]


def _count(columns: MeasureColumns, measure: Measure, slo_class: str) -> int:
    return len(_known(columns, measure, slo_class))


def _is_constant(columns: MeasureColumns, measure: Measure, slo_class: str) -> bool:
    """Return whether the measure counts an outcome that is the same for all requests."""
    if not measure.of_outcome:
        return False
    met = _known(columns, measure, slo_class)
    return len(met) > 0 and bool((met == met[0]).all())


def _value(group: PointGroup, measure: Measure, slo_class: str) -> float | None:
    if measure.needs is not None and not any(getattr(point.row, measure.needs) for point in group.points):
        return None
    if measure.of_outcome and not _has_outcome(group, measure, slo_class):
        return None  # the goodput of requests without a target is not 0
    if not group.has_records:
        values = [getattr(point.rows[slo_class], measure.name) for point in group.points if slo_class in point.rows]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None
    columns = group.columns
    (value,) = measure.of(columns, columns.mask(slo_class))(np.ones((1, len(columns.due_s))))
    return None if np.isnan(value) else float(value)


def _has_outcome(group: PointGroup, measure: Measure, slo_class: str) -> bool:
    """Return whether any request of a class has the target whose outcome the measure counts."""
    if group.has_records:
        return _count(group.columns, measure, slo_class) > 0
    share = ATTAINMENT_TPOT if measure.counts == ATTAINMENT_TPOT.counts else ATTAINMENT
    rows = [point.rows[slo_class] for point in group.points if slo_class in point.rows]
    return any(getattr(row, share.name) is not None for row in rows)


def _over(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Divide; the result is infinite over 0, and NaN for 0 / 0."""
    nothing = np.where(one > 0, np.inf, np.nan)
    return np.divide(one, other, out=nothing, where=other > 0)


def heading(measure: Measure) -> str:
    """Return the title of a column of the measure, with its unit."""
    return measure.title + UNIT_NAMES[measure.unit]


def cell(measure: Measure, estimate: Estimate) -> str:
    """Return an estimate as a cell, e.g. "93.1% (90.2 to 95.5)"."""
    return _with_interval(estimate, measure, sign="", suffix="%" if measure.unit == "share" else "")


def difference_cell(measure: Measure, estimate: Estimate) -> str:
    """Return a difference as a cell, e.g. "+2.9 better (+1.0 to +4.8)"; shares are in percentage points.

    The words better and worse are left out where the interval does not exclude 0.
    """
    judged = ""
    if estimate.value is not None and estimate.excludes_zero:
        judged = " better" if measure.better(estimate.value, 0.0) else " worse"
    return _with_interval(estimate, measure, sign="+", suffix=judged)


def titled(measure: Measure) -> str:
    """Return the title for the beginning of a sentence."""
    return measure.title[0].upper() + measure.title[1:]


def amounts(measure: Measure, values: Sequence[float]) -> str:
    """Return the range of differences without their signs, e.g. "4.2 percentage points", "2.0 to 4.1 ms"."""
    least, most = (number(measure.unit, of(map(abs, values))) for of in (min, max))
    return span(least, most) + _AMOUNTS[measure.unit]


def number(unit: Unit, value: float | None, sign: str = "") -> str:
    return "-" if value is None else format(value * _SCALES[unit], sign + _FORMATS[unit])


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def ms(seconds: float | None) -> str:
    return number("s", seconds)


def size(parameters: int) -> str:
    """Return a number of parameters, e.g. "110.2M" or "8.03B"."""
    for unit, scale, digits in (("B", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if parameters >= scale:
            return f"{parameters / scale:.{digits}f}{unit}"
    return str(parameters)


def listed(names: Sequence[str]) -> str:
    """Return names as a list, e.g. "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _with_interval(estimate: Estimate, measure: Measure, *, sign: str, suffix: str) -> str:
    text = number(measure.unit, estimate.value, sign)
    if estimate.value is None:
        return text
    text += suffix
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({number(measure.unit, estimate.low, sign)} to {number(measure.unit, estimate.high, sign)})"
