"""Trace events of one measured point for ui.perfetto.dev: a track per request, and counters of the engine.

Format: the Trace Event Format (JSON), as Perfetto reads it: times in microseconds, slices of one track never overlap.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.points import Measured, MeasuredPoint, find_point
from adaserve_jax.report.view import View, point_facts
from adaserve_jax.results.records import RequestRecord, violation_cause
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.whole_file import SHARED, write_whole

REQUESTS, ENGINE = 1, 2
"""Process ids of the requests, each of which is a thread, and of the engine."""
COUNTERS = {
    "requests": ("running", "waiting"),
    "KV pages": ("pages_used", "extension_used"),
    "draft": ("depth", "width"),
    "budget": ("budget",),
    "draft resident": ("draft_resident",),
}
Event = dict[str, Any]


def write_trace(point: MeasuredPoint, path: Path) -> None:
    """Write the trace of a point, compressed if the path ends in .gz. Raises ConfigError: the point has no request
    records, or the file cannot be written."""
    if not point.records:
        raise ConfigError(
            f"expected request records of {point.name!r} to trace, its folder has none: keep requests.jsonl beside "
            "results.jsonl"
        )
    text = json.dumps(trace(point), separators=(",", ":"), allow_nan=False).encode()
    try:
        write_whole(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text, mode=SHARED)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from error


def traced_point(found: Measured, name: str | None, rate: float | None = None) -> MeasuredPoint:
    """Return the point of a name; None chooses the one that a report at this rate shows over time, else the first valid
    one with records, else any. Raises ConfigError: there is no such point or rate."""
    if name is not None:
        return find_point(found.points, name)
    sampled = View.of(found, rate).timeline_point() if found.valid else None
    return sampled or min(found.points, key=lambda point: (not point.records, not point.row.valid))


def trace(point: MeasuredPoint) -> dict[str, Any]:
    """Return the JSON object: all events, and the conditions of the point."""
    events = [*_names(point), *_request_events(point), *_engine_events(point.samples)]
    events.sort(key=lambda event: event.get("ts", -1.0))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(point_facts(point))}


def _names(point: MeasuredPoint) -> Iterator[Event]:
    yield _named("process_name", REQUESTS, 0, f"requests of {point.name}")
    yield _named("process_name", ENGINE, 0, "engine")
    for track, record in enumerate(point.records, 1):
        yield _named("thread_name", REQUESTS, track, f"{record.slo_class} {record.request_id}")
        yield {"ph": "M", "name": "thread_sort_index", "pid": REQUESTS, "tid": track, "args": {"sort_index": track}}


def _named(kind: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _request_events(point: MeasuredPoint) -> Iterator[Event]:
    drafted = sum(record.drafted_tokens for record in point.records)
    acceptance_rate = sum(record.accepted_tokens for record in point.records) / drafted if drafted else 0.0
    for track, record in enumerate(point.records, 1):
        at = {"pid": REQUESTS, "tid": track, "cat": record.slo_class}
        args = _args(record)
        if (cause := violation_cause(record, acceptance_rate=acceptance_rate)) is not None:
            args["missed_by"] = cause
        arrival_us = _us(record.due_s + record.late_s)
        yield {"ph": "i", "s": "t", "name": "arrival", "ts": arrival_us, "args": args, **at}
        for (name, start_us), (_, end_us) in _stages(record, arrival_us):
            yield {"ph": "X", "name": name, "ts": start_us, "dur": round(end_us - start_us, 3), "args": args, **at}
        for offset_s, tokens in groupby(record.token_offsets_s):
            if record.ttft_s is not None:
                ts = _us(record.due_s + record.late_s + record.ttft_s + offset_s)
                count = len(list(tokens))
                name = "token" if count == 1 else f"{count} tokens"
                yield {"ph": "i", "s": "t", "name": name, "ts": ts, "args": {"tokens": count}, **at}
        if record.status != "finished":
            end_us = _us(record.due_s + record.late_s + (record.e2e_s or record.queue_s or 0.0))
            name = record.status if record.error_code is None else f"{record.status}: {record.error_code}"
            yield {"ph": "i", "s": "t", "name": name, "ts": end_us, "args": args, **at}


def _stages(record: RequestRecord, arrival_us: float) -> Iterator[tuple[tuple[str, float], tuple[str, float]]]:
    """Return the start and end of each stage of a request; each starts where the one before it ends."""
    since = record.due_s + record.late_s
    edges = [("queued", arrival_us)]
    if record.queue_s is not None:
        edges.append(("prefill", _us(since + record.queue_s)))
    if record.ttft_s is not None:
        edges.append(("decode", _us(since + record.ttft_s)))
        edges.append(("end", _us(since + (record.e2e_s or record.ttft_s))))
    return pairwise(edges)


def _args(record: RequestRecord) -> dict[str, Any]:
    """Return the values that a click on the request shows; times in ms."""
    shown = {
        f"{name.removesuffix('_s')}_ms": round(seconds * 1e3, 6)
        for name in ("queue_s", "ttft_s", "tpot_s", "ttft_slo_s", "tpot_slo_s")
        if (seconds := getattr(record, name)) is not None
    }
    counts = (
        "status", "slo_met", "prompt_tokens", "output_tokens", "verify_steps", "drafted_tokens", "accepted_tokens",
        "preemptions", "replica",
    )  # fmt: skip
    return shown | {name: value for name in counts if (value := getattr(record, name)) is not None}


def _engine_events(samples: Sequence[Sample]) -> Iterator[Event]:
    for sample in samples:
        for name, columns in COUNTERS.items():
            args = {column: int(getattr(sample, column)) for column in columns}
            yield {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": _us(sample.t_s), "args": args}


def _us(seconds: float) -> float:
    """Return microseconds, rounded to the nanosecond."""
    return round(seconds * 1e6, 3)
