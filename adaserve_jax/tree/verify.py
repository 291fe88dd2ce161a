"""Tree verification: the accept walk, and the ancestor masks that tree attention reads.

The walk starts at the root and follows the child that holds the target's token (sample-and-follow). It is lossless for
any tree (docs/architecture/tree.md). A chain of tokens, as in prefill and plain decoding, is the simplest tree.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PREFILL = -1
"""emit_depth of a prompt token after which nothing is sampled."""
PADDING = -2
"""emit_depth of an index that holds no token."""


class Accepted(NamedTuple):
    """Result of the accept walk.

    accepted: bool[T], nodes on the walked paths, roots and prompt ends included. tokens: i32[R, max_depth + 1], emitted
    tokens, the bonus token last; the first counts[r] are valid. counts: i32[R]. commit: bool[T], tokens whose K/V joins
    the context.
    """

    accepted: jax.Array
    tokens: jax.Array
    counts: jax.Array
    commit: jax.Array


def accept_walk(
    token: jax.Array, parent: jax.Array, emit_depth: jax.Array, row: jax.Array, drawn: jax.Array,
    *, num_rows: int, max_depth: int, agrees: jax.Array | None = None,
) -> Accepted:  # fmt: skip
    """Walk all trees at once. All arrays are i32[T], packed, parents before children.

    parent: packed index, -1 for a root. emit_depth: 0 for a root or the last token of a prompt, j for a tree node of
    depth j, PREFILL or PADDING. drawn: the target's token after each node, read where emit_depth >= 0. agrees: bool[T],
    nodes that are accepted where their parent is, at most one child of each; None: those whose token was drawn after
    their parent.
    """
    is_root = emit_depth == 0
    if agrees is None:
        agrees = (emit_depth > 0) & (drawn[parent] == token)

    accepted, above = is_root | agrees, jnp.where(is_root, jnp.arange(len(parent)), parent)
    # pointer doubling: a node and its nearest 1, 2, 4, ... ancestors
    for _ in range(max(max_depth - 1, 0).bit_length()):
        accepted, above = accepted & accepted[above], above[above]
    tokens = jnp.zeros((num_rows, max_depth + 1), jnp.int32)
    depth = jnp.where(accepted, emit_depth, max_depth + 1)
    tokens = tokens.at[row, depth].set(drawn, mode="drop")
    counts = jnp.zeros(num_rows, jnp.int32).at[row].add(accepted.astype(jnp.int32), mode="drop")
    return Accepted(accepted, tokens, counts, accepted | (emit_depth == PREFILL))


def synthetic_draws(
    token: jax.Array, parent: jax.Array, emit_depth: jax.Array, coin: jax.Array, drawn: jax.Array,
    rates: tuple[float, ...],
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Accept nodes by coins with a chance by depth, instead of by comparison (docs/simulate.md).

    Arrays as for `accept_walk`. coin: f32[T], uniform in (0, 1). rates: chances of depth 1, 2, ...; 0 beyond.
    Returns `drawn` with an accepted child's token after its parent, and `agrees`: of several children whose coins say
    so, the first.
    """
    num_tokens = token.shape[0]
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    chance = jnp.array((0.0, *rates, 0.0), jnp.float32)[jnp.clip(emit_depth, 0, len(rates) + 1)]
    lands = coin < chance
    first = jnp.full(num_tokens, num_tokens, jnp.int32)
    first = first.at[jnp.where(lands, parent, num_tokens)].min(index, mode="drop")
    agrees = lands & (first[parent] == index)
    return jnp.where(first < num_tokens, token[jnp.minimum(first, num_tokens - 1)], drawn), agrees


def ancestor_bits(parent: jax.Array) -> jax.Array:
    """Return the packed tokens that each token may attend to, as bits: itself and its ancestors.

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
    """Return the path to each token: path[t, j] is the packed index of its j-th ancestor from the root, itself last.

    mask: bool[T, T] from `expand_bits`. Returns i32[T, T]; entries past the token's own depth are 0.
    """
    num_tokens = mask.shape[0]
    rank = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, num_tokens)
    rows = jnp.broadcast_to(jnp.arange(num_tokens)[:, None], mask.shape)
    values = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[None, :], mask.shape)
    return jnp.zeros((num_tokens, num_tokens), jnp.int32).at[rows, rank].set(values, mode="drop")
