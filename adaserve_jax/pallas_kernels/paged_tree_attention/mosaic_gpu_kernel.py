"""The Hopper kernel of paged tree attention: TMA copies, wgmma products, a running softmax over a share of the keys.

One thread block of one warpgroup per split, KV head, block of queries and tile of 64 query rows. `DEPTH` slots of keys
and of values are in shared memory or on their way. The warpgroup that uses a slot is the one that asks for the next, so
the only thing ever waited for is that bytes which were asked for have come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import pl, plgpu
from adaserve_jax.pallas_kernels.paged_tree_attention.mosaic_gpu_keys import Block, Inputs, Pipeline, Share, Sizes
from adaserve_jax.pallas_kernels.paged_tree_attention.operands import TILE
from adaserve_jax.pallas_kernels.paged_tree_attention.warpgroup import ROWS, Warpgroup, across

DEPTH = {64: 4, 128: 3}
"""Slots in shared memory, by head dimension: few enough that two thread blocks share a multiprocessor."""
LOWEST = -1e30
"""Peak of a row that has seen nothing. Finite, so that a masked score of -inf weighs exp2(-inf - peak) = 0."""


@dataclass(frozen=True)
class Visibility:
    """Which keys of a step each query row sees, and which values of a page slot no row may touch.

    words: i32[W, ROWS], in global memory; first: i32[ROWS], first context position that each row sees, or None.
    """

    share: Share
    group: Warpgroup
    words: Any
    first: jax.Array | None

    def in_pages(self, step: Any) -> jax.Array:
        """bool[ROWS, TILE]."""
        position = self.share.position(step) + self.group.index(TILE, 1)
        live = self.share.live(position)
        return live if self.first is None else live & (position >= across(self.first, TILE))

    def in_tiles(self, step: Any) -> jax.Array:
        """bool[ROWS, TILE]."""
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


def kernel(*refs: Any, sizes: Sizes, group: Warpgroup) -> None:
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
    weighted, peak, mass = _attend_share(share, keys, values, visibility, group, q)

    out_cell = split * (sizes.num_blocks * sizes.kv_heads * sizes.row_tiles) + cell
    weighted_stage, peak_stage, mass_stage = stages
    weighted_stage[...], peak_stage[...], mass_stage[...] = weighted, peak, mass
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(weighted_stage.at[rows], weighted_out.at[out_cell])
    plgpu.copy_smem_to_gmem(peak_stage, peak_out.at[out_cell])
    plgpu.copy_smem_to_gmem(mass_stage, mass_out.at[out_cell])
    plgpu.wait_smem_to_gmem(0)


def _attend_share(
    share: Share, keys: Pipeline, values: Pipeline, visibility: Visibility, group: Warpgroup, q: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted sum f32[ROWS, D], peak f32[ROWS] in powers of two, mass f32[ROWS]. q: bf16[ROWS, D], shared memory."""
    head_dim = share.sizes.head_dim
    to_powers_of_two = head_dim**-0.5 * math.log2(math.e)

    def absorb(step: Any, state: Any, visible: jax.Array, scores: jax.Array, *, in_pages: bool) -> Any:
        weighted, peak, mass = state
        scores = jnp.where(visible, scores * to_powers_of_two, -jnp.inf)
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
