"""What a target makes of the cells that a draft service names: log f of a tree's nodes, by its own chances.

A tree brings which cell of the acceptance table each node is in, and the draft's own probability of it; chances stay
with the target, which learns them. Imports no jax.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from adaserve_jax.tree.chances import ChanceTable


def cells_hash(table: ChanceTable) -> str:
    """16 hexadecimal digits of how many cells a table has and where they end; its chances do not count."""
    edges = [[repr(float(edge)) for edge in mode] for mode in table.edges.astype(np.float32)]
    said = json.dumps([list(table.chance.shape), edges])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def log_f_of(cell: np.ndarray, parent: np.ndarray, log_chance: np.ndarray, coupled: np.ndarray) -> np.ndarray:
    """f32[R, D, W], log f of trees by a table's chances, bit for bit as `tree.beam` adds them up on a device.

    cell, parent: i32[R, D, W], parent a column (level * W + rank), both -1 where absent. log_chance: f32[2, cells], by
    mode; coupled: bool[R].
    """
    gain = log_chance[coupled.astype(np.intp)[:, None, None], np.maximum(cell, 0)]
    return along_paths(np.where(cell < 0, np.float32(-np.inf), gain), parent)


def along_paths(gain: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """f32[R, D, W], sums of `gain` from the first level down to each node, added in that order; -inf below what is
    absent. gain: f32[R, D, W], -inf where absent; parent: as in `log_f_of`."""
    rows, depth, width = gain.shape
    sums = gain.copy()
    flat = sums.reshape(-1)
    above = np.maximum(parent, 0) + np.arange(0, rows * depth * width, depth * width)[:, None, None]
    for level in range(1, depth):
        sums[:, level] += flat[above[:, level]]
    return sums
