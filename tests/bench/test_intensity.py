"""Times drawn by a law: their mean, spread and distribution, against the law in numbers of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adaserve_jax.workloads.arrivals import Constant, Law, Peak, Sine, Steps, draw_times

DURATION_S = 100.0
LAWS = {
    "constant": Constant(),
    "steps": Steps((30.0, 60.0), (3.0, 0.0)),
    "sine": Sine(40.0, 0.9),
    "peak": Peak(70.0, 10.0, 0.25, DURATION_S),
}


def rate_of(name: str, at_s: np.ndarray) -> np.ndarray:
    """The law itself, written down a second time, up to a factor."""
    match name:
        case "steps":
            return np.select([at_s < 30, at_s < 60], [1.0, 3.0], 0.0)
        case "sine":
            return 1 + 0.9 * np.sin(2 * math.pi * at_s / 40)
        case "peak":
            bell = np.exp(-((at_s - 70) ** 2) / 200)
            return 0.25 / DURATION_S + 0.75 * bell / (bell.mean() * DURATION_S)
    return np.ones_like(at_s)


def integral(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The middles of 100,000 spans, and the law's integral up to the end of each, by addition."""
    edges = np.linspace(0, DURATION_S, 100_001)
    spans = rate_of(name, (edges[1:] + edges[:-1]) / 2) * np.diff(edges)
    return edges[1:], np.cumsum(spans)


def drawn(law: Law, rate: float, cv: float, seed: int, duration: float = DURATION_S) -> np.ndarray:
    return draw_times(law, rate, duration, cv, np.random.default_rng(seed))


@pytest.mark.parametrize("name", LAWS)
def test_the_integral_is_that_of_the_law(name: str):
    at, passed = integral(name)
    ours = LAWS[name].cumulative(at)
    np.testing.assert_allclose(ours / ours[-1], passed / passed[-1], atol=1e-5)
    if name in ("constant", "peak"):  # those that are said to have a mean of 1 over the whole
        assert ours[-1] == pytest.approx(DURATION_S)


def test_the_peaks_intensity_is_what_its_integral_grows_by():
    law, at = LAWS["peak"], np.linspace(1, 99, 197)
    assert isinstance(law, Peak)
    grown = (law.cumulative(at + 1e-4) - law.cumulative(at - 1e-4)) / 2e-4
    np.testing.assert_allclose(law.intensity(at), grown, rtol=1e-5)


@pytest.mark.parametrize("name", LAWS)
def test_times_are_distributed_as_the_law(name: str):
    """Kolmogorov-Smirnov: given their number, times of a Poisson process are independent draws from the law."""
    times = drawn(LAWS[name], 200.0, 1.0, seed=5)
    at, passed = integral(name)
    expected = np.interp(times, at, passed / passed[-1])
    ranks = np.arange(len(times)) / len(times)
    distance = max(np.max(expected - ranks), np.max(ranks + 1 / len(times) - expected))
    assert distance < 1.63 / len(times) ** 0.5, "the 1 % critical value"


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_gaps_are_gamma_with_the_stated_spread(cv: float):
    gaps = np.diff(drawn(Constant(), 5.0, cv, seed=2, duration=8000.0))
    assert gaps.mean() == pytest.approx(0.2, rel=4 * cv / len(gaps) ** 0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    oracle = np.random.default_rng(77).gamma(cv**-2, 0.2 * cv**2, 200_000)
    gaps, oracle = (np.sort(np.maximum(each, 1e-9)) for each in (gaps, oracle))  # finer than that times are not
    both = np.concatenate([gaps, oracle])
    ours = np.searchsorted(gaps, both, "right") / len(gaps)
    distance = np.max(np.abs(ours - np.searchsorted(oracle, both, "right") / len(oracle)))
    assert distance < 1.63 * (1 / len(gaps) + 1 / len(oracle)) ** 0.5


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_the_expected_number_is_exact_in_every_part_of_a_short_run(name: str, cv: float):
    """Also where a gap is as long as the run: over many seeds, the mean number in each fifth is the law's integral."""
    law, seeds = LAWS[name], 150
    edges = np.linspace(0, DURATION_S, 6)
    counts = np.array([np.histogram(drawn(law, 0.05, cv, seed), edges)[0] for seed in range(seeds)])
    expected = 0.05 * np.diff(law.cumulative(edges))
    deviation = counts.std(axis=0) / seeds**0.5
    assert (np.abs(counts.mean(axis=0) - expected) <= 4 * deviation + 1e-12).all()


def test_nothing_arrives_while_the_rate_is_zero():
    times = drawn(LAWS["steps"], 50.0, 1.0, seed=0)
    assert times.max() < 60 and (np.diff(times) > 0).all()
    assert len(times) == pytest.approx(50 * (30 + 90), abs=4 * 6000**0.5)


def test_a_longer_run_begins_as_the_shorter():
    short, long = drawn(Constant(), 100.0, 2.0, seed=1), drawn(Constant(), 100.0, 2.0, seed=1, duration=1000.0)
    np.testing.assert_allclose(long[: len(short)], short)
    assert len(long) > 50_000
