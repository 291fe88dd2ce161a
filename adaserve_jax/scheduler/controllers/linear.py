"""Contextual bandits that are linear in the size of the batch (policies `linucb` and `lints`): chain length by reward.

They know no target and no cost of switching. Nightjar compares itself with them. Sources: LinUCB (Li et al., 2010),
linear Thompson sampling (Agrawal and Goyal, 2013).
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.controllers.alone import Alone
from adaserve_jax.scheduler.controllers.base import ALL_SIZES, ArmReport, Controller, Decision, Feedback, Load, arm_name
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts, tells_of_its_chain
from adaserve_jax.scheduler.controllers.fixed import fill
from adaserve_jax.types import Limits

REGULARISATION = 1.0
"""lambda."""
UCB_WIDTH = 0.25
"""alpha: standard errors that LinUCB adds, in rewards of 0 to 1."""
SAMPLING_WIDTH = 0.1
"""v: scale of the posterior that Thompson sampling draws from, in the same unit."""


class _LinearBandit(Controller):
    """K arms, arm a being a chain of a tokens. x = [1, B / B_max] of a step with B decode rows; its reward is what a
    row emits per second over `ChainCosts.fastest_rate`. Steps in which few rows drafted teach nothing."""

    def __init__(self, limits: Limits, costs: ChainCosts):
        self._limits = limits
        self._costs = costs
        self._design = np.tile(np.eye(2) * REGULARISATION, (costs.arms, 1, 1))  # A
        self._rewarded = np.zeros((costs.arms, 2))  # b
        self._inverse = np.zeros((costs.arms, 3))  # of A: both diagonal entries and the one beside them
        self._inverse[:, :2] = 1 / REGULARISATION
        self._weights = np.zeros((costs.arms, 2))  # theta
        self._playing: tuple[int, np.ndarray] | None = None
        self._best: int | None = None
        self._regret_s = 0.0

    def decide(self, load: Load) -> Decision:
        x = np.array([1.0, load.num_decode / self._limits.max_requests])
        arm = int((self._weights @ x + self._margin(self.uncertainty(x))).argmax())
        self._playing = arm, x
        return fill(self._limits, load, depth=arm, width=1 if arm else 0)

    def fastest_alone(self, alone: Alone) -> float:
        """With the best chain, none included."""
        return alone.fastest_chain(0)

    def arms(self) -> ArmReport:
        """The chain of most expected reward at the size of the last batch."""
        return ArmReport({} if self._best is None else {ALL_SIZES: arm_name(self._best)}, self._regret_s)

    def learn(self, feedback: Feedback) -> None:
        if self._playing is None:
            return
        arm, x = self._playing
        self._playing = None
        scores = self._weights @ x
        self._best = int(scores.argmax())
        if scores[self._best] > 0:
            self._regret_s += feedback.step_s * float(1 - max(scores[arm], 0.0) / scores[self._best])
        if feedback.step_s > 0 and tells_of_its_chain(feedback, arm):
            rate = feedback.decoded / feedback.decode_rows / feedback.step_s
            self.reward(arm, x, rate / self._costs.fastest_rate)

    def reward(self, arm: int, x: np.ndarray, reward: float) -> None:
        """A += x x^T, b += reward x, of one arm."""
        design, rewarded = self._design[arm], self._rewarded[arm]
        design += np.outer(x, x)
        rewarded += reward * x
        (a, c), (_, d) = design.tolist()
        determinant = a * d - c * c
        first, second, beside = self._inverse[arm] = d / determinant, a / determinant, -c / determinant
        one, size = rewarded.tolist()
        self._weights[arm] = first * one + beside * size, beside * one + second * size

    def uncertainty(self, x: np.ndarray) -> np.ndarray:
        """f64[K], sqrt(x^T A^-1 x)."""
        one, size = x.tolist()
        return np.sqrt(self._inverse @ np.array([one * one, size * size, 2 * one * size]))

    def _margin(self, uncertainty: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class LinUcb(_LinearBandit):
    """argmax theta x + alpha sqrt(x^T A^-1 x), theta = A^-1 b."""

    def _margin(self, uncertainty: np.ndarray) -> np.ndarray:
        return UCB_WIDTH * uncertainty


class LinearSampling(_LinearBandit):
    """argmax theta x, theta ~ N(A^-1 b, v^2 A^-1) for each arm: theta x is normal around its mean, with v times the
    uncertainty."""

    def __init__(self, limits: Limits, costs: ChainCosts, seed: int):
        super().__init__(limits, costs)
        self._rng = np.random.default_rng(seed)

    def _margin(self, uncertainty: np.ndarray) -> np.ndarray:
        return SAMPLING_WIDTH * uncertainty * self._rng.standard_normal(len(uncertainty))
