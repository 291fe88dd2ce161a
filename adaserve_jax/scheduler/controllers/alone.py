"""How fast one request could go on an empty machine, by the shape of its trees. Knows no policy and no target."""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import Limits


class Alone:
    """Reads the tables that learn while serving; holds no state of its own."""

    def __init__(self, limits: Limits, cost: CostTable, acceptance: LearnedAcceptance):
        self._limits = limits
        self._cost = cost
        self._acceptance = acceptance

    def rate(self, depth: int, width: int, nodes: int) -> float:
        """Expected tokens per second when every step drafts `depth` levels of `width` and verifies the `nodes` best of
        them beside the root; depth 0: one verified token per step."""
        verify_s = self._cost.verify_s(1)
        if not depth:
            return 1.0 / float(verify_s[self._edge(1)] + self._cost.overhead_s(False))
        chance = np.sort(self._acceptance.expected()[:depth, :width], axis=None)[::-1]
        tokens = 1.0 + float(chance[:nodes].sum())
        step_s = verify_s[self._edge(1 + nodes)] + self._cost.overhead_s(True)
        step_s += self._cost.catchup_s(math.ceil(tokens)) + depth * self._cost.level_s(1)[width - 1]
        return tokens / float(step_s)

    def fastest_chain(self, shortest: int) -> float:
        """The best rate of all chains of `shortest` to max_depth tokens."""
        return max(self.rate(k, min(k, 1), k) for k in range(shortest, max(self._limits.max_depth, shortest) + 1))

    def _edge(self, tokens: int) -> int:
        return self._limits.token_edges.index(self._limits.bucket(tokens))
