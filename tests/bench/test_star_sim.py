"""Simulated targets at the real core of a draft service: by hand, beside the closed forms, and beside Table 1."""

from __future__ import annotations

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from benchmarks.starsd.closed_forms import emitted_tokens, full_targets
from benchmarks.starsd.sim import StarPlan, closed_row, simulated_row
from tests.star.test_admission import LOAD, R_Q, T_IDLE

SECONDS = ("wait_s", "idle_s")


def flat(rows: int) -> float:
    return 0.010


def growing(rows: int) -> float:
    return 0.008 + 0.002 * rows


def test_by_hand() -> None:
    """Every level accepted, 4 + 1 tokens a round of 10 + 1 + 29 ms; four targets fill the draft, five wait 10 ms."""
    for targets, round_s, wait_s, idle_s in ((1, 0.040, 0.0, 0.030), (4, 0.040, 0.0, 0.0), (5, 0.050, 0.010, 0.0)):
        plan = StarPlan(targets, verify_s=0.029, network_s=0.001, acceptance=1.0, depth=4, max_rows=1, rounds=80)
        found = simulated_row(plan, flat)
        assert (found.n, found.kind, found.batched) == (targets, "simulated", False)
        assert found.rounds_per_s == pytest.approx(targets / round_s, rel=0.02)
        assert found.throughput_tps == pytest.approx(5 * targets / round_s, rel=0.02)
        assert found.per_target_tps == pytest.approx(5 / round_s, rel=0.02)
        assert (found.wait_s, found.idle_s) == pytest.approx((wait_s, idle_s), abs=1e-4)
        assert found.load == pytest.approx(min(targets * 0.010 / 0.040, 1.0), abs=0.005)


@pytest.mark.parametrize("targets", [1, 2, 3, 4, 5, 6, 20])
@pytest.mark.parametrize("back_s", [0.005, 0.0311])
def test_one_by_one_it_is_the_closed_form(targets: int, back_s: float) -> None:
    """Within 1%: only the window's ends differ. Tokens are drawn, so within four standard deviations."""
    plan = StarPlan(targets, back_s - 0.001, 0.001, acceptance=0.7, depth=4, max_rows=1, rounds=40)
    found, closed = simulated_row(plan, flat), closed_row(plan, flat)
    assert found.rounds_per_s == pytest.approx(closed.rounds_per_s, rel=0.01)
    assert found.load == pytest.approx(closed.load, rel=0.01)
    for name in SECONDS:
        assert getattr(found, name) == pytest.approx(getattr(closed, name), abs=2e-4)
    error = 4 * 1.6 / np.sqrt(targets * plan.rounds * 0.75)
    assert found.throughput_tps / found.rounds_per_s == pytest.approx(emitted_tokens(0.7, 4), abs=error)


@pytest.mark.slow
def test_batched_it_is_the_closed_form_where_phases_settle_as_it_says() -> None:
    """Batched, a loop settles at the groups that its phases fall into: seldom one more or fewer than the closed form
    has. So the median is held close, and each point only as far as one group goes."""
    off = []
    for back_s in (0.005, 0.031, 0.08):
        for targets in (1, 2, 3, 6, 16, 40):
            plan = StarPlan(targets, back_s, 0.0, acceptance=0.7, depth=4, rounds=40)
            found, closed = simulated_row(plan, growing), closed_row(plan, growing)
            off.append(abs(found.rounds_per_s / closed.rounds_per_s - 1))
            assert found.batched and closed.batched
            assert found.load == pytest.approx(closed.load, abs=0.25)
    assert np.median(off) < 0.01 and np.mean(off) < 0.03 and max(off) < 0.25


def test_rows_of_a_target_are_drafted_together() -> None:
    """Three rows of one target: one batch of 14 ms and 36 ms back."""
    plan = StarPlan(1, verify_s=0.036, network_s=0.0, acceptance=0.0, depth=3, rows=3, rounds=40)
    found, closed = simulated_row(plan, growing), closed_row(plan, growing)
    assert found.rounds_per_s == pytest.approx(3 / 0.050, rel=0.05)
    assert found.throughput_tps == pytest.approx(3 / 0.050, rel=0.05)
    assert found.idle_s == pytest.approx(0.036, rel=0.05)
    assert found.rounds_per_s == pytest.approx(closed.rounds_per_s, rel=0.05)
    one_by_one = simulated_row(StarPlan(1, 0.036, 0.0, 0.0, 3, rows=3, max_rows=1, rounds=40), growing)
    assert one_by_one.rounds_per_s == pytest.approx(3 / 0.066, rel=0.05)
    assert one_by_one.wait_s == pytest.approx(0.010, rel=0.05)  # 0, 10 and 20 ms


@pytest.mark.slow
def test_beside_table_1_of_the_paper() -> None:
    """S of each N is its load over its rounds/s, Z is 31 ms. Rounds/s within 2% but at N = 4, the edge of full load,
    where targets that all take the same time leave no gap; times that spread by 30% leave some."""
    off, spread = [], []
    for targets, (rate, load, idle_s) in enumerate(zip(R_Q, LOAD, T_IDLE, strict=True), 1):
        plan = StarPlan(targets, 0.031, 0.0, acceptance=0.75, depth=5, max_rows=1, rounds=100)
        found = simulated_row(plan, lambda rows, service_s=load / rate: service_s)
        off.append(abs(found.rounds_per_s / rate - 1))
        assert found.idle_s == pytest.approx(idle_s, abs=0.0012)
        uneven = StarPlan(targets, 0.031, 0.0, acceptance=0.75, depth=5, max_rows=1, rounds=100, spread=0.3)
        spread.append(simulated_row(uneven, lambda rows, service_s=load / rate: service_s).load)
    assert max(off[:3] + off[4:]) < 0.025 and off[3] < 0.1
    assert full_targets(LOAD[3] / R_Q[3], 0.031) == 4
    assert spread[3] < 0.97 and abs(spread[3] - LOAD[3]) < 0.05


def test_the_same_again_and_another_with_another_seed() -> None:
    plan = StarPlan(3, 0.03, 0.001, 0.6, 4, spread=0.2, rounds=30)
    assert simulated_row(plan, growing) == simulated_row(plan, growing)
    other = StarPlan(3, 0.03, 0.001, 0.6, 4, spread=0.2, rounds=30, seed=1)
    assert simulated_row(plan, growing) != simulated_row(other, growing)


@pytest.mark.parametrize("wrong", [{"targets": 0}, {"depth": 0}, {"verify_s": -1.0}, {"acceptance": 1.5}, {"rows": 0}])
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="at least 1 of targets, depth, rows, max_rows and rounds"):
        StarPlan(**({"targets": 1, "verify_s": 0.1, "network_s": 0.0, "acceptance": 0.5, "depth": 2} | wrong))
