"""The calibrated chance that the target takes a drafted child: a small monotone table, read on the device.

Coupled (temperature > 0): looked up by the gap between the child's perturbed score and the best other one.
Greedy: by the child's log probability. Source: spec adaserve, candidate trees. Fitted offline per pair, shipped as
calibration.json beside the models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.errors import CheckpointError

SMALLEST = 1e-4


class AcceptanceTable(NamedTuple):
    """log_chance: f32[2, D, ranks, bins], first axis greedy then coupled; edges: f32[2, bins - 1], increasing."""

    log_chance: jax.Array
    edges: jax.Array

    def log_chance_of(self, feature: jax.Array, coupled: jax.Array, level: jax.Array) -> jax.Array:
        """Log chances of children. feature: f32[..., W], rank along the last axis; coupled: bool[...] per parent;
        level: i32 scalar, depth of the children, from 1; deeper than the table reads its last level."""
        mode = coupled.astype(jnp.int32)[..., None]
        depth = jnp.minimum(level - 1, self.log_chance.shape[1] - 1)
        rank = jnp.minimum(jnp.arange(feature.shape[-1]), self.log_chance.shape[2] - 1)
        column = jnp.sum(feature[..., None] >= self.edges[mode], axis=-1)
        return self.log_chance[mode, depth, rank, column]


def _section(data: dict[str, Any], name: str, source: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        edges = np.asarray(data[name]["edges"], np.float32)
        table = np.asarray(data[name]["table"], np.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: section {name!r} must hold numeric 'edges' and 'table' ({error})") from error
    fits = table.ndim == 3 and edges.ndim == 1 and table.shape[2] == len(edges) + 1
    if not fits or (np.diff(edges) <= 0).any() or not ((table >= 0) & (table <= 1)).all():
        raise CheckpointError(
            f"{source}: section {name!r} must hold increasing edges [E] and chances [depth, rank, E + 1] in [0, 1], "
            f"got shapes {edges.shape} and {table.shape}"
        )
    return edges, table


def load_acceptance_table(path: Path) -> AcceptanceTable:
    """Read calibration.json. Raises CheckpointError when it is not a valid table."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read the acceptance table ({error})") from error
    sections = [_section(data, name, path) for name in ("greedy", "coupled")]
    bins = max(len(edges) for edges, _ in sections)
    depth = max(table.shape[0] for _, table in sections)
    ranks = max(table.shape[1] for _, table in sections)
    edges = np.full((2, bins), np.inf, np.float32)
    chances = np.zeros((2, depth, ranks, bins + 1), np.float32)
    for mode, (own_edges, own) in enumerate(sections):
        edges[mode, : len(own_edges)] = own_edges
        grown = np.pad(own, [(0, depth - own.shape[0]), (0, ranks - own.shape[1]), (0, bins - len(own_edges))], "edge")
        chances[mode] = grown
    return AcceptanceTable(jnp.asarray(np.log(np.maximum(chances, SMALLEST))), jnp.asarray(edges))
