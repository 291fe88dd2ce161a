"""Selection of the candidate nodes to verify: AdaServe's Algorithm 2, corrected, and its baselines.

f never increases along a path. So the nodes taken from one sequence are a prefix of its candidates sorted by (-f,
depth, column), and every node comes with its parent. `kernels.py` has the loops over rows and nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from adaserve_jax.errors import BudgetError, ConfigError
from adaserve_jax.scheduler.shapes import kernels
from adaserve_jax.types import CandidateTrees, DraftTrees

SloOrder = Literal["cheapest-first", "slowest-first", "fastest-first"]

_ROW_BITS, _COLUMN_BITS = 15, 10
"""Divide the 32 bits that break ties. The 7 bits left hold a node's depth, at most `EngineConfig.suffix_depth`."""
_NEVER = np.iinfo(np.int64).max
_NO_ORDER = np.zeros(0)


@dataclass(frozen=True, eq=False)
class Ranked:
    """Candidates of every row, best first.

    key: i64[R, C], unique and comparable across rows, lower is better. f: f64[R, C], non-increasing along C, 0 for an
    absent node. column: i64[R, C], index in the candidates.
    """

    key: np.ndarray
    f: np.ndarray
    column: np.ndarray


@dataclass(frozen=True, eq=False)
class Offered:
    """Describe the nodes that a policy's own selector chooses from.

    f: f64[R, C], probability that the whole path to each node is accepted, likeliest first in each row; 0: no node.
    need: f64[R], tokens that each request must gain in this step, the root's counted, so that up to 1 needs no node; 0
    without a target and for hopeless ones. most: nodes that fit the step.
    """

    f: np.ndarray
    need: np.ndarray
    most: int


SelectionFunction = Callable[[Offered], np.ndarray]
"""Return how many nodes of each request to verify, i64[R], its likeliest first."""


def rank(candidates: CandidateTrees) -> Ranked:
    """Sort each row by (-f, depth, column). Keys of all rows compare by (-f, depth, row, column)."""
    cost = _cost(candidates)
    key, column, ordered = np.empty(cost.shape, np.int64), np.empty(cost.shape, np.int64), np.empty_like(cost)
    bits = cost.view(np.int32)  # which order as a float >= 0 does
    kernels().rank(bits, candidates.depth.copy(), _ROW_BITS, _COLUMN_BITS, key, ordered.view(np.int32), column)
    return Ranked(key, _f(ordered), column)


def _cost(candidates: CandidateTrees) -> np.ndarray:
    """Return -log f >= 0, f32[R, C], in which no node costs less than its parent; inf for an absent node or NaN."""
    cost = np.empty(candidates.log_f.shape, np.float32)
    kernels().cost(candidates.log_f.copy("C"), candidates.parent.copy("C"), cost)
    return cost


def _f(cost: np.ndarray) -> np.ndarray:
    """Return f, f64[R, C], of these costs."""
    return np.exp(-cost.astype(np.float64))


def slo_phase(
    f: np.ndarray, need: np.ndarray, *, budget: int, max_slo_nodes: int = 0, order: SloOrder = "cheapest-first"
) -> np.ndarray:
    """Take from each sequence the fewest candidates whose expected tokens reach `need`, while the budget lasts: i64[R].

    f: f64[R, C], non-increasing along C, 0 for absent nodes. need: f64[R], A_cap in tokens, root counted. budget: tree
    tokens of the step, one root per sequence included. max_slo_nodes: most candidates per sequence; 0 for no limit.
    With order `cheapest-first`, sequences that cannot reach their need with all their candidates come last. Source:
    AdaServe Alg. 2 lines 9-17, corrected (docs/equations.md). Raises BudgetError if budget < R.
    """
    rows = len(need)
    if budget < rows:
        raise BudgetError(f"the budget must be at least {rows} tokens, one root per request, got {budget}")
    by = {"cheapest-first": _NO_ORDER, "slowest-first": -need, "fastest-first": need}[order]
    taken = np.empty(rows, np.int64)
    kernels().slo_phase(f, need, by, budget - rows, max_slo_nodes or f.shape[1], taken)
    return taken


def taken_by(function: SelectionFunction, offered: Offered) -> np.ndarray:
    """Return how many candidates of each sequence `function` takes, i64[R]. Raises ConfigError if they cannot be
    verified.
    """
    rows, returned = len(offered.f), function(offered)
    try:
        taken = np.asarray(returned)
    except ValueError:  # lines of several lengths
        taken = np.zeros(0)
    if taken.shape == (rows,) and taken.dtype.kind in "iu" and taken.min() >= 0:
        drafted = np.minimum(taken, np.count_nonzero(offered.f, axis=1))
        if drafted.sum() <= offered.most:
            return drafted
    raise ConfigError(
        f"a policy's selector must return, in integers, how many nodes of each of {rows} requests to verify, at "
        f"most {offered.most} in all, got {returned.tolist() if isinstance(returned, np.ndarray) else returned}; fix "
        "the function"
    )


def throughput_phase(ranked: Ranked, taken: np.ndarray, left: int) -> np.ndarray:
    """Add to `taken` (i64[R]) the `left` best remaining candidates of all sequences: bool[R, C] along ranked columns.

    Source: AdaServe Alg. 2 lines 18-22: one global top-k, ties by (depth, row, column).
    """
    chosen = np.empty(ranked.key.shape, bool)
    kernels().throughput_phase(ranked.key, ranked.f, taken, left, chosen)
    return chosen


def equal_share(ranked: Ranked, left: int) -> np.ndarray:
    """Take the best candidates of each sequence, as many for every sequence as fit: bool[R, C] along ranked columns."""
    present = ranked.f > 0
    by_place = present.T.cumsum().reshape(present.T.shape).T
    return present & (by_place <= left)


def equal_rest(ranked: Ranked, taken: np.ndarray, left: int) -> np.ndarray:
    """Add to `taken` (i64[R]) `left` more candidates, as many for every sequence as fit: bool[R, C] along ranked
    columns.
    """
    columns = ranked.key.shape[1]
    beyond = np.arange(columns) - taken[:, None]
    place = np.where((beyond >= 0) & (ranked.f > 0), beyond, columns)
    chosen = beyond < 0
    more = np.argsort(place, axis=None, kind="stable")[: max(left, 0)]
    chosen.ravel()[more] = True
    return chosen & (ranked.f > 0)


def best_overall(ranked: Ranked, left: int) -> np.ndarray:
    """Take the `left` likeliest candidates of all sequences together: bool[R, C] along ranked columns.

    Source: TETRIS (arXiv 2502.15197), whose score is the product of the draft's probabilities along the path.
    """
    return throughput_phase(ranked, np.zeros(len(ranked.key), np.int64), left)


def most_per_second(
    ranked: Ranked, sizes: np.ndarray, step_s: np.ndarray, need: np.ndarray | None = None
) -> np.ndarray:
    """Take as many of the likeliest candidates of all sequences together as bring the most expected tokens per second:
    bool[R, C] along ranked columns.

    sizes: i64[S], numbers of candidates to choose from, non-decreasing; step_s: f64[S], seconds of a step with so many.
    need: f64[R, S], tokens that each sequence must gain in such a step, root counted: only sizes that give the most
    sequences what they need are compared. Source: DSpark's Algorithm 1 without its early stop (section 5.2), which
    needs no causal barrier here, because no choice of nodes can change a text.
    """
    rows, columns = ranked.key.shape
    order = np.argsort(ranked.key, axis=None)
    f = ranked.f.ravel()[order]
    sizes = np.minimum(sizes, np.count_nonzero(f))
    total = np.zeros(len(f) + 1)
    np.cumsum(f, out=total[1:])
    rate = (rows + total[sizes]) / step_s
    if need is not None:
        part = np.searchsorted(sizes, np.arange(1, len(f) + 1))  # the smallest size that holds each candidate
        number = len(sizes) + 1
        gained = np.bincount(order // columns * number + part, f, rows * number).reshape(rows, number)
        expected = 1.0 + gained[:, :-1].cumsum(axis=1)
        satisfied = np.count_nonzero(expected >= need, axis=0)
        rate = np.where(satisfied == satisfied.max(), rate, -np.inf)
    return best_overall(ranked, int(sizes[rate.argmax()]))


def only_needed(ranked: Ranked, taken: np.ndarray, left: int) -> np.ndarray:
    """Add nothing to `taken` (i64[R]), whatever is left: bool[R, C] along ranked columns."""
    return np.arange(ranked.key.shape[1]) < taken[:, None]


def static_tree(candidates: CandidateTrees, ranked: Ranked, widths: tuple[int, ...], left: int) -> np.ndarray:
    """Take the same tree for every sequence, whatever its candidates are worth: bool[R, C] along ranked columns.

    widths: nodes of level 1, 2, ..., the likeliest ones whose parents are in the tree; levels beyond are left out. If
    `left` does not hold all, the least likely go first. Source: SpecInfer's static trees (AdaServe section 6).
    """
    rows, columns = ranked.key.shape
    in_tree = np.zeros((rows, columns + 1), bool)
    in_tree[:, -1] = True  # the root, at index -1
    for level, width in enumerate(widths, 1):
        (here,) = np.nonzero(candidates.depth == level)
        present = np.isfinite(candidates.log_f[:, here])
        open_nodes = present & np.take_along_axis(in_tree, candidates.parent[:, here], axis=1)
        worst_last = np.argsort(np.where(open_nodes, -candidates.log_f[:, here], np.inf), axis=1, kind="stable")
        place = np.argsort(worst_last, axis=1)
        in_tree[:, here] = open_nodes & (place < width)
    chosen = np.take_along_axis(in_tree, ranked.column, axis=1) & (ranked.f > 0)
    if chosen.sum() <= left:
        return chosen
    keys = np.where(chosen, ranked.key, _NEVER).ravel()
    return chosen & (ranked.key <= np.partition(keys, left - 1)[left - 1]) if left > 0 else np.zeros_like(chosen)


def pack(candidates: CandidateTrees, root_token: np.ndarray, ranked: Ranked, chosen: np.ndarray) -> DraftTrees:
    """Return the trees of all rows: roots and the `chosen` candidates (bool[R, C] along ranked columns)."""
    return _pack(candidates, root_token, ranked.f, ranked.column, chosen)


def pack_all(candidates: CandidateTrees, root_token: np.ndarray) -> DraftTrees:
    """Return trees of every present candidate: the result of any rule whose budget holds them all."""
    f = _f(_cost(candidates))
    return _pack(candidates, root_token, f, np.arange(f.size).reshape(f.shape) % f.shape[1], f > 0)


def _pack(
    candidates: CandidateTrees, root_token: np.ndarray, f: np.ndarray, column: np.ndarray, chosen: np.ndarray
) -> DraftTrees:
    # copies, because a kernel is compiled again for arrays that are read-only or lie in columns
    given = candidates.token, candidates.parent, candidates.depth, root_token.astype(np.int32)
    packed = kernels().pack(*(each.copy("C") for each in given), f, column, np.ascontiguousarray(chosen))
    return DraftTrees(*packed)


def roots_only(root_token: np.ndarray) -> DraftTrees:
    """Return one root per row: plain decoding."""
    rows = len(root_token)
    absent = np.full(rows, -1, np.int32)
    return DraftTrees(
        row=np.arange(rows, dtype=np.int32),
        token=np.asarray(root_token, np.int32),
        parent=absent,
        depth=np.zeros(rows, np.int32),
        candidate=absent,
        f=np.ones(rows, np.float32),
    )


def select_slo(
    candidates: CandidateTrees,
    root_token: np.ndarray,
    ranked: Ranked,
    need: np.ndarray,
    *,
    budget: int,
    max_slo_nodes: int = 0,
    order: SloOrder = "cheapest-first",
    rest: Callable[[Ranked, np.ndarray, int], np.ndarray] = throughput_phase,
) -> DraftTrees:
    """Run Algorithm 2: first the nodes that targets need, then by `rest` what is left of the budget. Raises
    BudgetError.
    """
    taken = slo_phase(ranked.f, need, budget=budget, max_slo_nodes=max_slo_nodes, order=order)
    chosen = rest(ranked, taken, budget - len(need) - int(taken.sum()))
    return pack(candidates, root_token, ranked, chosen)
