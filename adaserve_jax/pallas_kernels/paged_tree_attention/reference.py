"""The XLA implementation: online softmax over pages, then over in-flight tokens, merged by log-sum-exp.

Context is visible by length, and by a sliding window where there is one, so committed pages need no mask; only
in-flight tokens do. Pages beyond a context or before the window, and slots beyond its end, are never read into a
result, whatever they hold (NaN included).
Axes: B query blocks, M query rows of one KV head (queries x heads per KV head), N in-flight keys, and those of
docs/architecture (H/K heads, D head dim, S page slots, P pages, L layers).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import platform
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import (
    PackedTokens,
    Pool,
    QueryBlocks,
    first_visible,
    fold,
    occupied,
    read_pages,
    sinks_of_rows,
    unfold,
)

LOWEST = -1e30

CPU_BLOCKS = 8
"""Query blocks that read their pages together on a CPU. All at once, every block waits for the longest context, and
blocks without queries, which come last, cost as much as others."""
KEYS_PER_STEP = 512
"""Keys per step of the loop over pages on a GPU or TPU, where a step costs launches and a wait. Not tuned."""


class Partial(NamedTuple):
    """Softmax-weighted values not yet normalised. weighted: f32[..., M, D]; peak, mass: f32[..., M]."""

    weighted: jax.Array
    peak: jax.Array
    mass: jax.Array


def _empty(shape: tuple[int, ...], sinks: jax.Array | None = None) -> Partial:
    """Return the sums over no key. sinks: f32, broadcasts to shape[:-1]; a sink is a key without a value."""
    weighted, rows = jnp.zeros(shape, jnp.float32), shape[:-1]
    if sinks is None:
        return Partial(weighted, jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32))
    return Partial(weighted, jnp.broadcast_to(sinks.astype(jnp.float32), rows), jnp.ones(rows, jnp.float32))


def capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Return softcap * tanh(scores / softcap); None: the scores."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the einsum in f32. Keys and values in f32 are not rounded to TF32, as a GPU does by default."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)


def _scores(axes: str, q: jax.Array, keys: jax.Array) -> jax.Array:
    """Return the products over sqrt(D), in f32. The quotient of a query in bf16 would be rounded to bf16."""
    return _product(axes, q, keys) * q.shape[-1] ** -0.5


def _absorb(
    state: Partial, scores: jax.Array, visible: jax.Array, values: jax.Array, softcap: float | None = None
) -> Partial:
    """Do one online-softmax step. scores: f32[..., M, S]; visible broadcasts to it; values: [..., S, D]."""
    scores = jnp.where(visible, capped(scores, softcap), LOWEST)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    weight = jnp.where(visible, jnp.exp(scores - peak[..., None]), 0.0)
    shrink = jnp.exp(state.peak - peak)
    update = _product("...ms,...sd->...md", weight, values)
    return Partial(state.weighted * shrink[..., None] + update, peak, state.mass * shrink + jnp.sum(weight, axis=-1))


def merge(first: Partial, second: Partial) -> jax.Array:
    """Return the normalised attention of two disjoint key sets, f32[..., M, D]; rows that see nothing are 0."""
    peak = jnp.maximum(first.peak, second.peak)
    scale_first, scale_second = jnp.exp(first.peak - peak), jnp.exp(second.peak - peak)
    mass = first.mass * scale_first + second.mass * scale_second
    weighted = first.weighted * scale_first[..., None] + second.weighted * scale_second[..., None]
    return weighted / jnp.maximum(mass, 1e-30)[..., None]


def on_cpu() -> bool:
    return platform() == "cpu"


def context_partial(
    q: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    layer: int,
    page_table: jax.Array,
    ctx_len: jax.Array,
    first: jax.Array | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attend to committed context, some pages at a time.

    q: [B, K, M, D]; pools: [L, P, K, S, D]; page_table: i32[B, pages]; ctx_len: i32[B]; first: i32[B, M], the
    first position that each query row sees, None: 0. On a CPU, CPU_BLOCKS blocks at a time and a page per step;
    elsewhere all blocks and KEYS_PER_STEP keys.
    """
    num_blocks, page_size = q.shape[0], k_pool.shape[3]
    by_block = (q, page_table, ctx_len) if first is None else (q, page_table, ctx_len, first)
    if not on_cpu():
        return _pages(k_pool, v_pool, layer, max(1, KEYS_PER_STEP // page_size), softcap, *by_block)
    if num_blocks <= CPU_BLOCKS:
        return _pages(k_pool, v_pool, layer, 1, softcap, *by_block)

    def grouped(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, -num_blocks % CPU_BLOCKS)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, CPU_BLOCKS, *x.shape[1:])

    groups = lax.map(
        lambda group: _pages(k_pool, v_pool, layer, 1, softcap, *group), tuple(grouped(x) for x in by_block)
    )
    return Partial(*(x.reshape(-1, *x.shape[2:])[:num_blocks] for x in groups))


def _pages(
    k_pool: Pool, v_pool: Pool, layer: int, step_pages: int, softcap: float | None, q: jax.Array,
    page_table: jax.Array, ctx_len: jax.Array, first: jax.Array | None = None,
) -> Partial:  # fmt: skip
    """Attend for blocks that read their pages together, step_pages at a time.

    The number of steps is that of the longest context, counted from the page in which the block's window begins.
    """
    page_size = k_pool.shape[3]
    floor = jnp.zeros_like(ctx_len) if first is None else jnp.maximum(jnp.min(first, axis=1), 0)
    first_page = floor // page_size
    num_pages = jnp.max((ctx_len + page_size - 1) // page_size - first_page)

    def gathered(pool: Pool, at_page: jax.Array) -> jax.Array:
        """Return [B, K, n * S, D] for pages i32[B, n], by index in the table."""
        ids = jnp.take_along_axis(page_table, jnp.minimum(at_page, page_table.shape[1] - 1), axis=1)
        if step_pages == 1:
            return read_pages(pool, layer, ids[:, 0], q.shape[-1])
        pages = read_pages(pool, layer, ids, q.shape[-1]).swapaxes(1, 2)
        return pages.reshape(*pages.shape[:2], step_pages * page_size, -1)

    def step(index: jax.Array, state: Partial) -> Partial:
        at_page = first_page[:, None] + index * step_pages + jnp.arange(step_pages)
        at = at_page[:, :1] * page_size + jnp.arange(step_pages * page_size)
        live = (at < ctx_len[:, None]) & (at >= floor[:, None])
        values = jnp.where(live[:, None, :, None], gathered(v_pool, at_page), 0)
        scores = _scores("bkmd,bksd->bkms", q, gathered(k_pool, at_page))
        visible = live[:, None, None, :]
        if first is not None:
            visible &= (at[:, None, :] >= first[:, :, None])[:, None]
        return _absorb(state, scores, visible, values, softcap)

    return lax.fori_loop(0, (num_pages + step_pages - 1) // step_pages, step, _empty(q.shape))


def inflight_partial(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> Partial:  # fmt: skip
    """Attend to in-flight tokens, and to the sinks, f32[K, M]. q: [B, K, M, D]; k, v: [B, K, N, D]; visible:
    bool[B, M, N]."""
    scores = _scores("bkmd,bknd->bkmn", q, k)
    return _absorb(_empty(q.shape, sinks), scores, visible[:, None], v, softcap)


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    layer: int,
    tokens: PackedTokens,
    blocks: QueryBlocks,
    window: int | None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend to context per query block and to the tree over the packed array, and merge both.

    q: [T, K, G, D]; k, v: [K, T, D]; sinks: f[H]. Returns f32[T, K, G, D].
    """
    num_tokens, kv_heads, group, head_dim = q.shape
    ctx_len = jnp.where(occupied(tokens, blocks), tokens.ctx_len[blocks.row], 0)
    first = None if window is None else jnp.tile(first_visible(tokens, blocks, window), (1, group))
    page_table = tokens.page_table[blocks.row]
    context = context_partial(fold(q, blocks), k_pool, v_pool, layer, page_table, ctx_len, first, softcap)

    def to_tokens(x: jax.Array) -> jax.Array:
        """Reshape [B, K, G * Q, ...] to [1, K, G * T, ...]."""
        by_head = jnp.moveaxis(unfold(x, blocks, group), 0, 2)
        return by_head.reshape(1, kv_heads, group * num_tokens, *x.shape[3:])

    context = Partial(*(to_tokens(x) for x in context))
    q_flat = q.transpose(1, 2, 0, 3).reshape(1, kv_heads, group * num_tokens, head_dim)
    visible = jnp.tile(tokens.visible(window), (group, 1))[None]
    row_sinks = sinks_of_rows(sinks, kv_heads, num_tokens)
    tree = inflight_partial(q_flat, k[None], v[None], visible, softcap, row_sinks)
    out = merge(context, tree)[0].reshape(kv_heads, group, num_tokens, head_dim)
    return out.transpose(2, 0, 1, 3)


def canonical_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    layer: int,
    page_table: jax.Array,
    ctx_len: jax.Array,
    position: jax.Array,
    path: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend with a result that is bitwise the same whether a token's predecessors are committed or in flight.

    Every token gathers its own keys in position order, page by page, from the pool below ctx_len and from its
    ancestors above, and reduces them with the same operations. Slow (each token reads its own context); it serves
    the deterministic mode. q: [T, K, G, D]; k, v: [T, K, D]; page_table: i32[T, pages]; ctx_len, position:
    i32[T]; path: i32[T, T] from `tree.verify.ancestor_paths`; sinks: f[H]. Returns f32[T, K, G, D].
    """
    page_size, head_dim = k_pool.shape[3], q.shape[-1]
    num_chunks = jnp.max(position) // page_size + 1
    slot = jnp.arange(page_size)

    def chunk(index: jax.Array, state: Partial) -> Partial:
        ids = lax.dynamic_index_in_dim(page_table, index, axis=1, keepdims=False)
        at = (index * page_size + slot)[None, :]
        committed = (at < ctx_len[:, None])[:, None, :, None]
        visible = at <= position[:, None]
        if window is not None:
            visible &= at > position[:, None] - window
        steps = jnp.clip(at - ctx_len[:, None], 0, path.shape[1] - 1)
        source = jnp.take_along_axis(path, steps, axis=1)
        flying_k, flying_v = (x[source].transpose(0, 2, 1, 3).astype(k_pool.dtype) for x in (k, v))
        keys = jnp.where(committed, read_pages(k_pool, layer, ids, head_dim), flying_k)
        in_order = visible[:, None, :, None]
        values = jnp.where(in_order, jnp.where(committed, read_pages(v_pool, layer, ids, head_dim), flying_v), 0)
        scores = _scores("tkgd,tksd->tkgs", q, keys)
        return _absorb(state, scores, visible[:, None, None, :], values, softcap)

    by_group = None if sinks is None else sinks.reshape(q.shape[1:3])
    state = lax.fori_loop(0, num_chunks, chunk, _empty(q.shape, by_group))
    return state.weighted / state.mass[..., None]
