"""Attention over packed tokens without a cache, every score held at once: for scoring and training, not for serving."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Attend


def attend_dense(config: ModelConfig, segment: jax.Array | None = None) -> Attend:
    """Each token sees itself and those before it, within its layer's window and its own text.

    segment: i32[T], which of several texts a token is of, each text's tokens side by side; None: all are one text.
    Holds f32[H, T, T] of scores.
    """

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        heads, dim, count = q.shape
        age = jnp.arange(count)[:, None] - jnp.arange(count)
        seen = age >= 0
        if segment is not None:
            seen &= segment[:, None] == segment
        window = config.window_of(layer)
        if window is not None:
            seen &= age < window
        highest = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        grouped = q.reshape(len(k), heads // len(k), dim, count)
        scores = jnp.einsum("kgdt,kds->kgts", grouped, k, precision=highest, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen, scores * dim**-0.5, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("kgts,kds->kgdt", weights, v, precision=highest).reshape(q.shape)

    return attend
