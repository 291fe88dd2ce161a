"""Traces of requests by length and target, without text: what a simulation needs. Reads AdaServe's published format.

One JSON object per line, gzip or plain: t_ms, input_length, output_length, prompt_id ("code-0096": its class), and
slo_ratio: above 0 a multiple of the baseline latency, below 0 milliseconds per token.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.types import SLO

FIELDS = ("t_ms", "prompt_id", "slo_ratio", "output_length", "input_length")


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
    """Requests in order of due_s. sha256, hex: of the file's bytes; of a trace made from another (`derived`), of that
    one's hash and what was done to it."""

    name: str
    sha256: str
    requests: tuple[TraceRequest, ...]

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
        return Trace(f"{self.name} {note}", hashlib.sha256(f"{self.sha256} {note}".encode()).hexdigest(), ordered)


def load_trace(path: Path, *, ttft_slo_s: float | None = None, time_scale: float = 1.0) -> Trace:
    """Read a trace. ttft_slo_s: a TTFT target that every request is given. time_scale: what its times are multiplied
    by. Raises ConfigError naming file, line and field."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read trace {path}: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    requests = [_request(line, f"{path}:{number}", ttft_slo_s, time_scale) for number, line in lines]
    if not requests:
        raise ConfigError(f"trace {path} holds no request")
    requests.sort(key=lambda request: request.due_s)
    return Trace(path.name, hashlib.sha256(raw).hexdigest(), tuple(requests))


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace in the format that `load_trace` reads, compressed when `path` ends in .gz. TTFT targets are not
    part of the format. Raises ConfigError when the file cannot be written."""
    text = "".join(_line(index, request) + "\n" for index, request in enumerate(trace.requests))
    data = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write trace {path}: {error.strerror}; choose another folder") from error


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


def _request(line: str, where: str, ttft_slo_s: float | None, time_scale: float) -> TraceRequest:
    try:
        values = json.loads(line)
        missing = [name for name in FIELDS if name not in values]
        if missing:
            raise ConfigError(f"{where}: field {missing[0]!r} is missing")
        ratio = float(values["slo_ratio"])
        ttft_ms = None if ttft_slo_s is None else ttft_slo_s * 1e3
        slo = SLO(relative=ratio, ttft_ms=ttft_ms) if ratio > 0 else SLO(tpot_ms=-ratio, ttft_ms=ttft_ms)
        prompt, output = int(values["input_length"]), int(values["output_length"])
        if min(prompt, output) < 1:
            raise ConfigError(f"{where}: input_length and output_length must be at least 1, got {prompt} and {output}")
        due_s = float(values["t_ms"]) / 1e3 * time_scale
        return TraceRequest(due_s, prompt, output, slo, str(values["prompt_id"]).rpartition("-")[0] or "default")
    except (ValueError, TypeError, RequestError) as error:
        raise ConfigError(f"{where}: {error}") from error
