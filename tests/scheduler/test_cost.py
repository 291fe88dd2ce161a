from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.cost_model import CostTable, PredictionError, TimesOfKind, errors_of
from adaserve_jax.types import CostSamples, DraftPlan, Limits, StepOutcome, context_load, scaled_samples
from tests.plans import step_plan

LIMITS = Limits(8, (1, 4, 16, 64), 32, 256, 16, 64, 4, 4)
VERIFY = {(e, r): 0.01 * (1 + e / 16) * (1 + r / 100) for e in LIMITS.token_edges for r in (1, 8)}
SAMPLES = CostSamples(VERIFY, {4: 0.001, 64: 0.004}, {(1, 1): 0.001, (1, 4): 0.002, (8, 1): 0.003, (8, 4): 0.005})


def plan_of(rows, draft=None, context=0):
    ctx_len = np.broadcast_to(np.asarray(context, np.int32), rows)
    return step_plan(rows, ctx_len=ctx_len, draft=draft, tree_token_cap=rows)


def outcome_of(bucket, verify_s, draft_s=0.0):
    return StepOutcome(np.zeros((1, 5)), np.zeros(1), np.zeros(1), draft_s, verify_s, 0.0, bucket)


def test_starts_from_the_samples():
    table = CostTable(SAMPLES, LIMITS)
    assert table.baseline_s == pytest.approx(0.01 * (1 + 1 / 16) * 1.01)
    assert table.verify_s(1).tolist() == pytest.approx([VERIFY[e, 1] for e in LIMITS.token_edges])
    assert table.verify_s(2).tolist() == table.verify_s(8).tolist()
    assert table.level_s(5).tolist() == [0.003, 0.005, 0.005, 0.005]
    assert [table.catchup_s(n) for n in (0, 1, 4, 5, 64, 128)] == [0.0, 0.001, 0.001, 0.004, 0.004, 0.008]
    assert table.max_catchup_tokens == 64


def test_the_draft_s_times_can_be_replaced_and_what_was_learned_of_them_goes():
    table = CostTable(SAMPLES, LIMITS)
    draft = DraftPlan(3, 4, np.zeros(8), np.ones(8, np.int32), np.zeros(8), np.ones(8, bool))
    for _ in range(50):
        table.observe(plan_of(8, draft), outcome_of(16, 2 * VERIFY[16, 8], 0.1), 0.5)
    verify_s, predicted = table.verify_s(8).tolist(), len(table.predictions())
    said = replace(SAMPLES, catchup_s={8: 0.002, 32: 0.006}, draft_level_s={(4, 1): 0.007, (4, 2): 0.009})
    table.retime_draft(said)
    assert table.samples is said and table.draft_widths == (1, 2) and table.max_catchup_tokens == 32
    assert table.level_s(3).tolist() == [0.007, 0.009, 0.009, 0.009]
    assert [table.catchup_s(n) for n in (8, 9, 64)] == [0.002, 0.006, 0.012]
    assert table.verify_s(8).tolist() == verify_s and len(table.predictions()) == predicted


def test_edges_without_a_time_are_interpolated():
    table = CostTable(CostSamples({(1, 1): 0.01, (64, 1): 0.073}, {}, {}), LIMITS)
    assert table.verify_s(3).tolist() == pytest.approx([0.01, 0.013, 0.025, 0.073])
    assert table.level_s(3).tolist() == [0.0] * 4
    assert table.max_catchup_tokens == 64


def test_follows_a_change_of_speed_and_carries_it_to_unseen_entries():
    table = CostTable(SAMPLES, LIMITS)
    before = table.verify_s(8).copy()
    for _ in range(2000):
        table.observe(plan_of(8), outcome_of(16, 2 * VERIFY[16, 8]), 0.05)
    after = table.verify_s(8)
    assert after[2] == pytest.approx(2 * before[2], rel=0.01)
    assert after[[0, 1, 3]] == pytest.approx(2 * before[[0, 1, 3]], rel=0.05)
    assert table.overhead_s(False) == pytest.approx(0.05 - 2 * VERIFY[16, 8], abs=1e-3)
    assert table.overhead_s(True) == 0.0  # steps that draft have an overhead of their own, not seen yet
    assert table.baseline_s == pytest.approx(VERIFY[1, 1])


def test_never_decreases_in_tokens_and_one_outlier_does_little():
    table = CostTable(SAMPLES, LIMITS)
    table.observe(plan_of(1), outcome_of(4, 100.0), 100.0)
    assert table.verify_s(1)[1] <= VERIFY[4, 1] * 1.7
    assert (np.diff(table.verify_s(1)) >= 0).all()


def test_draft_times_are_learned_as_one_ratio():
    table = CostTable(SAMPLES, LIMITS)
    draft = DraftPlan(3, 4, np.zeros(8), np.ones(8, np.int32), np.zeros(8), np.ones(8, bool))
    sample_s = 0.004 + 3 * 0.005
    for _ in range(60):
        table.observe(plan_of(8, draft), outcome_of(16, VERIFY[16, 8], draft_s=3 * sample_s), 0.1)
    assert table.level_s(8)[3] == pytest.approx(0.015, rel=0.02)
    assert table.catchup_s(8) == pytest.approx(0.012, rel=0.02)


def test_a_call_that_only_catches_up_teaches_nothing():
    """It returns before the device is done: its time is that of a dispatch."""
    table = CostTable(SAMPLES, LIMITS)
    draft = DraftPlan(0, 1, np.zeros(64), np.full(8, 8, np.int32), np.zeros(8), np.zeros(8, bool))
    for _ in range(60):
        table.observe(plan_of(8, draft), outcome_of(16, VERIFY[16, 8], draft_s=1e-5), 0.1)
    assert table.level_s(8)[3] == 0.005
    assert table.catchup_s(64) == 0.004


def edited(bucket, verify_s, draft_s=0.0):
    return replace(outcome_of(bucket, verify_s, draft_s), edited=np.zeros(8, bool))


def test_steps_with_edits_have_an_overhead_of_their_own():
    """Verifications at their samples and 2 ms of overhead; with edits 10 ms more, of which nobody says where they were
    spent. Half of the time, then always, and a step without them after that."""
    table, plain_s = CostTable(SAMPLES, LIMITS), VERIFY[16, 8]
    for _ in range(300):
        table.observe(plan_of(8), outcome_of(16, plain_s), plain_s + 0.002)
        assert table.overhead_s(False) < 0.003
        table.observe(plan_of(8), edited(16, plain_s + 0.008), plain_s + 0.012)
        assert table.verify_s(8)[2] == pytest.approx(plain_s)
    assert table.overhead_s(False) == pytest.approx(0.012, rel=0.01)
    assert table.overhead_s(True) == 0.0
    predicted_s = table.observe(plan_of(8), edited(16, plain_s + 0.008), plain_s + 0.012)
    assert predicted_s == pytest.approx(plain_s + 0.012, rel=0.01)
    table.observe(plan_of(8), outcome_of(16, plain_s), plain_s + 0.002)
    assert table.overhead_s(False) == pytest.approx(0.002, rel=0.01)
    assert table.served.overhead == {(False, 8): TimesOfKind(301, pytest.approx(0.602), 0.0)}
    verify_s = pytest.approx(301 * plain_s)
    assert table.served.verify == {(16, 8): TimesOfKind(301, verify_s, verify_s)}
    assert errors_of(table.predictions())["verify"].steps == 301


def test_refuses_samples_without_times():
    with pytest.raises(ConfigError, match="at least one verify time"):
        CostTable(CostSamples({}, {}, {}), LIMITS)
    with pytest.raises(ConfigError, match="verify time must be above 0 seconds"):
        CostTable(CostSamples({(1, 1): 0.0}, {}, {}), LIMITS)
    with pytest.raises(ConfigError, match=r"times of \(1, 1\) must not be below 0 seconds without context, got -0.09"):
        CostTable(CostSamples({(1, 1): 0.01}, {}, {}, 100, 8, {(1, 1): 0.001}), LIMITS)


def test_rows_are_read_in_groups_that_wait_for_their_longest():
    context = np.array([5, 900, 3, 7, 20, 10])
    assert context_load(context, 1) == 945
    assert context_load(context, 4) == 900 + 20
    assert context_load(context, 6) == context_load(context, 64) == 900
    assert context_load(context[:0], 4) == 0


WITH_CONTEXT = replace(
    SAMPLES, context=100, context_rows=4,
    verify_per_context_s=dict.fromkeys(VERIFY, 1e-05), catchup_per_context_s={4: 1e-6, 64: 2e-6},
    level_per_context_s=dict.fromkeys(SAMPLES.draft_level_s, 3e-06),
)  # fmt: skip


def test_context_costs_what_the_samples_say():
    """8 rows are two groups of 4: the sample at 64 tokens was taken with a load of 2 x 100 tokens."""
    table = CostTable(WITH_CONTEXT, LIMITS)
    assert table.verify_s(8, 200.0)[3] == pytest.approx(VERIFY[64, 8])
    assert table.verify_s(8, 700.0)[3] == pytest.approx(VERIFY[64, 8] + 500e-5)
    assert table.verify_s(8, 0.0)[3] == pytest.approx(VERIFY[64, 8] - 200e-5)
    assert table.verify_s(8)[3] == table.verify_s(8, 200.0)[3]  # nothing seen yet: contexts as at the start
    assert table.level_s(8, 300.0)[0] == pytest.approx(0.003 + 100 * 3e-6)
    assert table.catchup_s(64, 500.0) == pytest.approx(0.004 + 300 * 2e-6)
    assert table.baseline_s == pytest.approx(VERIFY[1, 1])
    assert table.context_load(np.array([1, 2, 3, 4, 5])) == 4 + 5
    step_s = VERIFY[16, 8] + 100e-5 + 3 * (0.005 + 100 * 3e-6)
    assert table.step_at_warm_up_s(16, 8, 3, 4, 300.0) == pytest.approx(step_s)
    assert table.step_at_warm_up_s(16, 8, 0, 0) == pytest.approx(VERIFY[16, 8])


def test_one_ratio_is_learned_for_all_contexts_and_lately_seen_contexts_are_typical():
    table = CostTable(WITH_CONTEXT, LIMITS)
    for load in [200, 1000] * 400:
        seconds = 1.5 * (VERIFY[16, 8] + (load - 200) * 1e-5)
        table.observe(plan_of(8, context=load // 2), outcome_of(16, seconds), 0.05)
    for load in (0, 200, 600, 2000):
        assert table.verify_s(8, load)[2] == pytest.approx(1.5 * (VERIFY[16, 8] + (load - 200) * 1e-5), rel=1e-6)
    assert table.verify_s(8)[2] == pytest.approx(table.verify_s(8, 600)[2], rel=0.05)


def test_samples_without_context_do_not_see_it():
    table = CostTable(SAMPLES, LIMITS)
    assert table.context_load(np.array([900] * 8)) == 0.0
    assert table.verify_s(8, 0.0).tolist() == table.verify_s(8).tolist()


def test_steps_are_logged_as_they_were_predicted_before_they_taught_anything():
    table = CostTable(SAMPLES, LIMITS)
    draft = DraftPlan(3, 4, np.zeros(8), np.ones(8, np.int32), np.zeros(8), np.ones(8, bool))
    draft_s = 0.004 + 3 * 0.005
    table.observe(plan_of(8), outcome_of(16, 2 * VERIFY[16, 8]), 2 * VERIFY[16, 8])
    table.observe(plan_of(8, draft), outcome_of(64, VERIFY[64, 8], draft_s=draft_s), VERIFY[64, 8] + draft_s + 0.01)
    seconds = table.predictions()
    assert seconds[0] == pytest.approx(np.array([[VERIFY[16, 8], 2 * VERIFY[16, 8]], [0, 0],
                                                 [VERIFY[16, 8], 2 * VERIFY[16, 8]]]))  # fmt: skip
    drifted_s = 1.2 * VERIFY[64, 8]  # a fifth of the way to twice the sample
    assert seconds[1, :, 0] == pytest.approx([drifted_s, draft_s, drifted_s + draft_s])
    errors = errors_of(table.predictions())
    assert errors["verify"].steps == 2 and errors["draft"].steps == 1
    assert errors["draft"].median == pytest.approx(0.0)
    assert errors["verify"].median == pytest.approx((0.5 + 0.2) / 2)


def test_errors_are_relative_to_what_was_measured():
    error = PredictionError.of(np.array([1.1, 0.5, 2.0, 7.0]), np.array([1.0, 1.0, 2.0, 0.0]))
    assert (error.steps, error.median) == (3, pytest.approx(0.1))
    assert error.p90 == pytest.approx(0.1 + 0.8 * 0.4)
    assert PredictionError.of(np.zeros(2), np.zeros(2)) == PredictionError(0, None, None)


def test_samples_are_scaled_with_their_slopes():
    samples = CostSamples({(1, 1): 0.01}, {4: 0.002}, {(1, 1): 0.003}, 64, 8, {(1, 1): 1e-6}, {4: 2e-6}, {(1, 1): 3e-6})
    scaled = scaled_samples(samples, verify=1.5, draft=2.0)
    assert (scaled.verify_s[1, 1], scaled.catchup_s[4], scaled.draft_level_s[1, 1]) == pytest.approx(
        (0.015, 0.004, 0.006)
    )
    slopes = scaled.verify_per_context_s[1, 1], scaled.catchup_per_context_s[4], scaled.level_per_context_s[1, 1]
    assert slopes == pytest.approx((1.5e-6, 4e-6, 6e-6))
    assert (scaled.context, scaled.context_rows) == (64, 8)


def test_a_step_whose_verification_was_not_timed_tells_of_the_rest_only():
    """Such as one that was longer than any edge, or one that verified nothing."""
    table = CostTable(SAMPLES, LIMITS)
    before = table.verify_s(8).copy()
    for outcome in (outcome_of(16, 0.0), outcome_of(2 * LIMITS.token_edges[-1], 0.5)):
        assert table.observe(plan_of(8), outcome, 0.01) == 0.0, "nothing was predicted"
    np.testing.assert_array_equal(table.verify_s(8), before)
    assert not table.served.verify
