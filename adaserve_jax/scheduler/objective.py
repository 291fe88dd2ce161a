"""Objective of a step: sequences on pace, emitted tokens per second, and prefilled tokens per second.

The joint controller uses it before drafting, the budget choice after. Source: docs/equations.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.shapes import kernels
from adaserve_jax.scheduler.slo import HORIZON_TOKENS


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


def choose_budget(objective: Objective, f: np.ndarray, question: BudgetQuestion) -> tuple[int, np.ndarray]:
    """Return the most valuable budget of tree tokens, tree and prefill together on a bucket edge, and A_cap f64[R] for
    it in its horizon form; hopeless sequences need nothing, they are served best-effort.

    f: f64[R, C], f of the ranked candidates, 0 for absent ones.
    """
    q, need = question, np.empty(len(question.need_rate))
    budget = kernels().choose_budget(
        f, np.sort(f, axis=None), q.need_rate, q.edges, q.verify_s, q.spent_s, q.prefill_tokens, q.tree_token_cap,
        q.depth, objective.emit, q.prefill_weight * q.prefill_tokens, q.baseline_s, need,
    )  # fmt: skip
    return budget, need
