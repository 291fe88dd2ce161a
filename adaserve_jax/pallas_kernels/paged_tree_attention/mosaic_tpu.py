"""Paged tree attention on TPUs, in Mosaic: one program per query block, pages and tiles copied from HBM by hand.

Programs run one after another, and each starts the copies of the next one's first pages, so that pages are always on
their way while others are computed. A step takes several pages of all KV heads at once. Whatever depends on a position
(a context's length, a window, bits) is a mask; nothing here knows decode from prefill.

The pools must lie in HBM in the order of their axes: XLA copies a whole pool that does not, and lays one out so by
itself only if D is a multiple of 128. Models of another D therefore have pools padded with zeros
(`runtime.pools.pool_head_dim`); queries and in-flight keys are padded here, which leaves scores and sums as they are.
The page table lies in SMEM, of which TPUs have 1 MiB: R * pages must be under about 260,000.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import pl, pltpu, tpu_interpret
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import TILE, Operands

LOWEST = -1e30
LANES = 128
KEYS_PER_STEP = 512
"""Context keys of one step, at most; fewer where the table has fewer pages or the buffers would grow too large."""
# By the compiled programs (benchmarks/kernels/tile_sizes.py): on v5e with 2 KV heads and on v6e with 8, copying the 512
# keys of the next step takes longer than the instructions of this one above 1.1 GHz, so that larger steps gain nothing.
# Steps of 256 keys are bound by instructions on v6e. On v5p and 7x, steps of 1024 keys have a fifth fewer instructions
# per key, but spill more registers, take 10 of 16 MiB of VMEM, and make contexts below 512 keys dearer by half.
PAGE_BUFFER_BYTES = 4 * 2**20
"""VMEM for pages: keys and values, those computed and those in flight. A kernel has 16 MiB of VMEM by default."""

_START, _WAIT = methodcaller("start"), methodcaller("wait")
_Refs = namedtuple(
    "_Refs",
    "layer page_table row ctx_len floor tile num_tiles q words first sinks k v k_pool v_pool out "
    "k_pages v_pages k_tile v_tile peak mass slot pages_arrived tile_arrived",
)
"""All that a program sees. M is padded to whole sublane tiles; a step has n pages.

In SMEM, i32: layer [1]; page_table [R * pages]; row, ctx_len, floor, tile, num_tiles [B], floor being the first
position that any query of the block sees. In VMEM: q f[1, K, M, D]; words i32[1, M, W], bits by query row; first
i32[1, M, 1]; sinks f32[1, K, M, 1], the same for every block, or None; out f32[1, K, M, D], unnormalised until the
end. In HBM: k, v f[K, N / TILE, TILE, D] and the pools. Scratch: k_pages, v_pages f[2, n, K, S, D]; k_tile, v_tile
f[2, K, TILE, D]; peak, mass f32[K, M, LANES], every lane the same; slot i32[1] in SMEM, of the block's first step;
pages_arrived, tile_arrived: a semaphore for each of the two slots.
"""


def attend(operands: Operands, *, softcap: float | None = None, interpret: bool = False) -> jax.Array:
    """Return attention f32[B, K, M, D], normalised; query rows that see nothing are 0. interpret: simulate on a CPU."""
    num_blocks, kv_heads, rows, head_dim = operands.q.shape
    lanes = operands.k_pool.shape[4]
    padding = -rows % _sublanes(operands.q.dtype)

    def by_row(x: jax.Array) -> jax.Array:
        """Spread i32[B, Q, ...] over query rows, i32[B, M, ...], padded."""
        return jnp.pad(jnp.tile(x, (1, operands.group, 1)), ((0, 0), (0, padding), (0, 0)))

    def by_tile(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, lanes - head_dim))).reshape(kv_heads, -1, TILE, lanes)

    first = operands.first
    if first is None:
        first = jnp.zeros((num_blocks, operands.num_queries), jnp.int32)
    scalars = (
        operands.layer, operands.page_table.reshape(-1), operands.row, operands.ctx_len,
        jnp.maximum(jnp.min(first, axis=1), 0), operands.tile, operands.num_tiles,
    )  # fmt: skip
    q = jnp.pad(operands.q, ((0, 0), (0, 0), (0, padding), (0, lanes - head_dim)))
    in_vmem = (q, by_row(lax.bitcast_convert_type(operands.bits, jnp.int32)), by_row(first[..., None]))
    sinks = []
    if operands.sinks is not None:
        sinks = [jnp.pad(operands.sinks, ((0, 0), (0, padding)))[None, ..., None]]
    in_hbm = (by_tile(operands.k), by_tile(operands.v), operands.k_pool, operands.v_pool)
    out = pl.pallas_call(
        partial(
            _kernel,
            scale=head_dim**-0.5,
            table_pages=operands.page_table.shape[1],
            windowed=operands.first is not None,
            softcap=softcap,
            has_sinks=bool(sinks),
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_blocks,),
            in_specs=[
                *map(_of_block, in_vmem),
                *map(_of_all, sinks),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(in_hbm),
            ],
            out_specs=_of_block(q),
            scratch_shapes=_scratch(operands, rows + padding),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=tpu_interpret() if interpret else False,
        name="paged_tree_attention",
    )(*scalars, *in_vmem, *sinks, *in_hbm)
    return out[:, :, :rows, :head_dim]


def unsupported(*, head_dim: int, page_size: int, group: int, dtype: jnp.dtype) -> str:
    """Say why these shapes cannot run, completing "paged tree attention by 'mosaic_tpu' ...", or ""."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"supports float32 and bfloat16, not {jnp.dtype(dtype).name}"
    if head_dim % LANES:
        return f"supports pools whose head dimension is padded to a multiple of {LANES}, not {head_dim}"
    if page_size % _sublanes(dtype):
        return f"supports page sizes that are multiples of {_sublanes(dtype)}, not {page_size}"
    return ""


def _sublanes(dtype: jnp.dtype) -> int:
    """Return the rows of one VMEM tile: 8 of float32, 16 of bfloat16."""
    return 32 // jnp.dtype(dtype).itemsize


def _of_block(x: jax.Array) -> pl.BlockSpec:
    """Return the part of an array [B, ...] that belongs to the program's block."""
    return pl.BlockSpec((1, *x.shape[1:]), lambda block, *_: (block, *[0] * (x.ndim - 1)))


def _of_all(x: jax.Array) -> pl.BlockSpec:
    """Return all of an array, for every block."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _scratch(operands: Operands, rows: int) -> list[Any]:
    """Return the shapes of _Refs' scratch. rows: M, padded."""
    _, _, kv_heads, page_size, head_dim = operands.k_pool.shape
    dtype = operands.k_pool.dtype
    page_bytes = kv_heads * page_size * head_dim * dtype.itemsize
    fitting = min(KEYS_PER_STEP // page_size, PAGE_BUFFER_BYTES // (4 * page_bytes), operands.page_table.shape[1])
    pages = pltpu.VMEM((2, max(1, fitting), kv_heads, page_size, head_dim), dtype)
    tile = pltpu.VMEM((2, kv_heads, TILE, head_dim), operands.k.dtype)
    by_row = pltpu.VMEM((kv_heads, rows, LANES), jnp.float32)
    arrived = pltpu.SemaphoreType.DMA((2,))
    return [pages, pages, tile, tile, by_row, by_row, pltpu.SMEM((1,), jnp.int32), arrived, arrived]


def _kernel(
    *all_refs: Any, scale: float, table_pages: int, windowed: bool, softcap: float | None, has_sinks: bool
) -> None:
    at = _Refs._fields.index("sinks")
    refs = _Refs(*(all_refs if has_sinks else [*all_refs[:at], None, *all_refs[at:]]))
    absorb = partial(_absorb, refs, scale, softcap)
    copy_pages = partial(_copy_pages, refs, table_pages)
    block, num_blocks = pl.program_id(0), pl.num_programs(0)
    num_tiles, step_pages = refs.num_tiles[block], refs.k_pages.shape[1]

    @pl.when(block == 0)
    def _() -> None:
        refs.slot[0] = 0
        copy_pages(block, 0, 0, _START)

    @pl.when(num_tiles > 0)
    def _() -> None:
        _copy_tile(refs, block, 0, _START)

    refs.out[...] = jnp.zeros_like(refs.out)
    if has_sinks:
        refs.peak[...] = jnp.broadcast_to(refs.sinks[0], refs.peak.shape)
        refs.mass[...] = jnp.ones_like(refs.mass)
    else:
        refs.peak[...] = jnp.full_like(refs.peak, LOWEST)
        refs.mass[...] = jnp.zeros_like(refs.mass)
    first_slot = refs.slot[0]
    begin, end = _page_range(refs, block)
    num_steps = _ceil_div(end - begin, step_pages)

    def start_after(step: jax.Array, slot: jax.Array) -> None:
        """Start the copies of the step after this one, which may be the next block's first."""
        here = step + 1 < num_steps
        next_block = jnp.where(here, block, block + 1)

        @pl.when(next_block < num_blocks)
        def _() -> None:
            copy_pages(next_block, jnp.where(here, step + 1, 0), slot, _START)

    @pl.when(num_steps == 0)
    def _() -> None:
        start_after(num_steps, first_slot)

    def context_step(step: jax.Array, _: None) -> None:
        slot = lax.rem(first_slot + step, 2)
        start_after(step, 1 - slot)
        copy_pages(block, step, slot, _WAIT)
        _attend_pages(refs, absorb, block, begin + step * step_pages, slot, windowed)

    def tile_step(index: jax.Array, _: None) -> None:
        @pl.when(index + 1 < num_tiles)
        def _() -> None:
            _copy_tile(refs, block, index + 1, _START)

        _copy_tile(refs, block, index, _WAIT)
        _attend_tile(refs, absorb, index)

    lax.fori_loop(0, num_steps, context_step, None)
    refs.slot[0] = lax.rem(first_slot + num_steps, 2)
    lax.fori_loop(0, num_tiles, tile_step, None)
    for head in range(refs.q.shape[1]):
        refs.out[0, head] = refs.out[0, head] / jnp.maximum(refs.mass[head, :, :1], 1e-30)


def _ceil_div(number: jax.Array, size: int) -> jax.Array:
    """Divide numbers >= 0, rounding up. `//` would ask for the kind of TPU, and lowering must not need one."""
    return lax.div(number + size - 1, size)


def _page_range(refs: _Refs, block: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the block's first page and the one after its last, by index in its row of the table."""
    page_size = refs.k_pages.shape[3]
    end = _ceil_div(refs.ctx_len[block], page_size)
    return jnp.minimum(lax.div(refs.floor[block], page_size), end), end


def _copy_pages(refs: _Refs, table_pages: int, block: Any, step: Any, slot: Any, action: Callable[[Any], None]) -> None:
    """Start the copies of a step's pages, or wait for them. Pages past the context are not copied."""
    step_pages = refs.k_pages.shape[1]
    begin, end = _page_range(refs, block)
    at = begin + step * step_pages

    def one(index: jax.Array, _: None) -> None:
        page = refs.page_table[refs.row[block] * table_pages + at + index]
        for pool, pages in ((refs.k_pool, refs.k_pages), (refs.v_pool, refs.v_pages)):
            source, target = pool.at[refs.layer[0], page], pages.at[slot, index]
            action(pltpu.make_async_copy(source, target, refs.pages_arrived.at[slot]))

    lax.fori_loop(0, jnp.clip(end - at, 0, step_pages), one, None)


def _copy_tile(refs: _Refs, block: jax.Array, index: Any, action: Callable[[Any], None]) -> None:
    """Start the copies of a block's in-flight tile, or wait for them."""
    slot = lax.rem(index, 2)
    for every, tile in ((refs.k, refs.k_tile), (refs.v, refs.v_tile)):
        source = every.at[:, refs.tile[block] + index]
        action(pltpu.make_async_copy(source, tile.at[slot], refs.tile_arrived.at[slot]))


def _attend_pages(
    refs: _Refs, absorb: Callable[..., None], block: jax.Array, page: jax.Array, slot: jax.Array, windowed: bool
) -> None:
    """Absorb the pages of one step, of which `page` is the first."""
    _, num_pages, kv_heads, page_size, head_dim = refs.k_pages.shape
    floor, ctx_len, num_keys = refs.floor[block], refs.ctx_len[block], num_pages * page_size
    start = page * page_size

    def clear_page(index: jax.Array, _: None) -> None:
        """Set values that no query sees to 0: they may be NaN, and 0 * NaN is NaN."""
        position = lax.broadcasted_iota(jnp.int32, (kv_heads, page_size, head_dim), 1) + start + index * page_size
        values = refs.v_pages[slot, index].astype(jnp.float32)
        values = jnp.where((position >= floor) & (position < ctx_len), values, 0.0)
        refs.v_pages[slot, index] = values.astype(refs.v_pages.dtype)

    @pl.when((start < floor) | (start + num_keys > ctx_len))
    def _() -> None:
        lax.fori_loop(0, num_pages, clear_page, None)

    position = start + lax.broadcasted_iota(jnp.int32, (refs.q.shape[2], num_keys), 1)
    visible = position < ctx_len
    if windowed:
        visible &= position >= refs.first[0]
    for head in range(kv_heads):
        keys, values = (x[slot, :, head].reshape(num_keys, head_dim) for x in (refs.k_pages, refs.v_pages))
        absorb(head, keys, values, visible)


def _attend_tile(refs: _Refs, absorb: Callable[..., None], index: jax.Array) -> None:
    """Absorb the block's in-flight tile of this index, behind its bits."""
    words, slot = refs.words[0], lax.rem(index, 2)
    at = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    low, high = (jnp.sum(jnp.where(at == 2 * index + half, words, 0), axis=1, keepdims=True) for half in (0, 1))
    column = lax.broadcasted_iota(jnp.int32, (words.shape[0], TILE), 1)
    by_key = jnp.where(column < 32, low, high)
    visible = lax.shift_right_logical(by_key, column & 31) & 1 != 0
    for head in range(refs.q.shape[1]):
        absorb(head, refs.k_tile[slot, head], refs.v_tile[slot, head], visible)


def _absorb(
    refs: _Refs, scale: float, softcap: float | None, head: int, keys: jax.Array, values: jax.Array, visible: jax.Array
) -> None:
    """Do one online-softmax step of one KV head. keys, values: f[n, D], values finite; visible: bool[M, n]."""
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scores = dot(refs.q[0, head], keys, (((1,), (1,)), ((), ()))) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, LOWEST)
    old_peak = refs.peak[head, :, :1]
    peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
    weight = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    shrink = jnp.exp(old_peak - peak)
    mass = refs.mass[head, :, :1] * shrink + jnp.sum(weight, axis=1, keepdims=True)
    update = dot(weight.astype(values.dtype), values, (((1,), (0,)), ((), ())))
    refs.out[0, head] = refs.out[0, head] * shrink + update
    refs.peak[head] = jnp.broadcast_to(peak, refs.peak.shape[1:])
    refs.mass[head] = jnp.broadcast_to(mass, refs.mass.shape[1:])
