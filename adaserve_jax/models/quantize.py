"""Weights in int8 with a scale per row of a matrix, or in int4 with a scale and a zero per group of inputs; activations
keep their type.

    int8:  w[o, i] ~ q[o, i] * s[o]                        s[o] = max_i |w[o, i]| / 127
    int4:  w[o, i] ~ (q[o, i] - z[o, g]) * s[o, g]         g: the group of input i; q and z from 0 to 15

Rounding is in f32, half to even. A weight moves by s / 2 at most in int8, and by little more in int4, unless s is
subnormal in f16. A row depends on itself alone, so weights are quantised while they are read, one block of rows after
another, and the bytes do not depend on the blocks. Norms and biases are not quantised.

Two inputs of int4 share a byte, the first in its low four bits. Devices divide the inputs between any two groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.config import INT4_GROUP
from adaserve_jax.cpu_kernels.product import (
    multiplies,
    multiplies_int4,
    multiply,
    multiply_int4,
)
from adaserve_jax.errors import CheckpointError

SCALE, ZERO = ".scale", ".zero"
"""Suffixes: scales of a quantised weight, and zeros of one in int4, have the weight's name followed by these."""
LARGEST = 127
INT4_LARGEST = 15
_INT4_SHARES = 4
_LEAST_SCALE = np.finfo(np.float32).tiny  # below, f32 has too few bits left to divide by
_BLOCK_ROWS, _BLOCK_ELEMENTS = 128, 1 << 18
"""Most that a CPU widens at once: small enough for its cache, and large enough for a product."""


def int4_group(inputs: int) -> int:
    """Return how many inputs of a row share a scale: INT4_GROUP, or the power of two below it that divides a quarter of
    them, so that up to four devices can divide a row."""
    return max(2, math.gcd(INT4_GROUP, inputs, inputs // _INT4_SHARES))


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


def quantize_groups(rows: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise f[out, in] to u8[out, in] from 0 to 15, scales f16[out, in / group] and zeros u8[out, in / group].

    A group of zeros has scale 1, and so has one too small for f16. A group with a value that is not finite, or beyond
    f16, has a scale that is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        groups = rows.astype(np.float32).reshape(len(rows), rows.shape[1] // group, group)
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        scale = ((high - low) / np.float32(INT4_LARGEST)).astype(np.float16)
        scale[scale == 0] = 1
        steps = scale.astype(np.float32)
        zero = np.clip(np.rint(-low / steps), 0, INT4_LARGEST)
        np.divide(groups, steps[..., None], out=groups)
        np.rint(groups, out=groups)
        groups += zero[..., None]
        values = np.clip(groups, 0, INT4_LARGEST, out=groups).astype(np.uint8).reshape(rows.shape)
        return values, scale, zero.astype(np.uint8)


class Int4Groups:
    """Destination of a read that quantises to int4: `groups[start:stop] = block` fills rows. A slice is a view.

    weight: i8[out, in / 2], scale: f16[out, G] and zero: i8[out, G] for G groups of inputs, to fill. Assigning raises
    CheckpointError, by `name`: a value is not finite.
    """

    def __init__(self, name: str, weight: np.ndarray, scale: np.ndarray, zero: np.ndarray):
        self.name = name
        self.weight, self.scale, self.zero = weight, scale, zero
        self.group = 2 * weight.shape[1] // scale.shape[1]

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, rows: slice) -> Int4Groups:
        return Int4Groups(self.name, self.weight[rows], self.scale[rows], self.zero[rows])

    def __setitem__(self, rows: slice, block: np.ndarray) -> None:
        self.put(rows, *quantize_groups(block, self.group))

    def put(self, rows: slice, values: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> None:
        """Fill rows with values from 0 to 15 that are in groups already: u8[rows, in], f[rows, G] and u8[rows, G]."""
        with np.errstate(over="ignore"):
            scale = scale.astype(np.float16)
        if not np.isfinite(scale).all():
            raise CheckpointError(f"weight {self.name} has a value that is not finite, which int4 cannot hold")
        packed = values[:, ::2] | values[:, 1::2] << 4
        self.weight[rows], self.scale[rows], self.zero[rows] = packed.view(np.int8), scale, zero


def int8_product(weight: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
    """Return (weight @ x) * scale, f32[out, T]; multiplied in x's type, accumulated in f32.

    weight: i8[out, in]; scale: f32[out]; x: f[in, T]. XLA on a CPU widens a weight before its product, which takes
    several times as long as the product of an f32 weight. So a CPU widens one block of rows after another.
    """
    on_cpu = multiply if multiplies(weight, x) else _int8_by_blocks
    return lax.platform_dependent(weight, x, cpu=on_cpu, default=product) * scale[:, None]


def int4_product(weight: jax.Array, scale: jax.Array, zero: jax.Array, x: jax.Array) -> jax.Array:
    """Return the int4 weight times x, f32[out, T]; multiplied in x's type, accumulated in f32.

    weight: i8[out, in / 2]; scale: f16[out, G]; zero: i8[out, G]; x: f[in, T]. A CPU widens as in `int8_product`.
    """
    on_cpu = multiply_int4 if multiplies_int4(x) else _int4_by_blocks
    return lax.platform_dependent(weight, scale, zero, x, cpu=on_cpu, default=_int4_whole)


def widen_int4(weight: jax.Array, scale: jax.Array, zero: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weights of even and of odd inputs, f32[out, in / 2] each.

    weight: i8[out, in / 2]; scale: f16[out, G]; zero: i8[out, G]. They stay apart: putting them in turns would move
    values between lanes.
    """
    packed = weight.reshape(*scale.shape, -1)
    halves = (
        (values - zero[..., None]) * scale.astype(jnp.float32)[..., None] for values in (packed & 15, packed >> 4 & 15)
    )
    even, odd = (half.reshape(weight.shape) for half in halves)
    return even, odd


def product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return weight @ x, f32[out, T], multiplied in x's type by XLA."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(weight.astype(x.dtype), x, precision=precision, preferred_element_type=jnp.float32)


def _int4_whole(weight: jax.Array, scale: jax.Array, zero: jax.Array, x: jax.Array) -> jax.Array:
    even, odd = widen_int4(weight, scale, zero)
    return product(even, x[::2]) + product(odd, x[1::2])


def _int8_by_blocks(weight: jax.Array, x: jax.Array) -> jax.Array:
    return _by_blocks((weight,), product, x)


def _int4_by_blocks(weight: jax.Array, scale: jax.Array, zero: jax.Array, x: jax.Array) -> jax.Array:
    return _by_blocks((weight, scale, zero), _int4_whole, x)


def _by_blocks(parts: tuple[jax.Array, ...], multiplied: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Compute `multiplied(*parts, x)`, f32[out, T], in blocks of rows of the parts. The last slice starts earlier if it
    would pass the end, and repeats rows of the block before."""
    outputs, inputs = len(parts[0]), len(x)
    step = max(1, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // inputs))
    if step >= outputs:
        return multiplied(*parts, x)

    def block(index: jax.Array, out: jax.Array) -> jax.Array:
        rows = [lax.dynamic_slice_in_dim(part, index * step, step) for part in parts]
        return lax.dynamic_update_slice_in_dim(out, multiplied(*rows, x), index * step, 0)

    return lax.fori_loop(0, -(-outputs // step), block, jnp.zeros((outputs, x.shape[1]), jnp.float32))
