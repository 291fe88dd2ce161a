import numpy as np
import pytest

from adaserve_jax.scheduler.slo import need, need_capped, need_rate
from tests.scheduler.harness import Run, limits_of, request_of


def test_need_by_hand():
    """0.5 s decoded, a step of 0.1 s, 10 tokens so far: at 50 ms a token 12 are due, so 2; at 100 ms 6, so -4."""
    tokens = need(np.array([0.5, 0.5, 0.5]), 0.1, np.array([0.05, 0.1, np.inf]), np.array([10, 10, 10]))
    assert tokens.tolist() == pytest.approx([2.0, -4.0, -10.0])
    assert need_capped(tokens, 0).tolist() == pytest.approx([1.0, -4.0, -10.0])
    assert need_capped(tokens, 3).tolist() == pytest.approx([2.0, -4.0, -10.0])


def test_horizon_spreads_what_one_step_would_demand():
    """0.5 s for 4 tokens at 50 ms: 6 behind. One step asks for 8 in 0.1 s; over 32 tokens it is 32 in 1.3 s."""
    decode_time_s, tpot_slo_s, decoded = np.array([0.5]), np.array([0.05]), np.array([4])
    assert need(decode_time_s, 0.1, tpot_slo_s, decoded)[0] == pytest.approx(8.0)
    assert need_rate(decode_time_s, tpot_slo_s, decoded, 32)[0] * 0.1 == pytest.approx(3.2 / 1.3)


def test_horizon_equal_to_need_is_the_papers_need():
    rng = np.random.default_rng(0)
    decode_time_s, tpot_slo_s = rng.uniform(0.1, 3, 50), rng.uniform(0.01, 0.1, 50)
    decoded = rng.integers(0, 60, 50)
    tokens = need(decode_time_s, 0.08, tpot_slo_s, decoded)
    due = tokens > 0
    rate = need_rate(decode_time_s[due], tpot_slo_s[due], decoded[due], tokens[due])
    np.testing.assert_allclose(rate * 0.08, tokens[due], rtol=1e-9)


def test_pacing_keeps_a_reserve():
    run = Run.of(limits_of(), policy="adaserve")
    run.add(request_of("a", tpot_slo_s=0.1))
    run.step()
    table, slots = run.scheduler.batch.table, run.scheduler.batch.slots
    assert table.paced_tpot_s[slots] == pytest.approx([0.099]) and table.tpot_slo_s[slots] == pytest.approx([0.1])


def test_without_target_nothing_is_needed_and_a_lost_cause_needs_the_impossible():
    rate = need_rate(np.array([5.0, 5.0]), np.array([np.inf, 0.01]), np.array([3, 3]), 32)
    assert rate.tolist() == [0.0, np.inf]
