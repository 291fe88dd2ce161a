"""What every kernel of paged tree attention is given: query blocks over pages and over tiles of in-flight keys.

`api.py` makes it from packed tokens or from a beam; a kernel knows neither. Decode, chain, tree and prefill differ in
numbers here, not in code.
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
    k_pool, v_pool: f[L, P, K, S, D]; layer: i32[1]. Pages and slots beyond a context hold anything, NaN included.
    page_table: i32[R, pages], anything outside a block's live pages; row: i32[B], the row of each block; ctx_len:
    i32[B], 0 for a block without queries.
    first: i32[B, Q], first context position that a query sees, or None: all see everything from 0.
    tile, num_tiles: i32[B]; in-flight keys that block b may see lie in [tile[b], tile[b] + num_tiles[b]) * TILE.
    bits: u32[B, Q, W]; bit c % 32 of word c // 32 says whether the query sees in-flight key tile[b] * TILE + c. W
    is a multiple of TILE / 32, and at least num_tiles[b] of them.
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

    @property
    def num_queries(self) -> int:
        """Q."""
        return self.bits.shape[1]

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.q.shape[2] // self.num_queries

    @property
    def page_size(self) -> int:
        return self.k_pool.shape[3]


def pad_to_tiles(x: jax.Array) -> jax.Array:
    """f[..., N, D] with zeros after its last key, up to a whole number of tiles."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % TILE), (0, 0)])
