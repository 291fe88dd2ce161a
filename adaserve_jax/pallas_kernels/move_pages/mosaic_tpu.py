"""The kernel for TPUs: pages go from HBM to HBM by DMA, [K, S, D] of a layer at a time, IN_FLIGHT of them at once.

Nothing passes through the core but page ids, prefetched as scalars. Copies may end in any order; the moves must not
depend on it. The target is aliased with the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import pl, pltpu

IN_FLIGHT = 8
LANES = 128
"""XLA lays a pool out row by row, as a kernel must have it, where rows are whole multiples of this. Other pools it may
lay out by pages, and would copy them whole before the kernel and after it."""


def move_pages(
    target: jax.Array, source: jax.Array, from_pages: jax.Array, to_pages: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """Implement `api.move_pages`."""
    return _run(target, (source,), from_pages, to_pages, interpret)


def move_pages_within(
    pool: jax.Array, from_pages: jax.Array, to_pages: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """Implement `api.move_pages_within`."""
    return _run(pool, (), from_pages, to_pages, interpret)


def unsupported(*, page_size: int, head_dim: int, dtype: jnp.dtype) -> str:
    """Say why pages of these shapes cannot be moved; "" if they can."""
    if head_dim % LANES:
        return f"needs head dims of a multiple of {LANES}, not {head_dim}"
    return ""


def _run(
    target: jax.Array, source: tuple[jax.Array, ...], from_pages: jax.Array, to_pages: jax.Array, interpret: Any
) -> jax.Array:
    """Run the kernel. source: the pool to read; empty to read the target."""
    operands = (from_pages, to_pages, *source, target)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        _move,
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[in_hbm] * (len(source) + 1),
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA((IN_FLIGHT,))],
        ),
        input_output_aliases={len(operands) - 1: 0},
        interpret=interpret,
        name="move_pages",
    )(*operands)


def _move(from_ref: Any, to_ref: Any, *refs: Any) -> None:
    """Run all moves by layer. refs: the source where there is one, the target as operand and again as result, and
    the semaphores."""
    *sources, _, target, done = refs
    source = sources[0] if sources else target
    layers, num_pages = target.shape[:2]
    moves = from_ref.shape[0]
    copies = layers * moves
    in_flight = min(IN_FLIGHT, copies)

    def unless_padding(copy: jax.Array, act: Callable[[Any], None]) -> None:
        """Act on the DMA of one of the copies."""
        layer, move = lax.div(copy, moves), lax.rem(copy, moves)
        to_page = to_ref[move]

        @pl.when((to_page >= 0) & (to_page < num_pages))
        def _() -> None:
            page = source.at[layer, from_ref[move]]
            act(pltpu.make_async_copy(page, target.at[layer, to_page], done.at[lax.rem(copy, IN_FLIGHT)]))

    @pl.loop(0, in_flight)
    def _(copy: jax.Array) -> None:
        unless_padding(copy, lambda dma: dma.start())

    @pl.loop(in_flight, copies)
    def _(copy: jax.Array) -> None:
        unless_padding(copy - in_flight, lambda dma: dma.wait())
        unless_padding(copy, lambda dma: dma.start())

    @pl.loop(copies - in_flight, copies)
    def _(copy: jax.Array) -> None:
        unless_padding(copy, lambda dma: dma.wait())
