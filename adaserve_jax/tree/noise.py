"""Gumbel noise as a pure function of (seed, choice, position, token id), shared by the draft and the target.

Knows nothing of models or trees. That the noise ignores the tree is what makes verification lossless
(spec: sample-and-follow; docs/architecture/tree.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p


def _threefry(key: tuple[jax.Array, jax.Array], high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32, elementwise over broadcast uint32 arrays (Salmon et al., Random123)."""
    operands = jnp.broadcast_arrays(*key, high, low)
    first, second = threefry2x32_p.bind(*operands)
    return first, second


def gumbel_noise(seed: jax.Array, choice: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise of the tokens at `position`.

    seed: u32[N, 2] (low, high word); choice, position: i32[N], position being that of the token drawn.
    Returns f32[N, V]; entry id is the same for every vocab_size > id.
    """
    words = seed.astype(jnp.uint32)
    key = _threefry((words[:, 0], words[:, 1]), choice.astype(jnp.uint32), position.astype(jnp.uint32))
    counter = jnp.arange(-(-vocab_size // 2), dtype=jnp.uint32)[None, :]
    even, odd = _threefry((key[0][:, None], key[1][:, None]), jnp.zeros_like(counter), counter)
    bits = jnp.stack([even, odd], axis=-1).reshape(seed.shape[0], -1)[:, :vocab_size]
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return -jnp.log(-jnp.log(uniform))
