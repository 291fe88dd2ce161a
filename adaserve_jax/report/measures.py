"""Measures that a report shows of a group of requests, each named as its column in results.jsonl.

Axes: N requests, S resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from adaserve_jax.results.bootstrap import Counted, Ratio, percentile
from adaserve_jax.results.records import RequestRecord, Status, arrival_order, slowest_part
from adaserve_jax.results.schema import ALL_CLASSES

WITH_TARGET, WITHOUT_TARGET = "with a target", "without a target"
"""Names that select requests by whether they have a target, where the name of a class selects by class."""
DUE_TOLERANCE_S = 1e-3
"""Arrivals due within this of each other are the same one: schedules are stored rounded."""
MIN_REQUESTS = 10
"""Fewest requests that have an interval: resamples of a handful are too alike to tell anything from chance."""
Unit = Literal["share", "tokens/s", "s", "tokens"]
_SAME_NAME = (
    "due_s", "slo_met", "tpot_met", "ttft_met", "e2e_met", "output_tokens", "queue_s", "ttft_s", "tpot_s", "ttft_slo_s",
    "e2e_slo_s", "verify_steps", "drafted_tokens", "accepted_tokens",
)  # fmt: skip
"""Columns that have the name of the record's field."""


@dataclass(frozen=True, eq=False)
class MeasureColumns:
    """Request records as columns f64[N], NaN for values that a record does not have.

    A measure of thousands of requests is then a product of arrays. sizes: number of records of each repeat, one after
    the other. wall_s: wall time of the repeat divided among its records, so that the sum over any repeats is their wall
    time. tpot_over: TPOT / target of requests with a target, 0 for a single token and infinite for requests that did
    not finish, NaN for those that their client cancelled. ttft_over: likewise. Where the thinking has a target of its
    own, tpot_slo_s and tpot_over are those of thinking or answer, whichever took longer for its target.
    """

    sizes: tuple[int, ...]
    slo_class: np.ndarray
    due_s: np.ndarray
    wall_s: np.ndarray
    finished: np.ndarray
    cancelled: np.ndarray
    slo_met: np.ndarray
    tpot_met: np.ndarray
    ttft_met: np.ndarray
    e2e_met: np.ndarray
    output_tokens: np.ndarray
    queue_s: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    tpot_slo_s: np.ndarray
    ttft_slo_s: np.ndarray
    e2e_slo_s: np.ndarray
    tpot_over: np.ndarray
    ttft_over: np.ndarray
    verify_steps: np.ndarray
    drafted_tokens: np.ndarray
    accepted_tokens: np.ndarray

    @classmethod
    def of(cls, repeats: Sequence[tuple[Sequence[RequestRecord], float]]) -> MeasureColumns:
        """Build columns of repeats, each given by its records and wall time in seconds; sort requests by arrival."""
        records = [record for each, _ in repeats for record in sorted(each, key=arrival_order)]
        walls = [wall_s / len(each) for each, wall_s in repeats for _ in each]
        statuses: list[Status] = [record.status for record in records]
        parts = [slowest_part(record.tpot_parts) for record in records]
        return cls(
            sizes=tuple(len(each) for each, _ in repeats),
            slo_class=np.array([record.slo_class for record in records], dtype=np.str_),
            wall_s=_numbers(walls),
            finished=_numbers(status == "finished" for status in statuses),
            cancelled=_numbers(status == "cancelled" for status in statuses),
            tpot_slo_s=_numbers(target_s for target_s, _ in parts),
            tpot_over=_over(statuses, [(tpot_s, target_s) for target_s, tpot_s in parts], one_token=0.0),
            ttft_over=_over(statuses, [(r.ttft_s, r.ttft_slo_s) for r in records], one_token=np.inf),
            **{name: _numbers(getattr(record, name) for record in records) for name in _SAME_NAME},
        )

    def mask(self, slo_class: str) -> np.ndarray:
        """Return bool[N], the requests of a class, all requests, or those with or without a target."""
        if slo_class == ALL_CLASSES:
            return np.ones(len(self.slo_class), bool)
        if slo_class in (WITH_TARGET, WITHOUT_TARGET):
            untargeted = np.isnan(self.tpot_slo_s) & np.isnan(self.ttft_slo_s) & np.isnan(self.e2e_slo_s)
            return untargeted == (slo_class == WITHOUT_TARGET)
        return self.slo_class == slo_class

    def same_requests(self, other: MeasureColumns) -> bool:
        """Return whether both have the same arrivals in the same order, so that their requests can be paired."""
        if self.sizes != other.sizes or not np.array_equal(self.slo_class, other.slo_class):
            return False
        return bool(np.allclose(self.due_s, other.due_s, rtol=0, atol=DUE_TOLERANCE_S))


def _numbers(values: Iterable[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _over(
    statuses: Sequence[Status], pairs: Sequence[tuple[float | None, float | None]], one_token: float
) -> np.ndarray:
    """Return measured / target. one_token: value for a request that finished without the measured time."""
    values: list[float | None] = []
    for status, (measured_s, target_s) in zip(statuses, pairs, strict=True):
        if target_s is None or status == "cancelled":
            values.append(None)
        elif status != "finished":
            values.append(np.inf)
        else:
            values.append(one_token if measured_s is None else measured_s / target_s)
    return _numbers(values)


Statistic = Callable[[MeasureColumns, np.ndarray], Counted]
"""Statistic of the requests in a mask, bool[N], given all requests' columns."""


@dataclass(frozen=True)
class Measure:
    """A figure of a group of requests.

    name: column of results.jsonl that has its value over one repeat. title: name in the report.
    counts: column that only the measured requests have. min_requests: fewest of them that have an interval.
    of_outcome: that column holds yes or no. needs: column of rows that must be above 0 for a value.
    of_run: the value varies with the run, so that only repeats tell its interval.
    """

    name: str
    title: str
    unit: Unit
    more_is_better: bool
    of: Statistic
    counts: str
    min_requests: int = MIN_REQUESTS
    of_outcome: bool = False
    needs: str | None = None
    of_run: bool = False

    def better(self, one: float, other: float) -> bool:
        """Return whether the first value is better than the other."""
        return one > other if self.more_is_better else one < other


def _share(outcome: str) -> Statistic:
    """Return the statistic for the share of requests with a true outcome, among those that have the outcome."""

    def of(columns: MeasureColumns, mask: np.ndarray) -> Counted:
        met = getattr(columns, outcome)
        return Ratio(_where(mask, met), mask & ~np.isnan(met))

    return of


def _rate(met: str | None) -> Statistic:
    """Return the statistic for output tokens of requests that met a target, or of all, per second of wall time."""

    def of(columns: MeasureColumns, mask: np.ndarray) -> Counted:
        counted = mask if met is None else mask & (getattr(columns, met) == 1)
        return Ratio(_where(counted, columns.output_tokens), columns.wall_s)

    return of


def _per(above: str, below: str) -> Statistic:
    def of(columns: MeasureColumns, mask: np.ndarray) -> Counted:
        return Ratio(_where(mask, getattr(columns, above)), _where(mask, getattr(columns, below)))

    return of


def _percentile(column: str, q: float) -> Statistic:
    def of(columns: MeasureColumns, mask: np.ndarray) -> Counted:
        return percentile(np.where(mask, getattr(columns, column), np.nan), q)

    return of


def _violations(columns: MeasureColumns, mask: np.ndarray) -> Counted:
    with_target = mask & ~np.isnan(columns.slo_met)
    return Ratio(with_target & (columns.slo_met == 0), with_target)


def _where(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(mask & ~np.isnan(values), values, 0.0)


def _by_outcome(name: str, title: str, unit: Unit, of: Statistic, met: str) -> Measure:
    return Measure(name, title, unit, name != "violations", of, met, of_outcome=True)


def _time(name: str, title: str, column: str, q: int) -> Measure:
    """Return the q-th percentile of a time. It has an interval where at least one request is beyond it."""
    return Measure(
        name, title, "s", False, _percentile(column, q), column, max(MIN_REQUESTS, math.ceil(100 / (100 - q)))
    )


ATTAINMENT = _by_outcome("attainment", "attainment, joint", "share", _share("slo_met"), "slo_met")
ATTAINMENT_TPOT = _by_outcome("attainment_tpot", "attainment, TPOT only", "share", _share("tpot_met"), "tpot_met")
VIOLATIONS = _by_outcome("violations", "violations", "share", _violations, "slo_met")
GOODPUT = _by_outcome("goodput_tps", "goodput", "tokens/s", _rate("slo_met"), "slo_met")
GOODPUT_TPOT = _by_outcome("goodput_tpot_tps", "goodput, TPOT only", "tokens/s", _rate("tpot_met"), "tpot_met")
THROUGHPUT = Measure("throughput_tps", "throughput", "tokens/s", True, _rate(None), "output_tokens", of_run=True)
TTFT_P50 = _time("ttft_p50_s", "TTFT p50", "ttft_s", 50)
TTFT_P90 = _time("ttft_p90_s", "TTFT p90", "ttft_s", 90)
TTFT_P99 = _time("ttft_p99_s", "TTFT p99", "ttft_s", 99)
TPOT_P50 = _time("tpot_p50_s", "TPOT p50", "tpot_s", 50)
TPOT_P90 = _time("tpot_p90_s", "TPOT p90", "tpot_s", 90)
TPOT_P99 = _time("tpot_p99_s", "TPOT p99", "tpot_s", 99)
QUEUE_P50 = _time("queue_p50_s", "queue time p50", "queue_s", 50)
QUEUE_P99 = _time("queue_p99_s", "queue time p99", "queue_s", 99)
MEAN_ACCEPTED = Measure(
    "mean_accepted",
    "accepted per verification",
    "tokens",
    True,
    _per("accepted_tokens", "verify_steps"),
    "verify_steps",
    needs="drafted_tokens",
)
RATIOS = (ATTAINMENT, ATTAINMENT_TPOT, VIOLATIONS, GOODPUT, GOODPUT_TPOT, THROUGHPUT, MEAN_ACCEPTED)
"""Measures that are quick to resample, so that they are resampled together."""
JUDGED_TIMES = (TPOT_P50, TPOT_P99, TTFT_P99)
PERCENTILES = (TTFT_P50, TTFT_P90, TTFT_P99, TPOT_P50, TPOT_P90, TPOT_P99, QUEUE_P50, QUEUE_P99)
HEADLINE = (ATTAINMENT, ATTAINMENT_TPOT, GOODPUT, TPOT_P50, TTFT_P50, TTFT_P99)
"""As many as fit beside the contents at 1280 pixels."""
