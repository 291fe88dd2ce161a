"""What the Hopper kernel asks of a warpgroup, and a stand-in for each that GPU interpret mode can run.

Interpret mode has no register layouts, no products with an operand in registers and no aliased shared memory; all
else (copies, barriers, loops, masks) runs there as it is written. Rows are query rows, columns are keys or features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.pallas_kernels.compat import gpu_load, pl, plgpu

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
        """f32 of that shape, all `value`."""
        return self._place(jnp.full(shape, value, jnp.float32))

    def index(self, columns: int, axis: int) -> jax.Array:
        """i32[ROWS, columns], each element its own row (axis 0) or column (axis 1)."""
        return self._place(lax.broadcasted_iota(jnp.int32, (ROWS, columns), axis))

    def load_rows(self, ref: Any) -> jax.Array:
        """[ROWS] from global memory."""
        if self.interpret:
            return ref[...]
        return gpu_load(ref, plgpu.Layout.WGMMA.reduce(1))

    def product(self, a: Any, b: Any) -> jax.Array:
        """f32[ROWS, N]: a @ b.T. a: bf16[ROWS, D] and b: bf16[N, D], both in shared memory. Returns when done."""
        if self.interpret:
            return a[...].astype(jnp.float32) @ b[...].astype(jnp.float32).T

        def multiply(total: Any) -> jax.Array:
            plgpu.wgmma(total, a, b.transpose((1, 0)))
            return total[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, b.shape[0]), jnp.float32))

    def accumulate(self, total: jax.Array, a: jax.Array, b: Any) -> jax.Array:
        """f32[ROWS, N]: total + a @ b. a: bf16[ROWS, S], in registers; b: bf16[S, N], in shared memory. Returns when
        done."""
        if self.interpret:
            return total + a.astype(jnp.float32) @ b[...].astype(jnp.float32)

        def multiply(total_ref: Any) -> None:
            plgpu.wgmma(total_ref, a, b)

        return cast(jax.Array, pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total)))


def across(rows: jax.Array, columns: int) -> jax.Array:
    """[ROWS, columns] from [ROWS]: each row's value in all its columns."""
    return lax.broadcast_in_dim(rows, (ROWS, columns), (0,))


def shared(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory of that shape in tiles of 8 rows by 128 bytes, swizzled, as matrix products and copies want it."""
    tile = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(128)))


def aliased(*groups: Any, interpret: bool) -> Any:
    """Groups of shared memory of which one is in use at a time: they take the room of the largest."""
    return groups if interpret else plgpu.RefUnion(*groups)
