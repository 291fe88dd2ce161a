"""Figures of groups of requests with their intervals, and differences between two groups, paired where they can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.report.measures import (
    ATTAINMENT,
    ATTAINMENT_TPOT,
    GOODPUT,
    JUDGED_TIMES,
    RATIOS,
    THROUGHPUT,
    TPOT_P50,
    TPOT_P99,
    TTFT_P99,
    VIOLATIONS,
    Columns,
    Measure,
    Unit,
)
from adaserve_jax.report.points import Group, Pairing, Point, pair_up
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


# Numbers as a report writes them: shares in percent, times in milliseconds, "-" for what is not known.

UNIT_NAMES: dict[Unit, str] = {"share": "", "tokens/s": ", tokens/s", "s": ", ms", "tokens": ""}
_SCALES: dict[Unit, float] = {"share": 100.0, "tokens/s": 1.0, "s": 1e3, "tokens": 1.0}
_FORMATS: dict[Unit, str] = {"share": ",.1f", "tokens/s": ",.1f", "s": ",.1f", "tokens": ",.2f"}


def heading(measure: Measure) -> str:
    """The title of a column of the measure, with its unit."""
    return measure.title + UNIT_NAMES[measure.unit]


def cell(measure: Measure, estimate: Estimate) -> str:
    """E.g. "93.1% (90.2 to 95.5)"."""
    return _with_interval(estimate, measure, sign="", suffix="%" if measure.unit == "share" else "")


def difference_cell(measure: Measure, estimate: Estimate) -> str:
    """E.g. "+2.9 better (+1.0 to +4.8)"; shares in percentage points. Without the word: chance may be all it is."""
    judged = ""
    if estimate.value is not None and estimate.is_not_zero:
        judged = " better" if measure.better(estimate.value, 0.0) else " worse"
    return _with_interval(estimate, measure, sign="+", suffix=judged)


def titled(measure: Measure) -> str:
    """The title at the beginning of a sentence."""
    return measure.title[0].upper() + measure.title[1:]


def amount(measure: Measure, value: float) -> str:
    """A difference without its sign, in words: "4.2 percentage points", "12.0 tokens/s", "3.1 ms"."""
    names: dict[Unit, str] = {"share": " percentage points", "tokens/s": " tokens/s", "s": " ms", "tokens": " tokens"}
    return number(measure.unit, abs(value)) + names[measure.unit]


def number(unit: Unit, value: float | None, sign: str = "") -> str:
    return "-" if value is None else format(value * _SCALES[unit], sign + _FORMATS[unit])


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def ms(seconds: float | None) -> str:
    return number("s", seconds)


def size(parameters: int) -> str:
    """E.g. "110.2M" or "8.03B"."""
    for unit, scale, digits in (("B", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if parameters >= scale:
            return f"{parameters / scale:.{digits}f}{unit}"
    return str(parameters)


def listed(names: Sequence[str]) -> str:
    """E.g. "a, b and c"."""
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


# Pairs of groups side by side: each measure's difference with its interval, and how often it is sure.

MEASURES = (ATTAINMENT, ATTAINMENT_TPOT, GOODPUT, TPOT_P50, TPOT_P99, TTFT_P99)


@dataclass(frozen=True)
class Pair:
    """What is judged, and what it is judged against."""

    ours: Group
    theirs: Group

    @property
    def has_records(self) -> bool:
        return self.ours.has_records and self.theirs.has_records


def how_paired(estimates: Estimates, pairs: Sequence[Pair]) -> list[str]:
    """What keeps the differences from being those of pairs of requests; empty where nothing does."""
    known = [estimates.pairing(pair.ours, pair.theirs) for pair in pairs if pair.has_records]
    independent = sum(not each.paired for each in known)
    partly = sum(each.left_out > 0 for each in known)
    texts = []
    if independent:
        texts.append(
            f"{independent} of {len(pairs)} comparisons are not of the same requests at the same times: their "
            "differences are those of independent samples, with wider intervals."
        )
    if partly:
        texts.append(
            f"{partly} of {len(pairs)} comparisons are of some repeats only, those that both sides have: their "
            "differences are not those of the figures of all repeats."
        )
    return texts


def columns(ratio: str) -> tuple[str, ...]:
    """Titles of `cells`. ratio: of what the last column is."""
    titles = (heading(m) + (", points" if m.unit == "share" else "") for m in MEASURES)
    return (*titles, f"violations, {ratio}")


def cells(estimates: Estimates, pair: Pair, slo_class: str = ALL_CLASSES) -> tuple[tuple[str, ...], set[int]]:
    """Ours minus theirs in each measure, then the ratio of their violations to ours, unbounded where ours may be none;
    and the columns where ours is better and the interval excludes 0."""
    found = [estimates.difference(pair.ours, pair.theirs, measure, slo_class) for measure in MEASURES]
    better = {
        column for column, (measure, each) in enumerate(zip(MEASURES, found, strict=True)) if _wins(measure, each)
    }
    texts = (difference_cell(measure, each) for measure, each in zip(MEASURES, found, strict=True))
    return (*texts, _ratio_cell(estimates.violation_ratio(pair.theirs, pair.ours, slo_class))), better


def tally(estimates: Estimates, pairs: Sequence[Pair], measure: Measure) -> str:
    """At how many pairs ours is better, worse, and neither beyond chance, and by how much."""
    if not any(pair.has_records for pair in pairs):
        return f"{titled(measure)}: without request records nothing tells a difference from chance."
    found = [estimates.difference(pair.ours, pair.theirs, measure) for pair in pairs]
    sure = [each.value for each in found if each.is_not_zero and each.value is not None]
    better = [value for value in sure if measure.better(value, 0.0)]
    worse = [value for value in sure if not measure.better(value, 0.0)]
    return (
        f"{titled(measure)}: better at {len(better)} of {len(pairs)} points{_by(measure, better)}, worse at "
        f"{len(worse)}{_by(measure, worse)}, and at {len(pairs) - len(sure)} not told apart."
    )


def _by(measure: Measure, values: Sequence[float]) -> str:
    """E.g. " (by 2.0 to 4.1 ms)"."""
    if not values:
        return ""
    low, high = min(map(abs, values)), max(map(abs, values))
    if number(measure.unit, low) == number(measure.unit, high):
        return f" (by {amount(measure, high)})"
    return f" (by {number(measure.unit, low)} to {amount(measure, high)})"


def _wins(measure: Measure, difference: Estimate) -> bool:
    return difference.is_not_zero and measure.better(difference.value or 0.0, 0.0)


def _ratio_cell(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    at_most = math.inf if estimate.high is None else estimate.high
    if estimate.low is not None and math.isinf(at_most):
        at_least = f"more than {estimate.low:.2f}"
        return at_least if math.isinf(estimate.value) else f"{estimate.value:.2f} ({at_least})"
    text = "only theirs" if math.isinf(estimate.value) else f"{estimate.value:.2f}"
    return text if estimate.low is None else f"{text} ({estimate.low:.2f} to {at_most:.2f})"
