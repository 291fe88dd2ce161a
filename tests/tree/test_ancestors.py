"""Ancestor bits against a walk up the parents."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from adaserve_jax.pallas_kernels.paged_tree_attention.packed import expand_bits
from adaserve_jax.tree.verify import ancestor_bits, ancestor_paths


def forest(rng: np.random.Generator, tokens: int, chain: bool) -> np.ndarray:
    parent = np.full(tokens, -1, np.int32)
    for token in range(1, tokens):
        if chain or rng.random() < 0.9:
            parent[token] = token - 1 if chain else rng.integers(0, token)
    return parent


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("tokens", [1, 33, 64])
def test_bits_and_paths_equal_the_walk(tokens: int, chain: bool) -> None:
    parent = forest(np.random.default_rng(tokens), tokens, chain)
    mask = np.asarray(jax.jit(lambda p: expand_bits(ancestor_bits(p), tokens))(parent))
    paths = np.asarray(jax.jit(ancestor_paths)(mask))
    for token in range(tokens):
        walk = [token]
        while parent[walk[-1]] >= 0:
            walk.append(int(parent[walk[-1]]))
        assert np.flatnonzero(mask[token]).tolist() == sorted(walk)
        assert paths[token, : len(walk)].tolist() == walk[::-1]
