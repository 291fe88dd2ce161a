"""Arrival processes: repeatable by seed, by their law in mean, spread and distribution, and a trace as recorded."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from adaserve_jax.bench.arrivals import Schedule, make_schedule, parse_arrivals
from adaserve_jax.bench.intensity import Constant, Peak, Sine, Steps, draw_times
from adaserve_jax.bench.workload import Workload, load_workload
from adaserve_jax.errors import ConfigError

PACKAGED = load_workload()


def scheduled(
    text: str, rate_rps: float | None, duration_s: float, seed: int = 0, workload: Workload = PACKAGED
) -> Schedule:
    return make_schedule(workload, parse_arrivals(text), rate_rps=rate_rps, duration_s=duration_s, seed=seed)


def times_of(schedule: Schedule) -> np.ndarray:
    return np.array([arrival.due_s for arrival in schedule.arrivals])


def test_poisson_is_repeatable_and_changes_with_the_seed():
    one = scheduled("poisson", 5, 20, seed=1)
    assert one == scheduled("poisson", 5, 20, seed=1)
    assert one.arrivals[0].due_s != scheduled("poisson", 5, 20, seed=2).arrivals[0].due_s


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0])
def test_gaps_have_the_mean_the_spread_and_the_law_that_was_asked_for(cv: float):
    text = "poisson" if cv == 1 else f"gamma:cv={cv}"
    schedule = scheduled(text, 20, 1000)
    gaps = np.diff(times_of(schedule))
    assert (gaps >= 0).all() and times_of(schedule)[-1] < 1000
    assert gaps.mean() == pytest.approx(0.05, rel=5 * cv / math.sqrt(20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    law = stats.gamma(cv**-2, scale=0.05 * cv**2)
    assert stats.kstest(gaps, law.cdf).pvalue > 0.01
    assert stats.kstest(gaps, stats.gamma(1.3 * cv**-2, scale=0.05 * cv**2 / 1.3).cdf).pvalue < 1e-6


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_bursty_arrivals_are_as_many_as_asked_for_even_in_a_short_run(cv: float):
    """A process begun with a whole gap would have (cv^2 - 1) / 2 more arrivals than the rate says."""
    rng = np.random.default_rng(5)
    counts = [len(draw_times(Constant(), 2.0, 3.0, cv, rng)) for _ in range(4000)]
    error = np.std(counts) / math.sqrt(len(counts))
    assert np.mean(counts) == pytest.approx(6.0, abs=4 * error)
    assert error < 0.15


LAWS = {
    "step": (Steps((20.0, 50.0), (4.0, 0.0)), lambda t: np.where(t < 20, 1.0, np.where(t < 50, 4.0, 0.0))),
    "sine": (Sine(25.0, 0.8), lambda t: 1 + 0.8 * np.sin(2 * np.pi * t / 25)),
    "full sine": (Sine(60.0, 1.0), lambda t: 1 + np.sin(2 * np.pi * t / 60)),
    "peak": (
        Peak(10.0, 8.0, 0.25, 60.0),
        lambda t: 0.25 + 0.75 * 60 * stats.truncnorm(-10 / 8, 50 / 8, loc=10, scale=8).pdf(t),
    ),
}


@pytest.mark.parametrize("name", list(LAWS))
def test_times_follow_the_law(name: str):
    """Against the intensity written down apart: its integral by quadrature, the arrivals by Kolmogorov-Smirnov."""
    law, intensity = LAWS[name]
    grid = np.linspace(0, 60, 600_001)
    values = intensity(grid)
    integral = np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2 * np.diff(grid))])
    assert law.cumulative(grid[::1000]) == pytest.approx(integral[::1000], abs=2e-3)
    rng = np.random.default_rng(2)
    counts, times = [], []
    for _ in range(200):
        drawn = draw_times(law, 1.0, 60.0, 1.0, rng)
        assert (np.diff(drawn) >= 0).all()
        counts.append(len(drawn))
        times.append(drawn)
    expected = integral[-1]
    assert np.mean(counts) == pytest.approx(expected, abs=4 * math.sqrt(expected / 200))
    pooled = np.concatenate(times)
    assert stats.kstest(pooled, lambda t: np.interp(t, grid, integral / expected)).pvalue > 0.01
    assert stats.kstest(pooled, lambda t: t / 60).pvalue < 1e-6


def test_offered_rates_are_means_over_the_run():
    assert scheduled("sine:period=30,swing=0.8", 2, 60).rate_rps == pytest.approx(2.0)
    assert scheduled("step:at=30,rate=4", 2, 60).rate_rps == pytest.approx(3.0)
    assert scheduled("step:at=90,rate=4", 2, 60).rate_rps == pytest.approx(2.0)
    assert scheduled("peaks:chat=15,code=40", 3, 60).rate_rps == 3.0


def test_a_request_is_the_same_at_every_rate_and_process():
    slow, fast = scheduled("poisson", 2, 30, seed=4), scheduled("poisson", 5, 30, seed=4)
    assert len(slow.arrivals) < len(fast.arrivals)
    pairs = list(zip(slow.arrivals, fast.arrivals, strict=False))
    assert all(a.item is b.item and a.seed == b.seed and a.due_s * 2 == pytest.approx(b.due_s * 5) for a, b in pairs)
    bursty = scheduled("gamma:cv=3", 4, 30, seed=4)
    assert [(a.item, a.seed) for a in bursty.arrivals[:20]] == [(a.item, a.seed) for a in fast.arrivals[:20]]
    longer = scheduled("poisson", 2, 60, seed=4)
    assert longer.arrivals[: len(slow.arrivals)] == slow.arrivals


def test_a_step_changes_nothing_before_it():
    plain, stepped = scheduled("poisson", 3, 40, seed=6), scheduled("step:at=20,rate=30", 3, 40, seed=6)
    before = [arrival for arrival in plain.arrivals if arrival.due_s < 20]
    assert [a.due_s for a in stepped.arrivals[: len(before)]] == pytest.approx([a.due_s for a in before])
    after = times_of(stepped)[len(before) :]
    assert len(after) == pytest.approx(600, abs=5 * math.sqrt(600)) and after.min() >= 20


def test_every_pass_has_the_workloads_mix():
    schedule = scheduled("poisson", 10, 60, seed=3)
    first_pass = [arrival.item for arrival in schedule.arrivals[:60]]
    assert len({item.prompt for item in first_pass}) == 60
    assert Counter(item.slo_class for item in first_pass) == {"code": 36, "chat": 12, "summary": 12}


def test_classes_peak_where_they_should_and_keep_their_shares():
    text = "peaks:chat=75,code=195,summary=285"
    times: dict[str, list[float]] = {"chat": [], "code": [], "summary": []}
    for seed in range(20):
        schedule = scheduled(text, 3, 360, seed)
        assert (np.diff(times_of(schedule)) >= 0).all()
        for arrival in schedule.arrivals:
            times[arrival.item.slo_class].append(arrival.due_s)
    for name, share, at_s in (("chat", 0.2, 75), ("code", 0.6, 195), ("summary", 0.2, 285)):
        expected = 3 * 360 * 20 * share
        assert len(times[name]) == pytest.approx(expected, abs=4 * math.sqrt(expected))
        around = [at for at in times[name] if abs(at - at_s) < 60]
        assert np.mean(around) == pytest.approx(at_s, abs=3.0)
        assert len(around) / len(times[name]) > 0.6
    chat = {rate: [(a.item, a.seed) for a in scheduled(text, rate, 360).arrivals if a.item.slo_class == "chat"]
            for rate in (1, 3)}  # fmt: skip
    assert chat[3][: len(chat[1])] == chat[1], "the same requests of a class at every rate"


@pytest.mark.parametrize(("rate", "duration"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0), (float("inf"), 1)])
def test_impossible_rates_are_refused(rate: float, duration: float):
    with pytest.raises(ConfigError, match=r"the (rate|duration) must be finite and above 0"):
        scheduled("poisson", rate, duration)


@pytest.fixture
def timed(tmp_path: Path) -> Workload:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{t}", "arrival_s": t}) + "\n" for t in (12.0, 10.0, 10.5, 30.0)))
    return load_workload(path)


def test_trace_times_are_sorted_shifted_and_cut(timed: Workload):
    for text in ("poisson", "trace"):
        schedule = scheduled(text, None, 4, workload=timed)
        assert [(a.due_s, a.item.prompt) for a in schedule.arrivals] == [(0.0, "p10.0"), (0.5, "p10.5"), (2.0, "p12.0")]
        assert (schedule.process, schedule.rate_rps) == ("trace", pytest.approx(3 / 4))


def test_a_trace_is_scaled_by_a_factor_or_to_a_rate(timed: Workload):
    assert times_of(scheduled("trace:scale=0.5", None, 100, workload=timed)).tolist() == [0.0, 0.25, 1.0, 10.0]
    schedule = scheduled("trace", 0.6, 100, workload=timed)  # mean gap 20 / 3 s becomes 5 / 3 s: a quarter
    assert times_of(schedule) == pytest.approx([0.0, 0.125, 0.5, 5.0])
    assert (schedule.rate_rps, schedule.duration_s) == (0.6, pytest.approx(4 / 0.6)), "not repeated"
    assert len(scheduled("trace", 0.6, 3, workload=timed).arrivals) == 3
    with pytest.raises(ConfigError, match="by its scale or to a rate, not by both"):
        scheduled("trace:scale=0.5", 0.6, 3, workload=timed)
    with pytest.raises(ConfigError, match="sine:period=3,swing=1 need rates as numbers"):
        scheduled("sine:period=3,swing=1", None, 3, workload=timed)


def test_trace_needs_times(tmp_path: Path):
    for text, rate in (("poisson", None), ("trace", 2.0)):
        with pytest.raises(ConfigError, match="workload packaged says no times of arrival; add them"):
            scheduled(text, rate, 4)
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "arrival_s": 3}\n')
    with pytest.raises(ConfigError, match=r"one.jsonl has all requests at one time"):
        scheduled("trace", 2.0, 4, workload=load_workload(tmp_path / "one.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one such as poisson, gamma:cv=2"),
        ("normal", "got 'normal'"),
        ("poisson:", "got 'poisson:'"),
        ("poisson:cv=2", "poisson: it has no settings, got 'cv=2'"),
        ("gamma", "gamma needs cv, such as gamma:cv=2"),
        ("gamma:cv", "gamma: its settings are cv, got 'cv'"),
        ("gamma:cv=x", "gamma: cv: expected a finite number, got 'x'"),
        ("gamma:cv=nan", "gamma: cv: expected a finite number"),
        ("gamma:cv=0", "gamma: cv: expected a number from 0.05 to 20, got 0"),
        ("gamma:cv=2,cv=3", "gamma: cv is given twice"),
        ("trace:scale=-1", "trace: scale: expected a number above 0, got -1"),
        ("step:at=3", "step needs rate, such as step:at=30,rate=4"),
        ("step:at=3,rate=1,at=2,rate=2", "step: expected for each time above 0, in rising order"),
        ("step:at=3,rate=1,rate=2", "step: expected for each time"),
        ("step:at=3,rate=-1", "a rate of at least 0"),
        ("sine:period=0,swing=0.5", "sine: period: expected a number above 0"),
        ("sine:period=60,swing=1.5", "sine: swing: expected a number from 0 to 1, got 1.5"),
        ("peaks:flat=0.5", "peaks needs a class and when it peaks"),
        ("peaks:chat=-3", "peaks: chat: expected a number from 0 to inf"),
        ("peaks:chat=3,chat=4", "peaks: chat is given twice"),
    ],
)
def test_wrong_processes_are_named(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_arrivals(text)


def test_peaks_of_no_class_and_runs_too_short_or_too_fine_are_refused():
    with pytest.raises(ConfigError, match="workload packaged has no class 'maths'; it has chat, code, summary"):
        scheduled("peaks:maths=3", 1, 10)
    with pytest.raises(ConfigError, match="chat peaks after the run's 10 s"):
        scheduled("peaks:chat=30", 1, 10)
    with pytest.raises(ConfigError, match=r"changes within 0\.001 s is too fine for a run of 600 s"):
        scheduled("sine:period=0.001,swing=1", 1, 600)
    with pytest.raises(ConfigError, match="more than 10000000 requests"):
        scheduled("poisson", 1e6, 60)
    with pytest.raises(ConfigError, match="seed must not be below 0"):
        scheduled("poisson", 1, 60, seed=-1)


def test_processes_are_written_as_they_are_read():
    for text in ("poisson", "gamma:cv=2", "trace:scale=0.5", "step:at=30,rate=4,at=60,rate=1", "peaks:a=1,flat=0.5"):
        assert parse_arrivals(text).text == text
    assert parse_arrivals(" gamma: cv = 2.0 ").text == "gamma:cv=2"
    assert parse_arrivals("gamma:cv=2").cv == 2.0
