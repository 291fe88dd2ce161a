"""What a beam search of a given depth and width is expected to bring, by the averages that were learned.

Knows no time, cost or load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.types import Limits

GRID = 16
"""Steps per token of the table that turns expected tokens into nodes."""
OUT_OF_REACH = 1 << 24
"""Nodes that no budget holds."""


@dataclass(frozen=True, eq=False)
class Shapes:
    """The options of the draft, O of them; the first is depth 0. depth, width, size (nodes): i64[O];
    mask: bool[O, max nodes]."""

    depth: np.ndarray
    width: np.ndarray
    size: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, limits: Limits, widths: tuple[int, ...]) -> Shapes:
        widths = tuple(width for width in widths if width <= limits.max_width)
        pairs = [(0, 0)] + [(depth, width) for depth in range(1, limits.max_depth + 1) for width in widths]
        depth = np.array([pair[0] for pair in pairs])
        width = np.array([pair[1] for pair in pairs])
        levels = np.arange(limits.max_depth)[:, None]
        ranks = np.arange(limits.max_width)[None, :]
        mask = (levels < depth[:, None, None]) & (ranks < width[:, None, None])
        return cls(depth, width, depth * width, mask.reshape(len(pairs), -1))

    def reach(self, chance: np.ndarray) -> Reach:
        """chance: f64[max_depth, max_width], that a node is accepted, by depth and rank."""
        best_first = np.sort(np.where(self.mask, chance.ravel(), 0.0), axis=1)[:, ::-1]
        tokens = np.zeros((len(self.depth), best_first.shape[1] + 1))
        np.cumsum(best_first, axis=1, out=tokens[:, 1:])
        return Reach.of(tokens)


@dataclass(frozen=True, eq=False)
class Reach:
    """tokens: f64[O, 1 + K], expected beyond the root with the best 0, 1, ... nodes of each shape. nodes: i64[O * G],
    the fewest nodes that bring each GRID-th of a token, shape after shape, OUT_OF_REACH in the last of each."""

    tokens: np.ndarray
    nodes: np.ndarray
    grid_steps: int

    @classmethod
    def of(cls, tokens: np.ndarray) -> Reach:
        steps = int(tokens[:, -1].max() * GRID) + 2
        levels = np.arange(steps) / GRID
        nodes = np.stack([np.searchsorted(row, levels) for row in tokens])
        nodes[nodes >= tokens.shape[1]] = OUT_OF_REACH
        return cls(tokens, nodes.ravel(), steps)

    def nodes_for(self, need_rate: np.ndarray, step_s: np.ndarray, shapes: np.ndarray | None = None) -> np.ndarray:
        """i64[O, E, R]: nodes that put each request on pace. need_rate: f64[R], tokens per second; step_s: f64[O, E];
        shapes: indices of the O rows of step_s, None for all."""
        first = np.arange(len(self.tokens)) if shapes is None else shapes
        gain = need_rate * (step_s * GRID)[:, :, None]
        gain -= GRID
        np.ceil(gain, out=gain)
        np.clip(gain, 0.0, self.grid_steps - 1, out=gain)
        gain += (first * self.grid_steps)[:, None, None]
        return self.nodes.take(gain.astype(np.intp))

    def gain(self, nodes: np.ndarray, shapes: np.ndarray | None) -> np.ndarray:
        """f64[O, ...], expected tokens beyond the root of `nodes` best nodes, linear between whole ones."""
        tokens = self.tokens if shapes is None else self.tokens[shapes]
        last = tokens.shape[1] - 1
        each = np.clip(nodes, 0, last)
        whole = each.astype(np.int64)
        above = np.minimum(whole + 1, last)
        return tokens[:, whole] + (tokens[:, above] - tokens[:, whole]) * (each - whole)
