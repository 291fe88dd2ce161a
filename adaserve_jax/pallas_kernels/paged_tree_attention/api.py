"""The one way to call paged tree attention: packed in-flight tokens of many requests over one paged pool.

Knows no model. Implementations: `reference.py` (XLA, everywhere).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaserve_jax.pallas_kernels.paged_tree_attention import reference


class QueryBlocks(NamedTuple):
    """Packed tokens grouped into blocks of one request each, so that a page is read once per block.

    token: i32[B, Q], packed index, T where absent; row: i32[B], row of the block; place: i32[T], the token's index
    in the flattened [B * Q].
    """

    token: jax.Array
    row: jax.Array
    place: jax.Array


class PackedTokens(NamedTuple):
    """Where the packed tokens of a step stand. page_table: i32[R, pages]; ctx_len: i32[R]; row, position: i32[T];
    mask: bool[T, T], ancestors and self; blocks: query blocks, or None to attend in the canonical order; path:
    i32[T, T], ancestors in order, needed for the canonical order only."""

    page_table: jax.Array
    ctx_len: jax.Array
    row: jax.Array
    position: jax.Array
    mask: jax.Array
    blocks: QueryBlocks | None
    path: jax.Array | None


def query_blocks(counts: jax.Array, row: jax.Array, *, num_blocks: int, block_size: int) -> QueryBlocks:
    """Cut each row's tokens into blocks. counts: i32[R], tokens per row, packed row after row; row: i32[T], R or more
    where the slot is padding. num_blocks must hold sum(ceil(counts / block_size)); it is not checked on the device.
    """
    num_rows, num_tokens = counts.shape[0], row.shape[0]
    safe_row = jnp.minimum(row, num_rows - 1)
    per_row = (counts + block_size - 1) // block_size
    first_block = jnp.cumsum(per_row) - per_row
    first_token = jnp.cumsum(counts) - counts
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    within = index - first_token[safe_row]
    place = (first_block[safe_row] + within // block_size) * block_size + within % block_size
    place = jnp.where(row < num_rows, place, num_blocks * block_size)
    token = jnp.full(num_blocks * block_size, num_tokens, jnp.int32).at[place].set(index, mode="drop")
    block_row = jnp.zeros(num_blocks, jnp.int32).at[place // block_size].set(safe_row, mode="drop")
    return QueryBlocks(
        token.reshape(num_blocks, block_size), block_row, jnp.minimum(place, num_blocks * block_size - 1)
    )


def paged_tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: int,
    tokens: PackedTokens,
    window: int | None = None,
) -> jax.Array:
    """Attention of packed tokens over their committed context and in-flight ancestors.

    q: [H, D, T]; k, v: [K, D, T], feature-major, rotated; pools: [L, P, K, S, D]. window: a token sees only keys at
    positions above its own minus this, itself included; None: all. Returns [H, D, T] in q's dtype. Scores are scaled
    by 1/sqrt(D) and reduced in float32.
    """
    num_heads, head_dim, num_tokens = q.shape
    kv_heads = k.shape[0]
    group = num_heads // kv_heads
    q_tokens = q.reshape(kv_heads, group, head_dim, num_tokens).transpose(3, 0, 1, 2) * (head_dim**-0.5)
    if tokens.blocks is None:
        if tokens.path is None:
            raise ValueError("canonical attention needs the ancestor paths: PackedTokens.path is None")
        k_tokens, v_tokens = k.transpose(2, 0, 1), v.transpose(2, 0, 1)
        out = reference.canonical_attention(
            q_tokens, k_tokens, v_tokens, k_pool, v_pool, layer, tokens.page_table[tokens.row],
            tokens.ctx_len[tokens.row], tokens.position, tokens.path, window,
        )  # fmt: skip
    else:
        out = _by_blocks(q_tokens, k, v, k_pool, v_pool, layer, tokens, tokens.blocks, window)
    return out.transpose(1, 2, 3, 0).reshape(num_heads, head_dim, num_tokens).astype(q.dtype)


def _by_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: int,
    tokens: PackedTokens,
    blocks: QueryBlocks,
    window: int | None,
) -> jax.Array:
    """Context per query block, tree over the packed array, merged. q: [T, K, G, D]; returns f32[T, K, G, D]."""
    num_tokens, kv_heads, group, head_dim = q.shape
    num_blocks, block_size = blocks.token.shape
    gathered = q[jnp.minimum(blocks.token, num_tokens - 1)]
    q_blocks = gathered.transpose(0, 2, 3, 1, 4).reshape(num_blocks, kv_heads, group * block_size, head_dim)
    occupied = jnp.any(blocks.token < num_tokens, axis=1)
    ctx_len = jnp.where(occupied, tokens.ctx_len[blocks.row], 0)
    first = None if window is None else jnp.tile(_first_visible(tokens, blocks, window), (1, group))
    context = reference.context_partial(q_blocks, k_pool, v_pool, layer, tokens.page_table[blocks.row], ctx_len, first)

    def to_tokens(x: jax.Array) -> jax.Array:
        """[B, K, G*Q, ...] -> [1, K, G*T, ...]."""
        split = x.reshape(num_blocks, kv_heads, group, block_size, *x.shape[3:])
        flat = jnp.moveaxis(split, 3, 1).reshape(num_blocks * block_size, kv_heads, group, *x.shape[3:])
        by_head = jnp.moveaxis(flat[blocks.place], 0, 2)
        return by_head.reshape(1, kv_heads, group * num_tokens, *x.shape[3:])

    context = reference.Partial(*(to_tokens(x) for x in context))
    q_flat = q.transpose(1, 2, 0, 3).reshape(1, kv_heads, group * num_tokens, head_dim)
    mask = tokens.mask
    if window is not None:
        mask &= tokens.position[None, :] > tokens.position[:, None] - window
    visible = jnp.tile(mask, (group, 1))[None]
    tree = reference.inflight_partial(q_flat, k.transpose(0, 2, 1)[None], v.transpose(0, 2, 1)[None], visible)
    out = reference.merge(context, tree)[0].reshape(kv_heads, group, num_tokens, head_dim)
    return out.transpose(2, 0, 1, 3)


def _first_visible(tokens: PackedTokens, blocks: QueryBlocks, window: int) -> jax.Array:
    """First position that each query of each block sees, i32[B, Q]; absent queries repeat their block's first one."""
    first = jnp.minimum(blocks.token, tokens.position.shape[0] - 1)
    first = jnp.where(blocks.token < tokens.position.shape[0], first, first[:, :1])
    return tokens.position[first] - window + 1
