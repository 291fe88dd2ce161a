"""Every implementation of paged tree attention against the float64 oracle, on named shapes, with poisoned pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.pallas_kernels.paged_tree_attention.api import PackedTokens, paged_tree_attention, query_blocks
from adaserve_jax.tree.ancestors import ancestor_bits, ancestor_paths, expand_bits
from tests.oracles.attention import oracle_attention


@dataclass(frozen=True)
class Spec:
    """One shape. counts: in-flight tokens per row; chain: parents form a chain, else a random tree."""

    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    chain: bool
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    tokens: int
    block_size: int
    window: int | None = None


SPECS = {
    "decode": Spec((1, 1, 1), (0, 17, 40), True, 4, 1, 16, 8, 4, 1),
    "tree": Spec((5, 1, 8), (3, 33, 16), False, 4, 2, 16, 8, 16, 4),
    "prefill": Spec((21, 1, 6), (8, 5, 0), True, 2, 2, 8, 16, 32, 16),
    "windowed_decode": Spec((1, 1, 1), (0, 17, 40), True, 4, 1, 16, 8, 4, 1, window=10),
    "windowed_tree": Spec((5, 1, 8), (3, 33, 16), False, 4, 2, 16, 8, 16, 4, window=3),
    "windowed_prefill": Spec((21, 1, 6), (8, 50, 30), True, 2, 2, 8, 8, 32, 8, window=17),
}


def random_case(spec: Spec, seed: int):
    """Inputs with NaN in every page and slot that no context uses, or that lies before the window of its row."""
    rng = np.random.default_rng(seed)
    rows = len(spec.counts)
    max_pages = -(-(max(spec.contexts) + 32) // spec.page_size)
    num_pages = rows * max_pages + 3
    page_table = rng.permutation(num_pages)[: rows * max_pages].reshape(rows, max_pages).astype(np.int32)
    shape = (2, num_pages, spec.kv_heads, spec.page_size, spec.head_dim)
    k_pool, v_pool = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for row, context in enumerate(spec.contexts):
        for position in range(max(0, context - (spec.window or context + 1) + 1), context):
            at = (slice(None), page_table[row, position // spec.page_size], slice(None), position % spec.page_size)
            k_pool[at] = rng.normal(size=(2, spec.kv_heads, spec.head_dim))
            v_pool[at] = rng.normal(size=(2, spec.kv_heads, spec.head_dim))
    row = np.full(spec.tokens, rows, np.int32)
    parent = np.full(spec.tokens, -1, np.int32)
    position = np.zeros(spec.tokens, np.int32)
    start = 0
    for index, (count, context) in enumerate(zip(spec.counts, spec.contexts, strict=True)):
        for offset in range(count):
            token = start + offset
            row[token] = index
            if offset:
                parent[token] = token - 1 if spec.chain else rng.integers(start, token)
            position[token] = context if offset == 0 else position[parent[token]] + 1
        start += count
    q = rng.normal(size=(spec.heads, spec.head_dim, spec.tokens)).astype(np.float32)
    k, v = (rng.normal(size=(spec.kv_heads, spec.head_dim, spec.tokens)).astype(np.float32) for _ in range(2))
    return q, k, v, k_pool, v_pool, page_table, np.asarray(spec.contexts, np.int32), row, parent, position


@partial(jax.jit, static_argnames=("spec", "canonical"))
def run(q, k, v, k_pool, v_pool, page_table, ctx_len, row, parent, position, *, spec: Spec, canonical: bool):
    rows = len(spec.counts)
    mask = expand_bits(ancestor_bits(parent), spec.tokens)
    blocks = query_blocks(jnp.asarray(spec.counts), row, num_blocks=spec.tokens, block_size=spec.block_size)
    tokens = PackedTokens(
        page_table, ctx_len, jnp.minimum(row, rows - 1), position, mask, None if canonical else blocks,
        ancestor_paths(mask) if canonical else None,
    )  # fmt: skip
    return paged_tree_attention(q, k, v, k_pool, v_pool, 1, tokens, spec.window)


@pytest.mark.parametrize("canonical", [False, True], ids=["blocks", "canonical"])
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_float64_oracle_and_poison_does_not_leak(name: str, canonical: bool) -> None:
    spec = SPECS[name]
    case = random_case(spec, seed=3)
    out = np.asarray(run(*case, spec=spec, canonical=canonical))
    q, k, v, k_pool, v_pool, page_table, ctx_len, row, parent, _ = case
    expected = oracle_attention(q, k, v, k_pool, v_pool, 1, page_table, ctx_len, row, parent, spec.window)
    real = row < len(spec.counts)
    np.testing.assert_allclose(out[:, :, real], expected[:, :, real], atol=2e-6, equal_nan=False)


def test_canonical_is_bitwise_the_same_committed_or_in_flight() -> None:
    """The same sequence, split at any point between pages and in-flight tokens, gives the same bits."""
    spec = Spec((4,), (0,), True, 4, 2, 16, 8, 32, 1)
    rng = np.random.default_rng(0)
    length = 20
    keys, values = (rng.normal(size=(2, 16, length)).astype(np.float32) for _ in range(2))
    query = rng.normal(size=(4, 16)).astype(np.float32)
    results = []
    for context in (0, 3, 8, 16, length - 1):
        k_pool, v_pool = (np.full((2, 5, 2, 8, 16), np.nan, np.float32) for _ in range(2))
        page_table = np.array([[3, 0, 4, 1]], np.int32)
        for position in range(context):
            at = (1, page_table[0, position // 8], slice(None), position % 8)
            k_pool[at], v_pool[at] = keys[:, :, position], values[:, :, position]
        flying = length - context
        k, v, q = (
            np.zeros((2, 16, 32), np.float32),
            np.zeros((2, 16, 32), np.float32),
            np.zeros((4, 16, 32), np.float32),
        )
        k[:, :, :flying], v[:, :, :flying] = keys[:, :, context:], values[:, :, context:]
        q[:, :, flying - 1] = query
        row = np.where(np.arange(32) < flying, 0, 1).astype(np.int32)
        parent = np.where(np.arange(32) < flying, np.arange(32) - 1, -1).astype(np.int32)
        position = np.where(np.arange(32) < flying, context + np.arange(32), 0).astype(np.int32)
        ctx_len = np.array([context], np.int32)
        out = run(q, k, v, k_pool, v_pool, page_table, ctx_len, row, parent, position, spec=spec, canonical=True)
        results.append(np.asarray(out)[:, :, flying - 1])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
