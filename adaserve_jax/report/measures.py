"""The figures that a report shows of a group of requests: each by the name of its column in results.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from adaserve_jax.report.columns import Columns
from adaserve_jax.results.bootstrap import Counted, Ratio, percentile

Unit = Literal["share", "tokens/s", "s", "tokens"]
LEAST_REQUESTS = 10
"""Fewer have no interval: resamples of a handful of requests are too much alike to tell anything from chance."""


@dataclass(frozen=True)
class Measure:
    """name: the column whose value it is over one repeat. title: as figures say it. more_is_better: which end wins.

    of: the statistic of the requests where the mask, bool[N], holds, given all requests' columns. counts: the column
    that the requests have which it is of. least_requests: so many of them have an interval, fewer none. of_outcome:
    that column says yes or no. needs: a column of rows that must be above 0 for the figure to say anything. of_run:
    only repeats tell how it varies, not which requests there were.
    """

    name: str
    title: str
    unit: Unit
    more_is_better: bool
    of: Callable[[Columns, np.ndarray], Counted]
    counts: str
    least_requests: int = LEAST_REQUESTS
    of_outcome: bool = False
    needs: str | None = None
    of_run: bool = False

    def better(self, one: float, other: float) -> bool:
        return one > other if self.more_is_better else one < other


def _share(outcome: str) -> Callable[[Columns, np.ndarray], Counted]:
    """Of the requests that have the outcome, those where it is true."""

    def of(columns: Columns, mask: np.ndarray) -> Counted:
        met = getattr(columns, outcome)
        return Ratio(_where(mask, met), mask & ~np.isnan(met))

    return of


def _rate(met: str | None) -> Callable[[Columns, np.ndarray], Counted]:
    """Output tokens of requests that met it, or of all, over the wall time of the repeats, whoever else they served."""

    def of(columns: Columns, mask: np.ndarray) -> Counted:
        held = mask if met is None else mask & (getattr(columns, met) == 1)
        return Ratio(_where(held, columns.output_tokens), columns.wall_s)

    return of


def _per(above: str, below: str) -> Callable[[Columns, np.ndarray], Counted]:
    def of(columns: Columns, mask: np.ndarray) -> Counted:
        return Ratio(_where(mask, getattr(columns, above)), _where(mask, getattr(columns, below)))

    return of


def _percentile(column: str, q: float) -> Callable[[Columns, np.ndarray], Counted]:
    def of(columns: Columns, mask: np.ndarray) -> Counted:
        return percentile(np.where(mask, getattr(columns, column), np.nan), q)

    return of


def _violations(columns: Columns, mask: np.ndarray) -> Counted:
    carried = mask & ~np.isnan(columns.slo_met)
    return Ratio(carried & (columns.slo_met == 0), carried)


def _where(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(mask & ~np.isnan(values), values, 0.0)


def _by_outcome(name: str, title: str, unit: Unit, of: Callable[[Columns, np.ndarray], Counted], met: str) -> Measure:
    return Measure(name, title, unit, name != "violations", of, met, of_outcome=True)


def _time(name: str, title: str, column: str, q: int) -> Measure:
    """The q-th percentile: at least one request must be beyond it, of those that an interval is of."""
    return Measure(
        name, title, "s", False, _percentile(column, q), column, max(LEAST_REQUESTS, math.ceil(100 / (100 - q)))
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
"""Quick to draw, so that they are drawn together."""
JUDGED_TIMES = (TPOT_P50, TPOT_P99, TTFT_P99)
PERCENTILES = (TTFT_P50, TTFT_P90, TTFT_P99, TPOT_P50, TPOT_P90, TPOT_P99, QUEUE_P50, QUEUE_P99)
HEADLINE = (
    ATTAINMENT, ATTAINMENT_TPOT, GOODPUT, THROUGHPUT, TPOT_P50, TPOT_P99, TTFT_P99, MEAN_ACCEPTED,
)  # fmt: skip
