"""Beam search of the draft for all rows at once. The beams of all levels together are the candidate trees.

The draft's forward is an argument of `beam_search`, so the search knows no model. Source: AdaServe, section 4
(speculate), with children drawn by Gumbel coupling (docs/architecture/tree.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.tree.acceptance_table import ChanceTable, log_chances
from adaserve_jax.tree.sampling import DeviceSampling, add_noise, scaled_scores


class AcceptanceTable(NamedTuple):
    """Calibrated chances that the target accepts a drafted child, on the device.

    Sampling rows (coupled, temperature > 0) look up the gap between the child's perturbed score and the best other one,
    greedy rows the child's log probability. log_chance: f32[2, D, ranks, bins], first axis greedy then coupled; edges:
    f32[2, bins - 1], increasing, the bins of that feature.
    """

    log_chance: jax.Array
    edges: jax.Array

    @classmethod
    def of(cls, table: ChanceTable) -> AcceptanceTable:
        """Copy a host table to the device."""
        return cls(jnp.asarray(log_chances(table.chance)), jnp.asarray(table.edges))

    def replaced(self, chance: np.ndarray) -> AcceptanceTable:
        """Return the same cells with other chances, f32[2, D, ranks, bins]; compiles nothing."""
        return self._replace(log_chance=jnp.asarray(log_chances(chance)))

    def cell_of(self, feature: jax.Array, coupled: jax.Array, level: jax.Array) -> jax.Array:
        """Return the children's cells, i32[..., W]: flat indices over [D, ranks, bins].

        feature: f32[..., W], by rank along the last axis. coupled: bool[...], per parent. level: i32 scalar, the
        children's depth from 1; depths beyond the table use its last one.
        """
        _, depths, ranks, bins = self.log_chance.shape
        mode = coupled.astype(jnp.int32)[..., None]
        depth = jnp.minimum(level - 1, depths - 1)
        rank = jnp.minimum(jnp.arange(feature.shape[-1]), ranks - 1)
        column = jnp.sum(feature[..., None] >= self.edges[mode], axis=-1)
        return ((depth * ranks + rank) * bins + column).astype(jnp.int32)

    def log_chance_of(self, cell: jax.Array, coupled: jax.Array) -> jax.Array:
        """Return the log chances of these cells, f32[..., W]. coupled: bool[...], per parent."""
        return self.log_chance.reshape(2, -1)[coupled.astype(jnp.int32)[..., None], cell]


BeamForward = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""forward(carry, level, token i32[R, W], position i32[R, W], visible bool[R, W, D * W]) -> logits f32[R, W, V], carry.
Node w of the level is key level * W + w of `visible`; the carry belongs to the forward alone."""


class Beam(NamedTuple):
    """Candidate trees as arrays [R, D, W]: depth (from 1) and rank in the beam of that depth.

    token: i32. parent: i32, index (depth - 1) * W + rank, -1 for the root. log_f: f32, log of the chance that the whole
    path is accepted, -inf where there is no candidate. cell: i32, of the acceptance table, -1 where there is no
    candidate. log_q: f32, the draft's own log probability of the token under the row's sampling.
    """

    token: jax.Array
    parent: jax.Array
    log_f: jax.Array
    cell: jax.Array
    log_q: jax.Array


class _Children(NamedTuple):
    """Best children of N nodes. token, cell: i32[R, N, W]; log_chance, log_q: f32[R, N, W]."""

    token: jax.Array
    log_chance: jax.Array
    cell: jax.Array
    log_q: jax.Array


class _State(NamedTuple):
    beam: Beam
    visible: jax.Array  # bool[R, W, D * W], ancestors of the newest level, itself included
    carry: Any


def beam_search(
    root_logits: jax.Array, sampler: DeviceSampling, root_position: jax.Array, active: jax.Array,
    table: AcceptanceTable, forward: BeamForward, carry: Any, depth: jax.Array, width_limit: jax.Array,
    calibrated: jax.Array,
    *, max_depth: int, width: int,
) -> Beam:  # fmt: skip
    """Search `depth` <= max_depth levels, keeping the min(width, width_limit) likeliest paths of each.

    Args:
        root_logits: f32[R, V], the draft's after each row's root.
        sampler: Sampling parameters of the rows.
        root_position: i32[R].
        active: bool[R]; other rows get no candidates.
        table: Acceptance table.
        forward: The draft on one level of the beam.
        carry: First carry of `forward`.
        depth: i32 scalar, traced: one program serves every depth and width limit.
        width_limit: i32 scalar, traced.
        calibrated: bool scalar, traced. A path's f is the product of the table's chances, or else of the draft's own
            probabilities.
        max_depth: D, most levels.
        width: W, most paths of a level.
    """
    num_rows = root_logits.shape[0]
    rank = jnp.arange(width)
    first = _children(root_logits[:, None], sampler, root_position + 1, table, calibrated, jnp.int32(1), width)
    log_f, _, first = _best(first, jnp.where(active, 0.0, -jnp.inf)[:, None], width_limit)
    no_parent = jnp.full((num_rows, width), -1, jnp.int32)
    beam = _grown(_empty((num_rows, max_depth, width)), jnp.int32(0), first, no_parent, log_f)
    keys = jnp.arange(max_depth * width)
    own = jnp.broadcast_to(keys[None, None, :] == rank[None, :, None], (num_rows, width, max_depth * width))

    def level(index: jax.Array, state: _State) -> _State:
        """Run the draft on level `index` (from 1) and choose level index + 1."""
        above = lax.dynamic_index_in_dim(state.beam.token, index - 1, axis=1, keepdims=False)
        above_f = lax.dynamic_index_in_dim(state.beam.log_f, index - 1, axis=1, keepdims=False)
        position = jnp.broadcast_to((root_position + index)[:, None], (num_rows, width))
        logits, new_carry = forward(state.carry, index - 1, above, position, state.visible)
        children = _children(logits, sampler, root_position + index + 1, table, calibrated, index + 1, width)
        log_f, parent_rank, chosen = _best(children, above_f, width_limit)
        grown = _grown(state.beam, index, chosen, (index - 1) * width + parent_rank, log_f)
        inherited = jnp.take_along_axis(state.visible, parent_rank[:, :, None], axis=1)
        visible = inherited | (keys[None, None, :] == (index * width + rank)[None, :, None])
        return _State(grown, visible, new_carry)

    return lax.fori_loop(1, depth, level, _State(beam, own, carry)).beam


def _children(
    logits: jax.Array, sampler: DeviceSampling, position: jax.Array, table: AcceptanceTable, calibrated: jax.Array,
    level: jax.Array, width: int,
) -> _Children:  # fmt: skip
    """Return the `width` best children of a level's nodes. logits: f32[R, N, V]; position: i32[R], the children's."""
    scaled = scaled_scores(logits, sampler)
    scores = add_noise(scaled, sampler, position)
    # XLA on CPU has a fast top-k for matrices only; with more axes it sorts the whole vocabulary.
    best, token = lax.top_k(scores.reshape(-1, scores.shape[-1]), width + 1)
    best, token = (x.reshape(*scores.shape[:2], width + 1) for x in (best, token))
    first, others = best[..., :1], best[..., 1:width]
    gap = jnp.concatenate([first - best[..., 1:2], others - first], axis=-1)
    token = token[..., :width].astype(jnp.int32)
    log_q = jnp.take_along_axis(scaled, token, axis=-1) - jax.nn.logsumexp(scaled, axis=-1)[..., None]
    log_q = jnp.minimum(log_q, 0.0)
    coupled = jnp.broadcast_to((sampler.temperature > 0)[:, None], logits.shape[:2])
    feature = jnp.where(coupled[..., None], gap, log_q)
    cell = table.cell_of(feature, coupled, level)
    chance = jnp.where(calibrated, table.log_chance_of(cell, coupled), log_q)
    return _Children(token, jnp.where(jnp.isfinite(best[..., :width]), chance, -jnp.inf), cell, log_q)


def _best(children: _Children, above_f: jax.Array, width_limit: jax.Array) -> tuple[jax.Array, jax.Array, _Children]:
    """Choose the W likeliest paths that end in these children, [R, N, W]. above_f: f32[R, N], log f of the parents.

    Returns log f [R, W], decreasing and -inf from width_limit on; the parent's rank [R, W]; the children [R, W].
    """
    num_rows, _, width = children.token.shape
    log_f, choice = lax.top_k((above_f[..., None] + children.log_chance).reshape(num_rows, -1), width)
    log_f = jnp.where(jnp.arange(width) < width_limit, log_f, -jnp.inf)
    chosen = (jnp.take_along_axis(values.reshape(num_rows, -1), choice, axis=1) for values in children)
    return log_f, choice // width, _Children(*chosen)


def _empty(shape: tuple[int, int, int]) -> Beam:
    none, absent = jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)
    return Beam(jnp.zeros(shape, jnp.int32), none, absent, none, absent)


def _grown(beam: Beam, index: jax.Array, chosen: _Children, parent: jax.Array, log_f: jax.Array) -> Beam:
    """Return the beam with level `index` set, from arrays [R, W]. Absent candidates get cell -1."""
    cell = jnp.where(jnp.isfinite(log_f), chosen.cell, -1)
    level = Beam(chosen.token, parent, log_f, cell, chosen.log_q)
    return Beam(
        *(lax.dynamic_update_index_in_dim(all_, one, index, axis=1) for all_, one in zip(beam, level, strict=True))
    )
