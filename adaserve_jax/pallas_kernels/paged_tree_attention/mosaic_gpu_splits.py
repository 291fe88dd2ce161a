"""How many splits share the keys of one tile of query rows on a GPU, and how their partial results are merged."""

from __future__ import annotations

import jax
import jax.numpy as jnp

NUM_SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200."""
CTAS_PER_SM = 4
"""Thread blocks to make for each: two run at a time, and as many again even out unequal contexts."""
MIN_SLOTS = 4
"""Fewest slots of 64 keys worth a split of their own, at the largest context that the page table can hold."""


def choose_splits(*, row_tiles: int, max_slots: int) -> int:
    """Splits of each tile of query rows, at least 1. row_tiles: tiles of query rows over all blocks and KV heads;
    max_slots: slots of 64 keys of the largest context, by the page table's width, and of in-flight keys."""
    wanted = NUM_SMS * CTAS_PER_SM // row_tiles
    return max(1, min(wanted, max_slots // MIN_SLOTS))


def merge_splits(weighted: jax.Array, peak: jax.Array, mass: jax.Array) -> jax.Array:
    """f32[..., D], rows that saw nothing 0, from partial results over axis 0.

    weighted: f32[splits, ..., D], sums of values by 2 ** (score - peak); peak, mass: f32[splits, ...], the largest
    score and the sum of weights, scores in powers of two.
    """
    shrink = jnp.exp2(peak - jnp.max(peak, axis=0))
    total = jnp.sum(weighted * shrink[..., None], axis=0)
    return total / jnp.maximum(jnp.sum(mass * shrink, axis=0), 1e-30)[..., None]
