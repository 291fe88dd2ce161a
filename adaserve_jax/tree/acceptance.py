"""The calibrated chance that the target takes a drafted child, read on the device from the table of `tree.chances`.

Coupled (temperature > 0): looked up by the gap between the child's perturbed score and the best other one.
Greedy: by the child's log probability. Source: spec adaserve, candidate trees.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.tree.chances import ChanceTable, log_chances


class AcceptanceTable(NamedTuple):
    """log_chance: f32[2, D, ranks, bins], first axis greedy then coupled; edges: f32[2, bins - 1], increasing."""

    log_chance: jax.Array
    edges: jax.Array

    @classmethod
    def of(cls, table: ChanceTable) -> AcceptanceTable:
        return cls(jnp.asarray(log_chances(table.chance)), jnp.asarray(table.edges))

    def replaced(self, chance: np.ndarray) -> AcceptanceTable:
        """The same cells with other chances, f32[2, D, ranks, bins]; nothing is compiled."""
        return self._replace(log_chance=jnp.asarray(log_chances(chance)))

    def cell_of(self, feature: jax.Array, coupled: jax.Array, level: jax.Array) -> jax.Array:
        """i32[..., W], the children's cells: index over [D, ranks, bins]. feature: f32[..., W], rank along the last
        axis; coupled: bool[...] per parent; level: i32 scalar, depth of the children, from 1; deeper than the table
        reads its last level."""
        _, depths, ranks, bins = self.log_chance.shape
        mode = coupled.astype(jnp.int32)[..., None]
        depth = jnp.minimum(level - 1, depths - 1)
        rank = jnp.minimum(jnp.arange(feature.shape[-1]), ranks - 1)
        column = jnp.sum(feature[..., None] >= self.edges[mode], axis=-1)
        return ((depth * ranks + rank) * bins + column).astype(jnp.int32)

    def log_chance_of(self, cell: jax.Array, coupled: jax.Array) -> jax.Array:
        """Log chances f32[..., W] of children in these cells. coupled: bool[...] per parent."""
        return self.log_chance.reshape(2, -1)[coupled.astype(jnp.int32)[..., None], cell]
