"""Summaries of request records, per SLO class and over all: of a measured point, or of what a server did in a time.

Definitions: docs/metrics.md. Axis: N requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from adaserve_jax.results.record_store import FileExtent, read_records
from adaserve_jax.results.records import (
    CAUSES,
    RequestRecord,
    ServedRecord,
    ServerRun,
    Status,
    slowest_part,
    violation_cause,
)
from adaserve_jax.results.schema import ALL_CLASSES, Summary

STATUSES: tuple[Status, ...] = get_args(Status)
TIMES = (
    "due_s", "late_s", "queue_s", "ttft_s", "tpot_s", "tpot_paper_s", "tpot_slo_s", "ttft_slo_s",
    "thinking_tpot_s", "answer_tpot_s", "thinking_tpot_slo_s", "e2e_slo_s",
)  # fmt: skip
"""Columns of f64, NaN where a record has None."""
COUNTS = ("prompt_tokens", "output_tokens", "verify_steps", "drafted_tokens", "accepted_tokens", "preemptions")
OUTCOMES = ("tpot_met", "ttft_met", "e2e_met", "slo_met", "slo_feasible", "tpot_paper_met")
"""Columns of i1: 1, 0, or UNKNOWN where a record has None."""
UNKNOWN = -1
ROW = np.dtype(
    [("slo_class", "i4"), ("status", "i1"), ("late_tokens", "i4"), ("gaps", "i4")]
    + [(name, "f8") for name in TIMES] + [(name, "i8") for name in COUNTS] + [(name, "i1") for name in OUTCOMES]
)  # fmt: skip
"""163 bytes a request, where its record takes 1,000. slo_class: an index of `RecordColumns.classes`. status: an
index of STATUSES. gaps: number of tokens after the first whose times are known."""
Percentiles = tuple[float | None, float | None, float | None]
"""50th, 90th and 99th percentile."""


class RecordColumns:
    """Columns of records that are added one by one, for runs of too many requests to keep their records.

    Token times are kept as they are. classes: in the order in which they came. rows: ROW[N].
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
        """Return f64, the times between successive tokens of the chosen requests (bool[N]); 0 within one step."""
        gaps = [np.diff(np.asarray(offsets_s)) for row, offsets_s in self._offsets_s.items() if chosen[row]]
        return np.concatenate(gaps) if gaps else np.zeros(0)

    def record(self, row: int) -> RequestRecord:
        """Return a record with the values that are kept; its names and token times are empty."""
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
    """Return a summary over all records, then one per SLO class in name order. wall_s: wall time of the whole run."""
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
    """Sum up the chosen requests, bool[N]. causes: number of their violations by cause."""
    rows = columns.rows[chosen]
    outputs, ttfts, queues = rows["output_tokens"], rows["ttft_s"], rows["queue_s"]
    totals = {name: int(rows[name].sum()) for name in COUNTS}
    attainment = _share(rows["slo_met"])
    e2es = ttfts + np.where(np.isnan(rows["tpot_s"]), 0.0, rows["tpot_s"]) * (outputs - 1)
    ended = ~np.isnan(e2es)
    finished = e2es[ended & (rows["status"] == STATUSES.index("finished"))]
    running = e2es - np.where(np.isnan(queues), 0.0, queues)
    queue = percentiles(_known(queues))
    return Summary(
        slo_class=name,
        requests=len(rows),
        requests_with_slo=int(np.count_nonzero(rows["slo_met"] != UNKNOWN)),
        **{name: int(np.count_nonzero(rows["status"] == at)) for at, name in enumerate(STATUSES)},
        **totals,
        attainment=attainment,
        attainment_tpot=_share(rows["tpot_met"]),
        attainment_ttft=_share(rows["ttft_met"]),
        attainment_e2e=_share(rows["e2e_met"]),
        attainment_tpot_paper=_share(rows["tpot_paper_met"]),
        violations=None if attainment is None else 1 - attainment,
        goodput_tps=_rate(outputs[rows["slo_met"] == 1], wall_s),
        goodput_tpot_tps=_rate(outputs[rows["tpot_met"] == 1], wall_s),
        throughput_tps=_rate(outputs, wall_s),
        **_named_percentiles("ttft", _known(ttfts)),
        **_named_percentiles("tpot", _known(rows["tpot_s"])),
        **_named_percentiles("itl", columns.gaps_s(chosen)),
        tpot_mean_s=_mean(_known(rows["tpot_s"])),
        tpot_paper_mean_s=_mean(_known(rows["tpot_paper_s"])),
        queue_p50_s=queue[0],
        queue_p99_s=queue[2],
        mean_accepted=_ratio(totals["accepted_tokens"], totals["verify_steps"]),
        acceptance_rate=_ratio(totals["accepted_tokens"], totals["drafted_tokens"]),
        fluidity=_fluidity(rows),
        **{f"cause_{cause}": causes[cause] for cause in CAUSES},
        e2e_mean_s=_mean(finished),
        running_mean=_ratio(_sum(running[ended]), wall_s),
        busy_throughput_tps=_ratio(totals["output_tokens"], _busy_s(rows[ended], e2es[ended])),
    )


def _named_percentiles(name: str, values: np.ndarray) -> dict[str, float | None]:
    p50, p90, p99 = percentiles(values)
    return {f"{name}_p50_s": p50, f"{name}_p90_s": p90, f"{name}_p99_s": p99}


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _sum(values: np.ndarray) -> float:
    """Add up one value after the other, so that the sum does not depend on how numpy splits an array."""
    return sum(values.tolist())


def _mean(values: np.ndarray) -> float | None:
    return _ratio(_sum(values), len(values))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _rate(tokens: np.ndarray, wall_s: float) -> float:
    return int(tokens.sum()) / wall_s if wall_s > 0 else 0.0


def _busy_s(rows: np.ndarray, e2e_s: np.ndarray) -> float:
    """Return the time during which at least one request was between its arrival and its last token."""
    busy_s, until_s = 0.0, -math.inf
    starts = rows["due_s"] + rows["late_s"]
    for start_s, end_s in sorted(zip(starts.tolist(), (starts + e2e_s).tolist(), strict=True)):
        busy_s += max(end_s - max(start_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return busy_s


def _share(outcomes: np.ndarray) -> float | None:
    """Return the share of True among the known outcomes."""
    return _ratio(int(np.count_nonzero(outcomes == 1)), int(np.count_nonzero(outcomes != UNKNOWN)))


def percentiles(values: Sequence[float] | np.ndarray) -> Percentiles:
    """Return the 50th, 90th and 99th percentile, linearly interpolated; None without values."""
    if not len(values):
        return None, None, None
    p50, p90, p99 = (float(p) for p in np.percentile(np.asarray(values, np.float64), (50, 90, 99)))
    return p50, p90, p99


def _fluidity(rows: np.ndarray) -> float | None:
    """Return the share of tokens after each first one that came by first token + i * target."""
    paced = rows[~np.isnan(rows["tpot_slo_s"]) & np.isnan(rows["thinking_tpot_slo_s"])]
    total = int(paced["gaps"].sum())
    return _ratio(total - int(paced["late_tokens"].sum()), total)


@dataclass(frozen=True)
class TargetSummary:
    """Targets of one kind in one class, and how its choices met them.

    least_s, most_s: least and largest target, None without any. over: percentiles of measured / target, over the
    choices that have both.
    """

    least_s: float | None
    most_s: float | None
    over: Percentiles


@dataclass(frozen=True)
class ClassReport:
    """One SLO class at a server, or all classes.

    aborted: number of the failed choices that the server stopped. errors: error codes and
    the number of choices that ended with them, the most frequent first.
    """

    summary: Summary
    tpot: TargetSummary
    ttft: TargetSummary
    e2e: TargetSummary
    cached_tokens: int
    aborted: int
    errors: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ServedReport:
    """Choices of a server that ended from `since` until before `until`.

    held: extent of the whole file. first_unix_s, last_unix_s: the first arrival and the last end, None without choices;
    wall_s: between the two, also where only one key or class is reported. runs: the engines that served the choices.
    classes: all classes together first, then each; empty where no choice fits.
    """

    held: FileExtent
    since_unix_s: float
    until_unix_s: float
    first_unix_s: float | None
    last_unix_s: float | None
    wall_s: float
    runs: tuple[ServerRun, ...]
    classes: tuple[ClassReport, ...]


def report_of(
    path: Path, *, since_unix_s: float, until_unix_s: float, slo_class: str | None = None, key: str | None = None
) -> ServedReport:
    """Report on a server's file of records, or on one class or one API key of it. Raises ConfigError: the file cannot
    be read."""
    records, held = read_records(path, since_unix_s=since_unix_s, until_unix_s=until_unix_s)
    first = min((record.arrival_unix_s for record in records), default=None)
    last = max((record.ended_unix_s for record in records), default=None)
    wall_s = 0.0 if first is None or last is None else last - first
    chosen = [record for record in records if key is None or record.key == key]
    summaries = summarize(chosen, wall_s=wall_s) if chosen else []
    classes = tuple(
        _class_report(each, [r for r in chosen if each.slo_class in (ALL_CLASSES, r.slo_class)])
        for each in summaries
        if slo_class is None or each.slo_class == slo_class
    )
    runs = tuple(dict.fromkeys(record.run for record in chosen))
    return ServedReport(held, since_unix_s, until_unix_s, first, last, wall_s, runs, classes)


def _class_report(summary: Summary, records: Sequence[ServedRecord]) -> ClassReport:
    errors = Counter(record.error_code for record in records if record.error_code is not None)
    return ClassReport(
        summary=summary,
        tpot=_targets([slowest_part(r.tpot_parts) for r in records]),
        ttft=_targets([(r.ttft_slo_s, r.ttft_s) for r in records]),
        e2e=_targets([(r.e2e_slo_s, r.e2e_s) for r in records]),
        cached_tokens=sum(record.cached_tokens for record in records),
        aborted=sum(record.ending == "abort" for record in records),
        errors=tuple(errors.most_common()),
    )


def _targets(pairs: Sequence[tuple[float | None, float | None]]) -> TargetSummary:
    """Sum up pairs of target and measured time."""
    targets = [target_s for target_s, _ in pairs if target_s is not None]
    over = [measured_s / target_s for target_s, measured_s in pairs if target_s is not None and measured_s is not None]
    return TargetSummary(min(targets, default=None), max(targets, default=None), percentiles(over))
