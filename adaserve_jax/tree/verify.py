"""The accept walk of sample-and-follow: from the root, follow the child that carries the target's token.

Lossless for any tree (spec: verification; docs/architecture/tree.md).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PREFILL = -1  # emit_depth of a prompt token that samples nothing
PADDING = -2  # emit_depth of a slot that holds no token


class Accepted(NamedTuple):
    """accepted: bool[T], nodes on the walked path (roots and prompt ends included); tokens: i32[R, depth + 1];
    counts: i32[R]; commit: bool[T], tokens whose K/V become part of the context."""

    accepted: jax.Array
    tokens: jax.Array
    counts: jax.Array
    commit: jax.Array


def accept_walk(
    token: jax.Array,
    parent: jax.Array,
    emit_depth: jax.Array,
    row: jax.Array,
    drawn: jax.Array,
    *,
    num_rows: int,
    max_depth: int,
) -> Accepted:
    """Walk all trees at once. All inputs i32[T], packed, parents before children.

    emit_depth: 0 for a root or the last token of a prompt, j for a tree node of depth j, PREFILL or PADDING.
    drawn: the target's token after each position (used where emit_depth >= 0).
    """  # fmt: skip
    is_root = emit_depth == 0
    agrees = (emit_depth > 0) & (drawn[parent] == token)

    def deeper(_: int, accepted: jax.Array) -> jax.Array:
        return is_root | (agrees & accepted[parent])

    accepted = lax.fori_loop(0, max_depth, deeper, is_root) if max_depth else is_root
    tokens = jnp.zeros((num_rows, max_depth + 1), jnp.int32)
    depth = jnp.where(accepted, emit_depth, max_depth + 1)
    tokens = tokens.at[row, depth].set(drawn, mode="drop")
    counts = jnp.zeros(num_rows, jnp.int32).at[row].add(accepted.astype(jnp.int32), mode="drop")
    return Accepted(accepted, tokens, counts, accepted | (emit_depth == PREFILL))


# Ancestor bits of packed in-flight tokens, from their parents. A chain (prefill, decode) is the simplest tree.


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
