"""Selection of the candidate nodes to verify: AdaServe's Algorithm 2, corrected, and its baselines, as array
operations.

f never increases along a path. So the nodes taken from one sequence are a prefix of its candidates sorted by (-f,
depth, column), and every node comes with its parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from adaserve_jax.errors import BudgetError, ConfigError
from adaserve_jax.types import CandidateTrees, DraftTrees

SloOrder = Literal["cheapest-first", "slowest-first", "fastest-first"]

_ROW_BITS, _COLUMN_BITS = 15, 10
"""Divide the 32 bits that break ties. The 7 bits left hold a node's depth, at most `EngineConfig.suffix_depth`."""
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Ranked:
    """Candidates of every row, best first.

    key: i64[R, C], unique and comparable across rows, lower is better. f: f64[R, C], non-increasing along C, 0 for an
    absent node. column: i64[R, C], index in the candidates. in_beam_order: column is 0, 1, ..., C - 1 in every row.
    """

    key: np.ndarray
    f: np.ndarray
    column: np.ndarray
    in_beam_order: bool = False


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
    rows, columns = cost.shape
    depth = candidates.depth.astype(np.int64) << (_ROW_BITS + _COLUMN_BITS)
    tie = (depth + np.arange(columns))[None, :] + (np.arange(rows) << _COLUMN_BITS)[:, None]
    # the bits of a float >= 0 order as it does
    key = (cost.view(np.int32).astype(np.int64) << 32) | tie
    in_beam_order = _are_chains(candidates)
    if not in_beam_order:
        key.sort(axis=1)
        cost = (key >> 32).astype(np.int32).view(np.float32)
    column = key & ((1 << _COLUMN_BITS) - 1)
    return Ranked(key, np.exp(-cost.astype(np.float64)), column, in_beam_order)


def _cost(candidates: CandidateTrees) -> np.ndarray:
    """Return -log f >= 0, f32[R, C], in which no node costs less than its parent; inf for an absent node."""
    if _are_chains(candidates):
        log_f = np.minimum.accumulate(np.minimum(candidates.log_f, 0.0, dtype=np.float32), axis=1)
        log_f[log_f != log_f] = -np.inf
    else:
        log_f = np.minimum(close_over_parents(candidates.log_f, candidates.parent), 0.0, dtype=np.float32)
    return 0.0 - log_f  # which turns -0.0 into 0.0 too


def _are_chains(candidates: CandidateTrees) -> bool:
    """Return whether each level has one node, whose parent is then the node of the level above."""
    return len(candidates.depth) > 0 and int(candidates.depth[-1]) == len(candidates.depth)


def close_over_parents(log_f: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Return log f, f32[R, C], in which no node is likelier than its parent or present without it; NaN counts as
    absent.
    """
    rows, columns = log_f.shape
    if not log_f.size:
        return log_f
    base = np.arange(rows)[:, None] * columns
    flat_parent = parent + base
    is_root_child = parent < 0
    while True:
        above = log_f.ravel()[np.where(is_root_child, 0, flat_parent)]
        fine = is_root_child & (log_f == log_f) | (log_f <= above)
        if fine.all():
            return log_f
        bounded = np.where(is_root_child, log_f, np.minimum(log_f, above))
        log_f = np.where(np.isnan(bounded), -np.inf, bounded).astype(np.float32)


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
    wanted, met = nodes_needed(f, need)
    if max_slo_nodes:
        wanted = np.minimum(wanted, max_slo_nodes)
    served = _serving_order(wanted, met, need, order)
    in_order = wanted[served]
    spent = np.cumsum(in_order) - in_order
    taken = np.empty(rows, np.int64)
    taken[served] = np.clip(budget - rows - spent, 0, in_order)
    return taken


def nodes_needed(f: np.ndarray, need: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the candidates until the expected tokens, 1 for the root included, reach `need`.

    f: f64[R, C], as in slo_phase; need: f64[R]. Returns the counts, i64[R], and whether the need is reached, bool[R].
    """
    rows, columns = f.shape
    reached = np.ones((rows, columns + 1))
    np.cumsum(f, axis=1, out=reached[:, 1:])
    reached[:, 1:] += 1.0
    wanted = np.count_nonzero((reached[:, :-1] < need[:, None]) & (f > 0), axis=1)
    return wanted, reached[:, -1] >= need


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
    columns = ranked.key.shape[1]
    chosen = np.arange(columns) < taken[:, None]
    if left <= 0 or not chosen.size:
        return chosen
    rest = np.where(chosen | (ranked.f <= 0), _NEVER, ranked.key).ravel()
    if left >= len(rest):
        return ranked.f > 0
    threshold = np.partition(rest, left - 1)[left - 1]
    if threshold == _NEVER:
        return ranked.f > 0
    return chosen | (ranked.key <= threshold) & (ranked.f > 0)


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
    if ranked.in_beam_order:
        return _pack(candidates, root_token, chosen, ranked.f)
    rows, columns = chosen.shape
    in_tree = np.zeros((rows, columns), bool)
    f = np.zeros((rows, columns), np.float32)
    place = (np.arange(rows)[:, None] * columns + ranked.column)[chosen]
    in_tree.reshape(-1)[place] = True
    f.reshape(-1)[place] = ranked.f[chosen]
    return _pack(candidates, root_token, in_tree, f)


def pack_all(candidates: CandidateTrees, root_token: np.ndarray) -> DraftTrees:
    """Return trees of every present candidate: the result of any rule whose budget holds them all."""
    f = np.exp(-_cost(candidates).astype(np.float64))
    return _pack(candidates, root_token, f > 0, f)


def _pack(candidates: CandidateTrees, root_token: np.ndarray, in_tree: np.ndarray, f: np.ndarray) -> DraftTrees:
    """Lay out all candidates, then drop those outside the trees. in_tree: bool[R, C], f: f[R, C], both in beam
    order.
    """
    rows, columns = in_tree.shape
    row, candidate, first_child = _layout(rows, columns)
    token, parent, depth = np.empty((3, rows, columns + 1), np.int32)
    token[:, 0], token[:, 1:] = root_token, candidates.token
    parent[:, 0] = -1
    np.add(candidates.parent, first_child, out=parent[:, 1:])
    depth[:, 0], depth[:, 1:] = 0, candidates.depth
    packed_f = np.empty((rows, columns + 1), np.float32)
    packed_f[:, 0], packed_f[:, 1:] = 1.0, f
    token, parent, depth = token.reshape(-1), parent.reshape(-1), depth.reshape(-1)
    packed_f = packed_f.reshape(-1)
    if np.count_nonzero(in_tree) < in_tree.size:
        keep = np.ones((rows, columns + 1), bool)
        keep[:, 1:] = in_tree
        (nodes,) = keep.reshape(-1).nonzero()
        place = np.empty(keep.size, np.int32)
        place[nodes] = np.arange(len(nodes), dtype=np.int32)
        row, token, depth, candidate = row[nodes], token[nodes], depth[nodes], candidate[nodes]
        packed_f = packed_f[nodes]
        parent = np.where(candidate < 0, np.int32(-1), place[parent[nodes]])
    return DraftTrees(row, token, parent, depth, candidate, packed_f)


@lru_cache(maxsize=256)
def _layout(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the layout of trees with all candidates: row and candidate, i32[R (1 + C)], and the index after each
    root, i32[R, 1].
    """
    row = np.repeat(np.arange(rows, dtype=np.int32), columns + 1)
    candidate = np.tile(np.arange(-1, columns, dtype=np.int32), rows)
    for constant in (row, candidate):
        constant.flags.writeable = False  # shared by the trees of many steps
    return row, candidate, np.arange(1, rows * (columns + 1), columns + 1, dtype=np.int32)[:, None]


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


def _serving_order(wanted: np.ndarray, met: np.ndarray, need: np.ndarray, order: SloOrder) -> np.ndarray:
    if order == "cheapest-first":
        return np.argsort(np.where(met, wanted, wanted + (1 << 32)), kind="stable")
    return np.argsort(-need if order == "slowest-first" else need, kind="stable")
