import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import CostSamples, DraftPlan, Limits, RowSampling, StepOutcome, StepPlan

LIMITS = Limits(8, (1, 4, 16, 64), 32, 256, 16, 64, 4, 4)
VERIFY = {(e, r): 0.01 * (1 + e / 16) * (1 + r / 100) for e in LIMITS.token_edges for r in (1, 8)}
SAMPLES = CostSamples(VERIFY, {4: 0.001, 64: 0.004}, {(1, 1): 0.001, (1, 4): 0.002, (8, 1): 0.003, (8, 4): 0.005})


def plan_of(rows, draft=None):
    ints, floats = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    sampling = RowSampling(ints.astype(np.uint64), ints, floats, ints, floats, floats)
    empty = np.zeros(0, np.int32)
    return StepPlan(0, ints, rows, ints, ints, np.zeros((rows, 16)), sampling, empty, empty, empty, draft, rows)


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


def test_refuses_samples_without_times():
    with pytest.raises(ConfigError, match="at least one verify time"):
        CostTable(CostSamples({}, {}, {}), LIMITS)
    with pytest.raises(ConfigError, match="above 0 seconds"):
        CostTable(CostSamples({(1, 1): 0.0}, {}, {}), LIMITS)
