"""The simulated machine keeps its word: f is the true chance, walks are right, and text depends on nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from adaserve_jax.sampling import RowSampling
from adaserve_jax.sim.executor import SimExecutor, VirtualClock
from adaserve_jax.sim.replica import TokenTimes
from adaserve_jax.sim.text import CONCENTRATION, Beams, Draws, acceptance_at, search, token_at, tokens_after
from adaserve_jax.types import CandidateTrees, CostSamples, DraftPlan, DraftTrees, Limits, StepPlan
from tests.plans import step_plan

VOCAB = 97
LIMITS = Limits(64, (1, 64, 1024), 1024, 4096, 16, 4096, 5, 3)


def executor(acceptance: float = 0.7) -> SimExecutor:
    costs = CostSamples({(1, 1): 0.01}, {}, {})
    return SimExecutor(LIMITS, costs, acceptance, VirtualClock(), vocab_size=VOCAB)


def plan_of(seed: np.ndarray, ctx: np.ndarray) -> StepPlan:
    sampling = RowSampling.greedy(len(seed))._replace(seed=seed.astype(np.uint64))
    return step_plan(len(seed), ctx_len=ctx.astype(np.int32), sampling=sampling, tree_token_cap=len(seed))


def draft_of(depth: int, width: int, rows: int) -> DraftPlan:
    none = np.zeros(0, np.int32)
    return DraftPlan(depth, width, none, none, none, np.ones(rows, bool))


def test_a_token_is_the_same_however_it_is_drawn() -> None:
    rng = np.random.default_rng(0)
    seed, choice = rng.integers(0, 2**64, 9, dtype=np.uint64), rng.integers(0, 4, 9).astype(np.int32)
    root = rng.integers(1, 4000, 9).astype(np.int32)
    one_by_one = [
        [int(token_at(int(s), int(c), int(r) + 1 + i, VOCAB)[0]) for i in range(5)]
        for s, c, r in zip(seed, choice, root, strict=True)
    ]
    assert tokens_after(seed, choice, root, 5, VOCAB).tolist() == one_by_one
    draws = Draws.of(seed, choice, root, 4, VOCAB)
    assert draws.target.tolist() == one_by_one
    later = Draws.of(seed, choice, root + 1, 4, VOCAB)
    np.testing.assert_array_equal(later.luck[:, :-1], draws.luck[:, 1:])
    np.testing.assert_array_equal(later.mood[:, :-1], draws.mood[:, 1:])
    assert len(np.unique([draws.luck, draws.mood])) == 2 * draws.luck.size


def test_tokens_are_spread_evenly() -> None:
    """Seeds as bad as they come: 0, 1, 2, ... Chi-square with 96 degrees of freedom, and 5 % autocorrelation."""
    seed, position = np.arange(200)[:, None], np.arange(500)[None, :]
    tokens = token_at(seed, 0, position, VOCAB)
    counts = np.bincount(tokens.ravel(), minlength=VOCAB)
    expected = tokens.size / VOCAB
    assert ((counts - expected) ** 2 / expected).sum() < 150
    centred = tokens - tokens.mean()
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(shifted.mean() / centred.var()) < 0.02


def searched(
    a: np.ndarray, luck: np.ndarray, width: int, *, decay: float = 1.0, calibrated: bool = True
) -> tuple[Beams, np.ndarray]:  # fmt: skip
    """Return what a search with this luck finds, and the nodes whose path is the text: bool[R, C]."""
    rows, depth = a.shape
    target = np.random.default_rng(3).integers(0, VOCAB, (rows, depth + 1)).astype(np.int32)
    beams = search(
        Draws(target, luck, np.zeros_like(luck), VOCAB),
        np.ascontiguousarray(a),
        width,
        decay=decay,
        calibrated=calibrated,
    )
    return beams, beams.token == np.repeat(target[:, :depth], width, axis=1)


@pytest.mark.parametrize(("depth", "width", "decay"), [(4, 1, 1.0), (3, 2, 1.0), (4, 3, 1.0), (3, 3, 0.5)])
def test_f_is_the_true_chance_of_each_node(depth: int, width: int, decay: float) -> None:
    """60,000 searches at the same chances: every node's path is the text as often as its f says, within 4 sigma."""
    rows = 60_000
    a = np.broadcast_to(np.array([0.6, 0.9, 0.35, 0.75])[:depth], (rows, depth))
    beams, true = searched(a, np.random.default_rng(1).random((rows, depth)), width, decay=decay)
    assert (true.reshape(rows, depth, width).sum(axis=2) <= 1).all()
    for node in range(depth * width):
        f = beams.f[0, node]
        assert true[:, node].mean() == pytest.approx(f, abs=4 * np.sqrt(f * (1 - f) / rows))


def test_a_choice_is_right_less_often_than_the_one_before_it() -> None:
    """A first choice of chance 0.6, and a decay of a half: 0.3 where it is wrong, and 0.15 where both are."""
    beams, _ = searched(np.array([[0.6]]), np.array([[0.5]]), 3, decay=0.5)
    np.testing.assert_allclose(beams.f[0], [0.6, 0.4 * 0.3, 0.4 * 0.7 * 0.15])
    for luck, right in ((0.59, 0), (0.61, 1), (0.71, 1), (0.73, 2), (0.75, 2), (0.77, None)):
        _, true = searched(np.array([[0.6]]), np.array([[luck]]), 3, decay=0.5)
        assert np.flatnonzero(true[0]).tolist() == ([] if right is None else [right])


@pytest.mark.parametrize("calibrated", [True, False])
def test_searches_keep_the_likeliest_paths_that_are_said(calibrated: bool) -> None:
    """Beside a search that keeps whole paths of picks, and knows the text as picks too."""
    rng, rows, depth, width = np.random.default_rng(2), 200, 4, 3
    a, luck = rng.uniform(0.05, 0.95, (rows, depth)), rng.random((rows, depth))
    beams, true = searched(a, luck, width, calibrated=calibrated)
    for row in range(rows):
        said = [x if calibrated else x**2 / (x**2 + (1 - x) ** 2) for x in a[row]]
        text = [
            next((r for r in range(width) if luck[row, t] < 1 - (1 - a[row, t]) ** (r + 1)), width) for t in range(4)
        ]
        kept: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for level in range(depth):
            grown = [
                ((*path, r), f * said[level] * (1 - said[level]) ** r) for path, f in kept for r in range(width)
            ]  # fmt: skip
            above, kept = kept, sorted(grown, key=lambda each: -each[1])[:width]
            here = slice(level * width, (level + 1) * width)
            np.testing.assert_allclose(beams.f[row, here], [f for _, f in kept])
            parents = [next(i for i, (path, _) in enumerate(above) if path == grown[:-1]) for grown, _ in kept]
            assert beams.parent[row, here].tolist() == [(level - 1) * width + each if level else -1 for each in parents]
            assert true[row, here].tolist() == [list(path) == text[: level + 1] for path, _ in kept]


def test_acceptance_varies_from_position_to_position_around_the_mean() -> None:
    mood = np.random.default_rng(4).random((3, 20_000))
    mean = np.array([0.3, 0.58, 0.8])
    for concentration in (CONCENTRATION, 20.0):
        a = acceptance_at(mean, mood, concentration)
        np.testing.assert_allclose(a.mean(axis=1), mean, atol=0.01)
        np.testing.assert_allclose(a.var(axis=1), mean * (1 - mean) / (1 + concentration), rtol=0.05)
    np.testing.assert_array_equal(acceptance_at(0.58, mood[1:2], 20.0), a[1:2])


def test_candidates_say_what_the_search_found() -> None:
    simulated, rows = executor(), 50
    plan = plan_of(np.arange(rows), np.full(rows, 30))
    draft = draft_of(4, 3, rows)
    draft.speculates[7] = False
    found = simulated._candidates(plan, draft)
    draws = Draws.of(plan.sampling.seed, plan.sampling.choice, plan.ctx_len, 4, VOCAB)
    beams = search(draws, acceptance_at(0.7, draws.mood, CONCENTRATION), 3)
    np.testing.assert_array_equal(found.token, beams.token)
    np.testing.assert_array_equal(found.parent, beams.parent)
    for row, node in np.ndindex(rows, 12):
        expected = np.log(beams.f[row, node]) if row != 7 else -np.inf
        assert found.log_f[row, node] == pytest.approx(expected, rel=1e-5)
        siblings = [each for each in range(12) if found.parent[row, each] == found.parent[row, node]]
        assert len({int(found.token[row, each]) for each in siblings}) == len(siblings)
    assert found.depth.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("max_depth", [1, 2, 5])
def test_walks_follow_the_text_down_the_tree(max_depth: int) -> None:
    """Random trees, half of their tokens right, beside a walk that goes from node to node."""
    rng, simulated = np.random.default_rng(max_depth), executor()
    lengths = set()
    for _ in range(40):
        rows = int(rng.integers(1, 7))
        plan = plan_of(rng.integers(0, 1000, rows), rng.integers(1, 300, rows))
        target = tokens_after(plan.sampling.seed, plan.sampling.choice, plan.ctx_len, max_depth + 1, VOCAB)
        nodes = []  # row, token, parent, depth
        for row in range(rows):
            root = len(nodes)
            nodes.append((row, 0, -1, 0))
            for _ in range(int(rng.integers(0, 9))):
                parent = int(rng.integers(root, len(nodes)))
                depth = nodes[parent][3] + 1
                taken = {token for _, token, above, _ in nodes if above == parent}
                token = int(target[row, depth - 1]) if depth <= max_depth and rng.random() < 0.5 else VOCAB + len(nodes)
                if depth <= max_depth and token not in taken:
                    nodes.append((row, token, parent, depth))
        columns = np.array(nodes, np.int32).T
        trees = DraftTrees(columns[0], columns[1], columns[2], columns[3], columns[2], np.ones(len(nodes), np.float32))
        outcome = simulated.verify(plan, trees)
        walked = np.zeros(len(nodes), bool)
        for row in range(rows):
            here, text = next(i for i, node in enumerate(nodes) if node[:1] == (row,)), []
            while here is not None:
                walked[here] = True
                text.append(int(target[row, nodes[here][3]]))
                here = next((i for i, node in enumerate(nodes) if node[2] == here and node[1] == text[-1]), None)
            assert outcome.tokens[row, : outcome.counts[row]].tolist() == text
            lengths.add(len(text))
        np.testing.assert_array_equal(outcome.accepted, walked)
    assert {1, 2, min(max_depth + 1, 4)} <= lengths


def test_one_draft_and_one_verification_share_their_draws() -> None:
    simulated = executor()
    plan = plan_of(np.arange(4), np.full(4, 10))
    candidates: CandidateTrees = simulated._candidates(plan, draft_of(3, 1, 4))
    assert simulated._target(plan, 3) is simulated._target(plan, 2)
    fresh = plan_of(np.arange(4), np.full(4, 10))
    np.testing.assert_array_equal(simulated._target(fresh, 3), simulated._target(plan, 3))
    assert candidates.token.shape == (4, 3)


def test_token_times_of_many_requests() -> None:
    """More requests and steps than there are rows and columns at first; those that end leave room for others."""
    rng, times, plain = np.random.default_rng(3), TokenTimes(), {}
    for step in range(400):
        among = np.arange(step * 5, step * 5 + 90)
        sequence = among[rng.random(90) < 0.7]
        counts = rng.integers(1, 5, len(sequence))
        times.take(SimpleNamespace(numbers=sequence, counts=counts), now=0.1 * step)  # type: ignore[arg-type]
        for number, count in zip(sequence.tolist(), counts.tolist(), strict=True):
            plain.setdefault(number, []).extend([0.1 * step] * count)
        for number in [number for number in plain if number < (step - 10) * 5]:
            told = plain.pop(number)
            assert times.pop(number) == tuple(at - told[0] for at in told)
    for number, told in plain.items():
        assert times.pop(number) == tuple(at - told[0] for at in told)
    assert times.pop(0) == () == times.pop(10**6)
