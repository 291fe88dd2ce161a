"""Products of a weight with few columns, at the cost of reading the weight; and of experts, each with its tokens, at
the cost of reading the experts that have any."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from adaserve_jax.cpu_kernels.library import fingerprint, target

MAX_COLUMNS = 64
"""Columns up to which the kernel is faster than XLA's product."""
_TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "i8"}


def multiplies(weight: jax.Array, x: jax.Array) -> bool:
    """Return True if `multiply` takes these: f32, bf16 or int8 weights and few columns, where there is a library."""
    return weight.dtype.name in _TYPES and 0 < x.shape[1] <= MAX_COLUMNS and bool(fingerprint())


def multiplies_int4(x: jax.Array) -> bool:
    """Return True if `multiply_int4` takes x: few columns, where there is a library."""
    return 0 < x.shape[1] <= MAX_COLUMNS and bool(fingerprint())


def multiplies_groups_int4() -> bool:
    """Return True if `multiply_groups_int4` is there."""
    return bool(fingerprint())


@jax.custom_vjp
def multiply(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return weight @ x, f32[out, T], multiplied and summed in f32. On CPUs only. weight: [out, in]; x: f[in, T]."""
    result = jax.ShapeDtypeStruct((weight.shape[0], x.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(target(f"product_{_TYPES[weight.dtype.name]}"), result)(weight, x.astype(jnp.float32))


def _forward(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return multiply(weight, x), (weight, x)


def _backward(inputs: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    weight, x = inputs
    of_weight = jnp.matmul(gradient, x.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)
    of_x = jnp.matmul(weight.astype(jnp.float32).T, gradient, precision=jax.lax.Precision.HIGHEST)
    return of_weight.astype(weight.dtype), of_x.astype(x.dtype)


multiply.defvjp(_forward, _backward)


def multiplies_groups(weight: jax.Array) -> bool:
    """Return True if `multiply_groups` takes these: f32, bf16 or int8 weights, where there is a library."""
    return weight.dtype.name in _TYPES and bool(fingerprint())


def multiply_groups(weight: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return weight[g] @ x[:, t] for each column t of group g, f32[out, P]; 0 in columns behind the last group.

    On CPUs only, without gradients. weight: [G, out, in]; x: f[in, P], group after group; sizes: i32[G], columns of
    each group. A column has the same bits whatever the size of its group.
    """
    result = jax.ShapeDtypeStruct((weight.shape[1], x.shape[1]), jnp.float32)
    handler = target(f"grouped_{_TYPES[weight.dtype.name]}")
    return jax.ffi.ffi_call(handler, result)(weight, x.astype(jnp.float32), sizes.astype(jnp.int32))


def multiply_int4(weight: jax.Array, scale: jax.Array, zero: jax.Array, x: jax.Array) -> jax.Array:
    """Return `models.quantize.int4_product` multiplied and summed in f32. On CPUs only, without gradients."""
    result = jax.ShapeDtypeStruct((weight.shape[0], x.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(target("product_i4"), result)(weight, scale, zero, x.astype(jnp.float32))


def multiply_groups_int4(
    weight: jax.Array, scale: jax.Array, zero: jax.Array, x: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Return `multiply_groups` of weights in int4, which lie one below another: i8[E * out, in / 2] of E experts."""
    result = jax.ShapeDtypeStruct((len(weight) // len(sizes), x.shape[1]), jnp.float32)
    given = weight, scale, zero, x.astype(jnp.float32), sizes.astype(jnp.int32)
    return jax.ffi.ffi_call(target("grouped_i4"), result)(*given)
