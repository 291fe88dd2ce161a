"""A generated trace whose classes of requests peak at different times: the shape of AdaServe's figure 13.

Of each class, FLAT_SHARE of the requests arrive evenly over the whole time and the rest around the class's peak, as a
normal distribution cut off at the ends; arrivals are Poisson.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.bench import intensity
from adaserve_jax.bench.arrival_spec import FLAT_SHARE, PEAK_WIDTH_S
from adaserve_jax.bench.traces import Trace, TraceRequest
from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO

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
    """f64, expected arrivals per second of class `name` at times `at_s`; each class has the same share of all."""
    law = intensity.Peak(PEAKS[name].at_s, PEAK_WIDTH_S, FLAT_SHARE, DURATION_S)
    return rate_rps / len(PEAKS) * law.intensity(at_s)


def fluctuating_trace(
    *, seed: int, rate_rps: float = RATE_RPS, like: Trace | None = None, ttft_slo_s: float | None = None
) -> Trace:
    """A trace of DURATION_S. like: a trace from whose requests of the same class lengths and targets are drawn.

    Raises ConfigError when `like` lacks a class.
    """
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
    source = "" if like is None else f" like {like.name}"
    digest = hashlib.sha256(f"fluctuating {rate_rps!r} {seed} {like.sha256 if like else ''}".encode()).hexdigest()
    return Trace(f"fluctuating at {rate_rps:g}/s seed {seed}{source}", digest, tuple(requests))


def _arrivals(name: str, rate_rps: float, rng: np.random.Generator) -> list[float]:
    """An inhomogeneous Poisson process by thinning: uniform candidates at the highest intensity, each kept by ratio."""
    highest = float(intensity_rps(name, np.array(PEAKS[name].at_s), rate_rps))
    times = rng.uniform(0.0, DURATION_S, rng.poisson(highest * DURATION_S))
    return np.sort(times[rng.random(len(times)) * highest < intensity_rps(name, times, rate_rps)]).tolist()


def _bodies(name: str, like: Trace | None, ttft_slo_s: float | None) -> list[TraceRequest]:
    """What requests of a class are drawn from; their times mean nothing."""
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
