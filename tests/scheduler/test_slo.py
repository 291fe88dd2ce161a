import numpy as np
import pytest

from adaserve_jax.scheduler.slo import need, need_capped, need_rate, paced_tpot_s
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


def test_pacing_keeps_a_reserve_that_is_smaller_where_prompts_are_urgent():
    assert paced_tpot_s(0.1, 0.02, is_patient=False) == pytest.approx(0.099)
    assert paced_tpot_s(0.1, 0.02, is_patient=True) == pytest.approx(0.1 - 0.05 * 0.08)
    assert paced_tpot_s(0.02, 0.03, is_patient=True) == pytest.approx(0.02), "a target that leaves no time"
    assert paced_tpot_s(np.inf, 0.02, is_patient=True) == paced_tpot_s(np.inf, 0.02, is_patient=False) == np.inf


@pytest.mark.parametrize(("policy", "ttft_s", "is_patient"), [
    ("adaserve", None, True), ("adaserve", 1.0, False), ("order-slowest", None, True), ("jitserve", None, False),
])  # fmt: skip
def test_ours_alone_paces_ahead_of_the_targets_of_patient_requests(policy, ttft_s, is_patient):
    run = Run.of(limits_of(), policy=policy)
    run.add(request_of("a", tpot_slo_s=0.1, ttft_slo_s=ttft_s))
    run.step()
    least_s = run.scheduler.batch.running[0].least_tpot_s
    paced_s = run.scheduler.batch.table.paced_tpot_s[run.scheduler.batch.slots[0]]
    assert 0 < least_s < 0.05 and paced_s == paced_tpot_s(0.1, least_s, is_patient=is_patient)


def test_without_target_nothing_is_needed_and_a_lost_cause_needs_the_impossible():
    rate = need_rate(np.array([5.0, 5.0]), np.array([np.inf, 0.01]), np.array([3, 3]), 32)
    assert rate.tolist() == [0.0, np.inf]
