"""Bootstrap intervals against closed forms, enumeration, numpy on real resamples, and their coverage."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.results.bootstrap import (
    ENOUGH_REPEATS,
    Interval,
    Ratio,
    between,
    distributions,
    percentile,
    resamples_for,
    sure_share,
)


def mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return Ratio(values, np.ones(len(values)))(counts)


def interval(statistic, groups, **drawn: int) -> Interval:
    """Of a statistic of all values under counts, the groups being repeats."""
    held = np.concatenate(groups)
    sizes = [len(group) for group in groups]
    return between(distributions([lambda counts: statistic(held, counts)], sizes, **drawn)[0])


values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)


@given(values, st.floats(0, 100), st.data())
def test_weighted_statistics_are_those_of_the_copied_records(held: list[float], q: float, data: st.DataObject):
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(held), max_size=len(held)))
    copied = np.repeat(held, counts)
    weights = np.array([counts], np.float64)
    if not len(copied):
        assert np.isnan(percentile(np.array(held), q)(weights)[0])
        assert np.isnan(mean(np.array(held), weights)[0])
    else:
        assert percentile(np.array(held), q)(weights)[0] == pytest.approx(np.percentile(copied, q), abs=1e-9)
        assert mean(np.array(held), weights)[0] == pytest.approx(copied.mean(), abs=1e-9)


def test_records_without_a_value_are_no_part_of_a_percentile():
    held = np.array([np.nan, 3.0, np.nan, 1.0])
    assert percentile(held, 50)(np.ones((1, 4)))[0] == 2.0
    assert np.isnan(percentile(np.full(3, np.nan), 50)(np.ones((1, 3)))[0])


def test_infinite_values_are_the_last_ones():
    held = np.array([1.0, np.inf, 2.0])
    assert percentile(held, 50)(np.ones((1, 3)))[0] == 2.0
    assert percentile(held, 75)(np.ones((1, 3)))[0] == math.inf
    assert percentile(np.full(2, np.inf), 50)(np.ones((1, 2)))[0] == math.inf


def test_distribution_of_a_mean_of_three_is_the_enumerated_one():
    held = np.array([0.0, 1.0, 5.0])
    drawn = distributions([lambda counts: mean(held, counts)], [3], samples=40_000, seed=1)[0]
    means = [sum(chosen) / 3 for chosen in itertools.product(held, repeat=3)]  # 27 equally likely resamples
    for level in sorted(set(means)):
        expected = sum(each <= level for each in means) / 27
        assert np.mean(drawn <= level + 1e-9) == pytest.approx(expected, abs=0.01)


def test_interval_of_a_mean_is_that_of_the_normal_law():
    held = np.random.default_rng(0).normal(3.0, 2.0, 400)
    found = interval(mean, [held], samples=20_000)
    half = 1.96 * held.std() / math.sqrt(400)  # of resamples: the population's deviation, 1 / n
    assert found.low == pytest.approx(held.mean() - half, abs=0.03 * half)
    assert found.high == pytest.approx(held.mean() + half, abs=0.03 * half)


def test_intervals_cover_a_share_as_often_as_they_say():
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(400):
        found = interval(mean, [(rng.random(120) < 0.8).astype(float)], samples=400, seed=trial)
        covered += found.low <= 0.8 <= found.high
    assert 0.90 <= covered / 400 <= 0.98


def test_whole_repeats_are_drawn_when_there_are_enough():
    apart = [np.full(50, float(level)) for level in range(ENOUGH_REPEATS)]
    few = interval(mean, apart[:-1])
    assert few == Interval(1.5, 1.5)  # within a repeat all requests are alike, and nothing else is seen
    many = interval(mean, apart)
    assert many.low < 1.5 and many.high > 2.5


def test_repeats_of_different_size_weigh_by_their_records():
    groups = [np.ones(10), np.zeros(30)]
    drawn = distributions([lambda counts: counts.sum(axis=1)], [len(each) for each in groups], samples=50)
    assert (drawn == 40).all()
    assert interval(mean, groups) == Interval(0.25, 0.25)


def test_draws_depend_on_sizes_and_seed_only():
    held = np.random.default_rng(0).random((2, 30))
    statistics = [lambda counts, each=each: mean(each, counts) for each in held]
    together = distributions(statistics, [10, 20], samples=100, seed=3)
    assert (distributions(statistics[:1], [10, 20], samples=100, seed=3)[0] == together[0]).all()
    assert (distributions(statistics, [10, 20], samples=100, seed=4) != together).any()


def test_chunks_hold_as_many_samples_as_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("adaserve_jax.results.bootstrap.CHUNK", 25)
    assert distributions([lambda counts: counts.sum(axis=1)], [10], samples=7).tolist() == [[10.0] * 7]


def test_nothing_is_known_of_nothing():
    assert interval(mean, [np.array([])]) == Interval(None, None)
    assert between(np.array([np.nan, np.nan, 1.0])) == Interval(None, None)
    assert np.isnan(Ratio(np.ones(2), np.zeros(2))(np.ones((1, 2)))[0])


def test_a_share_of_one_leaves_room_for_what_was_not_seen():
    # of n records that all have it, the least share p with p**n = 2.5%
    assert sure_share(100) ** 100 == pytest.approx(0.025)
    assert sure_share(1) == pytest.approx(0.025)


def test_many_records_get_fewer_resamples():
    assert [resamples_for(n) for n in (1, 2000, 10**6)] == [2000, 2000, 500]


def test_ratios_drawn_together_are_those_drawn_alone():
    held = np.random.default_rng(2).random((4, 25))
    ratios = [Ratio(held[0], held[1]), Ratio(held[2], held[3])]
    mixed = [ratios[0], lambda counts: percentile(held[0], 90)(counts), ratios[1]]
    together = distributions(mixed, [25], samples=60, seed=9)
    for statistic, row in zip(mixed, together, strict=True):
        assert distributions([statistic], [25], samples=60, seed=9)[0] == pytest.approx(row, rel=1e-12)
