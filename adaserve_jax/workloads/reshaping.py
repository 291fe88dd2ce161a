"""Makes other traces from a trace: another rate, mix of classes, target or number of requests. Seeded, and named so.

Knows nothing of machines, policies or time other than the requests' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.traces import Trace
from adaserve_jax.workloads.workload import with_relative


@dataclass(frozen=True)
class Reshaping:
    """Changes to a trace; None and 0 change nothing. rate_rps: mean requests per second. mix: class -> share.
    slo_scale: the relative TPOT target, in baseline latencies, of requests that have one."""

    rate_rps: float | None = None
    mix: Mapping[str, float] | None = None
    slo_scale: float | None = None
    requests: int = 0


def reshape(trace: Trace, reshaping: Reshaping, seed: int) -> Trace:
    """Return the trace with every change of `reshaping`: number of requests, then mix, rate and target."""
    if reshaping.requests:
        trace = with_requests(trace, reshaping.requests, seed)
    if reshaping.mix is not None:
        trace = with_mix(trace, reshaping.mix, seed)
    if reshaping.rate_rps is not None:
        trace = at_rate(trace, reshaping.rate_rps)
    return trace if reshaping.slo_scale is None else with_slo_scale(trace, reshaping.slo_scale)


def at_rate(trace: Trace, rate_rps: float) -> Trace:
    """Scale the arrival times to a mean rate of `rate_rps`."""
    if not trace.duration_s:
        raise ConfigError(f"trace {trace.name} has all requests at time 0, so its rate cannot be changed")
    factor = trace.rate_rps / rate_rps
    requests = (replace(request, due_s=request.due_s * factor) for request in trace.requests)
    return trace.derived(f"at {rate_rps:g}/s", requests)


def with_mix(trace: Trace, mix: Mapping[str, float], seed: int) -> Trace:
    """Keep the times; at each, draw a class by its share in `mix` and a request of that class, with replacement."""
    by_class = {name: [each for each in trace.requests if each.slo_class == name] for name in trace.classes}
    unknown = sorted(mix.keys() - by_class.keys())
    if unknown:
        raise ConfigError(f"mix: trace {trace.name} has no class {unknown[0]!r}; it has {', '.join(trace.classes)}")
    names, shares = list(mix), np.array(list(mix.values()), np.float64)
    if not (shares >= 0).all() or not np.isfinite(shares).all() or shares.sum() <= 0:
        raise ConfigError(f"mix: shares must not be below 0, and one above, got {dict(mix)}")
    rng = np.random.default_rng(seed)
    drawn = rng.choice(len(names), len(trace.requests), p=shares / shares.sum())
    picks = rng.random(len(trace.requests))
    requests = []
    for request, kind, pick in zip(trace.requests, drawn.tolist(), picks.tolist(), strict=True):
        members = by_class[names[kind]]
        requests.append(replace(members[int(pick * len(members))], due_s=request.due_s))
    return trace.derived(f"mix {','.join(f'{name}={mix[name]:g}' for name in names)} seed {seed}", requests)


def with_slo_scale(trace: Trace, scale: float) -> Trace:
    """Make relative TPOT targets `scale` times the baseline latency; targets in milliseconds stay."""
    return trace.derived(f"scale {scale:g}", with_relative(trace.requests, scale, f"trace {trace.name}"))


def with_requests(trace: Trace, count: int, seed: int) -> Trace:
    """Take the first `count` requests. A shorter trace is repeated, one mean gap between, with its requests in another
    order each time."""
    have = trace.requests
    if count <= len(have):
        return trace.derived(f"first {count}", have[:count])
    start_s = have[0].due_s
    period_s = (trace.duration_s - start_s) * len(have) / max(len(have) - 1, 1)
    if not period_s:
        raise ConfigError(f"trace {trace.name} has all requests at one time, so it cannot be repeated")
    rng = np.random.default_rng(seed)
    requests = list(have)
    while len(requests) < count:
        shift_s = period_s * (len(requests) // len(have))
        order = rng.permutation(len(have)).tolist()
        requests += [replace(have[i], due_s=at.due_s + shift_s) for i, at in zip(order, have, strict=True)]
    return trace.derived(f"repeated to {count} seed {seed}", requests[:count])
