"""Visibility among in-flight tokens as bits: bit c % 32 of word c // 32 says whether token c is seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def expand_bits(bits: jax.Array, num_tokens: int) -> jax.Array:
    """bool[..., num_tokens] from u32[..., W]."""
    index = jnp.arange(num_tokens)
    return (bits[..., index // 32] >> (index % 32).astype(jnp.uint32)) & 1 != 0


def pack_bits(visible: jax.Array) -> jax.Array:
    """u32[..., ceil(N / 32)] from bool[..., N]."""
    padded = jnp.pad(visible, [(0, 0)] * (visible.ndim - 1) + [(0, -visible.shape[-1] % 32)])
    words = padded.reshape(*visible.shape[:-1], -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
