"""Applies penalties, biases and bans to the target's logits after every node of a tree.

The edits after a node are those of plain decoding after the same tokens: penalties count the row's text and the path to
the node. So p' of a node is a function of its path, which the proof of exactness requires
(docs/architecture/constraints.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.tree.sampling import MASKED

CHUNK = 1024
"""Table entries that one loop iteration scatters; a table's length is a multiple."""


class EditTable(NamedTuple):
    """E entries: tokens that a row's penalties or biases concern, each once per row.

    index: i32[E], row * V + token, at least R * V for no entry. seen: i32[E], 2 * count in the output, plus 1 if the
    prompt has the token. bias: f32[E]. chunks: i32[], number of chunks that hold entries.
    """

    index: jax.Array
    seen: jax.Array
    bias: jax.Array
    chunks: jax.Array


class Penalties(NamedTuple):
    """Penalties of the rows, f32[R] each."""

    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array


class Paths(NamedTuple):
    """Trees of the N sampled positions. at: i32[N], packed indices; row: i32[N]; token, parent, emit_depth: i32[T],
    packed; emit_depth is above 0 for nodes below a root."""

    at: jax.Array
    row: jax.Array
    token: jax.Array
    parent: jax.Array
    emit_depth: jax.Array


def edited_logits(
    logits: jax.Array, penalties: Penalties, tables: Sequence[EditTable], allowed: jax.Array, paths: Paths,
    *, max_depth: int,
) -> jax.Array:  # fmt: skip
    """Return the logits to sample from, f32[N, V]: penalties applied, then biases, then bans.

    tables: filled from the first one on; if all are empty, only bans cost anything. allowed: u32[N, ceil(V / 32)], bit
    v % 32 of word v // 32 for token v.
    """

    def with_tables(logits: jax.Array) -> jax.Array:
        return _penalised(logits, penalties, tables, paths, max_depth)

    scores = lax.cond(tables[0].chunks > 0, with_tables, lambda logits: logits, logits)
    vocab = jnp.arange(logits.shape[1])
    bits = jnp.repeat(allowed, 32, axis=1)[:, : len(vocab)] >> (vocab % 32).astype(jnp.uint32)
    return jnp.where(bits & 1, scores, MASKED)


def _penalised(
    logits: jax.Array, penalties: Penalties, tables: Sequence[EditTable], paths: Paths, max_depth: int
) -> jax.Array:
    rows, vocab_size = penalties.presence.shape[0], logits.shape[1]
    seen, bias = (spread.reshape(rows, vocab_size)[paths.row] for spread in _spread(tables, rows * vocab_size))
    output_count = _with_paths(seen >> 1, paths, max_depth)
    presence, frequency, repetition = (each[paths.row][:, None] for each in penalties)
    in_output = output_count > 0
    repeated = in_output | (seen % 2 > 0)
    scores = jnp.where(repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    scores = scores - presence * in_output - frequency * output_count
    return scores + bias


def _spread(tables: Sequence[EditTable], size: int) -> tuple[jax.Array, jax.Array]:
    """Scatter the tables to seen i32[R * V] and bias f32[R * V], chunk by chunk: an empty table costs nothing."""

    def add(table: EditTable, chunk: jax.Array, spread: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, seen, bias = (lax.dynamic_slice(column, (chunk * CHUNK,), (CHUNK,)) for column in table[:3])
        return spread[0].at[index].set(seen, mode="drop"), spread[1].at[index].set(bias, mode="drop")

    spread = jnp.zeros(size, jnp.int32), jnp.zeros(size, jnp.float32)
    for table in tables:
        spread = lax.fori_loop(0, table.chunks, partial(add, table), spread)
    return spread


def _with_paths(counts: jax.Array, paths: Paths, max_depth: int) -> jax.Array:
    """Add the tokens on each position's path below the root to counts i32[N, V]."""
    if not max_depth:
        return counts
    lines = jnp.arange(counts.shape[0])

    def climb(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        counts, node = state
        below = paths.emit_depth[node] > 0
        token = jnp.where(below, paths.token[node], counts.shape[1])
        return counts.at[lines, token].add(1, mode="drop"), jnp.where(below, paths.parent[node], node)

    return lax.fori_loop(0, max_depth, climb, (counts, paths.at))[0]
