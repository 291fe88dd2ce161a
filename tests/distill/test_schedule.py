"""What a piece is expected to take, and the share of the time that training may have."""

from __future__ import annotations

import numpy as np
import pytest

from adaserve_jax.distill.pieces import FORGET_RATE, MAX_RISE, TIME_RATE, Allowance, PieceTimes


def test_a_kind_is_expected_to_take_what_it_took():
    times = PieceTimes({"check": 0.01, "apply": 0.05})
    assert times.expected_s("check") == 0.01
    times.took("check", 0.015)
    assert times.expected_s("check") == pytest.approx(0.01 + TIME_RATE * 0.005)
    times.took("check", 0.0)
    assert times.expected_s("check") == pytest.approx((1 - TIME_RATE) * (0.01 + TIME_RATE * 0.005))
    assert times.expected_s("apply") == 0.05


def test_one_slow_piece_says_little():
    times = PieceTimes({"check": 0.01})
    times.took("check", 5.0)
    assert times.expected_s("check") == pytest.approx(0.01 * (1 + TIME_RATE * (MAX_RISE - 1)))


def test_what_is_refused_runs_again_and_not_before_what_was_measured_fits():
    """A kind that became four times slower than it was measured, for a while."""
    times, refusals = PieceTimes({"check": 0.01, "apply": 0.01}), 0
    while times.expected_s("check") < 0.04:
        times.took("check", 0.05)
    while times.expected_s("check") > 0.01:
        times.refused("check")
        refusals += 1
    assert np.log(4) / -np.log1p(-FORGET_RATE) <= refusals < np.log(8) / -np.log1p(-FORGET_RATE)
    assert times.expected_s("check") == 0.01
    times.refused("check")
    assert times.expected_s("check") == times.expected_s("apply") == 0.01
    times.took("apply", 0.001)
    quick = times.expected_s("apply")
    times.refused("apply")
    assert times.expected_s("apply") == quick < 0.01


def test_no_share_is_never_open():
    allowance = Allowance(0.0)
    allowance.pass_time(0.0, busy=True)
    allowance.pass_time(100.0, busy=True)
    assert not allowance.is_open


@pytest.mark.parametrize("share", [0.05, 0.25, 0.8])
def test_training_takes_no_more_than_its_share_and_one_piece(share: float):
    rng, now, spent, busy_s = np.random.default_rng(1), 0.0, 0.0, 0.0
    allowance, longest = Allowance(share), 0.0
    for _ in range(3000):
        busy = bool(rng.random() < 0.7)
        allowance.pass_time(now, busy=busy)
        step_s = float(rng.uniform(0.001, 0.03))
        if busy:
            if allowance.is_open:
                piece_s = float(rng.uniform(0.001, 0.05))
                allowance.spend(piece_s)
                spent, longest, step_s = spent + piece_s, max(longest, piece_s), step_s + piece_s
            busy_s += step_s
        now += step_s
        assert spent <= share * busy_s + longest
    assert spent > 0.7 * share * busy_s
