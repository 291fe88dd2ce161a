"""The accept walk and the ancestor masks against walks of one tree at a time."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from adaserve_jax.pallas_kernels.paged_tree_attention.packed import expand_bits
from adaserve_jax.tree.verify import PADDING, PREFILL, accept_walk, ancestor_bits, ancestor_paths, synthetic_draws

DEPTH = 3


def walk_one(root: int, token: np.ndarray, parent: np.ndarray, drawn: np.ndarray) -> tuple[list[int], list[int]]:
    """Emitted tokens and walked nodes of one tree."""
    node, emitted, walked = root, [], []
    while True:
        walked.append(node)
        emitted.append(int(drawn[node]))
        following = [c for c in range(len(token)) if parent[c] == node and token[c] == drawn[node]]
        if not following:
            return emitted, walked
        (node,) = following


def test_equals_the_walk_of_each_tree() -> None:
    walk_all = jax.jit(partial(accept_walk, num_rows=4, max_depth=DEPTH))
    seen_depths = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        token, parent, depth, row = ([] for _ in range(4))
        roots = []
        for tree in range(2):
            roots.append(len(token))
            token, parent, depth, row = [*token, 0], [*parent, -1], [*depth, 0], [*row, tree]
            used: set[tuple[int, int]] = set()
            for _ in range(rng.integers(0, 9)):
                above = int(rng.integers(roots[-1], len(token)))
                label = int(rng.integers(0, 3))
                if depth[above] < DEPTH and (above, label) not in used:
                    used.add((above, label))
                    token, parent, row = [*token, label], [*parent, above], [*row, tree]
                    depth = [*depth, depth[above] + 1]
        chunk = len(token)
        for offset in range(3):  # a prompt chunk in row 2 that ends its prompt
            token, row = [*token, 1], [*row, 2]
            parent, depth = [*parent, -1 if offset == 0 else chunk + offset - 1], [*depth, PREFILL if offset < 2 else 0]
        pad = 24 - len(token)
        arrays = [
            np.asarray(a + [f] * pad, np.int32) for a, f in ((token, 0), (parent, -1), (depth, PADDING), (row, 4))
        ]
        drawn = rng.integers(0, 3, 24).astype(np.int32)
        result = jax.tree.map(np.asarray, walk_all(*arrays, drawn))
        expected_nodes = set()
        for tree, root in enumerate(roots):
            emitted, walked = walk_one(root, arrays[0], arrays[1], drawn)
            expected_nodes |= set(walked)
            seen_depths.add(len(walked))
            assert result.tokens[tree, : result.counts[tree]].tolist() == emitted
        assert result.counts.tolist()[2:] == [1, 0]
        assert result.tokens[2, 0] == drawn[chunk + 2]
        assert set(np.flatnonzero(result.accepted)) == expected_nodes | {chunk + 2}
        assert set(np.flatnonzero(result.commit)) == expected_nodes | {chunk, chunk + 1, chunk + 2}
    assert seen_depths == {1, 2, 3, 4}


def forest(rng: np.random.Generator, tokens: int, chain: bool) -> np.ndarray:
    parent = np.full(tokens, -1, np.int32)
    for token in range(1, tokens):
        if chain or rng.random() < 0.9:
            parent[token] = token - 1 if chain else rng.integers(0, token)
    return parent


@partial(jax.jit, static_argnums=1)
def masks(parent: jax.Array, tokens: int) -> jax.Array:
    return expand_bits(ancestor_bits(parent), tokens)


PATHS, DRAWS = jax.jit(ancestor_paths), jax.jit(synthetic_draws, static_argnums=5)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("tokens", [1, 33, 64])
def test_bits_and_paths_equal_the_walk(tokens: int, chain: bool) -> None:
    parent = forest(np.random.default_rng(tokens), tokens, chain)
    mask = np.asarray(masks(parent, tokens))
    paths = np.asarray(PATHS(mask))
    for token in range(tokens):
        walk = [token]
        while parent[walk[-1]] >= 0:
            walk.append(int(parent[walk[-1]]))
        assert np.flatnonzero(mask[token]).tolist() == sorted(walk)
        assert paths[token, : len(walk)].tolist() == walk[::-1]


def test_synthetic_draws_accept_the_first_child_whose_coin_lands() -> None:
    #         0 root
    #    1 (0.8)   2 (0.1)  3 (0.2)       coins; chance at depth 1: 0.5
    #              4 (0.9)  5 (0.3)       chance at depth 2: 0.4
    token = np.array([9, 1, 2, 3, 4, 5], np.int32)
    parent = np.array([-1, 0, 0, 0, 2, 3], np.int32)
    depth = np.array([0, 1, 1, 1, 2, 2], np.int32)
    coin = np.array([0.0, 0.8, 0.1, 0.2, 0.9, 0.3], np.float32)
    target = np.full(6, 7, np.int32)
    drawn, agrees = DRAWS(token, parent, depth, coin, target, (0.5, 0.4))
    assert np.flatnonzero(agrees).tolist() == [2, 5]  # 5 under 3, which is not reached
    walk_one_row = jax.jit(partial(accept_walk, num_rows=1, max_depth=2))
    walk = walk_one_row(token, parent, depth, np.zeros(6, np.int32), drawn, agrees=agrees)
    assert walk.tokens[0, : int(walk.counts[0])].tolist() == [2, 7]  # the bonus token is the target's
    _, none = DRAWS(token, parent, depth, coin, target, ())
    assert not none.any()
