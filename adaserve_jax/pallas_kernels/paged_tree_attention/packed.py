"""Packed in-flight tokens of many requests, their query blocks, and the operands of the kernels made of them.

Kernels read query blocks over pages and over tiles of in-flight keys, whether these come from packed tokens or from a
beam. Decode, chain, tree and prefill differ in numbers, not in code. Visibility among in-flight tokens is bits: bit
c % 32 of word c // 32 says whether token c is seen.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64
"""In-flight keys of one tile. A tile has TILE / 32 words of bits."""


class Operands(NamedTuple):
    """B query blocks, each with up to Q queries of one request, and M = G * Q query rows per KV head.

    q: f[B, K, M, D]; row g * Q + i is query i of the block in head g of the KV head's group. Not scaled: a kernel
    multiplies float32 scores by D ** -0.5. Rows of absent queries hold anything finite.
    k, v: f[K, N, D], in-flight keys and values, N a multiple of TILE; finite everywhere.
    k_pool, v_pool: f[L, P, K, S, D], on a TPU with zeros in more features than D; layer: i32[1]. Pages and slots beyond
    a context hold anything, NaN included.
    page_table: i32[R, pages], anything outside a block's live pages; row: i32[B], the row of each block; ctx_len:
    i32[B], 0 for a block without queries.
    first: i32[B, Q], first context position that a query sees, or None: all see everything from 0.
    tile, num_tiles: i32[B]; in-flight keys that block b may see lie in [tile[b], tile[b] + num_tiles[b]) * TILE.
    bits: u32[B, Q, W]; bit c % 32 of word c // 32 says whether the query sees in-flight key tile[b] * TILE + c. W
    is a multiple of TILE / 32, and at least num_tiles[b] of them.
    sinks: f32[K, M], the score of each query row's sink, or None: there are none.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    layer: jax.Array
    page_table: jax.Array
    row: jax.Array
    ctx_len: jax.Array
    first: jax.Array | None
    tile: jax.Array
    num_tiles: jax.Array
    bits: jax.Array
    sinks: jax.Array | None = None

    @property
    def num_queries(self) -> int:
        """Return Q."""
        return self.bits.shape[1]

    @property
    def group(self) -> int:
        """Return G, query heads per KV head."""
        return self.q.shape[2] // self.num_queries

    @property
    def page_size(self) -> int:
        return self.k_pool.shape[3]


def pad_to_tiles(x: jax.Array) -> jax.Array:
    """Pad f[..., N, D] with zero keys to a whole number of tiles."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % TILE), (0, 0)])


def expand_bits(bits: jax.Array, num_tokens: int) -> jax.Array:
    """Unpack u32[..., W] to bool[..., num_tokens]."""
    index = jnp.arange(num_tokens)
    return (bits[..., index // 32] >> (index % 32).astype(jnp.uint32)) & 1 != 0


def pack_bits(visible: jax.Array) -> jax.Array:
    """Pack bool[..., N] to u32[..., ceil(N / 32)]."""
    padded = jnp.pad(visible, [(0, 0)] * (visible.ndim - 1) + [(0, -visible.shape[-1] % 32)])
    words = padded.reshape(*visible.shape[:-1], -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


class QueryBlocks(NamedTuple):
    """Packed tokens grouped into blocks of one request each, so that a page is read once per block.

    token: i32[B, Q], packed index, T where absent; row: i32[B], row of the block; place: i32[T], the token's index
    in the flattened [B * Q]; start: i32[B], packed index of the first token of the block's row.
    """

    token: jax.Array
    row: jax.Array
    place: jax.Array
    start: jax.Array


class PackedTokens(NamedTuple):
    """Layout of a step's packed tokens. page_table: i32[R, pages]; ctx_len, count: i32[R]; row, position: i32[T];
    bits: u32[T, ceil(T/32)], ancestors and self; blocks: query blocks, or None to attend in the canonical order; path:
    i32[T, T], ancestors in order, needed for the canonical order only."""

    page_table: jax.Array
    ctx_len: jax.Array
    count: jax.Array
    row: jax.Array
    position: jax.Array
    bits: jax.Array
    blocks: QueryBlocks | None
    path: jax.Array | None

    @property
    def num_tokens(self) -> int:
        return self.bits.shape[0]

    def visible(self, window: int | None) -> jax.Array:
        """Return bool[T, T], the in-flight tokens that each one sees, within `window` positions if it is set."""
        mask = expand_bits(self.bits, self.num_tokens)
        if window is None:
            return mask
        return mask & (self.position[None, :] > self.position[:, None] - window)


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
        token.reshape(num_blocks, block_size), block_row, jnp.minimum(place, num_blocks * block_size - 1),
        first_token[block_row],
    )  # fmt: skip


def occupied(tokens: PackedTokens, blocks: QueryBlocks) -> jax.Array:
    """Return bool[B], the blocks that have a query. A block's first query is there if any is."""
    return blocks.token[:, 0] < tokens.num_tokens


def fold(q: jax.Array, blocks: QueryBlocks) -> jax.Array:
    """Group queries f[T, K, G, D] by block, f[B, K, G * Q, D]. Absent queries repeat the last token's."""
    num_tokens, kv_heads, group, head_dim = q.shape
    num_blocks, block_size = blocks.token.shape
    gathered = q[jnp.minimum(blocks.token, num_tokens - 1)]
    return gathered.transpose(0, 2, 3, 1, 4).reshape(num_blocks, kv_heads, group * block_size, head_dim)


def unfold(x: jax.Array, blocks: QueryBlocks, group: int) -> jax.Array:
    """Undo `fold`: [B, K, G * Q, ...] to [T, K, G, ...]."""
    num_blocks, block_size = blocks.token.shape
    split = x.reshape(num_blocks, x.shape[1], group, block_size, *x.shape[3:])
    flat = jnp.moveaxis(split, 3, 1).reshape(num_blocks * block_size, x.shape[1], group, *x.shape[3:])
    return flat[blocks.place]


def first_visible(tokens: PackedTokens, blocks: QueryBlocks, window: int) -> jax.Array:
    """Return the first position that each query sees, i32[B, Q]; absent queries repeat their block's first one."""
    first = jnp.minimum(blocks.token, tokens.num_tokens - 1)
    first = jnp.where(blocks.token < tokens.num_tokens, first, first[:, :1])
    return tokens.position[first] - window + 1


def sinks_of_rows(sinks: jax.Array | None, kv_heads: int, num_queries: int) -> jax.Array | None:
    """Spread the sinks of heads, f[H], over query rows g * Q + i: f32[K, G * Q]."""
    if sinks is None:
        return None
    return jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, -1), num_queries, axis=1)


def packed_operands(
    q: jax.Array, k: jax.Array, v: jax.Array, k_pool: jax.Array, v_pool: jax.Array, layer: int,
    tokens: PackedTokens, blocks: QueryBlocks, window: int | None, sinks: jax.Array | None = None,
) -> Operands:  # fmt: skip
    """Build the operands of packed tokens. q: f[T, K, G, D], not scaled; k, v: f[K, T, D]; sinks: f[H]."""
    num_tokens = tokens.num_tokens
    live = occupied(tokens, blocks)
    last = jnp.max(jnp.where(blocks.token < num_tokens, blocks.token, 0), axis=1)
    tile = jnp.minimum(blocks.start, num_tokens - 1) // TILE
    return Operands(
        q=fold(q, blocks),
        k=pad_to_tiles(k),
        v=pad_to_tiles(v),
        k_pool=k_pool,
        v_pool=v_pool,
        layer=jnp.full(1, layer, jnp.int32),
        page_table=tokens.page_table,
        row=blocks.row,
        ctx_len=jnp.where(live, tokens.ctx_len[blocks.row], 0),
        first=None if window is None else first_visible(tokens, blocks, window),
        tile=tile,
        num_tiles=jnp.where(live, last // TILE - tile + 1, 0),
        bits=_block_bits(tokens, blocks, tile, window),
        sinks=sinks_of_rows(sinks, q.shape[1], blocks.token.shape[1]),
    )


def _block_bits(tokens: PackedTokens, blocks: QueryBlocks, tile: jax.Array, window: int | None) -> jax.Array:
    """Return visibility bits u32[B, Q, W], from each block's first tile on; absent queries see nothing."""
    bits = tokens.bits if window is None else pack_bits(tokens.visible(window))
    words = -(-tokens.num_tokens // TILE) * (TILE // 32)
    bits = jnp.pad(bits, ((0, 1), (0, words - bits.shape[1])))
    at = tile[:, None] * (TILE // 32) + jnp.arange(words)
    gathered = bits[blocks.token[:, :, None], jnp.minimum(at, words - 1)[:, None, :]]
    return jnp.where((at < words)[:, None, :], gathered, 0)


class Slabs(NamedTuple):
    """A pool in two arrays, while it is extended; programs compiled for one array contain nothing of this.

    base: [L, P, K, S, D], pages 0 <= id < P. extension: [L, X, K, S, D], the X pages after them. shape and dtype are
    those of both as one pool.
    """

    base: jax.Array
    extension: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        layers, pages, *page = self.base.shape
        return (layers, pages + self.extension.shape[1], *page)

    @property
    def dtype(self) -> jnp.dtype:
        return self.base.dtype


Pool = jax.Array | Slabs
"""Keys or values of all layers, [L, P, K, S, D]."""


def read_pages(pool: Pool, layer: int, ids: jax.Array, head_dim: int) -> jax.Array:
    """Read pages of a layer, [..., K, S, head_dim] for ids i32[...]; ids without a page read arbitrary values.

    Features of the pool beyond head_dim are padding (`runtime.pools.pool_head_dim`), and are left out.

    Of two slabs both are read and one result is chosen: a page of the other slab costs little, because it is always
    its first, which stays in the cache. Branches cost more (docs/architecture/device.md).
    """
    if not isinstance(pool, Slabs):
        return pool[layer, ids][..., :head_dim]
    base_pages = pool.base.shape[1]
    in_base = ids < base_pages
    of_base = pool.base[layer, jnp.where(in_base, ids, 0)]
    of_extension = pool.extension[layer, jnp.where(in_base, 0, ids - base_pages)]
    return jnp.where(in_base[..., None, None, None], of_base, of_extension)[..., :head_dim]
