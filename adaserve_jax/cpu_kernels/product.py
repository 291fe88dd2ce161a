"""Products of a weight with few columns, at the cost of reading the weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from adaserve_jax.cpu_kernels.library import fingerprint, target

MAX_COLUMNS = 64
"""Columns up to which the kernel is faster than XLA's product."""
_HANDLERS = {"float32": "product_f32", "bfloat16": "product_bf16", "int8": "product_i8"}


def multiplies(weight: jax.Array, x: jax.Array) -> bool:
    """Return True if `multiply` takes these: f32, bf16 or int8 weights and few columns, where there is a library."""
    return weight.dtype.name in _HANDLERS and 0 < x.shape[1] <= MAX_COLUMNS and bool(fingerprint())


@jax.custom_vjp
def multiply(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return weight @ x, f32[out, T], multiplied and summed in f32. On CPUs only. weight: [out, in]; x: f[in, T]."""
    result = jax.ShapeDtypeStruct((weight.shape[0], x.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(target(_HANDLERS[weight.dtype.name]), result)(weight, x.astype(jnp.float32))


def _forward(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return multiply(weight, x), (weight, x)


def _backward(inputs: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    weight, x = inputs
    of_weight = jnp.matmul(gradient, x.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)
    of_x = jnp.matmul(weight.astype(jnp.float32).T, gradient, precision=jax.lax.Precision.HIGHEST)
    return of_weight.astype(weight.dtype), of_x.astype(x.dtype)


multiply.defvjp(_forward, _backward)
