import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.types import CandidateTrees, DraftTrees

DEPTH, WIDTH, ROWS = 3, 2, 8


def step(rng, f, truth, verified):
    """One verification in which the draft claims f and the target accepts with chance `truth` (both [DEPTH, WIDTH]).

    verified: columns that are verified, of every row."""
    level = np.repeat(np.arange(1, DEPTH + 1), WIDTH).astype(np.int32)
    log_f = np.broadcast_to(np.log(f).reshape(-1), (ROWS, DEPTH * WIDTH)).astype(np.float32)
    parent = np.full((ROWS, DEPTH * WIDTH), -1, np.int32)
    candidates = CandidateTrees(parent, parent, log_f, level)
    columns = np.concatenate([[-1], verified])
    row = np.repeat(np.arange(ROWS), len(columns))
    candidate = np.tile(columns, ROWS)
    chance = np.where(candidate < 0, 1.0, truth.reshape(-1)[candidate])
    depth = np.where(candidate < 0, 0, level[candidate])
    f_node = np.where(candidate < 0, 1.0, f.reshape(-1)[candidate]).astype(np.float32)
    trees = DraftTrees(row, row, np.full(len(row), -1), depth, candidate, f_node)
    return candidates, trees, rng.random(len(row)) < chance


def test_learns_true_acceptance_when_only_some_nodes_are_verified():
    rng = np.random.default_rng(0)
    f = np.array([[0.8, 0.1], [0.6, 0.05], [0.4, 0.02]])
    truth = np.array([[0.6, 0.2], [0.3, 0.1], [0.2, 0.04]])
    table = LearnedAcceptance(DEPTH, WIDTH)
    for _ in range(400):
        candidates, trees, accepted = step(rng, f, truth, np.array([0, 1, 2]))
        table.observe(candidates, WIDTH, np.ones(ROWS, bool), trees, accepted)
    learned = table.expected()
    assert learned[0, 0] == pytest.approx(0.6, abs=0.08)
    assert learned[0, 1] == pytest.approx(0.2, abs=0.08)
    assert learned[1, 0] == pytest.approx(0.3, abs=0.08)
    assert (np.diff(learned, axis=0) <= 0).all()
    assert learned[2, 0] <= learned[1, 0]


def test_forgets_towards_the_prior_so_that_speculation_is_tried_again():
    rng = np.random.default_rng(1)
    table = LearnedAcceptance(DEPTH, WIDTH)
    prior = table.expected()
    for _ in range(100):
        candidates, trees, _ = step(rng, np.full((DEPTH, WIDTH), 0.5), np.zeros((DEPTH, WIDTH)), np.arange(6))
        table.observe(candidates, WIDTH, np.ones(ROWS, bool), trees, trees.candidate < 0)
    assert table.expected()[0, 0] < 0.1
    for _ in range(2000):
        table.forget()
    np.testing.assert_allclose(table.expected(), prior, atol=0.01)


def test_rows_that_did_not_speculate_teach_nothing():
    table = LearnedAcceptance(DEPTH, WIDTH)
    prior = table.expected()
    candidates, trees, accepted = step(np.random.default_rng(2), np.full((3, 2), 0.5), np.ones((3, 2)), np.arange(6))
    table.observe(candidates, WIDTH, np.zeros(ROWS, bool), trees, accepted)
    np.testing.assert_array_equal(table.expected(), prior)


def test_rows_with_changed_logits_teach_nothing_and_the_others_as_if_alone():
    """Half of the rows are edited and accept nothing; a second table sees the other half only."""
    rng = np.random.default_rng(3)
    f, edited = np.array([[0.8, 0.1], [0.6, 0.05], [0.4, 0.02]]), np.arange(ROWS) >= ROWS // 2
    table, alone = LearnedAcceptance(DEPTH, WIDTH), LearnedAcceptance(DEPTH, WIDTH)
    for _ in range(50):
        candidates, trees, accepted = step(rng, f, f, np.array([0, 1, 2]))
        others = ~edited[trees.row]
        expected = table.observe(candidates, WIDTH, np.ones(ROWS, bool), trees, accepted & others, edited)
        half = DraftTrees(*(getattr(trees, name)[others] for name in trees.__dataclass_fields__))
        fewer = CandidateTrees(candidates.token[:4], candidates.parent[:4], candidates.log_f[:4], candidates.depth)
        of_half = alone.observe(fewer, WIDTH, np.ones(ROWS // 2, bool), half, accepted[others])
        assert expected == pytest.approx(2 * of_half)  # of all that was verified, as what was accepted is
    np.testing.assert_array_equal(table.expected(), alone.expected())
    before, updates = table.expected(), table.updates
    assert table.observe(candidates, WIDTH, np.ones(ROWS, bool), trees, trees.candidate < 0, edited | True) > 0
    np.testing.assert_array_equal(table.expected(), before)
    assert table.updates == updates == 50
