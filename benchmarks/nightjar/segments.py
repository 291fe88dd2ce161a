"""Takes a part of a long trace that fits a machine: the minutes in which the rate swings most, thinned and shortened.

Every change is named in the trace that it makes. Knows nothing of machines, policies or targets. The scripts under
benchmarks/ that follow the Nightjar paper use it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.traces import Trace

MINUTE_S = 60.0


def busiest_swing(trace: Trace, minutes: int) -> Trace:
    """The `minutes` whole minutes in a row whose busiest minute has the most requests more than their quietest; of
    equals the first. Times are counted from their beginning. The last minute of a trace, begun and not full, is out.

    Raises ConfigError: the trace is no longer than that.
    """
    per_minute = minute_counts(trace)
    if minutes < 1 or len(per_minute) < minutes:
        raise ConfigError(f"trace {trace.name} has {len(per_minute)} whole minutes, fewer than the {minutes} wanted")
    windows = np.lib.stride_tricks.sliding_window_view(per_minute, minutes)
    start = int((windows.max(axis=1) - windows.min(axis=1)).argmax())
    begin_s, end_s = start * MINUTE_S, (start + minutes) * MINUTE_S
    requests = (replace(r, due_s=r.due_s - begin_s) for r in trace.requests if begin_s <= r.due_s < end_s)
    return trace.derived(f"minutes {start} to {start + minutes}", requests)


def minute_counts(trace: Trace) -> np.ndarray:
    """i64[minutes], requests of each whole minute."""
    times = np.array([request.due_s for request in trace.requests])
    return np.bincount((times // MINUTE_S).astype(np.int64))[: int(trace.duration_s // MINUTE_S)]


def thinned(trace: Trace, rate_rps: float) -> Trace:
    """Every so manyeth request, so that the mean rate is `rate_rps` and the times stay. Raises ConfigError: the trace
    has no such rate."""
    share = rate_rps / trace.rate_rps
    if not 0 < share <= 1:
        raise ConfigError(f"trace {trace.name} has {trace.rate_rps:g} requests/s; cannot thin it to {rate_rps:g}")
    kept = np.floor(share * np.arange(1, len(trace.requests) + 1)) > np.floor(share * np.arange(len(trace.requests)))
    return trace.derived(
        f"thinned to {rate_rps:.4g}/s", (r for r, keep in zip(trace.requests, kept.tolist(), strict=True) if keep)
    )


def shortened(trace: Trace, factor: float) -> Trace:
    """The same requests, `factor` times as fast after each other."""
    if not factor > 0:
        raise ConfigError(f"a trace is shortened by a factor above 0, got {factor!r}")
    return trace.derived(f"{factor:g} times as fast", (replace(r, due_s=r.due_s / factor) for r in trace.requests))


def with_lengths(trace: Trace, *, prompt_parts: float = 1.0, most_output: int, max_context: int) -> Trace:
    """One of `prompt_parts` tokens of every prompt, at least one; at most `most_output` output tokens; and of the
    prompt no more than leaves the output room in `max_context`."""
    if prompt_parts < 1 or not 1 <= most_output < max_context:
        raise ConfigError(
            f"expected prompt_parts of at least 1 and most_output below max_context, got {prompt_parts:g}, "
            f"{most_output} and {max_context}"
        )
    requests = []
    for request in trace.requests:
        output = min(request.output_tokens, most_output)
        prompt = min(max(1, round(request.prompt_tokens / prompt_parts)), max_context - output)
        requests.append(replace(request, prompt_tokens=prompt, output_tokens=output))
    return trace.derived(f"prompts / {prompt_parts:g}, outputs to {most_output}, context {max_context}", requests)


def poisson_arrivals(trace: Trace, *, rate_rps: float, count: int, seed: int) -> Trace:
    """Draw `count` requests from the trace, each at most once, with exponential gaps whose mean is 1 / rate_rps."""
    if count > len(trace.requests):
        raise ConfigError(f"trace {trace.name} has {len(trace.requests)} requests, fewer than the {count} wanted")
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate_rps, count))
    times *= count / rate_rps / times[-1]  # so few gaps have another mean than they are drawn with
    picks = rng.permutation(len(trace.requests))[:count].tolist()
    requests = (replace(trace.requests[pick], due_s=due_s) for pick, due_s in zip(picks, times.tolist(), strict=True))
    return trace.derived(f"Poisson {rate_rps:.4g}/s first {count} seed {seed}", requests)


def at_once(trace: Trace, *, count: int, seed: int) -> Trace:
    """`count` requests drawn from the trace, each at most once, all at time 0."""
    drawn = poisson_arrivals(trace, rate_rps=1.0, count=count, seed=seed)
    return trace.derived(f"{count} at once seed {seed}", (replace(r, due_s=0.0) for r in drawn.requests))
