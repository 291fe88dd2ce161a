"""Controllers of published baselines: fixed chains and trees, AdaServe's eq. 8 and 9, BanditSpec, SmartSpec and
linear bandits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.scheduler.controllers.base import (
    ALL_SIZES,
    ArmReport,
    ChainController,
    Controller,
    Decision,
    Feedback,
    Load,
    SoloSpeed,
    arm_name,
)
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts, is_of_its_chain
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import CostSamples, Limits

LEAST_PREFILL_DIVISOR = 4
"""While prompts wait, tree tokens leave at least one token in this many of the step to prefill."""
PAPER_VERIFY_TOKENS, PAPER_DRAFT_TOKENS = 512, 96
"""B1 and B2 of AdaServe's artifact; a smaller machine keeps their ratio."""
CONFIDENCE = 0.05
"""delta of BanditSpec: probability that a bound of UCB does not hold."""
FIRST_ACCEPTANCE = 0.7
"""Acceptance that SmartSpec assumes at the start."""
OLD_SHARE = 0.85
"""Weight of the old acceptance in SmartSpec's moving average."""
STEPS_PER_DECISION = 20
"""Steps for which SmartSpec keeps its chain length."""
OFF_FAVOUR = 1.1
"""Factor on SmartSpec's goodput of k = 0; TurboSpec has none."""
REGULARISATION = 1.0
"""lambda of the linear bandits."""
UCB_WIDTH = 0.25
"""alpha of LinUCB: standard errors that it adds, in rewards of 0 to 1."""
SAMPLING_WIDTH = 0.1
"""v of linear Thompson sampling: scale of the posterior that it draws from, in the same unit."""


@dataclass(frozen=True)
class FixedController(Controller):
    """Constant shape: every decode row drafts `depth` levels of `width` in every step; prefill takes the rest.

    nodes: most nodes verified per row, its root left out; None: all that were drafted. step_tokens: most tokens of a
    step with prefill, tree and prefill together; None: what the buckets hold.
    """

    limits: Limits
    depth: int
    width: int = 1
    nodes: int | None = None
    step_tokens: int | None = None

    def decide(self, load: Load) -> Decision:
        width = self.width if self.depth else 0
        decision = fill(self.limits, load, depth=self.depth, width=width, nodes=self.nodes)
        if self.step_tokens is None:
            return decision
        room = max(self.step_tokens - decision.tree_token_cap, 1)
        return replace(decision, prefill_tokens=min(decision.prefill_tokens, room))

    def fastest_alone(self, alone: SoloSpeed) -> float:
        """Return the rate of the best size of tree: a static tree is smaller than `nodes` where a level's parents
        are missing.
        """
        if self.nodes is None or self.width == 1:
            return super().fastest_alone(alone)
        sizes = range(self.decide(Load.of_one()).tree_token_cap)
        return max(alone.rate(self.depth, self.width, nodes) for nodes in sizes)


@dataclass(frozen=True)
class ClosedFormController(Controller):
    """AdaServe eq. 8 and 9: d = clip(floor(B1 / (n + c1)) - 1, Dmin, Dmax), w = clip(floor(B2 / n) + c2, 1, Wmax).

    verify_tokens: B1. draft_tokens: B2, draft tokens of one level. rounds_up: d = min(ceil(B1 / n), Dmax), as in the
    authors' code.
    """

    limits: Limits
    verify_tokens: int
    draft_tokens: int
    depth_offset: int = 0
    width_offset: int = 0
    min_depth: int = 1
    rounds_up: bool = False

    @classmethod
    def for_limits(
        cls, limits: Limits, *, depth_offset: int = 0, width_offset: int = 0, rounds_up: bool = False
    ) -> ClosedFormController:
        """Return the controller whose B1 is max_tree_tokens, with B2 in the paper's ratio."""
        tokens = limits.max_tree_tokens
        draft_tokens = max(1, tokens * PAPER_DRAFT_TOKENS // PAPER_VERIFY_TOKENS)
        return cls(limits, tokens, draft_tokens, depth_offset, width_offset, rounds_up=rounds_up)

    def decide(self, load: Load) -> Decision:
        rows = max(load.num_decode, 1)
        depth = -(-self.verify_tokens // rows)
        if not self.rounds_up:
            depth = self.verify_tokens // (rows + self.depth_offset) - 1
        depth = min(max(depth, self.min_depth), self.limits.max_depth)
        width = min(max(self.draft_tokens // rows + self.width_offset, 1), self.limits.max_width)
        return fill(self.limits, load, depth=depth, width=width)


def fill(limits: Limits, load: Load, *, depth: int, width: int, nodes: int | None = None) -> Decision:
    """Return the largest trees that fit, then prefill with the rest, no less than its share. nodes: most per row."""
    reserved = min(load.prefill_tokens, max(1, limits.max_tokens // LEAST_PREFILL_DIVISOR))
    most = min(limits.max_tree_tokens, limits.max_tokens - reserved)
    each = depth * width if nodes is None else min(nodes, depth * width)
    cap = max(load.num_decode, min(load.num_decode * (1 + each), most))
    prefill = min(load.prefill_tokens, limits.max_tokens - cap)
    return Decision(depth, width, cap, prefill, feed_draft=depth > 0)


class _ChainBandit(Controller):
    """BanditSpec (policies `ucbspec`, `exp3spec`; arXiv 2505.15141): arms are chains of 1 to max_depth tokens.

    There is one context, whatever the size of the batch. The reward is the number of tokens that a row emits in a step,
    in [1, L + 1], without regard to cost or targets. Steps in which no row drafted teach nothing and try nothing.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self.num_arms = self.longest = limits.max_depth
        """K and L."""
        self._arm: int | None = None
        self._steps = np.zeros(self.num_arms)
        self._emitted = np.zeros(self.num_arms)
        self._regret_s = 0.0

    def decide(self, load: Load) -> Decision:
        if self._arm is None:
            self._arm = self._choose()
        return fill(self._limits, load, depth=self._arm + 1, width=1)

    def fastest_alone(self, alone: SoloSpeed) -> float:
        """Return the rate of the best arm, whichever that turns out to be."""
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
        """Return the chain of most emitted tokens; regret is measured in them too."""
        best = int((self._emitted / np.maximum(self._steps, 1)).argmax())
        return ArmReport({ALL_SIZES: arm_name(1 + best)} if self._steps.any() else {}, self._regret_s)

    def _choose(self) -> int:
        raise NotImplementedError

    def _reward(self, arm: int, emitted: float) -> None:
        raise NotImplementedError


class UcbSpec(_ChainBandit):
    """UCB: each arm once, then the largest mean + (L / 2) sqrt((1 + n) / n^2 (1 + 2 log(K t^2 sqrt(1 + n) /
    delta))).
    """

    def __init__(self, limits: Limits):
        super().__init__(limits)
        self._mean = np.zeros(self.num_arms)

    def _choose(self) -> int:
        untried = np.flatnonzero(self._steps == 0)
        return int(untried[0]) if len(untried) else int(np.argmax(self._mean + self.radius()))

    def radius(self) -> np.ndarray:
        """Return f64[K], half the width of each arm's confidence interval, in tokens."""
        n, t = self._steps, self._steps.sum()
        inside = 1 + 2 * np.log(self.num_arms * t**2 * np.sqrt(1 + n) / CONFIDENCE)
        return self.longest / 2 * np.sqrt((1 + n) / n**2 * inside)

    def _reward(self, arm: int, emitted: float) -> None:
        self._mean[arm] += (emitted - self._mean[arm]) / self._steps[arm]


class Exp3Spec(_ChainBandit):
    """EXP3: arm a with probability proportional to exp(-eta_t * losses[a]), eta_t = sqrt(log K / (t K)).

    The loss of the arm taken is estimated as (L + 1 - emitted) / (L p).
    """

    def __init__(self, limits: Limits, seed: int):
        super().__init__(limits)
        self._losses = np.zeros(self.num_arms)
        self._rounds = 1
        self._rng = np.random.default_rng(seed)

    def chances(self) -> np.ndarray:
        """Return f64[K], p."""
        rate = math.sqrt(math.log(self.num_arms) / (self._rounds * self.num_arms))
        weights = np.exp(-rate * (self._losses - self._losses.min()))
        return weights / weights.sum()

    def _choose(self) -> int:
        return int(self._rng.choice(self.num_arms, p=self.chances()))

    def _reward(self, arm: int, emitted: float) -> None:
        self._losses[arm] += (self.longest + 1 - emitted) / (self.longest * self.chances()[arm])
        self._rounds += 1


class GoodputController(ChainController):
    """SmartSpec (policy `dsd`; arXiv 2406.14066): the chain length of highest predicted goodput, decided now and then.

    goodput(k) = n (1 - a^(k+1)) / (1 - a) / (T_draft(k) + T_target(k) + T_overhead), with a the acceptance of a drafted
    token at any depth. At k = 0 nothing is drafted and a stays as it is, so that speculation once off stays off while
    the load does, as in SmartSpec itself. With `probe_steps`, one step in so many drafts a chain of 1 all the same.

    TurboSpec (policy `turbospec`) is the third version of the same paper: it decides in each step (steps_per_decision
    1), by goodput alone (off_favour 1). It closes the loop by feedback; that it probes while speculation is off, so
    that there is some, is our choice.
    """

    def __init__(
        self, limits: Limits, cost: CostTable, *, probe_steps: int = 0, steps_per_decision: int = STEPS_PER_DECISION,
        off_favour: float = OFF_FAVOUR,
    ):  # fmt: skip
        self._steps_per_decision = steps_per_decision
        self._off_favour = off_favour
        self._limits = limits
        self._cost = cost
        self._latency = LatencyModel(cost.samples)
        self._probe_steps = probe_steps
        self._depth = limits.max_depth
        self._steps = 0
        self.acceptance = FIRST_ACCEPTANCE

    def decide(self, load: Load) -> Decision:
        if self._steps % self._steps_per_decision == 0 and load.num_decode:
            self._depth = int(np.argmax(self.goodput(load.num_decode)))
        depth = self._depth
        if not depth and self._probe_steps and self._steps % self._probe_steps == self._probe_steps - 1:
            depth = min(1, self._limits.max_depth)
        return fill(self._limits, load, depth=depth, width=1 if depth else 0)

    def retimed(self, cost: CostTable) -> None:
        self._latency = LatencyModel(cost.samples)

    def arms(self) -> ArmReport:
        """Return the chain that was decided last; nothing is known of the others, so there is no regret."""
        return ArmReport({ALL_SIZES: arm_name(self._depth)})

    def learn(self, feedback: Feedback) -> None:
        self._steps += 1
        if feedback.drafted:
            share = feedback.accepted / feedback.drafted
            self.acceptance = OLD_SHARE * self.acceptance + (1 - OLD_SHARE) * share

    def goodput(self, rows: int) -> np.ndarray:
        """Return f64[max_depth + 1], emitted tokens per second by chain length, with k = 0 favoured."""
        k = np.arange(self._limits.max_depth + 1)
        seconds = self._latency.target_s(rows, rows * (k + 1)) + self._latency.draft_s(rows) * k
        seconds = seconds + np.where(k > 0, self._cost.overhead_s(True), self._cost.overhead_s(False))
        goodput = rows * emitted_per_row(self.acceptance, k) / seconds
        goodput[0] *= self._off_favour
        return goodput


@dataclass(frozen=True)
class FastestChain(ChainController):
    """AdaSpec's adaptive drafter (SoCC'25, arXiv 2503.05096; policy `adaspec`): the chain of most predicted tokens per
    second, by what drafts of each length were accepted and took lately.

    How many tokens of it are verified for each request is left to the selection, which knows their confidence. The
    paper stops drafting after any token; here the length is decided before the first.
    """

    limits: Limits
    chains: ChainCosts

    def decide(self, load: Load) -> Decision:
        depth = 0
        if load.num_decode and load.speculates:
            seconds, tokens = self.chains.predicted(load.num_decode)
            depth = int((tokens / seconds).argmax())
        return fill(self.limits, load, depth=depth, width=min(depth, 1))


def emitted_per_row(acceptance: float, depth: np.ndarray) -> np.ndarray:
    """Return the expected tokens of a chain, f64: (1 - a^(k+1)) / (1 - a), or k + 1 if a is 1."""
    if acceptance >= 1.0:
        return depth + 1.0
    return (1.0 - acceptance ** (depth + 1.0)) / (1.0 - acceptance)


class LatencyModel:
    """Seconds by batch and verified tokens, fitted to the warm-up's samples by least squares.

    Linear, or quadratic if that explains more than a hundredth of the variance beyond the line.
    """

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
        """Return f64, seconds to verify; never less than the fastest program measured."""
        at = np.stack([np.asarray(tokens, np.float64), np.full(len(tokens), float(rows))], axis=1)
        return np.maximum(_features(at, self._power) @ self._weights, self._least_s)

    def draft_s(self, rows: int) -> float:
        """Return the seconds of one drafted token of every row."""
        return float(np.interp(rows, self._draft_rows, self._draft_s))


def _features(at: np.ndarray, power: int) -> np.ndarray:
    """Return [1, tokens, rows, their squares] of f64[N, 2]."""
    columns = [np.ones(len(at)), *at.T]
    return np.stack(columns + ([*(at.T**2)] if power == 2 else []), axis=1)


def _fit(features: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the weights and R^2."""
    weights = np.linalg.lstsq(features, seconds, rcond=None)[0]
    spread = ((seconds - seconds.mean()) ** 2).sum()
    return weights, 1.0 if spread == 0 else 1.0 - ((seconds - features @ weights) ** 2).sum() / spread


class _LinearBandit(ChainController):
    """Contextual bandit that is linear in the size of the batch: K arms, arm a being a chain of a tokens.

    x = [1, B / B_max] in a step with B decode rows; the reward is what a row emits per second over
    `ChainCosts.fastest_rate`. Targets and switching costs are ignored. Steps in which few rows drafted teach nothing.
    Nightjar compares itself with these bandits.
    """

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
        arm = int((self.expected(x) + self.margin(self.uncertainty(x))).argmax())
        self._playing = arm, x
        return fill(self._limits, load, depth=arm, width=1 if arm else 0)

    def arms(self) -> ArmReport:
        """Return the chain of most expected reward at the size of the last batch."""
        return ArmReport({} if self._best is None else {ALL_SIZES: arm_name(self._best)}, self._regret_s)

    def learn(self, feedback: Feedback) -> None:
        if self._playing is None:
            return
        arm, x = self._playing
        self._playing = None
        scores = self.expected(x)
        self._best = int(scores.argmax())
        if scores[self._best] > 0:
            self._regret_s += feedback.step_s * float(1 - max(scores[arm], 0.0) / scores[self._best])
        if feedback.step_s > 0 and is_of_its_chain(feedback, arm):
            rate = feedback.decoded / feedback.decode_rows / feedback.step_s
            self.reward(arm, x, rate / self._costs.fastest_rate)

    def reward(self, arm: int, x: np.ndarray, reward: float) -> None:
        """Update one arm: A += x x^T, b += reward x."""
        design, rewarded = self._design[arm], self._rewarded[arm]
        design += np.outer(x, x)
        rewarded += reward * x
        (a, c), (_, d) = design.tolist()
        determinant = a * d - c * c
        first, second, beside = self._inverse[arm] = d / determinant, a / determinant, -c / determinant
        one, size = rewarded.tolist()
        self._weights[arm] = first * one + beside * size, beside * one + second * size

    def uncertainty(self, x: np.ndarray) -> np.ndarray:
        """Return f64[K], sqrt(x^T A^-1 x)."""
        one, size = x.tolist()
        return np.sqrt(self._inverse @ np.array([one * one, size * size, 2 * one * size]))

    def expected(self, x: np.ndarray) -> np.ndarray:
        """Return f64[K], theta x."""
        return self._weights @ x

    def margin(self, uncertainty: np.ndarray) -> np.ndarray:
        """Return f64[K], what exploring adds to the expected rewards."""
        raise NotImplementedError


class LinUcb(_LinearBandit):
    """LinUCB (policy `linucb`; Li et al., 2010): argmax theta x + alpha sqrt(x^T A^-1 x), theta = A^-1 b."""

    def margin(self, uncertainty: np.ndarray) -> np.ndarray:
        return UCB_WIDTH * uncertainty


class LinearSampling(_LinearBandit):
    """Linear Thompson sampling (policy `lints`; Agrawal and Goyal, 2013): argmax theta x, theta ~ N(A^-1 b, v^2 A^-1).

    theta x of each arm is normal around its mean, with v times the uncertainty.
    """

    def __init__(self, limits: Limits, costs: ChainCosts, seed: int):
        super().__init__(limits, costs)
        self._rng = np.random.default_rng(seed)

    def margin(self, uncertainty: np.ndarray) -> np.ndarray:
        return SAMPLING_WIDTH * uncertainty * self._rng.standard_normal(len(uncertainty))
