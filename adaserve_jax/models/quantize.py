"""int8 weights with one scale per row of a matrix; activations keep their type.

    w[o, i] ~ q[o, i] * s[o]        s[o] = max_i |w[o, i]| / 127        q[o, i] = round(w[o, i] / s[o]), half to even

in f32, so that |w - q s| <= s / 2. A row depends on itself alone, so weights are quantised while they are read, one
block of rows after another, and the bytes do not depend on the blocks. Norms and biases are not quantised.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.cpu_kernels.product import multiplies, multiply
from adaserve_jax.errors import CheckpointError

SCALE = ".scale"
"""Suffix: the scale of an int8 weight has the weight's name followed by this."""
LARGEST = 127
_LEAST_SCALE = np.finfo(np.float32).tiny  # below, f32 has too few bits left to divide by
_BLOCK_ROWS, _BLOCK_ELEMENTS = 128, 1 << 18
"""Most that a CPU widens at once: small enough for its cache, and large enough for a product."""


def quantize_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise f[out, in] to i8[out, in] and scales f32[out].

    A row of zeros has scale 1, and so has one too small for f32 to divide. A row with a value that is not finite has a
    scale that is not finite.
    """
    with np.errstate(over="ignore"):  # f64 beyond f32
        rows = rows.astype(np.float32)
    scale = np.max(np.abs(rows), axis=1) / np.float32(LARGEST)
    scale[scale < _LEAST_SCALE] = 1
    with np.errstate(invalid="ignore"):
        np.divide(rows, scale[:, None], out=rows)
        np.rint(rows, out=rows)
        return np.clip(rows, -LARGEST, LARGEST, out=rows).astype(np.int8), scale


class Int8Rows:
    """Destination of a read that quantises: `rows[start:stop] = block` fills whole rows. A slice is a view.

    weight: i8[out, in] and scale: f32[out], to fill. columns: those of each row that `weight` keeps. Assigning raises
    CheckpointError, by `name`: a value is not finite.
    """

    def __init__(self, name: str, weight: np.ndarray, scale: np.ndarray, columns: slice = slice(None)):
        self.name = name
        self.weight = weight
        self.scale = scale
        self.columns = columns

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, rows: slice) -> Int8Rows:
        return Int8Rows(self.name, self.weight[rows], self.scale[rows], self.columns)

    def __setitem__(self, rows: slice, block: np.ndarray) -> None:
        weight, scale = quantize_rows(block)
        self.put(rows, weight, scale)

    def put(self, rows: slice, weight: np.ndarray, scale: np.ndarray) -> None:
        """Fill whole rows with values that are in int8 already, i8[rows, in] and f32[rows]."""
        if not np.isfinite(scale).all():
            raise CheckpointError(f"weight {self.name} has a value that is not finite, which int8 cannot hold")
        self.weight[rows], self.scale[rows] = weight[:, self.columns], scale


def int8_product(weight: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
    """Return (weight @ x) * scale, f32[out, T]; multiplied in x's type, accumulated in f32.

    weight: i8[out, in]; scale: f32[out]; x: f[in, T]. XLA on a CPU widens a weight before its product, which takes
    several times as long as the product of an f32 weight. So a CPU widens one block of rows after another.
    """
    on_cpu = multiply if multiplies(weight, x) else _product_by_blocks
    return lax.platform_dependent(weight, x, cpu=on_cpu, default=product) * scale[:, None]


def product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return weight @ x, f32[out, T], multiplied in x's type by XLA."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(weight.astype(x.dtype), x, precision=precision, preferred_element_type=jnp.float32)


def _product_by_blocks(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Compute `product` in blocks of rows. The last slice starts earlier if it would pass the end, and repeats rows of
    the block before."""
    outputs, inputs = weight.shape
    step = max(1, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // inputs))
    if step >= outputs:
        return product(weight, x)

    def block(index: jax.Array, out: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(weight, index * step, step)
        return lax.dynamic_update_slice_in_dim(out, product(rows, x), index * step, 0)

    return lax.fori_loop(0, -(-outputs // step), block, jnp.zeros((outputs, x.shape[1]), jnp.float32))
