"""Ancestor bits of packed in-flight tokens, from their parents. A chain (prefill, decode) is the simplest tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def ancestor_bits(parent: jax.Array) -> jax.Array:
    """Which in-flight tokens each token may attend to: itself and its ancestors.

    parent: i32[T], index into the same array with parent[t] < t, or -1. Returns u32[T, ceil(T/32)]; bit u % 32 of
    word u // 32 belongs to token u. Pointer doubling: ceil(log2 T) rounds, each a gather of rows.
    """
    num_tokens = parent.shape[0]
    words = -(-num_tokens // 32)
    index = jnp.arange(num_tokens)
    own = jnp.where(
        jnp.arange(words)[None, :] == (index // 32)[:, None],
        jnp.uint32(1) << (index % 32).astype(jnp.uint32)[:, None],
        0,
    ).astype(jnp.uint32)
    # One extra row stands for "no parent": it adds no bits and points at itself.
    bits = jnp.concatenate([own, jnp.zeros((1, words), jnp.uint32)])
    jump = jnp.concatenate([jnp.where(parent < 0, num_tokens, parent), jnp.full((1,), num_tokens, parent.dtype)])

    def double(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seen, step = state
        return seen | seen[step], step[step]

    rounds = max(1, (num_tokens - 1).bit_length())
    bits, _ = lax.fori_loop(0, rounds, double, (bits, jump))
    return bits[:num_tokens]


def ancestor_paths(mask: jax.Array) -> jax.Array:
    """The in-flight path to each token: path[t, j] is the packed index of its j-th ancestor from the root, itself last.

    mask: bool[T, T] from `expand_bits`. Returns i32[T, T]; entries past the token's own depth are 0.
    """
    num_tokens = mask.shape[0]
    rank = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, num_tokens)
    rows = jnp.broadcast_to(jnp.arange(num_tokens)[:, None], mask.shape)
    values = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[None, :], mask.shape)
    return jnp.zeros((num_tokens, num_tokens), jnp.int32).at[rows, rank].set(values, mode="drop")
