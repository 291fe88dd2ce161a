"""Pairs of groups side by side: each measure's difference with its interval, and how often it is sure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adaserve_jax.report.estimates import Estimate, Estimates
from adaserve_jax.report.measures import (
    ATTAINMENT,
    ATTAINMENT_TPOT,
    GOODPUT,
    TPOT_P50,
    TPOT_P99,
    TTFT_P99,
    Measure,
)
from adaserve_jax.report.points import Group
from adaserve_jax.report.words import amount, difference_cell, heading, number, titled
from adaserve_jax.results.schema import ALL_CLASSES

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
