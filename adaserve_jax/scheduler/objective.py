"""Objective of a step: sequences on pace, emitted tokens per second, and prefilled tokens per second.

The joint controller uses it before drafting, the budget choice after. Source: docs/equations.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.shapes import cumulated, kernels
from adaserve_jax.scheduler.slo import HORIZON_TOKENS, need_capped


@dataclass(frozen=True)
class Objective:
    """Weights in units of sequences; rates are relative to one token per baseline latency.

    horizon: tokens over which "on pace" is judged. emit: a. prefill, prefill_wait: b = prefill + prefill_wait * x^2
    with x the waiting time of the most urgent waiting sequence over its TTFT target, at most 1.
    """

    horizon: int = HORIZON_TOKENS
    emit: float = 1.0
    prefill: float = 0.4
    prefill_wait: float = 0.3

    def prefill_weight(self, wait_ratio: float) -> float:
        """Return b, in sequences."""
        return self.prefill + self.prefill_wait * min(max(wait_ratio, 0.0), 1.0) ** 2


@dataclass(frozen=True, eq=False)
class BudgetQuestion:
    """Inputs of the budget choice. E token edges.

    need_rate: f64[R], tokens per second, inf if hopeless. edges: i64[E]; verify_s: f64[E], seconds to verify each.
    spent_s: time of the step that has passed or is fixed. prefill_tokens: of this step. prefill_weight: b, in
    sequences. tree_token_cap: most tree tokens, roots included. depth: deepest candidate. baseline_s: seconds of one
    token of one sequence without speculation.
    """

    need_rate: np.ndarray
    edges: np.ndarray
    verify_s: np.ndarray
    spent_s: float
    prefill_tokens: int
    prefill_weight: float
    tree_token_cap: int
    depth: int
    baseline_s: float


def capped_need(need_rate: np.ndarray, step_time_s: float, depth: int) -> np.ndarray:
    """Return A_cap in its horizon form, f64[R]; hopeless sequences need nothing, they are served best-effort."""
    return need_capped(np.where(np.isinf(need_rate), 0.0, need_rate) * step_time_s, depth)


def choose_budget(objective: Objective, f: np.ndarray, question: BudgetQuestion) -> tuple[int, np.ndarray]:
    """Return the most valuable budget of tree tokens, tree and prefill together on a bucket edge, and A_cap f64[R] for
    it.

    f: f64[R, C], f of the ranked candidates, 0 for absent ones.
    """
    q = question
    rows = len(q.need_rate)
    present = np.count_nonzero(f)
    low = np.searchsorted(q.edges, rows + q.prefill_tokens)
    high = np.searchsorted(q.edges, min(rows + present, q.tree_token_cap) + q.prefill_tokens)
    chosen = slice(int(low), int(high) + 1)
    budget = np.minimum(q.edges[chosen] - q.prefill_tokens, q.tree_token_cap)
    step_s = q.spent_s + q.verify_s[chosen]
    best = 0
    if len(budget) > 1:
        (best_first,) = cumulated(np.sort(f, axis=None)[None, ::-1])
        value = np.empty(len(budget))
        kernels().value_budgets(
            f, q.need_rate, step_s, budget, q.depth, best_first, objective.emit, q.prefill_weight * q.prefill_tokens,
            q.baseline_s, value,
        )  # fmt: skip
        best = int(value.argmax())
    return int(budget[best]), capped_need(q.need_rate, float(step_s[best]), q.depth)
