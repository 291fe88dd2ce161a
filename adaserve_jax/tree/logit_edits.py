"""Penalties, biases and bans on the target's logits after every node of a tree.

After a node they are what plain decoding would have after the same tokens: counts are those of the row's own text and
of the path to the node. So p' of a node is a function of its path, which is all that the proof of exactness asks
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
"""Entries of a table that are spread at a time: its length is a multiple."""


class Table(NamedTuple):
    """A part of the tokens that the rows' penalties or biases concern, E of them, each once per row. index: i32[E],
    row * V + token, R * V or more where there is none; seen: i32[E], 2 * times in the output + whether the prompt has
    it; bias: f32[E]; chunks: i32[], how many chunks hold any."""

    index: jax.Array
    seen: jax.Array
    bias: jax.Array
    chunks: jax.Array


class Penalties(NamedTuple):
    """Of the rows, f32[R] each."""

    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array


class Paths(NamedTuple):
    """How the sampled positions hang together. at: i32[N], their packed indices; row: i32[N]; token, parent,
    emit_depth: i32[T], packed, emit_depth above 0 for what a tree has below its root."""

    at: jax.Array
    row: jax.Array
    token: jax.Array
    parent: jax.Array
    emit_depth: jax.Array


def edited_logits(
    logits: jax.Array, penalties: Penalties, tables: Sequence[Table], allowed: jax.Array, paths: Paths,
    *, max_depth: int,
) -> jax.Array:  # fmt: skip
    """The logits that the sampler sees, f32[N, V]: penalties, then biases, then bans. logits: f32[N, V]; tables: filled
    from the first one on; allowed: u32[N, ceil(V / 32)], bit v % 32 of word v // 32 for token v. With empty tables only
    bans cost anything."""

    def with_tables(logits: jax.Array) -> jax.Array:
        return _penalised(logits, penalties, tables, paths, max_depth)

    scores = lax.cond(tables[0].chunks > 0, with_tables, lambda logits: logits, logits)
    vocab = jnp.arange(logits.shape[1])
    bits = jnp.repeat(allowed, 32, axis=1)[:, : len(vocab)] >> (vocab % 32).astype(jnp.uint32)
    return jnp.where(bits & 1, scores, MASKED)


def _penalised(
    logits: jax.Array, penalties: Penalties, tables: Sequence[Table], paths: Paths, max_depth: int
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


def _spread(tables: Sequence[Table], size: int) -> tuple[jax.Array, jax.Array]:
    """seen i32[R * V] and bias f32[R * V], chunk by chunk, so that an empty table costs nothing."""

    def add(table: Table, chunk: jax.Array, spread: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, seen, bias = (lax.dynamic_slice(column, (chunk * CHUNK,), (CHUNK,)) for column in table[:3])
        return spread[0].at[index].set(seen, mode="drop"), spread[1].at[index].set(bias, mode="drop")

    spread = jnp.zeros(size, jnp.int32), jnp.zeros(size, jnp.float32)
    for table in tables:
        spread = lax.fori_loop(0, table.chunks, partial(add, table), spread)
    return spread


def _with_paths(counts: jax.Array, paths: Paths, max_depth: int) -> jax.Array:
    """Add to i32[N, V] the tokens between each position's root and itself."""
    if not max_depth:
        return counts
    lines = jnp.arange(counts.shape[0])

    def climb(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        counts, node = state
        below = paths.emit_depth[node] > 0
        token = jnp.where(below, paths.token[node], counts.shape[1])
        return counts.at[lines, token].add(1, mode="drop"), jnp.where(below, paths.parent[node], node)

    return lax.fori_loop(0, max_depth, climb, (counts, paths.at))[0]
