"""Algorithms 1 and 2 against every tree there is, on small instances with f known and all candidates there."""

from itertools import product

import numpy as np
import pytest

from adaserve_jax.scheduler import selection
from adaserve_jax.types import CandidateTrees
from tests.oracles import selection as oracle

QUICK, ALL = 600, 10_500
LADDER = np.array([1.0, 0.9, 0.75, 0.5, 0.4, 0.25, 0.1])


def random_instance(rng: np.random.Generator):
    """Up to three requests over one (depth, width) grid, and their needs; repeated chances make ties."""
    levels, width = [(1, 2), (1, 3), (2, 1), (2, 2), (3, 1)][rng.integers(5)]
    requests = []
    for _ in range(rng.integers(1, 4)):
        nodes = []
        for level in range(1, levels + 1):
            for _ in range(width):
                above = -1 if level == 1 else (level - 2) * width + int(rng.integers(width))
                nodes.append(((1.0 if above < 0 else nodes[above][0]) * float(rng.choice(LADDER)), level, above))
        requests.append(nodes)
    need = rng.choice([-1.0, 0.3, 1.0, 1.447, 1.833, 2.617, 3.391], len(requests)).tolist()
    return requests, need, len(requests) + int(rng.integers(0, 7))


def ranked_of(requests):
    shape = (len(requests), len(requests[0]))
    f, depth, parent = (np.array([[node[part] for node in nodes] for nodes in requests]) for part in range(3))
    candidates = CandidateTrees(
        np.zeros(shape, np.int32), parent.astype(np.int32), np.log(f).astype(np.float32), depth[0].astype(np.int32)
    )
    return candidates, selection.rank(candidates)


def check(rng: np.random.Generator) -> bool:
    """One instance; whether all needs can be met."""
    requests, need, budget = random_instance(rng)
    candidates, ranked = ranked_of(requests)
    optimum = oracle.algorithm_1(requests, need, budget)
    orders = ("cheapest-first", "slowest-first", "fastest-first")
    chosen = {
        order: selection.select_slo(
            candidates, np.zeros(len(requests), np.int32), ranked, np.array(need), budget=budget, order=order
        )
        for order in orders
    }
    if optimum is None:
        # Partial trees: within the budget, connected, nothing left over that would fit.
        for trees in chosen.values():
            assert oracle.is_connected(trees)
            assert trees.num_nodes == min(budget, len(requests) * (1 + len(requests[0])))
        return False
    for trees in chosen.values():
        assert oracle.is_connected(trees)
        assert trees.f.sum() == pytest.approx(optimum, rel=1e-5)
        assert (np.bincount(trees.row, trees.f) >= np.array(need) - 1e-5).all()
    return True


def test_algorithms_1_and_2_are_optimal() -> None:
    rng = np.random.default_rng(0)
    feasible = sum(check(rng) for _ in range(QUICK))
    assert 0.2 * QUICK < feasible < 0.8 * QUICK


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_algorithms_1_and_2_are_optimal_on_ten_thousand_instances() -> None:
    rng = np.random.default_rng(1)
    feasible = sum(check(rng) for _ in range(ALL))
    assert 0.2 * ALL < feasible < 0.8 * ALL


def beam_nodes(chance: dict[tuple[int, ...], float], vocabulary: int, depth: int, width: int) -> set[tuple[int, ...]]:
    """Token paths that a beam search of the draft keeps. chance: of each path, the product of its steps."""
    kept, level = set(), [()]
    for _ in range(depth):
        paths = [(*path, token) for path in level for token in range(vocabulary)]
        level = sorted(paths, key=lambda path: -chance[path])[:width]
        kept.update(level)
    return kept


def test_theorem_4_1_a_beam_as_wide_as_the_budget_holds_the_optimal_tree() -> None:
    """All token paths of a small vocabulary, budget B: the tree of the B - 1 likeliest ones lies in the beam of width
    B and of the tree's own depth."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        vocabulary, depth = int(rng.integers(2, 4)), int(rng.integers(1, 5))
        chance: dict[tuple[int, ...], float] = {(): 1.0}
        for level in range(1, depth + 1):
            for path in product(range(vocabulary), repeat=level):
                if path[-1] == 0:
                    steps = rng.dirichlet(np.full(vocabulary, 0.6))
                chance[path] = chance[path[:-1]] * steps[path[-1]]
        budget = int(rng.integers(2, 9))
        best = sorted((path for path in chance if path), key=lambda path: (-chance[path], len(path)))[: budget - 1]
        assert all(path[:-1] in {(), *best} for path in best), "the likeliest paths are a tree"
        deepest = max(map(len, best))
        assert set(best) <= beam_nodes(chance, vocabulary, deepest, budget)
