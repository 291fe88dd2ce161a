"""Schedules: the law of each process, the workload's own times, and what different loads have in common."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.arrivals import Schedule, make_schedule, parse_arrivals
from adaserve_jax.workloads.items import Workload
from adaserve_jax.workloads.workload import load_workload


def schedule(text: str = "poisson", *, rate: float | None = 20.0, duration: float = 50.0, seed: int = 0) -> Schedule:
    return make_schedule(load_workload(), parse_arrivals(text), rate_rps=rate, duration_s=duration, seed=seed)


def times(made: Schedule) -> np.ndarray:
    return np.array([arrival.due_s for arrival in made.arrivals])


@pytest.fixture
def timed(tmp_path: Path) -> Workload:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{t}", "arrival_s": t}) + "\n" for t in (12.0, 10.0, 10.5, 30.0)))
    return load_workload(path)


@pytest.mark.parametrize(
    "text",
    ["poisson", "gamma:cv=3", "step:at=20,rate=5", "sine:period=25,swing=0.8", "peaks:chat=10,code=30,width=5"],
)
def test_the_seed_says_everything(text: str):
    assert schedule(text) == schedule(text)
    assert times(schedule(text))[0] != times(schedule(text, seed=1))[0]
    assert times(schedule(text))[-1] < 50
    assert all(a <= b for a, b in pairwise(times(schedule(text))))


@pytest.mark.parametrize("text", ["poisson", "gamma:cv=2.5", "sine:period=25,swing=0.8", "step:at=20,rate=40"])
def test_other_loads_get_the_same_requests_with_the_same_seeds(text: str):
    base = [(a.item, a.seed) for a in schedule("poisson", rate=5).arrivals]
    other = [(a.item, a.seed) for a in schedule(text).arrivals]
    assert len(base) < len(other) and other[: len(base)] == base


@pytest.mark.parametrize("text", ["poisson", "gamma:cv=2.5"])
def test_times_at_another_rate_are_those_of_one_scaled(text: str):
    slow, fast = times(schedule(text, rate=5)), times(schedule(text, rate=20))
    np.testing.assert_allclose(fast[: len(slow)], slow / 4)


def test_of_peaks_a_class_has_the_same_requests_at_every_rate():
    def bodies(made: Schedule, name: str) -> list:
        return [(a.item, a.seed) for a in made.arrivals if a.item.slo_class == name]

    slow, fast = (schedule("peaks:chat=10,code=30,width=5", rate=rate) for rate in (5.0, 20.0))
    for name in ("chat", "code", "summary"):
        assert bodies(fast, name)[: len(bodies(slow, name))] == bodies(slow, name)


def test_every_pass_has_the_workloads_mix():
    arrivals = schedule().arrivals
    for first in (0, 60):
        one_pass = [arrival.item for arrival in arrivals[first : first + 60]]
        assert len({item.prompt for item in one_pass}) == 60
        assert Counter(item.slo_class for item in one_pass) == {"code": 36, "chat": 12, "summary": 12}


def test_poisson_counts_and_gaps_have_the_right_moments():
    at = times(schedule(duration=500))
    assert abs(len(at) - 10_000) < 4 * 100  # standard deviation of a Poisson count: its root
    gaps = np.diff(at)
    assert gaps.mean() == pytest.approx(0.05, rel=0.04)
    assert gaps.std() == pytest.approx(0.05, rel=0.04)


def test_classes_peak_when_they_are_said_to_and_the_others_arrive_evenly():
    """A normal distribution has 68.3 % within one deviation; 20 % of each arrive evenly: 2 % in 10 of 100 s."""
    made = schedule("peaks:chat=30,code=70,width=5,flat=0.2", rate=100, duration=100)
    at = {name: [a.due_s for a in made.arrivals if a.item.slo_class == name] for name in ("chat", "code", "summary")}
    assert len(at["code"]) == pytest.approx(6000, abs=4 * 6000**0.5)  # 36 of the packaged 60, of 10,000
    assert len(at["chat"]) == pytest.approx(2000, abs=4 * 2000**0.5)
    near = {name: np.mean(np.abs(np.array(at[name]) - peak) < 5) for name, peak in (("chat", 30), ("code", 70))}
    assert near["chat"] == pytest.approx(0.8 * 0.683 + 0.02, abs=0.045)
    assert near["code"] == pytest.approx(0.8 * 0.683 + 0.02, abs=0.026)
    tenths = np.histogram(at["summary"], bins=10, range=(0, 100))[0]
    assert tenths.sum() == pytest.approx(2000, abs=4 * 2000**0.5)
    assert np.abs(tenths - 200).max() < 4 * 200**0.5


def test_offered_rates_are_means_over_the_run():
    assert schedule("poisson").rate_rps == 20
    assert schedule("step:at=10,rate=45").rate_rps == pytest.approx((10 * 20 + 40 * 45) / 50)
    assert schedule("sine:period=25,swing=0.8").rate_rps == pytest.approx(20)
    assert schedule("peaks:chat=5").rate_rps == 20


def test_own_times_are_sorted_counted_from_the_first_and_cut(timed: Workload):
    for text in ("poisson", "trace"):
        made = make_schedule(timed, parse_arrivals(text), rate_rps=None, duration_s=4, seed=0)
        assert [(a.due_s, a.item.prompt) for a in made.arrivals] == [(0.0, "p10.0"), (0.5, "p10.5"), (2.0, "p12.0")]
        assert (made.process, made.duration_s) == ("trace", 4)
        assert made.rate_rps == pytest.approx(3 / 4)


def test_own_times_can_be_scaled_or_brought_to_a_rate(timed: Workload):
    half = make_schedule(timed, parse_arrivals("trace:scale=0.5"), rate_rps=None, duration_s=100, seed=0)
    assert times(half).tolist() == [0.0, 0.25, 1.0, 10.0]
    assert half.process == "trace:scale=0.5"
    assert half.duration_s == pytest.approx(10 + 10 / 3), "the run ends a mean gap after the last"
    assert half.rate_rps == pytest.approx(4 / half.duration_s)
    at_rate = make_schedule(timed, parse_arrivals("trace"), rate_rps=0.3, duration_s=100, seed=0)
    assert times(at_rate).tolist() == pytest.approx([0.0, 0.25, 1.0, 10.0])  # 3 gaps in 20 s are 0.15/s: twice as fast
    assert at_rate.rate_rps == pytest.approx(0.3)
    cut = make_schedule(timed, parse_arrivals("trace"), rate_rps=0.3, duration_s=5, seed=0)
    assert cut.rate_rps == len(cut.arrivals) / 5 != 0.3, "what is offered, not what was asked for"
    assert [(a.item, a.seed) for a in at_rate.arrivals] == [(a.item, a.seed) for a in half.arrivals]


def test_one_request_is_a_trace_too(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "p", "arrival_s": 3}\n')
    made = make_schedule(load_workload(path), parse_arrivals("trace"), rate_rps=None, duration_s=8, seed=0)
    assert (times(made).tolist(), made.rate_rps) == ([0.0], 1 / 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "the rate must be finite and above 0, got 0.0"),
        ({"rate": float("nan")}, "the rate must be finite and above 0, got nan"),
        ({"duration": float("inf")}, "the duration must be finite and above 0, got inf"),
        ({"seed": -1}, "the seed must be at least 0, got -1"),
        ({"rate": 1e9}, "more than 10000000 requests; shorten the run"),
        ({"rate": None}, "workload packaged says no times of arrival"),
        ({"text": "trace"}, "workload packaged says no times of arrival"),
        ({"text": "gamma:cv=2", "rate": None}, "arrivals gamma:cv=2 need rates as numbers"),
        ({"text": "peaks:maths=3"}, "arrivals: peaks: workload packaged has no class 'maths'; it has chat"),
        (
            {"text": "step:at=10,rate=4,at=50,rate=1"},
            "the rate changes at 50 s, which is not within the run's 50 s",
        ),
        ({"text": "peaks:chat=60"}, "peaks: chat peaks after the run's 50 s; make it longer"),
        ({"text": "sine:period=1e-6,swing=0.5"}, "a rate that changes within 1e-06 s is too fine for a run of 50 s"),
        ({"text": "sine:period=1e-310,swing=0.5"}, "too fine for a run of 50 s"),
        ({"text": "peaks:chat=5,width=1e-310"}, "too fine for a run of 50 s"),
    ],
)
def test_what_cannot_be_is_said(settings: dict, message: str):
    with pytest.raises(ConfigError) as told:
        schedule(**settings)
    assert message in str(told.value)


def test_a_trace_is_scaled_in_one_way(timed: Workload):
    with pytest.raises(ConfigError, match="by its scale or to a rate, not by both"):
        make_schedule(timed, parse_arrivals("trace:scale=2"), rate_rps=1.0, duration_s=9, seed=0)
    same = Workload("same", "", timed.items[:1] * 2)
    with pytest.raises(ConfigError, match="workload same has all requests at one time, so its rate cannot be changed"):
        make_schedule(same, parse_arrivals("trace"), rate_rps=1.0, duration_s=9, seed=0)
