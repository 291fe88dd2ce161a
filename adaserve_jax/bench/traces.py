"""Traces of requests by length and target, without text: what a simulation needs, from every workload with lengths."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adaserve_jax.bench.arrivals import Schedule
from adaserve_jax.bench.readers import AUTO
from adaserve_jax.bench.slo_table import SloTable
from adaserve_jax.bench.workload import load_workload
from adaserve_jax.bench.workload_items import Workload, WorkloadItem, derived_hash
from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """due_s: seconds since the start of the trace."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    slo: SLO
    slo_class: str


@dataclass(frozen=True)
class Trace:
    """Requests in order of due_s. sha256, hex: as of the workload that it was made of; of a trace made from another
    (`derived`), of that one's hash and what was done to it. notes: sentences on what reading left out."""

    name: str
    sha256: str
    requests: Sequence[TraceRequest]
    notes: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.requests[-1].due_s

    @property
    def rate_rps(self) -> float:
        """Requests per second, over the trace."""
        return len(self.requests) / self.duration_s if self.duration_s else float(len(self.requests))

    @property
    def classes(self) -> list[str]:
        """In name order."""
        return sorted({request.slo_class for request in self.requests})

    def derived(self, note: str, requests: Iterable[TraceRequest]) -> Trace:
        """Another trace of `requests`, put in order, that says by its name and hash how it came from this one."""
        ordered = tuple(sorted(requests, key=lambda request: request.due_s))
        return Trace(f"{self.name} {note}", derived_hash(self.sha256, note), ordered, self.notes)


def load_trace(
    path: Path, *, format: str = AUTO, slos: SloTable | None = None, slo_class: str | None = None,
    ttft_slo_s: float | None = None, time_scale: float = 1.0,
) -> Trace:  # fmt: skip
    """Read a workload file that has times and lengths. slos, slo_class: as of `load_workload`; the rest as of
    `adjusted`. Raises ConfigError naming file, line and field."""
    workload = load_workload(path, format=format, slos=slos, slo_class=slo_class, texts=False)
    return adjusted(trace_of(workload), ttft_slo_s=ttft_slo_s, time_scale=time_scale)


def adjusted(trace: Trace, *, ttft_slo_s: float | None = None, time_scale: float = 1.0) -> Trace:
    """Another trace, whose hash says what was done. ttft_slo_s: a TTFT target that every request is given. time_scale:
    what times are multiplied by."""
    if time_scale != 1.0:
        trace = trace.derived(
            f"times x {time_scale:g}", (replace(each, due_s=each.due_s * time_scale) for each in trace.requests)
        )
    if ttft_slo_s is None:
        return trace
    with_ttft = {slo: replace(slo, ttft_ms=ttft_slo_s * 1e3) for slo in {each.slo for each in trace.requests}}
    requests = tuple(replace(each, slo=with_ttft[each.slo]) for each in trace.requests)
    return replace(trace, sha256=derived_hash(trace.sha256, f"ttft {ttft_slo_s:g} s"), requests=requests)


def trace_of(workload: Workload, schedule: Schedule | None = None) -> Trace:
    """The lengths and targets of a workload's requests, at its own times or at those of a schedule of it.

    Raises ConfigError: a request has no lengths, or there are no times.
    """
    if any(item.lengths is None for item in workload.items):
        raise ConfigError(
            f"workload {workload.name} has texts and not the lengths that a simulation needs; give a trace, such as "
            "AdaServe's, Azure's, Mooncake's or BurstGPT's"
        )
    if schedule is not None:
        due = [(arrival.due_s, arrival.item) for arrival in schedule.arrivals]
        note = f"{schedule.process} {schedule.rate_rps!r}/s {schedule.duration_s!r} s seed {schedule.seed}"
        sha256, name = derived_hash(workload.sha256, note), f"{workload.name} {note}"
    elif workload.has_arrivals:
        due = [(item.arrival_s or 0.0, item) for item in workload.items]
        sha256, name = workload.sha256, workload.name
    else:
        raise ConfigError(f"workload {workload.name} says no times; give a rate at which its requests arrive")
    if not due:
        raise ConfigError(f"no request of workload {workload.name} arrives; raise the rate or the duration")
    requests = sorted((_request(at, item) for at, item in due), key=lambda request: request.due_s)
    return Trace(name, sha256, tuple(requests), workload.notes)


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace in the format `adaserve-trace`, compressed when `path` ends in .gz. TTFT targets are not part of
    the format. Raises ConfigError when the file cannot be written."""
    text = "".join(_line(index, request) + "\n" for index, request in enumerate(trace.requests))
    data = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write trace {path}: {error.strerror}; choose another folder") from error


def _request(due_s: float, item: WorkloadItem) -> TraceRequest:
    assert item.lengths is not None
    return TraceRequest(due_s, item.lengths.prompt_tokens, item.lengths.output_tokens, item.slo, item.slo_class)


def _line(index: int, request: TraceRequest) -> str:
    slo = request.slo
    values = {
        "t_ms": round(request.due_s * 1e3, 6),
        "prompt_id": f"{request.slo_class}-{index:04d}",
        "slo_ratio": slo.relative if slo.relative is not None else -(slo.tpot_ms or 0.0),
        "output_length": request.output_tokens,
        "input_length": request.prompt_tokens,
    }
    return json.dumps(values)
