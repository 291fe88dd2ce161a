"""A decoder that goes on with several texts at once over a dense KV cache: for drawing texts to learn from, not for
serving.

Axes: B texts, C tokens that each is extended by, S slots of a text, H/K query/KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Attend, Params, decode


class Cache(NamedTuple):
    """Keys and values of all texts, of each layer f[B, S, K, D], the token at position s in slot s. Layers apart: one
    array of all would be copied by every step."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def new_cache(config: ModelConfig, texts: int, slots: int, dtype: Any) -> Cache:
    shape = (texts, slots, config.num_kv_heads, config.head_dim)
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return Cache(k, v)


def extend(
    params: Params, config: ModelConfig, cache: Cache, tokens: jax.Array, start: jax.Array, count: jax.Array
) -> tuple[jax.Array, Cache]:
    """Feed each text its next tokens. tokens: i32[B, C], of which count i32[B] are real; start: i32[B], the position of
    the first. Pure. Returns (hidden f[d, B, C], the cache with them). What is not real leaves no trace in the cache.
    """
    texts, added = tokens.shape
    position = start[:, None] + jnp.arange(added, dtype=jnp.int32)
    slot = jnp.where(jnp.arange(added) < count[:, None], position, cache.k[0].shape[1])  # beyond the end: dropped
    new: list[tuple[jax.Array, jax.Array]] = []
    attend = _attend(config, cache, position, slot, new)
    hidden = decode(params, config, tokens.reshape(-1), position.reshape(-1), attend)
    keys, values = zip(*new, strict=True)
    return hidden.reshape(-1, texts, added), Cache(keys, values)


def _attend(
    config: ModelConfig, cache: Cache, position: jax.Array, slot: jax.Array, new: list[tuple[jax.Array, jax.Array]]
) -> Attend:
    """Attention that writes to the cache of each layer before it reads; the layers' caches go to `new`."""
    texts, added = position.shape
    row = jnp.arange(texts)[:, None]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        heads, dim, _ = q.shape
        kv_heads = len(k)

        def written(held: jax.Array, fresh: jax.Array) -> jax.Array:
            fresh = jnp.moveaxis(fresh.reshape(kv_heads, dim, texts, added), (0, 1), (2, 3))
            return held.at[row, slot].set(fresh.astype(held.dtype), mode="drop")

        keys, values = written(cache.k[layer], k), written(cache.v[layer], v)
        new.append((keys, values))
        age = position[:, :, None] - jnp.arange(keys.shape[1])
        seen = age >= 0
        window = config.window_of(layer)
        if window is not None:
            seen &= age < window
        highest = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        grouped = q.reshape(kv_heads, heads // kv_heads, dim, texts, added)
        scores = jnp.einsum("kgdbc,bskd->kgbcs", grouped, keys, precision=highest, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen, scores * dim**-0.5, -jnp.inf), axis=-1).astype(values.dtype)
        return jnp.einsum("kgbcs,bskd->kgdbc", weights, values, precision=highest).reshape(q.shape)

    return attend
