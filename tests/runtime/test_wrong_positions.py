"""Where the draft was wrong: against a walk written down node by node, over random trees."""

from __future__ import annotations

import numpy as np

from adaserve_jax.distill.records import wrong_nodes
from adaserve_jax.types import CandidateTrees, DraftTrees, StepOutcome, StepPlan
from tests.plans import step_plan

DEPTH, WIDTH, VOCAB = 3, 3, 6


def plan_of(num_decode: int, num_rows: int) -> StepPlan:
    return step_plan(num_decode, [[]] * (num_rows - num_decode))


def random_step(rng: np.random.Generator) -> tuple[StepPlan, DraftTrees, CandidateTrees, StepOutcome, list[int]]:
    """A step whose target draws a token after each node, and the nodes where the draft was wrong, by walking."""
    rows, prompts = int(rng.integers(1, 5)), int(rng.integers(0, 3))
    columns = DEPTH * WIDTH
    token = np.zeros((rows, columns), np.int32)
    parent = np.full((rows, columns), -1, np.int32)
    log_f = np.full((rows, columns), -np.inf, np.float32)
    packed: list[tuple[int, int, int, int, int]] = []
    accepted: list[bool] = []
    tokens = rng.integers(0, VOCAB, (rows + prompts, DEPTH + 1)).astype(np.int32)
    counts = np.ones(rows + prompts, np.int32)
    wrong = []
    for row in range(rows):
        children: dict[int, dict[int, int]] = {}
        for column in range(columns * int(rng.random() < 0.85)):
            level = column // WIDTH
            above = [-1] if level == 0 else [c for c in range((level - 1) * WIDTH, level * WIDTH) if log_f[row, c] == 0]
            if not above or rng.random() < 0.3:
                parent[row, column], token[row, column] = rng.integers(-1, columns), rng.integers(0, VOCAB)  # absent
                continue
            chosen = int(rng.choice(above))
            free = sorted(set(range(VOCAB)) - set(children.get(chosen, {})))
            parent[row, column], token[row, column], log_f[row, column] = chosen, int(rng.choice(free)), 0
            children.setdefault(chosen, {})[int(token[row, column])] = column
        at = {-1: len(packed)}
        packed.append((row, int(rng.integers(0, VOCAB)), -1, 0, -1))
        accepted.append(True)
        for column in range(columns):
            if log_f[row, column] == 0 and int(parent[row, column]) in at and rng.random() < 0.7:
                at[column] = len(packed)
                packed.append((row, int(token[row, column]), at[int(parent[row, column])], column // WIDTH + 1, column))
                accepted.append(False)
        node, depth = -1, 0
        while children.get(node, {}).get(int(tokens[row, depth]), -2) in at and depth < DEPTH:
            node = children[node][int(tokens[row, depth])]
            depth += 1
            accepted[at[node]] = True
        counts[row] = depth + 1
        if children.get(node) and int(tokens[row, depth]) not in children[node]:
            wrong.append(at[node])
    arrays = np.array(packed, np.int32).T
    trees = DraftTrees(*arrays, np.ones(len(packed), np.float32))
    levels = np.repeat(np.arange(1, DEPTH + 1, dtype=np.int32), WIDTH)
    candidates = CandidateTrees(token, parent, log_f, levels)
    outcome = StepOutcome(tokens, counts, np.array(accepted), 0.0, 0.0, 0.0, 64)
    return plan_of(rows, rows + prompts), trees, candidates, outcome, wrong


def test_the_nodes_are_those_of_the_walk() -> None:
    rng = np.random.default_rng(0)
    seen = {True: 0, False: 0}
    for _ in range(400):
        plan, *step, expected = random_step(rng)
        assert wrong_nodes(plan, *step).tolist() == expected
        seen[True] += len(expected)
        seen[False] += plan.num_decode - len(expected)
    assert min(seen.values()) > 200


def test_the_cases_one_by_one() -> None:
    """A root with the candidates 3 and 4, 3 with the child 5; 3 is selected, 4 and 5 are not."""
    candidates = CandidateTrees(
        np.array([[3, 4, 5, 0]], np.int32), np.array([[-1, -1, 0, 0]], np.int32),
        np.array([[-0.1, -0.5, -0.7, -np.inf]], np.float32), np.array([1, 1, 2, 2], np.int32),
    )  # fmt: skip
    trees = DraftTrees(
        np.zeros(2, np.int32), np.array([9, 3]), np.array([-1, 0]), np.array([0, 1]), np.array([-1, 0]), np.ones(2)
    )
    for drawn, expected in (
        ([7], [0]),  # not proposed
        ([4], []),  # proposed, and pruned
        ([3, 5], []),  # the same one deeper
        ([3, 0], [1]),  # the candidate 0 is absent
        ([3, 8], [1]),
    ):
        tokens = np.zeros((1, 3), np.int32)
        tokens[0, : len(drawn)] = drawn
        accepted = np.array([True, len(drawn) > 1])
        outcome = StepOutcome(tokens, np.array([len(drawn)], np.int32), accepted, 0.0, 0.0, 0.0, 8)
        assert wrong_nodes(plan_of(1, 1), trees, candidates, outcome).tolist() == expected, drawn
        cut = StepOutcome(tokens, np.array([len(drawn) - 1], np.int32), accepted, 0.0, 0.0, 0.0, 8)
        assert wrong_nodes(plan_of(1, 1), trees, candidates, cut).tolist() == [], "that token was not emitted"
        none = CandidateTrees.empty(1)
        assert wrong_nodes(plan_of(1, 1), trees, none, outcome).tolist() == []
    assert wrong_nodes(plan_of(0, 2), trees, CandidateTrees.empty(0), outcome).tolist() == []
