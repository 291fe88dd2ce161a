"""Paged tree attention for Hopper GPUs, in Mosaic: TMA copies, wgmma products, a running softmax over a share of keys.

One thread block of one warpgroup runs per split, KV head, block of queries and tile of up to 64 query rows. The splits
of a tile take equal runs of its keys, and their partial results are merged afterwards. A block's keys are slots of 64:
those of its pages, then its in-flight tiles; one step takes one slot. `DEPTH` slots of keys and of values are in shared
memory or on their way. The warpgroup that uses a slot starts the copy of the next, so it only ever waits for copies.

`Warpgroup` has a stand-in that GPU interpret mode runs. That mode has no register layouts, no products with an operand
in registers and no aliased shared memory; copies, barriers, loops and masks run there as they are written. Rows are
query rows, columns are keys or features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import gpu_interpret, gpu_load, pl, plgpu
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import TILE, Operands


class KernelSizes(NamedTuple):
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
        """Return the copies of keys, or of values, that fill a slot."""
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

    sizes: KernelSizes
    inputs: Inputs
    block: Block
    layer: Any
    head: Any
    first_slot: Any
    num_slots: Any
    start: Any
    end: Any

    @classmethod
    def of(cls, sizes: KernelSizes, inputs: Inputs, block: Block, head: Any, split: Any) -> Share:
        first_slot = lax.div(block.floor, TILE)
        num_slots = jnp.maximum(lax.div(block.ctx_len + TILE - 1, TILE) - first_slot, 0)
        steps = num_slots + block.num_tiles
        start, end = (lax.div(steps * (split + i), sizes.num_splits) for i in (0, 1))
        return cls(sizes, inputs, block, inputs.layer[0], head, first_slot, num_slots, start, end)

    @property
    def first_tile_step(self) -> Any:
        return jnp.clip(self.num_slots, self.start, self.end)

    def position(self, step: Any) -> Any:
        """Return the context position of a page slot's first key."""
        return (self.first_slot + step) * TILE

    def live(self, position: jax.Array) -> jax.Array:
        """Return bool: positions whose key some query of the block sees."""
        return (position >= self.block.floor) & (position < self.block.ctx_len)

    def page_chunk(self, step: Any, copy: int) -> Any:
        """Return the index in a pool of chunk `copy` of a page slot. A chunk without a live key is replaced by one with
        a live key, since its page may not exist."""
        sizes = self.sizes
        position = self.position(step) + copy * sizes.chunk
        position = jnp.minimum(jnp.maximum(position, self.block.floor), self.block.ctx_len - 1)
        page = self.inputs.page_table[self.block.row, lax.div(position, sizes.page_size)]
        per_page = sizes.page_size // sizes.chunk
        within = lax.div(lax.rem(position, sizes.page_size), sizes.chunk)
        return ((self.layer * sizes.num_pages + page) * sizes.kv_heads + self.head) * per_page + within

    def tile_chunk(self, step: Any, copy: int) -> Any:
        """Return the index of chunk `copy` of an in-flight tile."""
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
        """Start the copy of a step's slot, if the share has that step. Its last content must have been read."""
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
        """Start the copy of the step that reuses the slot of this one, whose reads are over."""
        self.fetch(step + self.slots.shape[0])

    def wait(self, step: Any) -> Any:
        """Wait for the step's slot, bf16[64, D]."""
        slot = self._slot(step)
        plgpu.barrier_wait(self.came.at[slot])
        return self.slots.at[slot]


ROWS = 64
"""Rows of a warpgroup's matrix product."""


@dataclass(frozen=True)
class Warpgroup:
    """One warpgroup's operations on arrays in registers: `[ROWS, columns]` matrices and `[ROWS]` vectors."""

    interpret: bool

    def _place(self, x: jax.Array) -> jax.Array:
        if self.interpret:
            return x
        return plgpu.layout_cast(x, plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1))

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """Return f32 of that shape, all `value`."""
        return self._place(jnp.full(shape, value, jnp.float32))

    def index(self, columns: int, axis: int) -> jax.Array:
        """Return i32[ROWS, columns], each element its own row (axis 0) or column (axis 1)."""
        return self._place(lax.broadcasted_iota(jnp.int32, (ROWS, columns), axis))

    def load_rows(self, ref: Any) -> jax.Array:
        """Load [ROWS] from global memory."""
        if self.interpret:
            return ref[...]
        return gpu_load(ref, plgpu.Layout.WGMMA.reduce(1))

    def product(self, a: Any, b: Any) -> jax.Array:
        """Return a @ b.T, f32[ROWS, N]. a: bf16[ROWS, D], b: bf16[N, D], both in shared memory. Waits."""
        if self.interpret:
            return a[...].astype(jnp.float32) @ b[...].astype(jnp.float32).T

        def multiply(total: Any) -> jax.Array:
            plgpu.wgmma(total, a, b.transpose((1, 0)))
            return total[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, b.shape[0]), jnp.float32))

    def accumulate(self, total: jax.Array, a: jax.Array, b: Any) -> jax.Array:
        """Return total + a @ b, f32[ROWS, N]. a: bf16[ROWS, S], in registers; b: bf16[S, N], shared memory. Waits."""
        if self.interpret:
            return total + a.astype(jnp.float32) @ b[...].astype(jnp.float32)

        def multiply(total_ref: Any) -> None:
            plgpu.wgmma(total_ref, a, b)

        return cast(jax.Array, pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total)))


def across(rows: jax.Array, columns: int) -> jax.Array:
    """Broadcast [ROWS] to [ROWS, columns]."""
    return lax.broadcast_in_dim(rows, (ROWS, columns), (0,))


def shared(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Describe shared memory in swizzled tiles of 8 rows by 128 bytes, as products and copies need it."""
    tile = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(128)))


def aliased(*groups: Any, interpret: bool) -> Any:
    """Describe groups of shared memory that share one place; only one of them is in use at a time."""
    return groups if interpret else plgpu.RefUnion(*groups)


DEPTH = {64: 4, 128: 3}
"""Slots in shared memory, by head dimension: few enough that two thread blocks share a multiprocessor."""
LOWEST = -1e30
"""Peak of a row that has seen nothing. Finite, so that a masked score of -inf weighs exp2(-inf - peak) = 0."""


@dataclass(frozen=True)
class Visibility:
    """Visibility of the keys of a step to each query row, and values of a page slot that no row may read.

    words: i32[W, ROWS], in global memory; first: i32[ROWS], first context position that each row sees, or None.
    """

    share: Share
    group: Warpgroup
    words: Any
    first: jax.Array | None

    def in_pages(self, step: Any) -> jax.Array:
        """Return bool[ROWS, TILE]."""
        position = self.share.position(step) + self.group.index(TILE, 1)
        live = self.share.live(position)
        return live if self.first is None else live & (position >= across(self.first, TILE))

    def in_tiles(self, step: Any) -> jax.Array:
        """Return bool[ROWS, TILE]."""
        word = (step - self.share.num_slots) * (TILE // 32)
        low, high = (across(self.group.load_rows(self.words.at[word + i]), TILE) for i in (0, 1))
        column = self.group.index(TILE, 1)
        return (jnp.where(column < 32, low, high) >> lax.rem(column, 32)) & 1 != 0

    def clear_dead_values(self, step: Any, values: Any) -> None:
        """Zero the values of a page slot, bf16[TILE, D], that no query sees: they may be NaN, and 0 * NaN is NaN."""
        position = self.share.position(step)

        @pl.when((position < self.share.block.floor) | (position + TILE > self.share.block.ctx_len))
        def _clear() -> None:
            live = self.share.live(position + self.group.index(values.shape[1], 0))
            values[...] = jnp.where(live, values[...], 0)
            plgpu.commit_smem()


def kernel(*refs: Any, sizes: KernelSizes, group: Warpgroup, softcap: float | None = None) -> None:
    """Attend to one share of the keys and leave its sums, which merge_splits describes, at its place in the outputs.

    refs: the inputs that there are; weighted f32[cells, rows, D], peak and mass f32[cells, ROWS]; shared memory of
    queries, of slots or results, and the barriers of queries, keys and values.
    """
    *given, weighted_out, peak_out, mass_out, q, aliases, q_came, k_came, v_came = refs
    inputs = Inputs(*given, *[None] * (len(Inputs._fields) - len(given)))
    (k_slots, v_slots), stages = aliases
    split, head, index, row_tile = (lax.axis_index(name) for name in ("split", "head", "block", "row_tile"))
    block = Block(*(inputs.blocks[index, field] for field in range(len(Block._fields))))
    share = Share.of(sizes, inputs, block, head, split)
    keys = Pipeline(share, inputs.k_pool, inputs.k, k_slots, k_came)
    values = Pipeline(share, inputs.v_pool, inputs.v, v_slots, v_came)
    first = None if inputs.first is None else group.load_rows(inputs.first.at[index, row_tile])
    visibility = Visibility(share, group, inputs.words.at[index, row_tile], first)

    rows = pl.ds(0, sizes.rows)
    cell = (index * sizes.kv_heads + head) * sizes.row_tiles + row_tile
    plgpu.copy_gmem_to_smem(inputs.q.at[cell], q.at[rows], q_came)
    for ahead in range(DEPTH[sizes.head_dim]):
        keys.fetch(share.start + ahead)
        values.fetch(share.start + ahead)
    plgpu.barrier_wait(q_came)
    weighted, peak, mass = _attend_share(share, keys, values, visibility, group, q, softcap)

    out_cell = split * (sizes.num_blocks * sizes.kv_heads * sizes.row_tiles) + cell
    weighted_stage, peak_stage, mass_stage = stages
    weighted_stage[...], peak_stage[...], mass_stage[...] = weighted, peak, mass
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(weighted_stage.at[rows], weighted_out.at[out_cell])
    plgpu.copy_smem_to_gmem(peak_stage, peak_out.at[out_cell])
    plgpu.copy_smem_to_gmem(mass_stage, mass_out.at[out_cell])
    plgpu.wait_smem_to_gmem(0)


def _attend_share(
    share: Share,
    keys: Pipeline,
    values: Pipeline,
    visibility: Visibility,
    group: Warpgroup,
    q: Any,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return weighted sum f32[ROWS, D], peak (powers of two) and mass f32[ROWS]. q: bf16[ROWS, D], shared memory."""
    head_dim = share.sizes.head_dim
    scale, to_powers_of_two = head_dim**-0.5, math.log2(math.e)

    def in_powers_of_two(scores: jax.Array) -> jax.Array:
        if softcap is None:
            return scores * (scale * to_powers_of_two)
        return jnp.tanh(scores * (scale / softcap)) * (softcap * to_powers_of_two)

    def absorb(step: Any, state: Any, visible: jax.Array, scores: jax.Array, *, in_pages: bool) -> Any:
        weighted, peak, mass = state
        scores = jnp.where(visible, in_powers_of_two(scores), -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weight = jnp.exp2(scores - across(new_peak, TILE))
        shrink = jnp.exp2(peak - new_peak)
        mass = mass * shrink + jnp.sum(weight, axis=1)
        weighted = weighted * across(shrink, head_dim)
        slot = values.wait(step)
        if in_pages:
            visibility.clear_dead_values(step, slot)
        weighted = group.accumulate(weighted, weight.astype(jnp.bfloat16), slot)
        values.fetch_next(step)
        return weighted, new_peak, mass

    def score(step: Any) -> jax.Array:
        scores = group.product(q, keys.wait(step))
        keys.fetch_next(step)
        return scores

    def page_step(step: Any, state: Any) -> Any:
        scores = score(step)
        return absorb(step, state, visibility.in_pages(step), scores, in_pages=True)

    def tile_step(step: Any, state: Any) -> Any:
        visible = visibility.in_tiles(step)  # first, for it waits for global memory
        return absorb(step, state, visible, score(step), in_pages=False)

    state = (group.full((ROWS, head_dim), 0.0), group.full((ROWS,), LOWEST), group.full((ROWS,), 0.0))
    state = lax.fori_loop(share.start, share.first_tile_step, page_step, state)
    return lax.fori_loop(share.first_tile_step, share.end, tile_step, state)


NUM_SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200."""
CTAS_PER_SM = 4
"""Thread blocks to make for each: two run at a time, and as many again even out unequal contexts."""
MIN_SLOTS = 4
"""Fewest slots of 64 keys worth a split of their own, at the largest context that the page table can hold."""


def choose_splits(*, row_tiles: int, max_slots: int) -> int:
    """Return the splits per tile of query rows, at least 1. row_tiles: tiles over all blocks and KV heads;
    max_slots: slots of 64 keys of the largest context, by the page table's width, and of in-flight keys."""
    wanted = NUM_SMS * CTAS_PER_SM // row_tiles
    return max(1, min(wanted, max_slots // MIN_SLOTS))


def merge_splits(weighted: jax.Array, peak: jax.Array, mass: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Merge partial results over axis 0 to f32[..., D]; rows that saw nothing are 0.

    weighted: f32[splits, ..., D], sums of values by 2 ** (score - peak); peak, mass: f32[splits, ...], the largest
    score and the sum of weights, scores in powers of two. sinks: f32, broadcasts to [...]: scores without a value.
    """
    top = jnp.max(peak, axis=0)
    if sinks is not None:
        sinks = sinks * math.log2(math.e)
        top = jnp.maximum(top, sinks)
    shrink = jnp.exp2(peak - top)
    total, weights = jnp.sum(weighted * shrink[..., None], axis=0), jnp.sum(mass * shrink, axis=0)
    if sinks is not None:
        weights += jnp.exp2(sinks - top)
    return total / jnp.maximum(weights, 1e-30)[..., None]


def unsupported(*, head_dim: int, page_size: int, group: int, dtype: jnp.dtype) -> str:
    """Say why these shapes cannot run, as the end of a sentence; "" if they can."""
    if dtype != jnp.bfloat16:
        return f"supports bfloat16 queries and pools, not {jnp.dtype(dtype).name}"
    if head_dim not in DEPTH:
        return f"supports head dimensions {' and '.join(map(str, DEPTH))}, not {head_dim}"
    if page_size % TILE and page_size not in (8, 16, 32):
        return f"supports pages of 8, 16, 32 and multiples of {TILE} slots, not {page_size}"
    return ""


def attend(operands: Operands, *, softcap: float | None = None, interpret: bool = False) -> jax.Array:
    """Return attention f32[B, K, M, D], normalised; query rows that see nothing are 0. interpret: simulate on a CPU."""
    sizes = _sizes(operands)
    num_blocks, kv_heads, num_rows, head_dim = operands.q.shape
    cells = (sizes.num_splits, num_blocks, kv_heads, sizes.row_tiles)
    sinks = None
    if operands.sinks is not None:
        padding = ((0, 0), (0, sizes.row_tiles * sizes.rows - num_rows))
        sinks = jnp.pad(operands.sinks, padding).reshape(kv_heads, sizes.row_tiles, sizes.rows)
    run = plgpu.kernel(
        partial(kernel, sizes=sizes, group=Warpgroup(interpret), softcap=softcap),
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
    weighted, peak, mass = run(*(x for x in _inputs(operands, sizes) if x is not None))  # sinks are merged afterwards
    out = merge_splits(
        weighted.reshape(*cells, sizes.rows, head_dim),
        peak.reshape(*cells, ROWS)[..., : sizes.rows],
        mass.reshape(*cells, ROWS)[..., : sizes.rows],
        sinks,
    )
    return out.reshape(num_blocks, kv_heads, -1, head_dim)[:, :, :num_rows]


def _sizes(operands: Operands) -> KernelSizes:
    num_blocks, kv_heads, num_rows, head_dim = operands.q.shape
    row_tiles = -(-num_rows // ROWS)
    num_pages, page_size = operands.page_table.shape[1], operands.page_size
    max_slots = -(-num_pages * page_size // TILE) + operands.bits.shape[2] * 32 // TILE
    return KernelSizes(
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


def _scratch(sizes: KernelSizes, interpret: bool) -> list[Any]:
    """Return the shared memory: queries; slots of keys and values, reused for the results; barriers."""
    depth = DEPTH[sizes.head_dim]
    slots = shared((depth, TILE, sizes.head_dim), jnp.bfloat16)
    results = (shared((ROWS, sizes.head_dim), jnp.float32), *[plgpu.SMEM((ROWS,), jnp.float32)] * 2)
    came = plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=depth)
    q = shared((ROWS, sizes.head_dim), jnp.bfloat16)
    return [q, aliased((slots, slots), results, interpret=interpret), plgpu.Barrier(), came, came]


def _inputs(operands: Operands, sizes: KernelSizes) -> Inputs:
    """Return the kernel's inputs. An array that is copied has one leading index, then the axes of one copy."""
    num_rows, head_dim = operands.q.shape[2:]
    padding = sizes.row_tiles * sizes.rows - num_rows
    q = jnp.pad(operands.q, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(-1, sizes.rows, head_dim)
    floor = jnp.zeros_like(operands.ctx_len) if operands.first is None else jnp.min(operands.first, axis=1)
    block = Block(operands.row, operands.ctx_len, jnp.maximum(floor, 0), operands.tile, operands.num_tiles)

    def by_row(x: jax.Array) -> jax.Array:
        """Spread per-query values [B, ..., Q] over query rows, i32[B, row_tiles, ..., ROWS]."""
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
