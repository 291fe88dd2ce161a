"""Nightjar's controllers (policies `nightjar`, `nightjar-v1`, `bingreedy`): which chain length earns most at which size
of batch, none included, learned from seconds per token.

They know no target. Sources: Nightjar, algorithm 1 of both versions, with the mends that docs/architecture/scheduler.md
lists; ADA-BINGREEDY.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.controllers.alone import Alone
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Feedback, Load
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts, tells_of_its_chain
from adaserve_jax.scheduler.controllers.fixed import fill
from adaserve_jax.scheduler.controllers.schedule import Schedule
from adaserve_jax.scheduler.controllers.switching import SwitchTable, doubling
from adaserve_jax.types import Limits

MIN_DWELL = 16
"""Steps that speculation stays on, or off, at least, whatever the size of the batch becomes."""
HYSTERESIS = 0.02
"""Share of its loss by which speculation must be better than none, or none better than it, to change from the other."""
PRIOR_STEPS = 1.0
"""Steps that the cost model's prediction of an arm counts for."""
OUTLIER = 4.0
"""A step longer than this factor times what its arm takes on average counts as so long."""
MEMORY_STEPS = 512
"""Most steps that an arm's sums stand for: what is older fades as new ones come."""
FADE = 0.5
"""What the end of a block leaves of every arm's sums, so that an arm tried again is believed."""

FOCUS = 8.0
"""How much less often an arm is explored the worse it seems: at twice the latency of another, 2 ** FOCUS times less."""


@dataclass(frozen=True)
class Rule:
    """explore_power: bin k of a block explores with the chance k ** -explore_power. locks: the arm stays for the whole
    bin, and speculation on or off for MIN_DWELL steps; else the arm is drawn or solved for in each step. contextual:
    every size of batch learns by itself. switching: what turning speculation on costs counts. focus: arms are explored
    with chances proportional to latency ** -focus, 0: uniform."""

    explore_power: float
    locks: bool
    focus: float = 0.0
    contextual: bool = True
    switching: bool = True


V2 = Rule(explore_power=1.0, locks=True, focus=FOCUS)
V1 = Rule(explore_power=0.5, locks=False)
BINGREEDY = Rule(explore_power=0.5, locks=False, contextual=False, switching=False)


class Bucket:
    """What sizes of batch that share their statistics have shown. K arms, arm a being a chain of a tokens.

    row_s: f64[K], seconds times rows; tokens, row_steps: f64[K], tokens that these rows emitted, and rows; they begin
    with what is predicted. arm: played while its bin lasts, None where it is to be chosen.
    """

    def __init__(self, predicted_s: np.ndarray, predicted_tokens: np.ndarray, rows: int):
        weight = PRIOR_STEPS * rows
        self.row_s = predicted_s * weight
        self.tokens = predicted_tokens * weight
        self.row_steps = np.full(len(predicted_s), weight)
        self.schedule = Schedule()
        self.arm: int | None = None
        self.explores = False

    @property
    def latency_s(self) -> np.ndarray:
        """f64[K], seconds per token of one request: of sums, not a mean of ratios."""
        return self.row_s / self.tokens

    def learn(self, arm: int, rows: int, seconds: float, tokens: int) -> None:
        """One step of `rows` decode rows."""
        usual_s = self.row_s.item(arm) / self.row_steps.item(arm)
        self.row_s[arm] += rows * min(seconds, OUTLIER * usual_s)
        self.tokens[arm] += tokens
        self.row_steps[arm] += rows
        excess = self.row_steps.item(arm) / (MEMORY_STEPS * rows)
        if excess > 1:
            self.row_s[arm] /= excess
            self.tokens[arm] /= excess
            self.row_steps[arm] /= excess

    def fade(self) -> None:
        """Let what comes count more than what was."""
        self.row_s *= FADE
        self.tokens *= FADE
        self.row_steps *= FADE


class NightjarController(Controller):
    """Explores and exploits chains of 0 to max_depth tokens by a `Rule`. Batches with prompts only teach nothing."""

    def __init__(self, limits: Limits, costs: ChainCosts, switch: SwitchTable, rule: Rule, seed: int):
        self._limits = limits
        self._costs = costs
        self._switch = switch
        self._rule = rule
        self._rng = np.random.default_rng(seed)
        self._sizes = doubling(limits.max_requests) if rule.contextual else [limits.max_requests]
        self._buckets: list[Bucket | None] = [None] * len(self._sizes)
        self._last = limits.max_depth  # prompts come first, and the draft is fed them unless speculation is off
        self._steps_since_change = MIN_DWELL
        self._playing: tuple[Bucket, int] | None = None

    def decide(self, load: Load) -> Decision:
        arm = self._last
        if not load.draft_resident:
            arm = 0  # bins of other arms wait
        if load.num_decode:
            bucket = self._bucket(load.num_decode)
            if load.draft_resident:
                if bucket.arm is None:
                    bucket.arm = self._choose(bucket, load)
                if not self._must_dwell(bucket.arm):
                    arm = bucket.arm
            self._playing = bucket, arm
        return fill(self._limits, load, depth=arm, width=1 if arm else 0)

    def fastest_alone(self, alone: Alone) -> float:
        """With the best chain, none included."""
        return alone.fastest_chain(0)

    def learn(self, feedback: Feedback) -> None:
        if self._playing is None:
            return
        bucket, arm = self._playing
        self._playing = None
        self._steps_since_change = 1 if (arm > 0) != (self._last > 0) else self._steps_since_change + 1
        self._last = arm
        if tells_of_its_chain(feedback, arm):
            seconds = self._costs.decode_s(feedback, arm)
            bucket.learn(arm, feedback.decode_rows, seconds, feedback.decoded)
        if arm != bucket.arm:  # held back by the dwell: the bin goes on when its own arm may be played
            return
        if bucket.schedule.advance():
            bucket.fade()
        if bucket.schedule.step == 1 or not self._rule.locks:
            bucket.arm = None

    def _bucket(self, rows: int) -> Bucket:
        index = bisect_left(self._sizes, rows)
        bucket = self._buckets[index]
        if bucket is None:
            bucket = self._buckets[index] = Bucket(*self._costs.predicted(rows), rows)
        return bucket

    def _choose(self, bucket: Bucket, load: Load) -> int:
        schedule = bucket.schedule
        if schedule.step == 1:
            bucket.explores = self._rng.random() < schedule.bin**-self._rule.explore_power
        if bucket.explores:
            weight = bucket.latency_s**-self._rule.focus
            chances = weight.cumsum()
            return int(chances.searchsorted(self._rng.random() * chances[-1], side="right"))
        return int(self.loss(bucket, load).argmin())

    def loss(self, bucket: Bucket, load: Load) -> np.ndarray:
        """f64[K], seconds per token of one request, with what changing from the arm played last costs: over the
        tokens that the request emits until speculation may be turned off again."""
        loss = bucket.latency_s
        if not self._rule.switching:
            return loss
        if self._last:
            loss[0] *= 1 + HYSTERESIS
        else:
            switch_s = self._switch.switch_s(int(load.draft_lag.max()), load.num_decode)
            per_step_s = switch_s / max(bucket.schedule.bin_steps, MIN_DWELL)
            off_s = loss.item(0)
            loss *= 1 + HYSTERESIS
            loss += bucket.row_steps * per_step_s / bucket.tokens
            loss[0] = off_s
        return loss

    def _must_dwell(self, arm: int) -> bool:
        return self._rule.locks and (arm > 0) != (self._last > 0) and self._steps_since_change < MIN_DWELL
