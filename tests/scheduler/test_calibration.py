"""The calibrator: what counts as an outcome, what is learned and forgotten, and how errors are measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import FIRST_STEPS, PSEUDO_OUTCOMES, REFIT_STEPS, Calibrator
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.types import CandidateTrees, DraftTrees, StepPlan
from tests.scheduler.harness import Run, limits_of, request_of
from tests.sim_kv import StrictExecutor

DEPTH, RANKS, BINS = 2, 2, 4
CELLS = DEPTH * RANKS * BINS
EDGES = np.array([[-2.0, -1.0, -0.5], [-1.0, 0.0, 1.0]], np.float32)


def table(chance: float | np.ndarray = 0.5) -> ChanceTable:
    return ChanceTable(np.broadcast_to(chance, (2, DEPTH, RANKS, BINS)).astype(np.float32), EDGES)


def star(cell: np.ndarray, accepted: np.ndarray, log_q: float = -1.0) -> tuple[CandidateTrees, DraftTrees, np.ndarray]:
    """One row: a root with a child in each cell. Not a tree that verification could give: several may be accepted."""
    count = len(cell)
    ints = np.arange(count, dtype=np.int32)[None]
    candidates = CandidateTrees(
        ints, np.full_like(ints, -1), np.zeros((1, count), np.float32), np.ones(count, np.int32),
        cell.astype(np.int32)[None], np.full((1, count), log_q, np.float32),
    )  # fmt: skip
    depth = np.concatenate([[0], np.ones(count)]).astype(np.int32)
    trees = DraftTrees(
        np.zeros(count + 1, np.int32), depth, depth - 1, depth, np.arange(-1, count, dtype=np.int32),
        np.ones(count + 1, np.float32),
    )  # fmt: skip
    return candidates, trees, np.concatenate([[True], accepted])


def feed(calibrator: Calibrator, true: np.ndarray, steps: int, *, mode: int, seed: int, per_step: int = 64) -> None:
    """Outcomes of random cells of a mode, accepted by `true`, [2, D, ranks, bins]."""
    rng = np.random.default_rng(seed)
    temperature = np.array([0.8 * mode], np.float32)
    for _ in range(steps):
        cell = rng.integers(0, CELLS, per_step)
        calibrator.observe(*star(cell, rng.random(per_step) < true[mode].ravel()[cell]), temperature)
    calibrator.take_in()


def growing(low: float, high: float) -> np.ndarray:
    return np.broadcast_to(np.linspace(low, high, BINS), (2, DEPTH, RANKS, BINS))


def test_only_nodes_behind_an_accepted_parent_count() -> None:
    """Two rows, greedy and sampled. Row 0: root, a taken child (cell 3), its child not taken (cell 9), and that one's
    child (cell 12), of which nothing is known. Row 1: root, a child not taken (cell 5), and one taken beside it (6)."""
    cell = np.array([[3, 9, 12], [5, 6, -1]], np.int32)
    candidates = CandidateTrees(
        cell, np.zeros_like(cell), np.zeros((2, 3), np.float32), np.array([1, 2, 3], np.int32), cell,
        np.log(np.array([[0.9, 0.6, 0.5], [0.2, 0.1, 0.1]], np.float32)),
    )  # fmt: skip
    trees = DraftTrees(
        row=np.array([0, 0, 0, 0, 1, 1, 1]), token=np.zeros(7, np.int32), parent=np.array([-1, 0, 1, 2, -1, 4, 4]),
        depth=np.array([0, 1, 2, 3, 0, 1, 1]), candidate=np.array([-1, 0, 1, 2, -1, 0, 1]), f=np.ones(7),
    )  # fmt: skip
    calibrator = Calibrator(table())
    accepted = np.array([True, True, False, False, True, False, True])
    calibrator.observe(candidates, trees, accepted, np.array([0.0, 0.8], np.float32))
    calibrator.take_in()
    learned = calibrator.table.learned
    assert learned is not None
    outcomes, taken = (part.reshape(2, CELLS) for part in (learned.outcomes, learned.accepted))
    assert {(m, c): n for m, c in np.argwhere(outcomes) if (n := outcomes[m, c])} == {
        (0, 3): 1, (0, 9): 1, (1, 5): 1, (1, 6): 1,
    }  # fmt: skip
    assert np.argwhere(taken).tolist() == [[0, 3], [1, 6]]
    assert calibrator.outcomes == {"greedy": 2, "coupled": 2}
    # raw: |0.9 - 1| and |0.6 - 0| of 2; |0.2 - 0| and |0.1 - 1| of 2, each in a bin of its own
    assert calibrator.errors["greedy"]["raw"] == pytest.approx((0.1 + 0.6) / 2)
    assert calibrator.errors["coupled"]["raw"] == pytest.approx((0.2 + 0.9) / 2)
    assert calibrator.errors["greedy"]["loaded"] == pytest.approx(0.0)  # one of two accepted, as 0.5 says


def test_rows_with_changed_logits_teach_nothing() -> None:
    """Two rows like stars; what forbids the second one's tokens is no fault of the draft's."""
    calibrator = Calibrator(table())
    cell = np.array([[3, 5], [7, 9]], np.int32)
    candidates = CandidateTrees(
        cell, np.full_like(cell, -1), np.zeros((2, 2), np.float32), np.ones(2, np.int32), cell,
        np.full((2, 2), -1.0, np.float32),
    )  # fmt: skip
    trees = DraftTrees(
        row=np.array([0, 0, 0, 1, 1, 1]), token=np.zeros(6, np.int32), parent=np.array([-1, 0, 0, -1, 3, 3]),
        depth=np.array([0, 1, 1, 0, 1, 1]), candidate=np.array([-1, 0, 1, -1, 0, 1]), f=np.ones(6),
    )  # fmt: skip
    accepted = np.array([True, True, False, True, False, False])
    calibrator.observe(candidates, trees, accepted, np.zeros(2, np.float32), np.array([False, True]))
    calibrator.take_in()
    learned = calibrator.table.learned
    assert learned is not None
    assert np.flatnonzero(learned.outcomes).tolist() == [3, 5]
    assert calibrator.outcomes == {"greedy": 2}
    before = calibrator.chance
    calibrator.observe(candidates, trees, accepted, np.zeros(2, np.float32), np.array([True, True]))
    calibrator.take_in()
    np.testing.assert_array_equal(calibrator.chance, before)


def test_learns_the_chances_of_each_mode_alone() -> None:
    calibrator, true = Calibrator(table()), growing(0.1, 0.9)
    feed(calibrator, true, 400, mode=1, seed=0)
    error = np.abs(calibrator.chance - true)
    number = 400 * 64 / CELLS
    assert (error[1] < 5 * np.sqrt(0.25 / number) + PSEUDO_OUTCOMES / number).all()
    np.testing.assert_allclose(calibrator.chance[0], 0.5, atol=1e-6)


def test_error_falls_as_it_learns_and_is_measured_before_learning() -> None:
    calibrator, true = Calibrator(table(0.9)), growing(0.1, 0.6)
    feed(calibrator, true, 1, mode=0, seed=0)
    assert calibrator.errors["greedy"]["online"] == calibrator.errors["greedy"]["loaded"] > 0.3
    feed(calibrator, true, 500, mode=0, seed=1)
    errors = calibrator.errors["greedy"]
    assert errors["online"] < 0.05 < 0.5 < errors["loaded"]
    assert set(calibrator.errors) == {"greedy"}


def test_forgets_with_its_half_life() -> None:
    """After a change the old outcomes weigh half for each half-life: 4 of them leave 1/16."""
    calibrator = Calibrator(table(), half_life=8000)
    feed(calibrator, growing(0.8, 0.8), 2000, mode=0, seed=0, per_step=16)
    assert calibrator.chance[0] == pytest.approx(0.8, abs=0.08)
    feed(calibrator, growing(0.2, 0.2), 2000, mode=0, seed=1, per_step=16)
    assert calibrator.chance[0] == pytest.approx(0.2 + 0.6 / 16, abs=0.08)
    learned = calibrator.table.learned
    assert learned is not None
    steady = 8000 / np.log(2)
    assert learned.outcomes[0].sum() == pytest.approx(steady * (1 - 2.0**-8), rel=0.15)
    assert not learned.outcomes[1].any()


def test_new_chances_are_due_to_the_draft_until_marked_sent() -> None:
    calibrator, true = Calibrator(table()), growing(0.1, 0.9)
    rng = np.random.default_rng(0)
    refits = []
    for step in range(1, 4 * REFIT_STEPS):
        cell = rng.integers(0, CELLS, 4)
        calibrator.observe(*star(cell, rng.random(4) < true[0].ravel()[cell]), np.zeros(1, np.float32))
        if (new := calibrator.unsent) is not None:
            assert new.shape == (2, DEPTH, RANKS, BINS) and new.dtype == np.float32
            refits.append(step)
            calibrator.mark_sent()
            assert calibrator.unsent is None
    firsts = [FIRST_STEPS * (2**k - 1) for k in range(1, 4)]  # 8, then 16 and 32 more
    assert refits == [*firsts, *range(firsts[-1] + REFIT_STEPS, 4 * REFIT_STEPS, REFIT_STEPS)]


def test_told_not_to_learn_it_only_measures() -> None:
    calibrator = Calibrator(table(0.9), learn=False)
    feed(calibrator, growing(0.2, 0.2), 100, mode=0, seed=0)
    assert calibrator.unsent is None and calibrator.table.learned is not None
    assert not calibrator.table.learned.outcomes.any()
    assert calibrator.errors["greedy"]["online"] == calibrator.errors["greedy"]["loaded"] > 0.6


def test_a_drafter_that_names_no_cells_teaches_nothing() -> None:
    calibrator = Calibrator(table())
    candidates, trees, accepted = star(np.arange(4), np.ones(4, bool))
    bare = CandidateTrees(candidates.token, candidates.parent, candidates.log_f, candidates.depth)
    calibrator.observe(bare, trees, accepted, np.zeros(1, np.float32))
    calibrator.take_in()
    assert calibrator.errors == {} and calibrator.unsent is None


def test_goes_on_from_what_was_learned_before() -> None:
    """Two halves in two calibrators, the second begun with the first one's table, teach what one does."""
    true = growing(0.1, 0.9)
    whole, first = Calibrator(table()), Calibrator(table())
    feed(first, true, 64, mode=0, seed=0)
    second = Calibrator(first.table)
    np.testing.assert_array_equal(second.chance, first.chance)
    feed(second, true, 64, mode=0, seed=1)
    feed(whole, true, 64, mode=0, seed=0)
    feed(whole, true, 64, mode=0, seed=1)
    np.testing.assert_allclose(second.chance, whole.chance, atol=0.01)


def test_a_new_version_of_the_draft_is_learned_anew() -> None:
    """What was seen of the old one counts only through the table, and no longer holds the new one back."""
    calibrator = Calibrator(table())
    feed(calibrator, np.full((2, DEPTH, RANKS, BINS), 0.2), 4 * REFIT_STEPS, mode=1, seed=0)
    before = calibrator.chance.copy()
    assert abs(before[1].mean() - 0.2) < 0.05
    cell = np.zeros(1, np.int64)
    calibrator.observe(*star(cell, np.array([True])), np.array([1.0], np.float32))
    calibrator.new_version()
    assert sum(calibrator.outcomes.values()) == 4 * REFIT_STEPS * 64 + 1, "the old one's last outcomes are measured too"
    learned = calibrator.table.learned
    assert learned is not None and not learned.outcomes.any() and not learned.accepted.any()
    np.testing.assert_array_equal(learned.prior.astype(np.float32), calibrator.chance)
    np.testing.assert_allclose(calibrator.chance, before, atol=0.05)
    calibrator.mark_sent()
    rng, temperature = np.random.default_rng(1), np.array([0.8], np.float32)
    for step in range(FIRST_STEPS):
        assert calibrator.unsent is None, step
        cells = rng.integers(0, CELLS, 64)
        calibrator.observe(*star(cells, rng.random(64) < 0.8), temperature)
    assert calibrator.unsent is not None, "the first fit comes soon again"
    # 512 outcomes over 16 cells, of 0.8 each: 32 beside 12 of the prior, which the pooled levels move as well
    assert abs(calibrator.chance[1].mean() - 0.8) < 0.1
    fixed = Calibrator(table(0.3), learn=False)
    feed(fixed, np.full((2, DEPTH, RANKS, BINS), 0.9), FIRST_STEPS, mode=0, seed=2)
    fixed.new_version()
    np.testing.assert_array_equal(fixed.chance, table(0.3).chance)


class Featured(StrictExecutor):
    """Says of every node that it is of the first cell, and gives its likelihood."""

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        candidates = super().speculate(plan)
        return replace(candidates, cell=np.zeros(candidates.parent.shape, np.int32), log_q=candidates.log_f)


def test_plans_bring_new_chances_until_a_step_with_them_was_committed() -> None:
    calibrator = Calibrator(table(0.5))
    run = Run.of(limits_of(), policy="spec:2", calibrator=calibrator, executor=Featured)
    run.add(request_of("a", tokens=200))
    brought: list[bool] = []
    while len(brought) < FIRST_STEPS + 2:
        plan, _ = run.step()
        assert plan is not None
        if plan.draft is not None and plan.num_decode:
            brought.append(plan.draft.chances is not None)
    assert brought == [False] * FIRST_STEPS + [True, False]
    assert FIRST_STEPS <= calibrator.outcomes["coupled"] <= 2 * FIRST_STEPS
    calibrator.new_version()
    for _ in range(3):
        plan = run.scheduler.plan(run.clock.now())
        assert plan is not None and plan.draft is not None
        np.testing.assert_array_equal(plan.draft.chances, calibrator.chance, "a plan that is forgotten sent nothing")
