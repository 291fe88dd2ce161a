"""What measured times suggest: where tokens stop being nearly free, and the budgets, depths and widths that emit most.

Imports no jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.acceptance import acceptance_of_nodes
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import CostSamples, Limits


@dataclass(frozen=True)
class ForRows:
    """For so many decoding requests. knee: see `knee`. budget, depth, width: of most expected tokens per second, which
    is tokens_per_s; plain_tokens_per_s: without speculation."""

    rows: int
    knee: float
    budget: int
    depth: int
    width: int
    tokens_per_s: float
    plain_tokens_per_s: float


@dataclass(frozen=True)
class Proposal:
    """max_tree_tokens, max_depth, max_width: the largest that any number of requests wants."""

    by_rows: tuple[ForRows, ...]
    max_tree_tokens: int
    max_depth: int
    max_width: int


def propose(samples: CostSamples, limits: Limits, acceptance: float | None) -> Proposal:
    """For every number of rows that was timed, at the typical context. acceptance: of the draft's first choice; None:
    nothing is drafted."""
    cost = CostTable(samples, limits)
    rows = [count for count in cost.grid.row_buckets if count <= limits.max_tree_tokens]
    found = tuple(_for_rows(cost, limits, count, acceptance) for count in rows)
    return Proposal(
        found,
        max_tree_tokens=max(each.budget for each in found),
        max_depth=max(each.depth for each in found),
        max_width=max(each.width for each in found),
    )


def knee(edges: Sequence[int], verify_s: np.ndarray) -> float:
    """Tokens at which a roofline bends: those that take, at the last edges' seconds per token, as long as the first
    edge. Below it tokens are nearly free. verify_s: f64[E]; the last edge where no token costs anything."""
    last = edges[-1]
    if len(edges) < 2 or verify_s[-1] <= verify_s[-2]:
        return float(last)
    per_token_s = (verify_s[-1] - verify_s[-2]) / (last - edges[-2])
    return float(min(verify_s[0] / per_token_s, last))


def _for_rows(cost: CostTable, limits: Limits, rows: int, acceptance: float | None) -> ForRows:
    edges, verify_s = np.array(limits.token_edges), cost.verify_s(rows)
    held = (edges >= rows) & (edges <= limits.max_tree_tokens)
    if not held.any():  # one edge that also holds prompts
        held = edges == edges[np.searchsorted(edges, rows)]
    budgets, seconds = np.minimum(edges[held], limits.max_tree_tokens), verify_s[held]
    plain = rows / seconds[0]
    best = ForRows(rows, knee(limits.token_edges, verify_s), int(budgets[0]), 0, 0, float(plain), float(plain))
    if acceptance is None or not limits.max_depth:
        return best
    chance = acceptance_of_nodes(acceptance, limits.max_depth, limits.max_width)
    level_s = cost.level_s(rows)
    for depth in range(1, limits.max_depth + 1):
        for width in (width for width in cost.draft_widths if width <= limits.max_width):
            nodes = np.sort(chance[:depth, :width].ravel())[::-1]
            reached = np.concatenate([[0.0], np.cumsum(nodes)])
            emitted = rows * (1 + np.interp(budgets / rows - 1, np.arange(len(reached)), reached))
            draft_s = depth * level_s[width - 1] + cost.catchup_s(2 * rows)
            rate = emitted / (seconds + draft_s)
            at = int(np.argmax(rate))
            if rate[at] > best.tokens_per_s:
                best = ForRows(
                    rows, best.knee, int(budgets[at]), depth, width, float(rate[at]), best.plain_tokens_per_s
                )
    return best
