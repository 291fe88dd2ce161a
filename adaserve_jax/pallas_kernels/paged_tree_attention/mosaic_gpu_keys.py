"""Where the keys and values of one thread block are, and their way into shared memory; static sizes and inputs.

A block's keys are slots of 64: those of its pages, then its in-flight tiles. One step takes one slot, and a split takes
an equal run of steps. Knows no attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import pl, plgpu
from adaserve_jax.pallas_kernels.paged_tree_attention.operands import TILE


class Sizes(NamedTuple):
    """Static sizes of one call. num_tiles: in-flight tiles in all; chunk: keys of one copy, a page or 64 of its keys;
    rows: query rows of a tile that are loaded and stored, a multiple of 8; row_tiles: tiles per block and KV head."""

    num_blocks: int
    kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    num_tiles: int
    chunk: int
    rows: int
    row_tiles: int
    num_splits: int

    @property
    def copies(self) -> int:
        """Copies of keys, or of values, that fill a slot."""
        return TILE // self.chunk


class Inputs(NamedTuple):
    """Arrays in global memory. q: bf16[B * K * row_tiles, rows, D]; k_pool, v_pool: bf16[L * P * K * S / chunk, chunk,
    D]; k, v: bf16[K * N / chunk, chunk, D]; layer: i32[1]; blocks: i32[B, 5], the fields of `Block`; page_table:
    i32[R, pages]; words: i32[B, row_tiles, W, 64], bits of each query row; first: i32[B, row_tiles, 64], or None."""

    q: Any
    k_pool: Any
    v_pool: Any
    k: Any
    v: Any
    layer: Any
    blocks: Any
    page_table: Any
    words: Any
    first: Any


class Block(NamedTuple):
    """Scalars of one block of queries. floor: first context position that any of them sees."""

    row: Any
    ctx_len: Any
    floor: Any
    tile: Any
    num_tiles: Any


@dataclass(frozen=True)
class Share:
    """The steps [start, end) of a thread block: page slots from `first_slot` on until `first_tile_step`, then tiles."""

    sizes: Sizes
    inputs: Inputs
    block: Block
    layer: Any
    head: Any
    first_slot: Any
    num_slots: Any
    start: Any
    end: Any

    @classmethod
    def of(cls, sizes: Sizes, inputs: Inputs, block: Block, head: Any, split: Any) -> Share:
        first_slot = lax.div(block.floor, TILE)
        num_slots = jnp.maximum(lax.div(block.ctx_len + TILE - 1, TILE) - first_slot, 0)
        steps = num_slots + block.num_tiles
        start, end = (lax.div(steps * (split + i), sizes.num_splits) for i in (0, 1))
        return cls(sizes, inputs, block, inputs.layer[0], head, first_slot, num_slots, start, end)

    @property
    def first_tile_step(self) -> Any:
        return jnp.clip(self.num_slots, self.start, self.end)

    def position(self, step: Any) -> Any:
        """Context position of a page slot's first key."""
        return (self.first_slot + step) * TILE

    def live(self, position: jax.Array) -> jax.Array:
        """bool: positions that hold a key which some query of the block sees."""
        return (position >= self.block.floor) & (position < self.block.ctx_len)

    def page_chunk(self, step: Any, copy: int) -> Any:
        """Index in a pool of chunk `copy` of a page slot. A chunk without a live key is replaced by one that has, for
        its page may be no page at all."""
        sizes = self.sizes
        position = self.position(step) + copy * sizes.chunk
        position = jnp.minimum(jnp.maximum(position, self.block.floor), self.block.ctx_len - 1)
        page = self.inputs.page_table[self.block.row, lax.div(position, sizes.page_size)]
        per_page = sizes.page_size // sizes.chunk
        within = lax.div(lax.rem(position, sizes.page_size), sizes.chunk)
        return ((self.layer * sizes.num_pages + page) * sizes.kv_heads + self.head) * per_page + within

    def tile_chunk(self, step: Any, copy: int) -> Any:
        """Index of chunk `copy` of an in-flight tile."""
        tile = self.head * self.sizes.num_tiles + self.block.tile + step - self.num_slots
        return tile * self.sizes.copies + copy


@dataclass(frozen=True)
class Pipeline:
    """Keys, or values, of a share's steps on their way through shared memory. slots: bf16[depth, 64, D]."""

    share: Share
    pool: Any
    tiles: Any
    slots: Any
    came: Any

    def _slot(self, step: Any) -> Any:
        return lax.rem(step - self.share.start, self.slots.shape[0])

    def fetch(self, step: Any) -> None:
        """Ask for a step's slot, if the share has that step. All reads of the slot's last content must be over."""
        share, slot = self.share, self._slot(step)

        def copy_all(source: Any, chunk_of: Any) -> None:
            size = share.sizes.chunk
            chunks = [chunk_of(step, copy) for copy in range(share.sizes.copies)]
            for copy, chunk in enumerate(chunks):
                to = self.slots.at[slot, pl.ds(copy * size, size)]
                plgpu.copy_gmem_to_smem(source.at[chunk], to, self.came.at[slot])

        first_tile_step = share.first_tile_step
        pl.when(step < first_tile_step)(lambda: copy_all(self.pool, share.page_chunk))
        pl.when((step >= first_tile_step) & (step < share.end))(lambda: copy_all(self.tiles, share.tile_chunk))

    def fetch_next(self, step: Any) -> None:
        """Ask for the step that takes the slot of this one, which is done with."""
        self.fetch(step + self.slots.shape[0])

    def wait(self, step: Any) -> Any:
        """The step's slot, bf16[64, D], once it has come."""
        slot = self._slot(step)
        plgpu.barrier_wait(self.came.at[slot])
        return self.slots.at[slot]
