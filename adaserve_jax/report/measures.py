"""The figures that a report shows of a group of requests: each by the name of its column in results.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from adaserve_jax.report.columns import Columns
from adaserve_jax.results.bootstrap import Counted, Ratio, percentile

Unit = Literal["share", "tokens/s", "s", "tokens"]


@dataclass(frozen=True)
class Measure:
    """name: the column whose value it is over one repeat. title: as figures say it. more_is_better: which end wins.

    of: the statistic of the requests where the mask, bool[N], holds, given all requests' columns. outcome: the column
    that says which requests count, of those that have it. needs: a column of rows that must be above 0 for the figure
    to say anything. of_run: only repeats tell how it varies, not which requests there were.
    """

    name: str
    title: str
    unit: Unit
    more_is_better: bool
    of: Callable[[Columns, np.ndarray], Counted]
    outcome: str | None = None
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


ATTAINMENT = Measure("attainment", "attainment, joint", "share", True, _share("slo_met"), "slo_met")
ATTAINMENT_TPOT = Measure("attainment_tpot", "attainment, TPOT only", "share", True, _share("tpot_met"), "tpot_met")
VIOLATIONS = Measure("violations", "violations", "share", False, _violations)
GOODPUT = Measure("goodput_tps", "goodput", "tokens/s", True, _rate("slo_met"), "slo_met")
GOODPUT_TPOT = Measure("goodput_tpot_tps", "goodput, TPOT only", "tokens/s", True, _rate("tpot_met"), "tpot_met")
THROUGHPUT = Measure("throughput_tps", "throughput", "tokens/s", True, _rate(None), of_run=True)
TTFT_P50 = Measure("ttft_p50_s", "TTFT p50", "s", False, _percentile("ttft_s", 50))
TTFT_P90 = Measure("ttft_p90_s", "TTFT p90", "s", False, _percentile("ttft_s", 90))
TTFT_P99 = Measure("ttft_p99_s", "TTFT p99", "s", False, _percentile("ttft_s", 99))
TPOT_P50 = Measure("tpot_p50_s", "TPOT p50", "s", False, _percentile("tpot_s", 50))
TPOT_P90 = Measure("tpot_p90_s", "TPOT p90", "s", False, _percentile("tpot_s", 90))
TPOT_P99 = Measure("tpot_p99_s", "TPOT p99", "s", False, _percentile("tpot_s", 99))
QUEUE_P50 = Measure("queue_p50_s", "queue time p50", "s", False, _percentile("queue_s", 50))
QUEUE_P99 = Measure("queue_p99_s", "queue time p99", "s", False, _percentile("queue_s", 99))
MEAN_ACCEPTED = Measure(
    "mean_accepted",
    "accepted per verification",
    "tokens",
    True,
    _per("accepted_tokens", "verify_steps"),
    needs="drafted_tokens",
)
RATIOS = (ATTAINMENT, ATTAINMENT_TPOT, VIOLATIONS, GOODPUT, GOODPUT_TPOT, THROUGHPUT, MEAN_ACCEPTED)
"""Quick to draw, so that they are drawn together."""
JUDGED_TIMES = (TPOT_P50, TPOT_P99, TTFT_P99)
PERCENTILES = (TTFT_P50, TTFT_P90, TTFT_P99, TPOT_P50, TPOT_P90, TPOT_P99, QUEUE_P50, QUEUE_P99)
HEADLINE = (
    ATTAINMENT, ATTAINMENT_TPOT, GOODPUT, THROUGHPUT, TPOT_P50, TPOT_P99, TTFT_P99, MEAN_ACCEPTED,
)  # fmt: skip
