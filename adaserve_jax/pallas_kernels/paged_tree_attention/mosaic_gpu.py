"""Paged tree attention for Hopper GPUs, in Pallas' Mosaic GPU dialect: TMA copies, wgmma products, split keys.

One thread block of one warpgroup per block of queries, KV head, tile of 64 query rows and split. The keys of a block
are slots of 64: those of its pages first, then its in-flight tiles; each split takes an equal run of them, keeps
`DEPTH` slots of keys and values on their way into shared memory, and leaves its sums to be merged (splits.py). One
warpgroup both asks for the copies and uses them, so no other barrier than "these bytes have come" is ever waited for.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import gpu_interpret, pl, plgpu
from adaserve_jax.pallas_kernels.paged_tree_attention.mosaic_gpu_splits import choose_splits, merge_splits
from adaserve_jax.pallas_kernels.paged_tree_attention.operands import TILE, Operands
from adaserve_jax.pallas_kernels.paged_tree_attention.warpgroup import ROWS, Warpgroup, across, aliased, shared

DEPTH = {64: 4, 128: 3}
"""Slots in shared memory by head dimension: what lets two thread blocks live on one multiprocessor."""
LOWEST = -1e30
"""Peak of a row that has seen nothing. Finite, so that a masked score of -inf weighs exp2(-inf - peak) = 0."""


class Sizes(NamedTuple):
    """Static sizes of one call. chunk: keys of one copy, a page or 64 of its keys; rows: query rows of a tile that
    are loaded and stored, a multiple of 8 and at most 64; row_tiles: tiles per block and KV head."""

    num_blocks: int
    kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    chunk: int
    rows: int
    row_tiles: int
    num_splits: int
    windowed: bool

    @property
    def copies(self) -> int:
        """Copies of keys, or of values, that fill a slot."""
        return TILE // self.chunk


def unsupported(*, head_dim: int, page_size: int, group: int, dtype: jnp.dtype) -> str:
    """Why these shapes cannot run, as the end of a sentence, or ""."""
    if dtype != jnp.bfloat16:
        return f"supports bfloat16 queries and pools, not {jnp.dtype(dtype).name}"
    if head_dim not in DEPTH:
        return f"supports head dimensions {' and '.join(map(str, DEPTH))}, not {head_dim}"
    if page_size % TILE and page_size not in (8, 16, 32):
        return f"supports pages of 8, 16, 32 and multiples of {TILE} slots, not {page_size}"
    return ""


def attend(operands: Operands, *, interpret: bool = False) -> jax.Array:
    """f32[B, K, M, D], normalised; query rows that see nothing are 0. interpret: on the CPU, simulated."""
    sizes = _sizes(operands)
    num_blocks, kv_heads, num_rows, head_dim = operands.q.shape
    cells = (sizes.num_splits, num_blocks, kv_heads, sizes.row_tiles)
    kernel = plgpu.kernel(
        partial(_kernel, sizes=sizes, group=Warpgroup(interpret)),
        out_type=(
            jax.ShapeDtypeStruct((math.prod(cells), sizes.rows, head_dim), jnp.float32),
            *[jax.ShapeDtypeStruct((math.prod(cells), ROWS), jnp.float32)] * 2,
        ),
        scratch_types=_scratch(sizes, interpret),
        grid=(num_blocks, kv_heads, sizes.num_splits, sizes.row_tiles),
        grid_names=("block", "head", "split", "row_tile"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=512
        ),
        interpret=gpu_interpret() if interpret else None,
    )
    weighted, peak, mass = kernel(*_arguments(operands, sizes))
    out = merge_splits(
        weighted.reshape(*cells, sizes.rows, head_dim),
        *(x.reshape(*cells, ROWS)[..., : sizes.rows] for x in (peak, mass)),
    )
    return out.reshape(num_blocks, kv_heads, -1, head_dim)[:, :, :num_rows]


def _sizes(operands: Operands) -> Sizes:
    num_blocks, kv_heads, num_rows, head_dim = operands.q.shape
    row_tiles = -(-num_rows // ROWS)
    num_pages, page_size = operands.page_table.shape[1], operands.page_size
    max_slots = -(-num_pages * page_size // TILE) + operands.bits.shape[2] * 32 // TILE
    return Sizes(
        num_blocks, kv_heads, head_dim, page_size, operands.k_pool.shape[1], chunk=min(page_size, TILE),
        rows=-(-num_rows // 8) * 8 if row_tiles == 1 else ROWS, row_tiles=row_tiles,
        num_splits=choose_splits(row_tiles=num_blocks * kv_heads * row_tiles, max_slots=max_slots),
        windowed=operands.first is not None,
    )  # fmt: skip


def _scratch(sizes: Sizes, interpret: bool) -> list[Any]:
    """Shared memory: queries; slots of keys and of values, whose room the results take at the end; barriers."""
    depth = DEPTH[sizes.head_dim]
    slots = shared((depth, TILE, sizes.head_dim), jnp.bfloat16)
    results = (shared((ROWS, sizes.head_dim), jnp.float32), *[plgpu.SMEM((ROWS,), jnp.float32)] * 2)
    arrived = plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=depth)
    return [
        shared((ROWS, sizes.head_dim), jnp.bfloat16),
        aliased((slots, slots), results, interpret=interpret),
        plgpu.Barrier(),
        arrived,
        arrived,
    ]


class Block(NamedTuple):
    """What the kernel reads of a block as scalars: one row of i32[B, 6]. floor: first context position that any of
    its queries sees."""

    layer: Any
    row: Any
    ctx_len: Any
    floor: Any
    tile: Any
    num_tiles: Any


def _arguments(operands: Operands, sizes: Sizes) -> list[jax.Array]:
    """The kernel's inputs: every array that is copied has one leading index, and the keys of one copy behind it."""
    num_blocks, kv_heads, num_rows, head_dim = operands.q.shape
    whole = sizes.row_tiles * sizes.rows
    q = jnp.pad(operands.q, ((0, 0), (0, 0), (0, whole - num_rows), (0, 0)))
    keys = [x.reshape(-1, sizes.chunk, head_dim) for x in (operands.k_pool, operands.v_pool, operands.k, operands.v)]
    first = jnp.zeros((num_blocks, 1), jnp.int32) if operands.first is None else jnp.maximum(operands.first, 0)
    blocks = Block(
        jnp.broadcast_to(operands.layer, num_blocks), operands.row, operands.ctx_len, jnp.min(first, axis=1),
        operands.tile, operands.num_tiles,
    )  # fmt: skip

    def by_row(x: jax.Array) -> jax.Array:
        """i32[..., row_tiles, ROWS] from [..., Q]: the value of each query row's query."""
        rows = jnp.tile(x, operands.group)
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, sizes.row_tiles * ROWS - num_rows)])
        return lax.bitcast_convert_type(rows, jnp.int32).reshape(*x.shape[:-1], sizes.row_tiles, ROWS)

    return [
        q.reshape(-1, sizes.rows, head_dim), *keys, jnp.stack(blocks, axis=1).astype(jnp.int32), operands.page_table,
        by_row(operands.bits.swapaxes(1, 2)), *([by_row(first)] if sizes.windowed else []),
    ]  # fmt: skip


def _kernel(*refs: Any, sizes: Sizes, group: Warpgroup) -> None:
    q_ref, k_pool, v_pool, k_tiles, v_tiles, blocks, page_table, words, *refs_left = refs
    first_rows = refs_left.pop(0) if sizes.windowed else None
    weighted_out, peak_out, mass_out, q, aliases, q_came, k_came, v_came = refs_left
    (k_slots, v_slots), (weighted_stage, peak_stage, mass_stage) = aliases
    index, head, split, row_tile = (lax.axis_index(name) for name in ("block", "head", "split", "row_tile"))
    block = Block(*(blocks[index, field] for field in range(len(Block._fields))))
    depth, head_dim = DEPTH[sizes.head_dim], sizes.head_dim
    rows = pl.ds(0, sizes.rows)

    first_slot = lax.div(block.floor, TILE)
    num_slots = jnp.maximum(lax.div(block.ctx_len + TILE - 1, TILE) - first_slot, 0)
    total = num_slots + block.num_tiles
    start, end = (lax.div(total * (split + i), sizes.num_splits) for i in (0, 1))
    first_tile_step = jnp.clip(num_slots, start, end)

    def page_chunk(step: Any, copy: int) -> Any:
        """Index in a pool of the `copy`-th chunk of a slot; of the last one in use where the context ends before."""
        position = jnp.minimum((first_slot + step) * TILE + copy * sizes.chunk, block.ctx_len - 1)
        page = page_table[block.row, lax.div(position, sizes.page_size)]
        per_page = sizes.page_size // sizes.chunk
        within = lax.div(lax.rem(position, sizes.page_size), sizes.chunk)
        return ((block.layer * sizes.num_pages + page) * sizes.kv_heads + head) * per_page + within

    def tile_chunk(step: Any, copy: int) -> Any:
        tiles = k_tiles.shape[0] // (sizes.kv_heads * sizes.copies)
        return (head * tiles + block.tile + step - num_slots) * sizes.copies + copy

    def fetch(step: Any, pool: Any, tiles: Any, slots: Any, came: Any) -> None:
        """Ask for the keys or values of a step, into the slot that step - depth has left."""
        slot = lax.rem(step - start, depth)

        def copy_all(source: Any, chunk_of: Any) -> None:
            for copy in range(sizes.copies):
                to = slots.at[slot, pl.ds(copy * sizes.chunk, sizes.chunk)]
                plgpu.copy_gmem_to_smem(source.at[chunk_of(step, copy)], to, came.at[slot])

        pl.when(step < first_tile_step)(lambda: copy_all(pool, page_chunk))
        pl.when((step >= first_tile_step) & (step < end))(lambda: copy_all(tiles, tile_chunk))

    fetch_keys = partial(fetch, pool=k_pool, tiles=k_tiles, slots=k_slots, came=k_came)
    fetch_values = partial(fetch, pool=v_pool, tiles=v_tiles, slots=v_slots, came=v_came)

    cell = ((split * sizes.num_blocks + index) * sizes.kv_heads + head) * sizes.row_tiles + row_tile
    q_cell = (index * sizes.kv_heads + head) * sizes.row_tiles + row_tile
    plgpu.copy_gmem_to_smem(q_ref.at[q_cell], q.at[rows], q_came)
    for ahead in range(depth):
        fetch_keys(start + ahead)
        fetch_values(start + ahead)
    plgpu.barrier_wait(q_came)

    def live(at: jax.Array) -> jax.Array:
        return (at >= block.floor) & (at < block.ctx_len)

    def page_visible(step: Any) -> jax.Array:
        at = (first_slot + step) * TILE + group.index(TILE, 1)
        if first_rows is None:
            return live(at)
        return live(at) & (at >= across(group.load_rows(first_rows.at[index, row_tile]), TILE))

    def tile_visible(step: Any) -> jax.Array:
        word = (step - num_slots) * (TILE // 32)
        low, high = (across(group.load_rows(words.at[index, word + i, row_tile]), TILE) for i in (0, 1))
        column = group.index(TILE, 1)
        return (jnp.where(column < 32, low, high) >> lax.rem(column, 32)) & 1 != 0

    def clear_dead_values(step: Any, values: Any) -> None:
        """Zero the values of a page slot that no query sees: they may be NaN, and 0 * NaN is not 0."""
        base = (first_slot + step) * TILE

        @pl.when((base < block.floor) | (base + TILE > block.ctx_len))
        def _clear() -> None:
            values[...] = jnp.where(live(base + group.index(head_dim, 0)), values[...], 0)
            plgpu.commit_smem()

    def absorb(step: Any, state: Any, *, in_pages: bool) -> Any:
        weighted, peak, mass = state
        slot = lax.rem(step - start, depth)
        plgpu.barrier_wait(k_came.at[slot])
        scores = group.product(q, k_slots.at[slot])
        fetch_keys(step + depth)
        visible = page_visible(step) if in_pages else tile_visible(step)
        scores = jnp.where(visible, scores * (head_dim**-0.5 * math.log2(math.e)), -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weight = jnp.exp2(scores - across(new_peak, TILE))
        shrink = jnp.exp2(peak - new_peak)
        mass = mass * shrink + jnp.sum(weight, axis=1)
        weighted = weighted * across(shrink, head_dim)
        plgpu.barrier_wait(v_came.at[slot])
        if in_pages:
            clear_dead_values(step, v_slots.at[slot])
        weighted = group.accumulate(weighted, weight.astype(jnp.bfloat16), v_slots.at[slot])
        fetch_values(step + depth)
        return weighted, new_peak, mass

    state = (group.full((ROWS, head_dim), 0.0), group.full((ROWS,), LOWEST), group.full((ROWS,), 0.0))
    state = lax.fori_loop(start, first_tile_step, partial(absorb, in_pages=True), state)
    weighted, peak, mass = lax.fori_loop(first_tile_step, end, partial(absorb, in_pages=False), state)

    weighted_stage[...], peak_stage[...], mass_stage[...] = weighted, peak, mass
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(weighted_stage.at[rows], weighted_out.at[cell])
    plgpu.copy_smem_to_gmem(peak_stage, peak_out.at[cell])
    plgpu.copy_smem_to_gmem(mass_stage, mass_out.at[cell])
    plgpu.wait_smem_to_gmem(0)
