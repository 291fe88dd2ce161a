"""Traces of requests by length and target, without text: what a simulation needs, from every workload with lengths."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.whole_file import SHARED, write_whole
from adaserve_jax.types import SLO
from adaserve_jax.workloads import arrivals as intensity
from adaserve_jax.workloads.arrivals import FLAT_SHARE, PEAK_WIDTH_S
from adaserve_jax.workloads.items import TraceRequest, Workload, WorkloadItem, derived_hash
from adaserve_jax.workloads.readers import AUTO
from adaserve_jax.workloads.workload import load_workload


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
        """Return the names of the SLO classes, in order."""
        return sorted({request.slo_class for request in self.requests})

    def derived(self, note: str, requests: Iterable[TraceRequest]) -> Trace:
        """Return another trace of `requests`, put in order, that says by its name and hash how it came from this
        one."""
        ordered = tuple(sorted(requests, key=lambda request: request.due_s))
        return Trace(f"{self.name} {note}", derived_hash(self.sha256, note), ordered, self.notes)


def load_trace(
    path: Path, *, format: str = AUTO, slo_class: str | None = None, ttft_slo_s: float | None = None
) -> Trace:  # fmt: skip
    """Read a workload file that has times and lengths. format, slo_class: as of `load_workload`; ttft_slo_s: as of
    `adjusted`. Raises ConfigError naming file, line and field."""
    workload = load_workload(path, format=format, slo_class=slo_class, texts=False)
    return adjusted(trace_of(workload), ttft_slo_s=ttft_slo_s)


def adjusted(
    trace: Trace, *, ttft_slo_s: float | None = None, keeps_own: bool = False, time_scale: float = 1.0
) -> Trace:
    """Return another trace, whose hash says what was done. ttft_slo_s: a TTFT target that every request is given, or
    with keeps_own every request that has none. time_scale: what times are multiplied by."""
    if time_scale != 1.0:
        trace = trace.derived(
            f"times x {time_scale:g}", (replace(each, due_s=each.due_s * time_scale) for each in trace.requests)
        )
    if ttft_slo_s is None:
        return trace
    slos = {each.slo for each in trace.requests}
    kept = {slo for slo in slos if keeps_own and slo.ttft_ms is not None}
    if kept == slos:
        return trace
    with_ttft = {slo: slo if slo in kept else replace(slo, ttft_ms=ttft_slo_s * 1e3) for slo in slos}
    requests = tuple(replace(each, slo=with_ttft[each.slo]) for each in trace.requests)
    note = f"ttft {ttft_slo_s:g} s{' where none' if kept else ''}"
    return replace(trace, sha256=derived_hash(trace.sha256, note), requests=requests)


def trace_of(workload: Workload) -> Trace:
    """Make a trace of a workload's lengths and targets, at its own times, counted from the earliest.

    Raises ConfigError when a request has no lengths, or there are no times.
    """
    if any(item.lengths is None for item in workload.items):
        raise ConfigError(
            f"workload {workload.name} has texts and not the lengths that a simulation needs; give a trace, such as "
            "AdaServe's, Azure's, Mooncake's or BurstGPT's"
        )
    if not workload.has_arrivals:
        raise ConfigError(f"workload {workload.name} says no times, which a simulation needs; give a trace")
    first_s = min(item.arrival_s or 0.0 for item in workload.items)
    due = ((item.arrival_s or 0.0) - first_s for item in workload.items)
    requests = sorted(map(_request, due, workload.items), key=lambda request: request.due_s)
    return Trace(workload.name, workload.sha256, tuple(requests), workload.notes)


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace in the format `adaserve-trace`, compressed when `path` ends in .gz. TTFT targets and deadlines are
    not part of the format. Raises ConfigError when the file cannot be written."""
    text = "".join(_line(index, request) + "\n" for index, request in enumerate(trace.requests))
    data = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    try:
        write_whole(path, data, mode=SHARED)
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


DURATION_S = 360.0
RATE_RPS = 3.0
"""Mean requests per second of all classes together, unless another one is given."""
OUTPUT_TOKENS = 256
PROMPT_LOG_SD = 0.5
"""Standard deviation of the logarithm of prompt lengths, which are drawn as log-normal."""


@dataclass(frozen=True)
class Peak:
    """One class: when it peaks, its target, and the median of its prompts' tokens when no trace gives lengths."""

    at_s: float
    slo: SLO
    median_prompt_tokens: int


PEAKS = {
    "chat": Peak(75.0, SLO(tpot_ms=50.0), 15),
    "code": Peak(195.0, SLO(relative=1.2), 118),
    "summarization": Peak(285.0, SLO(tpot_ms=150.0), 705),
}


def intensity_rps(name: str, at_s: np.ndarray, rate_rps: float = RATE_RPS) -> np.ndarray:
    """Return f64, expected arrivals per second of class `name` at times `at_s`; each class has the same share of
    all."""
    law = intensity.Peak(PEAKS[name].at_s, PEAK_WIDTH_S, FLAT_SHARE, DURATION_S)
    return rate_rps / len(PEAKS) * law.intensity(at_s)


def fluctuating_trace(
    *, seed: int, rate_rps: float = RATE_RPS, like: Trace | None = None, ttft_slo_s: float | None = None,
    max_context: int | None = None,
) -> Trace:  # fmt: skip
    """Generate a trace of DURATION_S whose classes peak at different times, as in AdaServe's figure 13.

    In each class FLAT_SHARE of the requests arrive evenly and the rest around the peak of the class. like: a trace
    whose requests of the same class provide lengths and targets. max_context: drawn prompts are no longer than leaves
    room for their output; None: as they are drawn.

    Raises ConfigError when `like` lacks a class, and for a context without room for a prompt.
    """
    if max_context is not None and max_context <= OUTPUT_TOKENS:
        raise ConfigError(
            f"a fluctuating trace needs a context of more than {OUTPUT_TOKENS} tokens, got {max_context}; choose "
            "another machine, or give a trace and --lengths"
        )
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    for name in PEAKS:
        bodies = _bodies(name, like, ttft_slo_s)
        for due_s in _arrivals(name, rate_rps, rng):
            body = bodies[int(rng.integers(len(bodies)))] if like is not None else _drawn(bodies[0], name, rng)
            requests.append(replace(body, due_s=due_s))
    if not requests:
        raise ConfigError(f"a fluctuating trace at {rate_rps:g} requests/s has no request; raise the rate")
    requests.sort(key=lambda request: request.due_s)
    source, made = "" if like is None else f" like {like.name}", f"fluctuating {rate_rps!r} {seed} "
    if like is None and ttft_slo_s is not None:
        made += f"ttft {ttft_slo_s!r} s "
    most = math.inf if like is not None or max_context is None else max_context - OUTPUT_TOKENS
    notes: tuple[str, ...] = ()
    if long := sum(request.prompt_tokens > most for request in requests):
        requests = [replace(each, prompt_tokens=min(each.prompt_tokens, int(most))) for each in requests]
        made += f"cut to {most} "
        notes = (
            f"{long} of {len(requests)} drawn prompts were cut to {most} tokens, so that the output fits the context",
        )
    digest = hashlib.sha256(f"{made}{like.sha256 if like else ''}".encode()).hexdigest()
    return Trace(f"fluctuating at {rate_rps:g}/s seed {seed}{source}", digest, tuple(requests), notes=notes)


def _arrivals(name: str, rate_rps: float, rng: np.random.Generator) -> list[float]:
    """Draw an inhomogeneous Poisson process by thinning: uniform candidates at the highest intensity, each kept by
    ratio."""
    highest = float(intensity_rps(name, np.array(PEAKS[name].at_s), rate_rps))
    times = rng.uniform(0.0, DURATION_S, rng.poisson(highest * DURATION_S))
    return np.sort(times[rng.random(len(times)) * highest < intensity_rps(name, times, rate_rps)]).tolist()


def _bodies(name: str, like: Trace | None, ttft_slo_s: float | None) -> list[TraceRequest]:
    """Return the requests that those of a class are drawn from; their times are ignored."""
    if like is None:
        peak = PEAKS[name]
        slo = replace(peak.slo, ttft_ms=None if ttft_slo_s is None else ttft_slo_s * 1e3)
        return [TraceRequest(0.0, peak.median_prompt_tokens, OUTPUT_TOKENS, slo, name)]
    bodies = [request for request in like.requests if request.slo_class == name]
    if not bodies:
        has = ", ".join(like.classes)
        raise ConfigError(f"a fluctuating trace needs requests of class {name!r}, but {like.name} has only {has}")
    return bodies


def _drawn(body: TraceRequest, name: str, rng: np.random.Generator) -> TraceRequest:
    tokens = PEAKS[name].median_prompt_tokens * math.exp(PROMPT_LOG_SD * rng.standard_normal())
    return replace(body, prompt_tokens=max(1, round(tokens)))
