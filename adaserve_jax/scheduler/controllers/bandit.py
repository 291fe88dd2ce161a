"""BanditSpec's controllers (policies `ucbspec` and `exp3spec`): which chain length, learned from emitted tokens alone.

They know no batch size, no cost and no target: one context, reward = tokens that a row emits in a step, in [1, L + 1].
Source: BanditSpec (arXiv 2505.15141).
"""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.scheduler.controllers.alone import Alone
from adaserve_jax.scheduler.controllers.base import ALL_SIZES, ArmReport, Controller, Decision, Feedback, Load, arm_name
from adaserve_jax.scheduler.controllers.fixed import fill
from adaserve_jax.types import Limits

CONFIDENCE = 0.05
"""delta: chance that a bound of UCB does not hold."""


class _ChainBandit(Controller):
    """Arms are chains of 1 to max_depth tokens. Steps in which no row drafted teach nothing and try nothing."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._arm: int | None = None
        self._steps = np.zeros(self.num_arms)
        self._emitted = np.zeros(self.num_arms)
        self._regret_s = 0.0

    @property
    def num_arms(self) -> int:
        """K."""
        return self._limits.max_depth

    @property
    def longest(self) -> int:
        """L."""
        return self._limits.max_depth

    def decide(self, load: Load) -> Decision:
        if self._arm is None:
            self._arm = self._choose()
        return fill(self._limits, load, depth=self._arm + 1, width=1)

    def fastest_alone(self, alone: Alone) -> float:
        """With the best arm, whichever that turns out to be."""
        return alone.fastest_chain(1)

    def learn(self, feedback: Feedback) -> None:
        if feedback.rows and self._arm is not None:
            emitted = feedback.emitted / feedback.rows
            self._steps[self._arm] += 1
            self._emitted[self._arm] += emitted
            seen = self._emitted / np.maximum(self._steps, 1)
            self._regret_s += feedback.step_s * (1 - seen.item(self._arm) / seen.max().item())
            self._reward(self._arm, emitted)
            self._arm = None

    def arms(self) -> ArmReport:
        """The chain of most emitted tokens; they are what regret is made of, too."""
        best = int((self._emitted / np.maximum(self._steps, 1)).argmax())
        return ArmReport({ALL_SIZES: arm_name(1 + best)} if self._steps.any() else {}, self._regret_s)

    def _choose(self) -> int:
        raise NotImplementedError

    def _reward(self, arm: int, emitted: float) -> None:
        raise NotImplementedError


class UcbSpec(_ChainBandit):
    """Each arm once, then the largest mean + (L / 2) sqrt((1 + n) / n^2 (1 + 2 log(K t^2 sqrt(1 + n) / delta)))."""

    def __init__(self, limits: Limits):
        super().__init__(limits)
        self._pulls = np.zeros(self.num_arms)
        self._mean = np.zeros(self.num_arms)

    def _choose(self) -> int:
        untried = np.flatnonzero(self._pulls == 0)
        return int(untried[0]) if len(untried) else int(np.argmax(self._mean + self.radius()))

    def radius(self) -> np.ndarray:
        """f64[K], half the width of each arm's confidence interval, tokens."""
        n, t = self._pulls, self._pulls.sum()
        inside = 1 + 2 * np.log(self.num_arms * t**2 * np.sqrt(1 + n) / CONFIDENCE)
        return self.longest / 2 * np.sqrt((1 + n) / n**2 * inside)

    def _reward(self, arm: int, emitted: float) -> None:
        self._pulls[arm] += 1
        self._mean[arm] += (emitted - self._mean[arm]) / self._pulls[arm]


class Exp3Spec(_ChainBandit):
    """Arm a with probability proportional to exp(-eta_t * losses[a]), eta_t = sqrt(log K / (t K)); the loss of the arm
    taken is estimated as (L + 1 - emitted) / (L p)."""

    def __init__(self, limits: Limits, seed: int):
        super().__init__(limits)
        self._losses = np.zeros(self.num_arms)
        self._rounds = 1
        self._rng = np.random.default_rng(seed)

    def chances(self) -> np.ndarray:
        """f64[K], p."""
        rate = math.sqrt(math.log(self.num_arms) / (self._rounds * self.num_arms))
        weights = np.exp(-rate * (self._losses - self._losses.min()))
        return weights / weights.sum()

    def _choose(self) -> int:
        return int(self._rng.choice(self.num_arms, p=self.chances()))

    def _reward(self, arm: int, emitted: float) -> None:
        self._losses[arm] += (self.longest + 1 - emitted) / (self.longest * self.chances()[arm])
        self._rounds += 1
