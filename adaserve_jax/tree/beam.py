"""Beam search of the draft for all rows at once; every level's beam stays in the candidate tree.

Knows no model: the forward comes as an argument, with a carry that only it understands.
Source: AdaServe section 4 (speculate), children by Gumbel coupling (spec: verification, adaserve).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.tree.acceptance import AcceptanceTable
from adaserve_jax.tree.sampling import Sampler, perturbed_scores

# forward(carry, level, token i32[R, W], position i32[R, W], visible bool[R, W, D * W]) -> (logits f32[R, W, V], carry);
# node w of that level is key level * W + w of `visible`.
Forward = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class Beam(NamedTuple):
    """Candidates in beam order, index (depth - 1) * W + rank. token, parent: i32[R, D, W]; log_f: f32[R, D, W], -inf
    where absent. parent is a candidate index, -1 for the root."""

    token: jax.Array
    parent: jax.Array
    log_f: jax.Array


class _State(NamedTuple):
    beam: Beam
    visible: jax.Array  # bool[R, W, D * W], ancestors of the newest level, itself included
    carry: Any


def _children(
    logits: jax.Array, sampler: Sampler, position: jax.Array, table: AcceptanceTable, level: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """The `width` best children of the nodes of a level. logits: f32[R, N, V]; position: i32[R], of the children.
    Returns tokens i32[R, N, width] and log chances f32[R, N, width]."""
    scores = perturbed_scores(logits, sampler, position)
    # XLA on CPU has a fast top-k for matrices only; with more axes it sorts the whole vocabulary.
    best, token = lax.top_k(scores.reshape(-1, scores.shape[-1]), width + 1)
    best, token = (x.reshape(*scores.shape[:2], width + 1) for x in (best, token))
    first, others = best[..., :1], best[..., 1:width]
    gap = jnp.concatenate([first - best[..., 1:2], others - first], axis=-1)
    log_q = best[..., :width] - jax.nn.logsumexp(logits, axis=-1)[..., None]
    coupled = jnp.broadcast_to((sampler.temperature > 0)[:, None], logits.shape[:2])
    feature = jnp.where(coupled[..., None], gap, log_q)
    chance = table.log_chance_of(feature, coupled, level)
    return token[..., :width].astype(jnp.int32), jnp.where(jnp.isfinite(best[..., :width]), chance, -jnp.inf)


def beam_search(
    root_logits: jax.Array,
    sampler: Sampler,
    root_position: jax.Array,
    active: jax.Array,
    table: AcceptanceTable,
    forward: Forward,
    carry: Any,
    depth: jax.Array,
    width_limit: jax.Array,
    *,
    max_depth: int,
    width: int,
) -> Beam:
    """Search `depth` <= max_depth levels, keeping the min(width, width_limit) likeliest paths of each.

    root_logits: f32[R, V]; root_position: i32[R]; active: bool[R], other rows get no candidates. depth, width_limit:
    i32 scalars, traced, so that one program serves every shape up to (max_depth, width).
    """
    num_rows = root_logits.shape[0]
    rank = jnp.arange(width)
    token, log_f = _children(root_logits[:, None], sampler, root_position + 1, table, jnp.int32(1), width)
    token, log_f = token[:, 0], log_f[:, 0]
    log_f = jnp.where(active[:, None] & (rank < width_limit)[None, :], log_f, -jnp.inf)
    shape = (num_rows, max_depth, width)
    beam = Beam(jnp.zeros(shape, jnp.int32), jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))
    beam = Beam(beam.token.at[:, 0].set(token), beam.parent, beam.log_f.at[:, 0].set(log_f))
    keys = jnp.arange(max_depth * width)
    own = jnp.broadcast_to(keys[None, None, :] == rank[None, :, None], (num_rows, width, max_depth * width))

    def level(index: jax.Array, state: _State) -> _State:
        """Feed level `index` (from 1) and choose level index + 1."""
        above = lax.dynamic_index_in_dim(state.beam.token, index - 1, axis=1, keepdims=False)
        above_f = lax.dynamic_index_in_dim(state.beam.log_f, index - 1, axis=1, keepdims=False)
        position = jnp.broadcast_to((root_position + index)[:, None], (num_rows, width))
        logits, new_carry = forward(state.carry, index - 1, above, position, state.visible)
        tokens, chances = _children(logits, sampler, root_position + index + 1, table, index + 1, width)
        paths = (above_f[..., None] + chances).reshape(num_rows, width * width)
        best, choice = lax.top_k(paths, width)
        best = jnp.where((rank < width_limit)[None, :], best, -jnp.inf)
        parent_rank = choice // width
        chosen = jnp.take_along_axis(tokens.reshape(num_rows, width * width), choice, axis=1)
        grown = Beam(
            lax.dynamic_update_index_in_dim(state.beam.token, chosen, index, axis=1),
            lax.dynamic_update_index_in_dim(state.beam.parent, (index - 1) * width + parent_rank, index, axis=1),
            lax.dynamic_update_index_in_dim(state.beam.log_f, best, index, axis=1),
        )
        inherited = jnp.take_along_axis(state.visible, parent_rank[:, :, None], axis=1)
        visible = inherited | (keys[None, None, :] == (index * width + rank)[None, :, None])
        return _State(grown, visible, new_carry)

    return lax.fori_loop(1, depth, level, _State(beam, own, carry)).beam
