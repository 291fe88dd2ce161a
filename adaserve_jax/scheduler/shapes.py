"""Draft shapes: the tokens that each is expected to bring, the rows that they keep on pace, and what options are worth.

The joint controller asks in every step, for every shape, token edge and row; `kernels.py` has the loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np

from adaserve_jax.types import Limits

_NO_TEXT, _NO_RATES = np.zeros((0, 0)), np.zeros(0)


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


def all_on_pace(rates: np.ndarray, step_s: np.ndarray, extra: np.ndarray, tokens: np.ndarray, grid: int) -> bool:
    """Return whether some shape and edge keeps every row on pace.

    rates: f64, tokens per second that rows with a draft need. step_s, tokens, grid: as of `value_options`. extra:
    i64[E], nodes beside the roots.
    """
    return bool(kernels().all_on_pace(rates, step_s, extra, tokens, grid))


def value_options(
    drafted: np.ndarray, plain: np.ndarray, step_s: np.ndarray, extra: np.ndarray, tokens: np.ndarray, grid: int, *,
    gained: np.ndarray, chunk: np.ndarray, root_tokens: int, emit: float, prefill: float, baseline_s: float,
    prompt_rates: np.ndarray | None = None, drafted_text: np.ndarray | None = None,
    plain_text: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the value of each shape, token edge and share of prefill, f64[O, E, F], and the rows on pace within it.

    Those, i64[O, E, F], are as many as `extra` nodes can keep on pace, the ones that need the fewest nodes first. The
    value adds prompts in time, and tokens and prompt tokens per baseline latency by their weights.

    drafted, plain: f64, tokens per second that rows with and without a draft need. step_s: f64[O, E], seconds of a step
    by shape and token edge. extra: i64[E, F], nodes beside the roots by edge and share of prefill; below 0 the value is
    -inf. tokens: f64[O, 1 + K], of the same shapes. grid: steps per token to which what a row must gain is rounded up.
    gained: f64[O, E, F], expected tokens beside those of the roots. chunk: i64[E, F], prefill tokens. prompt_rates: as
    in `Load`. drafted_text, plain_text: f64[rows, 1 + C], expected tokens of text already seen, a line for each row;
    None: no text.
    """
    value, on_pace = np.empty(gained.shape), np.empty(gained.shape, np.int64)
    kernels().value_options(
        drafted, plain, step_s, extra, tokens, grid, _NO_TEXT if drafted_text is None else drafted_text,
        _NO_TEXT if plain_text is None else plain_text, gained, chunk,
        _NO_RATES if prompt_rates is None else prompt_rates, root_tokens, emit, prefill, baseline_s, value, on_pace,
    )  # fmt: skip
    return value, on_pace


@cache
def kernels() -> ModuleType:
    """Import the loops, and with them numba, and compile them or load them from its cache, so that no step waits."""
    from adaserve_jax.scheduler import kernels as loops

    rates, empty = np.ones(1), np.ones((1, 1))
    loops.gain(empty, rates, empty.copy())
    loops.all_on_pace(rates, empty, np.zeros(1, np.int64), empty, 1)
    value, counts = np.zeros((1, 1, 1)), np.zeros((1, 1, 1), np.int64)
    loops.value_options(
        rates, rates, empty, counts[0], empty, 1, _NO_TEXT, _NO_TEXT, value, counts[0], _NO_RATES, 1, 1.0, 1.0, 1.0,
        value.copy(), counts,
    )  # fmt: skip
    loops.choose_budget(empty, rates, rates, counts[0, 0] + 1, rates, 1.0, 0, 1, 1, 1.0, 1.0, 1.0, rates.copy())
    nodes, costs, chosen = np.full((1, 1), -1, np.int32), np.zeros((1, 1), np.float32), np.ones((1, 1), bool)
    loops.cost(costs, nodes, costs.copy())
    loops.rank(nodes, nodes[0], 1, 1, counts[0], nodes.copy(), counts[0].copy())
    loops.slo_phase(empty, rates, rates, 1, 1, counts[0, 0])
    loops.throughput_phase(counts[0], empty, counts[0, 0], 1, chosen)
    loops.pack(nodes, nodes, nodes[0], nodes[0], empty, counts[0], chosen)
    return loops
