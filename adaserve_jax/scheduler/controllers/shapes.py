"""Draft shapes, the tokens that each is expected to bring, and the rows that they keep on pace.

The joint controller asks in every step, for every shape, token edge and row; `shape_kernels` has the loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np

from adaserve_jax.types import Limits

_NO_TEXT = np.zeros((0, 0))


@dataclass(frozen=True, eq=False)
class Shapes:
    """Shapes of the beam search, O of them; the first is depth 0.

    depth, width, size (nodes): i64[O]. mask: bool[O, max nodes].
    """

    depth: np.ndarray
    width: np.ndarray
    size: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, limits: Limits, widths: tuple[int, ...]) -> Shapes:
        """Return every depth with every width that was timed."""
        widths = tuple(width for width in widths if width <= limits.max_width)
        pairs = [(0, 0)] + [(depth, width) for depth in range(1, limits.max_depth + 1) for width in widths]
        depth = np.array([pair[0] for pair in pairs])
        width = np.array([pair[1] for pair in pairs])
        levels = np.arange(limits.max_depth)[:, None]
        ranks = np.arange(limits.max_width)[None, :]
        mask = (levels < depth[:, None, None]) & (ranks < width[:, None, None])
        return cls(depth, width, depth * width, mask.reshape(len(pairs), -1))

    def tokens(self, chance: np.ndarray) -> np.ndarray:
        """Return f64[O, 1 + K], the expected tokens beyond the root of each shape's best 0, 1, ... nodes.

        chance: f64[max_depth, max_width], f by depth and rank.
        """
        return cumulated(np.sort(np.where(self.mask, chance.ravel(), 0.0), axis=1)[:, ::-1])


def cumulated(f: np.ndarray) -> np.ndarray:
    """Return f64[N, 1 + K], the sums of the first 0, 1, ... nodes of each line; f: f64[N, K]."""
    tokens = np.zeros((len(f), 1 + f.shape[1]))
    np.cumsum(f, axis=1, out=tokens[:, 1:])
    return tokens


def gain(tokens: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Return f64[O, ...], expected tokens beyond the root of the `nodes` best nodes, linear between whole ones.

    tokens: f64[O, 1 + K], as from `Shapes.tokens`. nodes: f64[...].
    """
    found = np.empty((len(tokens), nodes.size))
    kernels().gain(tokens, np.ascontiguousarray(nodes, np.float64).reshape(-1), found)
    return found.reshape(len(tokens), *nodes.shape)


def rows_on_pace(
    drafted: np.ndarray, plain: np.ndarray, step_s: np.ndarray, extra: np.ndarray, tokens: np.ndarray, grid: int,
    drafted_text: np.ndarray = _NO_TEXT, plain_text: np.ndarray = _NO_TEXT,
) -> np.ndarray:  # fmt: skip
    """Count the rows that `extra` nodes can keep on pace, i64[O, E, F]: those that need the fewest nodes first.

    drafted, plain: f64, tokens per second that rows with and without a draft need. step_s: f64[O, E], seconds of a step
    by shape and token edge. extra: i64[E, F], nodes beside the roots by edge and share of prefill; below 0 no row is
    kept. tokens: f64[O, 1 + K], of the same shapes. grid: steps per token to which what a row must gain is rounded up.
    drafted_text, plain_text: f64[rows, 1 + C], expected tokens of text already seen, a line for each row.
    """
    found = np.zeros((*step_s.shape, extra.shape[1]), np.int64)
    kernels().count_on_pace(drafted, plain, step_s, extra, tokens, grid, drafted_text, plain_text, found)
    return found


@cache
def kernels() -> ModuleType:
    """Import the loops, and with them numba, and compile them or load them from its cache, so that no step waits."""
    from adaserve_jax.scheduler.controllers import shape_kernels

    rates, empty = np.ones(1), np.ones((1, 1))
    shape_kernels.gain(empty, rates, empty.copy())
    counts = np.zeros((1, 1, 1), np.int64)
    shape_kernels.count_on_pace(rates, rates, empty, counts[0], empty, 1, _NO_TEXT, _NO_TEXT, counts)
    return shape_kernels
