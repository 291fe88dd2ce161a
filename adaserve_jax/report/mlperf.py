"""Section on the highest rate at which 99 of 100 requests meet each class's targets, as in MLPerf's server scenario.

MLPerf Inference (mlcommons/inference_policies, inference_rules.adoc): queries arrive by a Poisson process; a run is
valid when the 99th percentile of TTFT and that of TPOT are both within the limits of the benchmark; the result is the
largest rate of a valid run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaserve_jax.report.document import Section, Table, Text
from adaserve_jax.report.estimates import listed, number, span
from adaserve_jax.report.measures import MeasureColumns
from adaserve_jax.report.points import PointGroup
from adaserve_jax.report.view import View
from adaserve_jax.results.schema import SERVED

QUANTILE = 99
DEFINITION = (
    "In the manner of MLPerf Inference's server scenario: the highest measured rate at which the 99th percentile of "
    "TTFT and that of TPOT are both within the class's targets. It is that of the nearest rank: 99 of 100 requests are "
    "at or below it, and of fewer than 100 all are. Requests that did not finish count as infinitely slow. "
    "Where targets differ from request to request, the 99th percentile of measured / target must be at most 1. These "
    "are not MLPerf results: model, workload, accuracy, duration (there at least 600 s) and number of queries are this "
    "report's own, and only the rates that were measured are candidates."
)


@dataclass(frozen=True)
class Tail:
    """99th percentiles of a class at one rate, in seconds and over target; None without such a target or times."""

    requests: int
    ttft_s: float | None
    tpot_s: float | None
    ttft_over: float | None
    tpot_over: float | None

    @classmethod
    def of(cls, columns: MeasureColumns, slo_class: str) -> Tail:
        """Return the percentiles of the class's requests with a target for TTFT or TPOT."""
        targeted = ~(np.isnan(columns.ttft_slo_s) & np.isnan(columns.tpot_slo_s))
        mask = columns.mask(slo_class) & ~np.isnan(columns.slo_met) & targeted
        unfinished = columns.finished == 0

        def tail(values: np.ndarray) -> float | None:
            known = values[mask & ~np.isnan(values)]
            return float(np.percentile(known, QUANTILE, method="inverted_cdf")) if len(known) else None

        return cls(
            requests=int(mask.sum()),
            ttft_s=tail(np.where(unfinished, np.inf, columns.ttft_s)),
            tpot_s=tail(np.where(unfinished, np.inf, columns.tpot_s)),
            ttft_over=tail(columns.ttft_over),
            tpot_over=tail(columns.tpot_over),
        )

    @property
    def meets(self) -> bool:
        """True if the percentiles are within all targets that the class has."""
        overs = [over for over in (self.ttft_over, self.tpot_over) if over is not None]
        return bool(overs) and all(over <= 1 for over in overs)


def mlperf(view: View) -> Section | None:
    """Build the section; None if no class has a target for TTFT or TPOT, or there are no request records."""
    rows = [row for policy in view.measured.policies for row in _rows(view, policy)]
    if not rows:
        return None
    columns = (
        "policy", "class", "TTFT target, ms", "TPOT target, ms", "highest rate met", "requests", "TTFT p99, ms",
        "TPOT p99, ms", "lowest rate missed",
    )  # fmt: skip
    others = [axis for axis in view.measured.varied if axis != "rate_rps"]
    where = f"At {view.focus.describe(others)}." if others else ""
    caption = f"Requests and 99th percentiles are of the highest rate met, else of the lowest rate. {where}".strip()
    table = Table(
        "mlperf", "99th percentiles within the targets", caption, columns, tuple(rows), frozenset(range(2, 8))
    )
    texts = [Text(DEFINITION)]
    processes = sorted({s.process for s in view.slice_through("rate_rps")} - {"poisson", SERVED})
    if processes:
        texts.append(
            Text(f"Arrivals here were not Poisson's, as MLPerf wants them, but: {listed(processes)}.", warns=True)
        )
    return Section("mlperf", "Rates within the targets", (*texts, table))


def _rows(view: View, policy: str) -> list[tuple[str, ...]]:
    """Return a row per class with a target, and one over all of them."""
    along = (view.measured.groups.get((policy, setting)) for setting in view.slice_through("rate_rps"))
    groups = [group for group in along if group is not None and group.has_records]
    unknown = _invalid(view, policy)
    rows, tails = [], {}
    for name in view.measured.classes:
        tails[name] = [Tail.of(group.columns, name) for group in groups]
        if any(tail.requests for tail in tails[name]):
            rows.append(_row(policy, name, groups, tails[name], unknown))
        else:
            del tails[name]
    if len(tails) > 1:
        met = [all(tail.meets or not tail.requests for tail in at) for at in zip(*tails.values(), strict=True)]
        highest, lowest = _rates(groups, met, unknown)
        rows.append((policy, "every class", "", "", highest, "", "", "", lowest))
    return rows


def _invalid(view: View, policy: str) -> list[str]:
    """Return the rates at which all points of a policy are invalid."""
    still = view.focus.without("rate_rps")
    lost = [
        at for name, at in view.measured.invalid
        if name == policy and (policy, at) not in view.measured.groups and at.without("rate_rps") == still
    ]  # fmt: skip
    return [at.cell("rate_rps") for at in sorted(lost, key=lambda at: at.order)]


def _row(
    policy: str, name: str, groups: Sequence[PointGroup], tails: Sequence[Tail], unknown: Sequence[str]
) -> tuple[str, ...]:  # fmt: skip
    there = [(group, tail) for group, tail in zip(groups, tails, strict=True) if tail.requests]
    met = [tail.meets for _, tail in there]
    shown = max((i for i, each in enumerate(met) if each), default=0)
    highest, lowest = _rates([group for group, _ in there], met, unknown)
    tail = there[shown][1]
    return (
        policy, name, _targets(groups, name, "ttft_slo_s"), _targets(groups, name, "tpot_slo_s"), highest,
        f"{tail.requests:,}", _time(tail.ttft_s), _time(tail.tpot_s), lowest,
    )  # fmt: skip


def _rates(groups: Sequence[PointGroup], met: Sequence[bool], unknown: Sequence[str]) -> tuple[str, str]:
    """Return the highest rate met and the lowest rate missed; beside the former, lower rates that were missed and rates
    whose points are invalid."""
    rates = [group.setting.cell("rate_rps") for group in groups]
    missed = [rate for rate, each in zip(rates, met, strict=True) if not each]
    kept = [i for i, each in enumerate(met) if each]
    below = [rate for rate in rates[: kept[-1]] if rate in missed] if kept else []
    notes = [f"{what} {listed(which)}" for what, which in (("missed at", below), ("invalid at", unknown)) if which]
    highest = (rates[kept[-1]] if kept else "none") + (f" ({'; '.join(notes)})" if notes else "")
    return highest, missed[0] if missed else "none"


def _targets(groups: Sequence[PointGroup], name: str, column: str) -> str:
    """Return the least and largest target of a class as a cell."""
    targets = np.concatenate([getattr(group.columns, column)[group.columns.mask(name)] for group in groups])
    known = targets[~np.isnan(targets)]
    return span(*(f"{value * 1e3:,.4g}" for value in (known.min(), known.max()))) if len(known) else "-"


def _time(seconds: float | None) -> str:
    return "more than 1% did not finish" if seconds == np.inf else number("s", seconds)
