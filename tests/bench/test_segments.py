"""The parts taken of a trace, by hand."""

from __future__ import annotations

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from benchmarks.nightjar.segments import (
    at_once,
    busiest_swing,
    minute_counts,
    poisson_arrivals,
    shortened,
    thinned,
    with_lengths,
)


def trace_of(*times_s: float, prompt: int = 100, output: int = 50) -> Trace:
    return Trace("t", "h", tuple(TraceRequest(at, prompt, output, SLO(), "default") for at in sorted(times_s)))


def by_minute(*counts: int) -> Trace:
    """So many requests in each minute, evenly, and one in the minute after."""
    times = [60.0 * minute + 60.0 * i / count for minute, count in enumerate(counts) for i in range(count)]
    return trace_of(*times, 60.0 * len(counts))


def test_the_segment_is_the_one_whose_rate_swings_most() -> None:
    trace = by_minute(5, 9, 4, 2, 9, 6)
    assert minute_counts(trace).tolist() == [5, 9, 4, 2, 9, 6]
    found = busiest_swing(trace, 2)  # swings of two minutes: 4, 5, 2, 7, 3
    assert (found.name, len(found.requests)) == ("t minutes 3 to 5", 11)
    assert found.requests[0].due_s == 0.0 and found.requests[-1].due_s == pytest.approx(60 + 60 * 8 / 9)
    assert busiest_swing(trace, 3).name == "t minutes 1 to 4", "of equals the first"
    with pytest.raises(ConfigError, match="has 6 whole minutes, fewer than the 7 wanted"):
        busiest_swing(trace, 7)


def test_thinning_keeps_times_and_shortening_keeps_requests() -> None:
    trace = trace_of(*(float(i) for i in range(1, 11)))  # 10 requests in 10 s
    thin = thinned(trace, 0.4)
    assert [r.due_s for r in thin.requests] == [3.0, 5.0, 8.0, 10.0]  # where 0.4 i passes 1, 2, 3 and 4
    assert [r.due_s for r in shortened(trace, 20).requests] == [i / 20 for i in range(1, 11)]
    with pytest.raises(ConfigError, match="cannot thin it to 2"):
        thinned(trace, 2.0)
    with pytest.raises(ConfigError, match="factor above 0"):
        shortened(trace, 0.0)


def test_lengths_fit_the_machine() -> None:
    long = Trace("t", "h", (*trace_of(0.0, prompt=14050, output=1000).requests, *trace_of(1.0, prompt=5).requests))
    fit = with_lengths(long, prompt_parts=10, most_output=256, max_context=1024)
    assert [(r.prompt_tokens, r.output_tokens) for r in fit.requests] == [(1024 - 256, 256), (1, 50)]
    with pytest.raises(ConfigError, match="most_output below max_context"):
        with_lengths(long, most_output=64, max_context=64)


def test_drawn_requests_come_once_each_at_the_rate() -> None:
    trace = Trace("t", "h", tuple(TraceRequest(0.0, 1 + i, 9, SLO(), "default") for i in range(2000)))
    drawn = poisson_arrivals(trace, rate_rps=4.0, count=2000, seed=3)
    assert sorted(r.prompt_tokens for r in drawn.requests) == list(range(1, 2001))
    assert drawn.rate_rps == pytest.approx(4.0)
    assert poisson_arrivals(trace, rate_rps=4.0, count=3, seed=3).rate_rps == pytest.approx(4.0), "few gaps too"
    assert drawn == poisson_arrivals(trace, rate_rps=4.0, count=2000, seed=3)
    other = poisson_arrivals(trace, rate_rps=4.0, count=2000, seed=4)
    assert other.sha256 != drawn.sha256 and other.requests != drawn.requests
    assert [r.prompt_tokens for r in at_once(trace, count=5, seed=3).requests] != [1, 2, 3, 4, 5]
    assert {r.due_s for r in at_once(trace, count=5, seed=3).requests} == {0.0}
    with pytest.raises(ConfigError, match=r"requests, fewer than the 2001 wanted"):
        poisson_arrivals(trace, rate_rps=4.0, count=2001, seed=0)
