"""SmartSpec's controller (policy `dsd`): the chain length whose predicted goodput is highest, decided now and then.

Source: SmartSpec (arXiv 2406.14066). goodput(k) = n (1 - a^(k+1)) / (1 - a) / (T_draft(k) + T_target(k) + T_overhead).
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.controllers.alone import Alone
from adaserve_jax.scheduler.controllers.base import ALL_SIZES, ArmReport, Controller, Decision, Feedback, Load, arm_name
from adaserve_jax.scheduler.controllers.fixed import fill
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import CostSamples, Limits

FIRST_ACCEPTANCE = 0.7
OLD_SHARE = 0.85
"""Weight of the old acceptance in its moving average."""
STEPS_PER_DECISION = 20
OFF_FAVOUR = 1.1
"""What the goodput of k = 0 is multiplied by."""


class GoodputController(Controller):
    """a: acceptance of a drafted token, whatever its depth. At k = 0 nothing is drafted and a stays as it is, so that
    speculation once off stays off while the load does: SmartSpec's own behaviour. With `probe_steps`, one step in so
    many drafts a chain of 1 all the same."""

    def __init__(self, limits: Limits, cost: CostTable, *, probe_steps: int = 0):
        self._limits = limits
        self._cost = cost
        self._latency = LatencyModel(cost.samples)
        self._probe_steps = probe_steps
        self._depth = limits.max_depth
        self._steps = 0
        self.acceptance = FIRST_ACCEPTANCE

    def decide(self, load: Load) -> Decision:
        if self._steps % STEPS_PER_DECISION == 0 and load.num_decode:
            self._depth = int(np.argmax(self.goodput(load.num_decode)))
        depth = self._depth
        if not depth and self._probe_steps and self._steps % self._probe_steps == self._probe_steps - 1:
            depth = min(1, self._limits.max_depth)
        return fill(self._limits, load, depth=depth, width=1 if depth else 0)

    def fastest_alone(self, alone: Alone) -> float:
        """With the best chain, none included."""
        return alone.fastest_chain(0)

    def retimed(self, cost: CostTable) -> None:
        self._latency = LatencyModel(cost.samples)

    def arms(self) -> ArmReport:
        """The chain that was decided last; it learns nothing of the others, so that there is no regret to tell."""
        return ArmReport({ALL_SIZES: arm_name(self._depth)})

    def learn(self, feedback: Feedback) -> None:
        self._steps += 1
        if feedback.drafted:
            share = feedback.accepted / feedback.drafted
            self.acceptance = OLD_SHARE * self.acceptance + (1 - OLD_SHARE) * share

    def goodput(self, rows: int) -> np.ndarray:
        """f64[max_depth + 1], emitted tokens per second by chain length, k = 0 favoured."""
        k = np.arange(self._limits.max_depth + 1)
        seconds = self._latency.target_s(rows, rows * (k + 1)) + self._latency.draft_s(rows) * k
        seconds = seconds + np.where(k > 0, self._cost.overhead_s(True), self._cost.overhead_s(False))
        goodput = rows * emitted_per_row(self.acceptance, k) / seconds
        goodput[0] *= OFF_FAVOUR
        return goodput


def emitted_per_row(acceptance: float, depth: np.ndarray) -> np.ndarray:
    """f64, expected tokens of a chain: (1 - a^(k+1)) / (1 - a), k + 1 where a is 1."""
    if acceptance >= 1.0:
        return depth + 1.0
    return (1.0 - acceptance ** (depth + 1.0)) / (1.0 - acceptance)


class LatencyModel:
    """Seconds as a function of the batch and of the tokens verified, fitted to the warm-up's samples by least squares:
    linear, or quadratic where that explains more than a hundredth of the variance that the line leaves."""

    def __init__(self, samples: CostSamples):
        at = np.array(list(samples.verify_s), np.float64).reshape(-1, 2)
        seconds = np.array(list(samples.verify_s.values()))
        linear, quadratic = (_fit(_features(at, power), seconds) for power in (1, 2))
        self._power = 2 if quadratic[1] > linear[1] + 0.01 else 1
        self._weights = (quadratic if self._power == 2 else linear)[0]
        self._least_s = float(seconds.min())
        narrow = {rows: s for (rows, width), s in samples.draft_level_s.items() if width == 1}
        self._draft_rows, self._draft_s = zip(*sorted(narrow.items()), strict=True) if narrow else ((1,), (0.0,))

    def target_s(self, rows: int, tokens: np.ndarray) -> np.ndarray:
        """f64, seconds to verify; never less than the quickest program measured."""
        at = np.stack([np.asarray(tokens, np.float64), np.full(len(tokens), float(rows))], axis=1)
        return np.maximum(_features(at, self._power) @ self._weights, self._least_s)

    def draft_s(self, rows: int) -> float:
        """Seconds of one drafted token of every row."""
        return float(np.interp(rows, self._draft_rows, self._draft_s))


def _features(at: np.ndarray, power: int) -> np.ndarray:
    """[1, tokens, rows, their squares] of f64[N, 2]."""
    columns = [np.ones(len(at)), *at.T]
    return np.stack(columns + ([*(at.T**2)] if power == 2 else []), axis=1)


def _fit(features: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights, and R^2."""
    weights = np.linalg.lstsq(features, seconds, rcond=None)[0]
    spread = ((seconds - seconds.mean()) ** 2).sum()
    return weights, 1.0 if spread == 0 else 1.0 - ((seconds - features @ weights) ** 2).sum() / spread
