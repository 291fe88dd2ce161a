"""The kernel for Hopper GPUs: pages go through shared memory by TMA, one CUDA block per layer and move.

A page [K, S, D] may be larger than shared memory, so a block copies it by KV head, [S, D] at a time, with up to
BUFFERS heads between their load and the end of their store. Blocks run in any order; the moves must not depend on
it. The target is a mutable reference, which is how `pl.kernel` writes into an array in place: the custom call has
the target as an operand that is aliased with its result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import pl, plgpu

BUFFERS = 4
BUFFER_BYTES = 48 * 1024
"""Largest [S, D] that is copied: BUFFERS of them fit in the 227 KiB of a block."""
LARGEST_BOX = 256
"""Elements that one TMA instruction takes along an axis."""
SMEM_ALIGNMENT = 128
GMEM_ALIGNMENT = 16
"""Bytes: of a TMA's place in shared memory, and of its steps in device memory."""


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
    row_bytes, head_bytes = head_dim * dtype.itemsize, page_size * head_dim * dtype.itemsize
    if max(page_size, head_dim) > LARGEST_BOX:
        return f"takes page sizes and head dims up to {LARGEST_BOX}, not {page_size} and {head_dim}"
    if row_bytes % GMEM_ALIGNMENT or head_bytes % SMEM_ALIGNMENT:
        return (
            f"needs rows of a multiple of {GMEM_ALIGNMENT} bytes and heads of a multiple of {SMEM_ALIGNMENT}, "
            f"not {row_bytes} and {head_bytes}"
        )
    if head_bytes > BUFFER_BYTES:
        return f"takes up to {BUFFER_BYTES} bytes per page and KV head, not {head_bytes}"
    return ""


def _run(
    target: jax.Array, source: tuple[jax.Array, ...], from_pages: jax.Array, to_pages: jax.Array, interpret: Any
) -> jax.Array:
    """Run the kernel. source: the pool to read; empty to read the target."""
    layers, _, kv_heads, page_size, head_dim = target.shape
    buffers = min(BUFFERS, kv_heads)
    scratch = (plgpu.SMEM((buffers, page_size, head_dim), target.dtype), plgpu.Barrier(num_barriers=buffers))
    pool = jax.new_ref(target, memory_space=plgpu.GMEM)
    kernel: Any = pl.kernel(
        lambda *refs: pl.run_scoped(partial(_move, *refs), *scratch),
        mesh=plgpu.Mesh(grid=(layers, len(from_pages)), grid_names=("layer", "move")),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        name="move_pages",
    )
    kernel(from_pages, to_pages, *source, pool)
    return jax.freeze(pool)


def _move(from_ref: Any, to_ref: Any, *refs: Any) -> None:
    """Move one page of one layer. refs: the source where there is one, the target, the buffers and their barriers."""
    *pools, buffers, loaded = refs
    source, target = pools[0], pools[-1]
    _, num_pages, kv_heads, _, _ = target.shape
    num_buffers = min(BUFFERS, kv_heads)
    layer, move = lax.axis_index("layer"), lax.axis_index("move")
    from_page, to_page = from_ref[move], to_ref[move]

    def load(head: int) -> None:
        at = head % num_buffers
        plgpu.copy_gmem_to_smem(source.at[layer, from_page, head], buffers.at[at], loaded.at[at])

    @pl.when((to_page >= 0) & (to_page < num_pages))
    def _() -> None:
        for head in range(num_buffers):
            load(head)
        for head in range(kv_heads):
            at = head % num_buffers
            plgpu.barrier_wait(loaded.at[at])
            plgpu.copy_smem_to_gmem(buffers.at[at], target.at[layer, to_page, head])
            # The buffer of the head before this one is free when all stores but the newest have been read.
            if head > 0 and head - 1 + num_buffers < kv_heads:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                load(head - 1 + num_buffers)
        plgpu.wait_smem_to_gmem(0)
