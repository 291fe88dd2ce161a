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
