"""Controller of `adaserve`: the joint choice, corrected by the times and tokens that draft shapes have shown.

For each size of batch it learns how far the tables are off for each shape. Now and then it tries a shape next to the
best one, never at the price of a sequence on pace. Source: Nightjar's bandit, carried from chains to trees;
docs/architecture/scheduler.md.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from adaserve_jax.scheduler.controllers.base import ArmReport, Controller, Decision, Feedback, Load, SoloSpeed, arm_name
from adaserve_jax.scheduler.controllers.chain_costs import is_of_its_chain
from adaserve_jax.scheduler.controllers.joint import Correction, JointController, Pick, Weighed
from adaserve_jax.scheduler.controllers.nightjar import MIN_DWELL, ExplorationSchedule, SwitchTable, doubling
from adaserve_jax.scheduler.controllers.shapes import Shapes
from adaserve_jax.scheduler.cost_model import OUTLIER, CostTable
from adaserve_jax.types import Limits

MEAN_SHARE = 0.35
"""Weight of the plain mean in a blended ratio; the moving average, which follows changes, has the rest."""
EXPLORE_SHARE = 0.1
"""Upper bound on the share of bins that begin with a trial; beyond it the probability falls with the bin's number in
its block.
"""
NEAR = 0.08
"""Share by which a shape may be worth less than the best, with corrections, to be tried."""
UNSURE = 0.5
"""Added to NEAR for a shape that has shown nothing: the tables may be off by a factor of two."""
TRIAL_STEPS = 3
"""Steps for which a shape that does better than predicted may become the best one."""
STEP_NOISE, STEP_PRIOR, STEP_LATELY, STEP_MEMORY = 0.05, 1.0, 5.0, 64.0
"""Seconds of a shape: size of noise, and weights in steps. They hardly scatter."""
TOKEN_NOISE, TOKEN_PRIOR, TOKEN_LATELY, TOKEN_MEMORY = 0.15, 64.0, 400.0, 4000.0
"""Tokens of a shape: size of noise, and weights in expected accepted nodes. They do scatter."""
HALF_LIFE = 256
"""Steps of a size of batch after which the weight of its measurements halves."""
LEAST_EXPECTED = 0.05
"""Expected accepted nodes below which a step says nothing about tokens."""


class OptionRatios:
    """Ratios of measured to predicted for O options, as factors that correct predictions.

    factor: f64[O], kept up to date, 1 for an option without measurements.
    """

    def __init__(self, options: int, *, noise: float, prior: float, lately: float, memory: float):
        """Start without measurements of O options.

        noise: distance from 1 up to which a factor corrects nothing. prior: weight of the prediction itself. lately:
        weight over which the moving average forgets all but 1 / e. memory: most weight that the mean stands for.
        """
        self.factor = np.ones(options)
        self._noise = noise
        self._correcting: set[int] = set()
        self._prior, self._lately_weight, self._memory = prior, lately, memory
        self._weight = [0.0] * options
        self._mean = [1.0] * options
        self._lately = [1.0] * options

    def learn(self, option: int, ratio: float, weight: float) -> None:
        """Take in one measurement of that weight; a ratio counts as no more than OUTLIER, and no less than 1 / it."""
        ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        total = self._weight[option] + weight
        self._mean[option] += weight / total * (ratio - self._mean[option])
        rate = max(weight / total, weight / (weight + self._lately_weight))
        self._lately[option] += rate * (ratio - self._lately[option])
        self._weight[option] = min(total, self._memory)
        self._set(option)

    @property
    def corrects(self) -> bool:
        """True if any factor is not 1."""
        return bool(self._correcting)

    def doubt(self, option: int) -> float:
        """Return the weight of the prediction in the factor: 1 for an option without measurements."""
        return self._prior / (self._prior + self._weight[option])

    def fade(self, share: float) -> None:
        """Multiply the weight of all measurements by `share`."""
        for option, weight in enumerate(self._weight):
            if weight:
                self._weight[option] = weight * share
                self._set(option)

    def _set(self, option: int) -> None:
        blended = MEAN_SHARE * self._mean[option] + (1 - MEAN_SHARE) * self._lately[option]
        off = (1 - self.doubt(option)) * (blended - 1)
        corrects = abs(off) > self._noise
        self.factor[option] = 1 + off if corrects else 1.0
        (self._correcting.add if corrects else self._correcting.discard)(option)


class ShapeBucket:
    """Measurements of shapes at sizes of batch that share them.

    best: shape last thought best. trial: shape on trial in this bin, or None. undecided: the bin has yet to be begun.
    """

    def __init__(self, shapes: int):
        self.seconds = OptionRatios(shapes, noise=STEP_NOISE, prior=STEP_PRIOR, lately=STEP_LATELY, memory=STEP_MEMORY)
        self.tokens = OptionRatios(
            shapes, noise=TOKEN_NOISE, prior=TOKEN_PRIOR, lately=TOKEN_LATELY, memory=TOKEN_MEMORY
        )
        self._correction = Correction(self.seconds.factor, self.tokens.factor)
        self.schedule = ExplorationSchedule()
        self.best: int | None = None
        self.undecided = True
        self.trial: int | None = None
        self.trial_steps = 0
        self.believed = 1.0

    @property
    def correction(self) -> Correction | None:
        """Factors on the tables; None where the tables are right but for noise."""
        return self._correction if self.seconds.corrects or self.tokens.corrects else None

    def begin(self, trial: int | None) -> None:
        """Begin a bin, with the shape that it tries."""
        self.undecided = False
        self.trial, self.trial_steps = trial, 0
        if trial is not None:
            self.believed = self.speed(trial)

    def speed(self, shape: int) -> float:
        """Return how many times the predicted tokens per second the shape brings."""
        return self.tokens.factor.item(shape) / self.seconds.factor.item(shape)

    def advance(self) -> None:
        """Advance by one step."""
        steps = self.schedule.bin_steps
        self.schedule.advance()
        if self.schedule.step == 1:
            share = 0.5 ** (steps / HALF_LIFE)
            self.seconds.fade(share)
            self.tokens.fade(share)
            self.undecided = True


@dataclass(frozen=True, slots=True)
class _Playing:
    """The pick of the step in flight. best: the pick without a trial or the dwell."""

    bucket: ShapeBucket
    pick: Pick
    best: Pick


class CorrectedController(Controller):
    """Bandit over shapes around the one that the corrected tables propose, for each size of batch."""

    reads_prompts: ClassVar[bool] = True

    def __init__(
        self, joint: JointController, limits: Limits, switch: SwitchTable, seed: int, *, plain_step_s: float
    ):  # fmt: skip
        """Set up around a joint controller. plain_step_s: seconds of one token of one sequence without speculation."""
        self._plain_step_s = plain_step_s
        self._joint = joint
        self._limits = limits
        self._switch = switch
        self._rng = np.random.default_rng(seed)
        self._sizes = doubling(limits.max_requests)
        self._buckets: list[ShapeBucket | None] = [None] * len(self._sizes)
        self._beside = neighbours(joint.shapes)
        self._on = True
        self._since_change = MIN_DWELL
        self._playing: _Playing | None = None
        self._regret_s = 0.0

    def retimed(self, cost: CostTable) -> None:
        self._switch = SwitchTable.of(cost, self._limits)

    def decide(self, load: Load) -> Decision:
        if not load.num_decode:
            return self._prompts_only(load)
        bucket = self._bucket(load.num_decode)
        if not load.can_draft:
            self._on = False  # its KV is gone: it will have to catch up
        if not load.can_speculate.any():  # whatever the reason, it says nothing of shapes
            self._playing = None
            return self._joint.weigh(load, bucket.correction).pick().decision
        switch_s = None if self._on else self._switch_s(load)  # while it is on, what lags is charged as it is
        weighed = self._joint.weigh(load, bucket.correction, switch_s)
        best = pick = weighed.pick()
        if bucket.undecided:
            bucket.begin(self._draw(bucket, weighed, best.shape))
        if switch_s is not None and best.shape and self._must_dwell(switch_s):
            off = weighed.pick(0)
            pick = off if off.on_pace >= best.on_pace else best
        elif bucket.trial is not None and bucket.trial != best.shape:
            pick = self._try(bucket, weighed, best)
        self._playing = _Playing(bucket, pick, best)
        return pick.decision

    def sustains(
        self, need_rate: np.ndarray, others: int, prefill_tokens: float, share: float, *, can_draft: bool = True
    ) -> bool:  # fmt: skip
        return self._joint.sustains(need_rate, others, prefill_tokens, share, can_draft=can_draft)

    def fastest_alone(self, alone: SoloSpeed) -> float:
        return self._joint.fastest_alone(alone)

    def learn(self, feedback: Feedback) -> None:
        playing, self._playing = self._playing, None
        if playing is None:
            return
        bucket, pick = playing.bucket, playing.pick
        on = pick.shape > 0
        self._since_change = 1 if on != self._on else self._since_change + 1
        self._on = on
        bucket.best = playing.best.shape
        if pick.shape != bucket.best:
            self._regret_s += feedback.step_s * _lost(pick, playing.best)
        depth = pick.decision.depth
        if is_of_its_chain(feedback, depth) and feedback.predicted_s > 0:
            bucket.seconds.learn(pick.shape, feedback.step_s / feedback.predicted_s, 1.0)
            if feedback.expected > LEAST_EXPECTED:
                bucket.tokens.learn(pick.shape, feedback.accepted / feedback.expected, feedback.expected)
        if pick.shape == bucket.trial:
            bucket.trial_steps += 1
        bucket.advance()

    def arms(self) -> ArmReport:
        """Return the shape last thought best at each size of batch that occurred."""
        shapes, met = self._joint.shapes, zip(self._sizes, self._buckets, strict=True)
        best = {str(size): bucket.best for size, bucket in met if bucket is not None and bucket.best is not None}
        named = {size: arm_name(int(shapes.depth[arm]), int(shapes.width[arm])) for size, arm in best.items()}
        return ArmReport(named, self._regret_s)

    def _bucket(self, rows: int) -> ShapeBucket:
        index = bisect_left(self._sizes, rows)
        bucket = self._buckets[index]
        if bucket is None:
            bucket = self._buckets[index] = ShapeBucket(len(self._joint.shapes.depth))
        return bucket

    def _switch_s(self, load: Load) -> float:
        """Return the switching cost of rows that lag by more than a step brings; the others catch up as always."""
        late = load.draft_lag[load.can_speculate & (load.draft_lag > self._limits.max_depth + 1)]
        return self._switch.switch_s(int(late.max()), len(late)) if len(late) else 0.0

    def _must_dwell(self, switch_s: float) -> bool:
        """Return whether speculation stays off for now: turning it on takes longer than a plain step.

        If drafts lag by little, on and off may alternate: chains are free beside prompts that fill the same bucket.
        """
        return self._since_change < MIN_DWELL and switch_s > self._plain_step_s

    def _prompts_only(self, load: Load) -> Decision:
        """Decide a step of prompts; they are fed to the draft unless so many rows were last served without it."""
        decision = self._joint.weigh(load).pick().decision
        bucket = self._buckets[bisect_left(self._sizes, load.num_prefill)] if load.num_prefill else None
        return replace(decision, feed_draft=False) if bucket is not None and bucket.best == 0 else decision

    def _draw(self, bucket: ShapeBucket, weighed: Weighed, best: int) -> int | None:
        """Return the shape to try in the bin that begins, or None."""
        if self._rng.random() >= min(EXPLORE_SHARE, 1 / bucket.schedule.bin):
            return None
        value, on_pace = weighed.by_shape()
        beside = self._beside[best] if best else [1 + int(value[1:].argmax())]
        fit = [shape for shape in beside if _may_be_tried(bucket, value, on_pace, shape, best)]
        return fit[int(self._rng.integers(len(fit)))] if fit else None

    def _try(self, bucket: ShapeBucket, weighed: Weighed, best: Pick) -> Pick:
        """Return the pick of the shape on trial, if no pace is at stake; end the trial once the shape is seen to be
        worse.
        """
        shape = bucket.trial
        assert shape is not None
        if bucket.trial_steps and (bucket.trial_steps >= TRIAL_STEPS or bucket.speed(shape) <= bucket.believed):
            bucket.trial = None
            return best
        pick = weighed.pick(shape)
        return pick if pick.on_pace >= best.on_pace else best


def neighbours(shapes: Shapes) -> list[list[int]]:
    """Return, by shape, the shapes beside it: none, a level more or less, the next width up or down."""
    index = {(depth, width): at for at, (depth, width) in enumerate(zip(shapes.depth, shapes.width, strict=True))}
    widths = sorted({width for depth, width in index if depth})
    beside: list[list[int]] = []
    for depth, width in index:
        at = widths.index(width) if depth else 0
        other = [(depth, each) for each in widths[max(at - 1, 0) : at + 2] if each != width] if depth else []
        near = [(0, 0), (depth - 1, width), (depth + 1, width), *other]
        beside.append(sorted({index[each] for each in near if each in index and each != (depth, width)}))
    return beside


def _may_be_tried(bucket: ShapeBucket, value: np.ndarray, on_pace: np.ndarray, shape: int, best: int) -> bool:
    """Return whether all sequences on pace stay so, and the rates are near enough."""
    if on_pace[shape] < on_pace[best]:
        return False
    margin = NEAR + UNSURE * bucket.seconds.doubt(shape)
    return bool(value[shape] - on_pace[shape] >= (1 - margin) * (value[best] - on_pace[best]))


def _lost(pick: Pick, best: Pick) -> float:
    """Return the share of a step's time by which the pick earns less than the best."""
    rate = best.value - best.on_pace
    return max(0.0, 1 - (pick.value - pick.on_pace) / rate) if rate > 0 else 0.0
