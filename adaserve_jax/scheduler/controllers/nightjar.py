"""Nightjar's controllers (policies `nightjar`, `nightjar-v1`, `bingreedy`): chain length by measured seconds per token.

For each size of batch they learn which chain, none included, earns most; targets are ignored. Sources: Nightjar,
algorithm 1 of both versions, with the changes that docs/architecture/baselines.md lists; ADA-BINGREEDY.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.controllers.base import (
    ALL_SIZES,
    ArmReport,
    ChainController,
    Decision,
    Feedback,
    Load,
    arm_name,
)
from adaserve_jax.scheduler.controllers.baselines import fill
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts, is_of_its_chain
from adaserve_jax.scheduler.cost_model import OUTLIER, CostTable
from adaserve_jax.types import Limits

MIN_DWELL = 16
"""Fewest steps that speculation stays on, or off, whatever the size of the batch becomes."""
HYSTERESIS = 0.02
"""Share of its loss by which speculation must be better than none, or none better than speculation, to change over."""
PRIOR_STEPS = 1.0
"""Weight, in steps, of the cost model's prediction of an arm."""
MEMORY_STEPS = 512
"""Most steps that an arm's sums stand for; older ones fade as new ones come."""
FADE = 0.5
"""Share of every arm's sums that the end of a block keeps, so that an arm tried again is believed."""
FOCUS = 8.0
"""Exponent by which a worse arm is explored less often: at twice the latency of another, 2 ** FOCUS times less."""
EXPLORE_MOST = 0.1
"""Upper bound on the share of bins that explore."""
NEAR = 0.25
"""Share by which an arm may seem worse than the best one and still be tried before others, until it has had
TRIAL_STEPS: predictions are off by that much.
"""
TRIAL_ROWS, TRIAL_STEPS = 16, 4
"""Rows times steps, and steps, for which an arm is explored before it is given up as worse than the best one:
prompts make single steps expensive.
"""
BELIEVED_ROWS = 256
"""Rows times steps that older measurements of an arm count for at most when it is explored, so that the new ones are
believed.
"""


class ExplorationSchedule:
    """Nightjar's blocks and bins (algorithm 1): blocks of H = 1, 2, 4, ... steps, of isqrt(H) bins of isqrt(H) steps
    each.
    """

    def __init__(self) -> None:
        self.block = 1
        """j."""
        self.bin = 1
        """k."""
        self.step = 1
        """tau."""

    @property
    def bin_steps(self) -> int:
        """Steps of a bin, and bins of a block."""
        return isqrt(1 << (self.block - 1))

    def advance(self) -> bool:
        """Advance by one step; return whether it ended a block."""
        self.step += 1
        if self.step > self.bin_steps:
            self.bin, self.step = self.bin + 1, 1
        if self.bin <= self.bin_steps:
            return False
        self.block, self.bin = self.block + 1, 1
        return True


class SwitchTable:
    """Cost of turning speculation on, C_switch(L_max, n): seconds by the draft's longest lag and the number of rows.

    A grid made monotone and looked up rounding both up. Source: Nightjar, table 3.
    """

    def __init__(self, lags: Sequence[int], rows: Sequence[int], seconds: np.ndarray):
        """Build the table; each entry becomes the largest of those at no more lag and no more rows.

        lags: tokens, rising. rows: rising. seconds: f64[lags, rows], at least 0. Raises ConfigError for any other grid.
        """
        seconds = np.asarray(seconds, np.float64)
        if seconds.shape != (len(lags), len(rows)) or not seconds.size:
            raise ConfigError(
                f"the table of switching costs must have {len(lags)} lags x {len(rows)} rows of seconds, at least one, "
                f"got shape {seconds.shape}"
            )
        if any(a >= b for grid in (lags, rows) for a, b in pairwise(grid)):
            raise ConfigError(f"lags and rows of the switching costs must rise, got {list(lags)} and {list(rows)}")
        if not (seconds >= 0).all():
            raise ConfigError(f"switching costs must be at least 0 seconds, got {seconds.min():g}")
        self._lags = list(lags)
        self._rows = list(rows)
        self._seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)

    @classmethod
    def of(cls, cost: CostTable, limits: Limits) -> SwitchTable:
        """Return the table as profiled, else the time to feed the draft what it lacks, with every row lagging as far
        as the furthest.
        """
        profiled = cost.samples.switch_s
        if profiled:
            lags, rows = (sorted(set(sizes)) for sizes in zip(*profiled, strict=True))
            return cls(lags, rows, np.array([[profiled[lag, n] for n in rows] for lag in lags]))
        lags, rows = doubling(limits.max_context), doubling(limits.max_requests)
        return cls(lags, rows, np.array([[cost.catchup_s(lag * n) for n in rows] for lag in lags]))

    def switch_s(self, lag: int, rows: int) -> float:
        """Return the seconds; beyond the grid, those at its edge."""
        row = min(bisect_left(self._lags, lag), len(self._lags) - 1)
        column = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        return self._seconds.item(row, column)


def doubling(most: int) -> list[int]:
    """Return 1, 2, 4, ... below `most`, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


@dataclass(frozen=True)
class Rule:
    """Variant of the algorithm.

    explore_power: bin k of a block explores with probability k ** -explore_power, at most explore_most. locks: the arm
    stays for the whole bin, unless it is on trial and seen to be worse, and speculation stays on or off for MIN_DWELL
    steps; otherwise the arm is chosen in each step. contextual: every size of batch learns by itself. switching: the
    cost of turning speculation on counts. focus: arms are explored with probabilities proportional to latency **
    -focus; 0: uniformly.
    """

    explore_power: float
    locks: bool
    explore_most: float = 1.0
    focus: float = 0.0
    contextual: bool = True
    switching: bool = True


V2 = Rule(explore_power=1.0, locks=True, explore_most=EXPLORE_MOST, focus=FOCUS)
V1 = Rule(explore_power=0.5, locks=False)
BINGREEDY = Rule(explore_power=0.5, locks=False, contextual=False, switching=False)


@dataclass(frozen=True, slots=True)
class ArmTrial:
    """Measurements of an arm in the bin that explores it."""

    steps: int
    row_steps: int
    row_s: float
    tokens: int


_NO_TRIAL = ArmTrial(0, 0, 0.0, 0)


class ArmBucket:
    """Statistics of sizes of batch that share them. K arms, arm a being a chain of a tokens.

    row_s: f64[K], seconds times rows; tokens, row_steps: f64[K], tokens that these rows emitted, and rows. They begin
    with the prediction. played: i64[K], steps of each arm. arm: the arm of the current bin; None until it is chosen.
    """

    def __init__(self, predicted_s: np.ndarray, predicted_tokens: np.ndarray, rows: int):
        weight = PRIOR_STEPS * rows
        self._predicted = (predicted_s * weight, predicted_tokens * weight, np.full(len(predicted_s), weight))
        self.row_s, self.tokens, self.row_steps = (sums.copy() for sums in self._predicted)
        self.played = np.zeros(len(predicted_s), np.int64)
        self.schedule = ExplorationSchedule()
        self.arm: int | None = None
        self.explores = False
        self.trial = _NO_TRIAL

    @property
    def latency_s(self) -> np.ndarray:
        """Seconds per token of one sequence, f64[K]: a ratio of sums, not a mean of ratios."""
        return self.row_s / self.tokens

    def learn(self, arm: int, rows: int, seconds: float, tokens: int) -> None:
        """Take in one step of `rows` decode rows."""
        self.played[arm] += 1
        usual_s = self.row_s.item(arm) / self.row_steps.item(arm)
        self.row_s[arm] += rows * min(seconds, OUTLIER * usual_s)
        self.tokens[arm] += tokens
        self.row_steps[arm] += rows
        excess = self.row_steps.item(arm) / (MEMORY_STEPS * rows)
        if excess > 1:
            self._shrink(arm, excess)

    def begin_trial(self, arm: int) -> None:
        """Begin a trial: older measurements of the arm count for at most BELIEVED_ROWS."""
        self.trial = _NO_TRIAL
        excess = self.row_steps.item(arm) / BELIEVED_ROWS
        if excess > 1:
            self._shrink(arm, excess)

    def on_trial(self, rows: int, seconds: float, tokens: int) -> bool:
        """Take in a step of the arm on trial; return whether it is worse than the best one."""
        trial = self.trial
        row_s = trial.row_s + rows * seconds
        self.trial = trial = ArmTrial(trial.steps + 1, trial.row_steps + rows, row_s, trial.tokens + tokens)
        enough = trial.steps >= TRIAL_STEPS and trial.row_steps >= TRIAL_ROWS
        return enough and trial.row_s / trial.tokens > self.latency_s.min()

    def best(self, speculating: bool) -> int:
        """Return the arm of least latency with speculation, or the one without."""
        return 1 + int(self.latency_s[1:].argmin()) if speculating else 0

    def _shrink(self, arm: int, factor: float) -> None:
        self.row_s[arm] /= factor
        self.tokens[arm] /= factor
        self.row_steps[arm] /= factor

    def fade(self) -> None:
        """Move all sums towards the prediction, so that new measurements count more and an arm that looked bad by
        chance is tried again.
        """
        for sums, predicted in zip((self.row_s, self.tokens, self.row_steps), self._predicted, strict=True):
            sums += (1 - FADE) * (predicted - sums)


class NightjarController(ChainController):
    """Bandit over chains of 0 to max_depth tokens by a `Rule`. Batches with prompts only teach nothing."""

    def __init__(self, limits: Limits, costs: ChainCosts, switch: SwitchTable, rule: Rule, seed: int):
        self._limits = limits
        self._costs = costs
        self._switch = switch
        self._rule = rule
        self._rng = np.random.default_rng(seed)
        self._sizes = doubling(limits.max_requests) if rule.contextual else [limits.max_requests]
        self._buckets: list[ArmBucket | None] = [None] * len(self._sizes)
        self._last = limits.max_depth  # prompts come first, and the draft is fed them unless speculation is off
        self._steps_since_change = MIN_DWELL
        self._playing: tuple[ArmBucket, int] | None = None
        self._regret_s = 0.0

    def retimed(self, cost: CostTable) -> None:
        self._switch = SwitchTable.of(cost, self._limits)

    def decide(self, load: Load) -> Decision:
        arm = self._last
        if not load.can_draft:
            arm = 0  # bins of other arms wait
        if load.num_decode:
            bucket = self.bucket(load.num_decode)
            if load.can_draft:
                if bucket.arm is None:
                    bucket.arm = self.choose(bucket, load)
                arm = bucket.best(self._last > 0) if self._must_dwell(bucket.arm) else bucket.arm
            self._playing = bucket, arm
        return fill(self._limits, load, depth=arm, width=1 if arm else 0)

    def arms(self) -> ArmReport:
        """Return the arm of least latency at each size of batch that occurred."""
        met = zip(self._sizes, self._buckets, strict=True)
        best = {size: bucket.latency_s.argmin() for size, bucket in met if bucket is not None}
        names = {str(size) if self._rule.contextual else ALL_SIZES: arm_name(int(arm)) for size, arm in best.items()}
        return ArmReport(names, self._regret_s)

    def learn(self, feedback: Feedback) -> None:
        if self._playing is None:
            return
        bucket, arm = self._playing
        self._playing = None
        latency_s = bucket.latency_s
        self._regret_s += feedback.step_s * (1 - latency_s.min().item() / latency_s.item(arm))
        self._steps_since_change += 1
        if (arm > 0) != (self._last > 0):
            self._steps_since_change = MIN_DWELL if bucket.explores else 1  # what is only tried is not held to
        self._last = arm
        trial = arm == bucket.arm and bucket.explores and self._rule.locks
        if is_of_its_chain(feedback, arm):
            seconds = self._costs.decode_s(feedback, arm)
            bucket.learn(arm, feedback.decode_rows, seconds, feedback.decoded)
            if trial and bucket.on_trial(feedback.decode_rows, seconds, feedback.decoded):
                bucket.arm, bucket.explores = None, False
        elif trial:
            bucket.arm, bucket.explores = None, False  # drafts that lag would have to be waited for
        if bucket.arm not in (arm, None):  # held back by the dwell: the bin goes on when its own arm may be played
            return
        if bucket.schedule.advance():
            bucket.fade()
        if bucket.schedule.step == 1:
            bucket.explores = False  # a bin that begins while the draft is away draws nothing
        if bucket.schedule.step == 1 or not self._rule.locks:
            bucket.arm = None

    def bucket(self, rows: int) -> ArmBucket:
        """Return the statistics that batches of `rows` decode rows share with others of about that size."""
        index = bisect_left(self._sizes, rows)
        bucket = self._buckets[index]
        if bucket is None:
            rows = self._sizes[index]
            bucket = self._buckets[index] = ArmBucket(*self._costs.predicted(rows), rows)
        return bucket

    def choose(self, bucket: ArmBucket, load: Load) -> int:
        """Draw the arm that plays next; at the first step of a bin, also whether the bin explores."""
        schedule = bucket.schedule
        loss = self.loss(bucket, load)  # what turning speculation on costs keeps an arm from being tried, too
        best = int(loss.argmin())
        untried = (bucket.played < TRIAL_STEPS) & (loss <= (1 + NEAR) * loss.item(best))
        untried[best] = False
        tries = bool(self._rule.focus and untried.any())
        if schedule.step == 1 and self._costs.arms > 1:
            most = 1.0 if tries else self._rule.explore_most
            bucket.explores = self._rng.random() < min(schedule.bin**-self._rule.explore_power, most)
        if not bucket.explores:
            return best
        if not self._rule.focus:
            return int(self._rng.integers(self._costs.arms))
        weight = loss**-self._rule.focus
        if tries:
            weight *= untried
        elif not self._waits(load):
            weight[best] = 0.0
        chances = weight.cumsum()
        arm = int(chances.searchsorted(self._rng.random() * chances[-1], side="right"))
        bucket.begin_trial(arm)
        return arm

    def _waits(self, load: Load) -> bool:
        """Return whether a trial of speculation would have to wait for drafts that lag."""
        return not self._last and int(load.draft_lag.sum()) > self._costs.max_catchup_tokens

    def loss(self, bucket: ArmBucket, load: Load) -> np.ndarray:
        """Return f64[K], seconds per token of one sequence, with the cost of changing from the arm played last.

        The switching cost is spread over the tokens that the sequence emits until speculation may be turned off again.
        """
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
