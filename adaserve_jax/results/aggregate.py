"""Turns request records into the summary of one class or of all. Definitions: docs/metrics.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np

from adaserve_jax.results.records import RequestRecord, Status, violation_cause
from adaserve_jax.results.schema import ALL_CLASSES, Summary

# What request records are summed up from, as columns: about 130 bytes a request where its record takes 1,000.
#
# For runs of so many requests that their records are not to be kept. N: requests.

STATUSES: tuple[Status, ...] = get_args(Status)
TIMES = ("due_s", "late_s", "queue_s", "ttft_s", "tpot_s", "tpot_paper_s", "tpot_slo_s", "ttft_slo_s")
"""f64, nan where a record has None."""
COUNTS = ("prompt_tokens", "output_tokens", "verify_steps", "drafted_tokens", "accepted_tokens", "preemptions")
OUTCOMES = ("tpot_met", "ttft_met", "slo_met", "slo_feasible", "tpot_paper_met")
"""i8: 1, 0, or UNKNOWN where a record has None."""
UNKNOWN = -1
ROW = np.dtype(
    [("slo_class", "i4"), ("status", "i1"), ("late_tokens", "i4"), ("gaps", "i4")]
    + [(name, "f8") for name in TIMES] + [(name, "i8") for name in COUNTS] + [(name, "i1") for name in OUTCOMES]
)  # fmt: skip


class RecordColumns:
    """Records, added one by one, of which only columns are kept; times of tokens stay as they are where there are any.

    classes: in the order in which they came. rows: ROW[N], slo_class an index of `classes`, status one of STATUSES;
    late_tokens as of the record; gaps: tokens after the first whose times are known.
    """

    def __init__(self, records: Iterable[RequestRecord] = ()):
        self.classes: list[str] = []
        self._class_of: dict[str, int] = {}
        self._rows: np.ndarray = np.zeros(256, ROW)
        self._count = 0
        self._offsets_s: dict[int, tuple[float, ...]] = {}
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> np.ndarray:
        return self._rows[: self._count]

    def add(self, record: RequestRecord) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        kind = self._class_of.get(record.slo_class)
        if kind is None:
            kind = self._class_of[record.slo_class] = len(self.classes)
            self.classes.append(record.slo_class)
        timed = len(record.token_offsets_s)
        if timed > 1:
            self._offsets_s[self._count] = record.token_offsets_s
        self._rows[self._count] = (
            kind, STATUSES.index(record.status), record.late_tokens, max(timed - 1, 0),
            *(_number(getattr(record, name), np.nan) for name in TIMES),
            *(getattr(record, name) for name in COUNTS),
            *(_number(getattr(record, name), UNKNOWN) for name in OUTCOMES),
        )  # fmt: skip
        self._count += 1

    def gaps_s(self, chosen: np.ndarray) -> np.ndarray:
        """f64, times between successive tokens of each chosen request (bool[N]); 0 between tokens of one step."""
        of = [np.diff(np.asarray(offsets_s)) for row, offsets_s in self._offsets_s.items() if chosen[row]]
        return np.concatenate(of) if of else np.zeros(0)

    def record(self, row: int) -> RequestRecord:
        """A record with what is kept of it; its names and the times of its tokens are empty."""
        at: dict[str, Any] = dict(zip(ROW.names or (), self._rows[row].item(), strict=True))
        values: dict[str, Any] = {name: None if np.isnan(at[name]) else float(at[name]) for name in TIMES}
        values |= {name: int(at[name]) for name in COUNTS}
        values |= {name: None if at[name] == UNKNOWN else bool(at[name]) for name in OUTCOMES}
        return RequestRecord(
            run_id="", policy="", rate_rps=0.0, request_id="", slo_class=self.classes[int(at["slo_class"])],
            status=STATUSES[int(at["status"])], error_code=None, token_offsets_s=(), **values,
        )  # fmt: skip


def _number(value: float | None, missing: float) -> float:
    return missing if value is None else value


def summarize(records: Iterable[RequestRecord] | RecordColumns, *, wall_s: float) -> list[Summary]:
    """One summary over all records, then one per SLO class in name order. wall_s: wall time of the whole run."""
    columns = records if isinstance(records, RecordColumns) else RecordColumns(records)
    kinds, missed = columns.rows["slo_class"], np.flatnonzero(columns.rows["slo_met"] == 0)
    run_acceptance = _ratio(*(int(columns.rows[name].sum()) for name in ("accepted_tokens", "drafted_tokens"))) or 0.0
    causes = [violation_cause(columns.record(row), acceptance_rate=run_acceptance) for row in missed.tolist()]
    groups = {ALL_CLASSES: np.ones(len(columns), bool)}
    for name in sorted(columns.classes):
        groups[name] = kinds == columns.classes.index(name)
    return [
        _summary(name, columns, chosen, wall_s, Counter(c for c, m in zip(causes, chosen[missed], strict=True) if m))
        for name, chosen in groups.items()
    ]


def _summary(
    name: str, columns: RecordColumns, chosen: np.ndarray, wall_s: float, causes: Counter[str | None]
) -> Summary:
    """chosen: bool[N], the requests that count. causes: of their violations."""
    rows = columns.rows[chosen]
    outputs, ttfts, queues = rows["output_tokens"], rows["ttft_s"], rows["queue_s"]
    totals = {name: int(rows[name].sum()) for name in COUNTS}
    status = Counter({name: int(np.count_nonzero(rows["status"] == at)) for at, name in enumerate(STATUSES)})
    attainment = _share(rows["slo_met"])
    ttft, tpot, queue = (percentiles(_known(rows[name])) for name in ("ttft_s", "tpot_s", "queue_s"))
    itl = percentiles(columns.gaps_s(chosen))
    e2es = ttfts + np.where(np.isnan(rows["tpot_s"]), 0.0, rows["tpot_s"]) * (outputs - 1)
    ended = ~np.isnan(e2es)
    finished = e2es[ended & (rows["status"] == STATUSES.index("finished"))]
    running = e2es - np.where(np.isnan(queues), 0.0, queues)
    return Summary(
        slo_class=name,
        requests=len(rows),
        requests_with_slo=int(np.count_nonzero(rows["slo_met"] != UNKNOWN)),
        finished=status["finished"],
        rejected=status["rejected"],
        failed=status["failed"],
        unfinished=status["unfinished"],
        prompt_tokens=totals["prompt_tokens"],
        output_tokens=totals["output_tokens"],
        attainment=attainment,
        attainment_tpot=_share(rows["tpot_met"]),
        attainment_ttft=_share(rows["ttft_met"]),
        attainment_tpot_paper=_share(rows["tpot_paper_met"]),
        violations=None if attainment is None else 1 - attainment,
        goodput_tps=_rate(outputs[rows["slo_met"] == 1], wall_s),
        goodput_tpot_tps=_rate(outputs[rows["tpot_met"] == 1], wall_s),
        throughput_tps=_rate(outputs, wall_s),
        ttft_p50_s=ttft[0],
        ttft_p90_s=ttft[1],
        ttft_p99_s=ttft[2],
        tpot_mean_s=_mean(_known(rows["tpot_s"])),
        tpot_p50_s=tpot[0],
        tpot_p90_s=tpot[1],
        tpot_p99_s=tpot[2],
        tpot_paper_mean_s=_mean(_known(rows["tpot_paper_s"])),
        itl_p50_s=itl[0],
        itl_p90_s=itl[1],
        itl_p99_s=itl[2],
        queue_p50_s=queue[0],
        queue_p99_s=queue[2],
        verify_steps=totals["verify_steps"],
        drafted_tokens=totals["drafted_tokens"],
        accepted_tokens=totals["accepted_tokens"],
        mean_accepted=_ratio(totals["accepted_tokens"], totals["verify_steps"]),
        acceptance_rate=_ratio(totals["accepted_tokens"], totals["drafted_tokens"]),
        preemptions=totals["preemptions"],
        fluidity=_fluidity(rows),
        cause_rejected=causes["rejected"],
        cause_failed=causes["failed"],
        cause_unfinished=causes["unfinished"],
        cause_queueing=causes["queueing"],
        cause_prefill=causes["prefill"],
        cause_infeasible=causes["infeasible"],
        cause_preemption=causes["preemption"],
        cause_low_acceptance=causes["low_acceptance"],
        cause_budget=causes["budget"],
        e2e_mean_s=_mean(finished),
        running_mean=_ratio(_sum(running[ended]), wall_s),
        busy_throughput_tps=_ratio(totals["output_tokens"], _busy_s(rows[ended], e2es[ended])),
    )


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _sum(values: np.ndarray) -> float:
    """One after the other, so that it does not depend on how an array is added up."""
    return sum(values.tolist())


def _mean(values: np.ndarray) -> float | None:
    return _ratio(_sum(values), len(values))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _rate(tokens: np.ndarray, wall_s: float) -> float:
    return int(tokens.sum()) / wall_s if wall_s > 0 else 0.0


def _busy_s(rows: np.ndarray, e2e_s: np.ndarray) -> float:
    """Time with at least one request between its arrival and its last token."""
    busy_s, until_s = 0.0, -math.inf
    starts = rows["due_s"] + rows["late_s"]
    for start_s, end_s in sorted(zip(starts.tolist(), (starts + e2e_s).tolist(), strict=True)):
        busy_s += max(end_s - max(start_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return busy_s


def _share(outcomes: np.ndarray) -> float | None:
    """Share of True among the outcomes that are known."""
    return _ratio(int(np.count_nonzero(outcomes == 1)), int(np.count_nonzero(outcomes != UNKNOWN)))


def percentiles(values: Sequence[float] | np.ndarray) -> tuple[float | None, float | None, float | None]:
    """50th, 90th and 99th percentile, linearly interpolated."""
    if not len(values):
        return None, None, None
    p50, p90, p99 = (float(p) for p in np.percentile(np.asarray(values, np.float64), (50, 90, 99)))
    return p50, p90, p99


def _fluidity(rows: np.ndarray) -> float | None:
    """Share of the tokens after each first one that came by first token + i * target."""
    paced = rows[~np.isnan(rows["tpot_slo_s"])]
    total = int(paced["gaps"].sum())
    return _ratio(total - int(paced["late_tokens"].sum()), total)
