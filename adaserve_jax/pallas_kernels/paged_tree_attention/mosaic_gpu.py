"""Paged tree attention for Hopper GPUs: what the kernel of mosaic_gpu_kernel.py is given, and what becomes of its sums.

A tile of up to 64 query rows is shared by splits, each with a run of its keys; their partial results are merged here.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import gpu_interpret, plgpu
from adaserve_jax.pallas_kernels.paged_tree_attention.mosaic_gpu_kernel import DEPTH, kernel
from adaserve_jax.pallas_kernels.paged_tree_attention.mosaic_gpu_keys import Block, Inputs, Sizes
from adaserve_jax.pallas_kernels.paged_tree_attention.mosaic_gpu_splits import choose_splits, merge_splits
from adaserve_jax.pallas_kernels.paged_tree_attention.operands import TILE, Operands
from adaserve_jax.pallas_kernels.paged_tree_attention.warpgroup import ROWS, Warpgroup, aliased, shared


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
    """f32[B, K, M, D], normalised; query rows that see nothing are 0. interpret: simulated, on the CPU."""
    sizes = _sizes(operands)
    num_blocks, kv_heads, num_rows, head_dim = operands.q.shape
    cells = (sizes.num_splits, num_blocks, kv_heads, sizes.row_tiles)
    run = plgpu.kernel(
        partial(kernel, sizes=sizes, group=Warpgroup(interpret)),
        out_type=(
            jax.ShapeDtypeStruct((math.prod(cells), sizes.rows, head_dim), jnp.float32),
            *[jax.ShapeDtypeStruct((math.prod(cells), ROWS), jnp.float32)] * 2,
        ),
        scratch_types=_scratch(sizes, interpret),
        grid=(sizes.num_splits, kv_heads, num_blocks, sizes.row_tiles),
        grid_names=("split", "head", "block", "row_tile"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        kernel_name="paged_tree_attention",
        interpret=gpu_interpret() if interpret else None,
    )
    weighted, peak, mass = run(*(x for x in _inputs(operands, sizes) if x is not None))
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
        num_blocks=num_blocks,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=operands.k_pool.shape[1],
        num_tiles=operands.k.shape[1] // TILE,
        chunk=min(page_size, TILE),
        rows=-(-num_rows // 8) * 8 if row_tiles == 1 else ROWS,
        row_tiles=row_tiles,
        num_splits=choose_splits(row_tiles=num_blocks * kv_heads * row_tiles, max_slots=max_slots),
    )


def _scratch(sizes: Sizes, interpret: bool) -> list[Any]:
    """Shared memory: queries; slots of keys and of values, whose room the results take at the end; barriers."""
    depth = DEPTH[sizes.head_dim]
    slots = shared((depth, TILE, sizes.head_dim), jnp.bfloat16)
    results = (shared((ROWS, sizes.head_dim), jnp.float32), *[plgpu.SMEM((ROWS,), jnp.float32)] * 2)
    came = plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=depth)
    q = shared((ROWS, sizes.head_dim), jnp.bfloat16)
    return [q, aliased((slots, slots), results, interpret=interpret), plgpu.Barrier(), came, came]


def _inputs(operands: Operands, sizes: Sizes) -> Inputs:
    """The kernel's inputs: every array that is copied has one leading index, and behind it what one copy takes."""
    num_rows, head_dim = operands.q.shape[2:]
    padding = sizes.row_tiles * sizes.rows - num_rows
    q = jnp.pad(operands.q, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(-1, sizes.rows, head_dim)
    floor = jnp.zeros_like(operands.ctx_len) if operands.first is None else jnp.min(operands.first, axis=1)
    block = Block(operands.row, operands.ctx_len, jnp.maximum(floor, 0), operands.tile, operands.num_tiles)

    def by_row(x: jax.Array) -> jax.Array:
        """i32[B, row_tiles, ..., ROWS] from [B, ..., Q]: of each query row, what its query has."""
        rows = jnp.tile(lax.bitcast_convert_type(x, jnp.int32), operands.group)
        rows = jnp.pad(rows, [(0, 0)] * (x.ndim - 1) + [(0, sizes.row_tiles * ROWS - num_rows)])
        return jnp.moveaxis(rows.reshape(*x.shape[:-1], sizes.row_tiles, ROWS), -2, 1)

    return Inputs(
        q,
        *(x.reshape(-1, sizes.chunk, head_dim) for x in (operands.k_pool, operands.v_pool, operands.k, operands.v)),
        layer=operands.layer,
        blocks=jnp.stack(block, axis=1),
        page_table=operands.page_table,
        words=by_row(operands.bits.swapaxes(1, 2)),
        first=None if operands.first is None else by_row(operands.first),
    )
