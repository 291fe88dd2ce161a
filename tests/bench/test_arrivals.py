"""Arrival processes: repeatable by seed, Poisson in distribution, and a trace as recorded."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.bench.arrivals import poisson_schedule, trace_schedule
from adaserve_jax.bench.workload import load_workload
from adaserve_jax.errors import ConfigError


def test_poisson_is_repeatable_and_changes_with_the_seed():
    workload = load_workload()
    one = poisson_schedule(workload, rate_rps=5, duration_s=20, seed=1)
    assert one == poisson_schedule(workload, rate_rps=5, duration_s=20, seed=1)
    assert one.arrivals[0].due_s != poisson_schedule(workload, rate_rps=5, duration_s=20, seed=2).arrivals[0].due_s


def test_poisson_counts_and_gaps_have_the_right_moments():
    schedule = poisson_schedule(load_workload(), rate_rps=20, duration_s=500, seed=0)
    times = np.array([arrival.due_s for arrival in schedule.arrivals])
    assert abs(len(times) - 10_000) < 5 * 100  # five standard deviations of a Poisson count
    gaps = np.diff(times)
    assert (gaps > 0).all() and times[-1] < 500
    assert gaps.mean() == pytest.approx(0.05, rel=0.05)
    assert gaps.std() == pytest.approx(0.05, rel=0.05)


def test_every_pass_has_the_workloads_mix():
    schedule = poisson_schedule(load_workload(), rate_rps=10, duration_s=60, seed=3)
    first_pass = [arrival.item for arrival in schedule.arrivals[:60]]
    assert len({item.prompt for item in first_pass}) == 60
    assert Counter(item.slo_class for item in first_pass) == {"code": 36, "chat": 12, "summary": 12}


@pytest.mark.parametrize(("rate", "duration"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0), (float("inf"), 1)])
def test_impossible_rates_are_refused(rate: float, duration: float):
    with pytest.raises(ConfigError, match="rate and duration must be finite and above 0"):
        poisson_schedule(load_workload(), rate_rps=rate, duration_s=duration, seed=0)


def test_trace_times_are_sorted_shifted_and_cut(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{t}", "arrival_s": t}) + "\n" for t in (12.0, 10.0, 10.5, 30.0)))
    schedule = trace_schedule(load_workload(path), duration_s=4, seed=0)
    assert [(a.due_s, a.item.prompt) for a in schedule.arrivals] == [(0.0, "p10.0"), (0.5, "p10.5"), (2.0, "p12.0")]
    assert schedule.rate_rps == pytest.approx(3 / 4)


def test_trace_needs_times():
    with pytest.raises(ConfigError, match="rate 'trace' needs arrival_s on every line of workload packaged"):
        trace_schedule(load_workload(), duration_s=4, seed=0)
