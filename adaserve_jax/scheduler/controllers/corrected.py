"""Controller of `adaserve`: the joint choice, corrected by the times and tokens that draft shapes have shown.

For each size of batch it learns how far the tables are off for each shape that was played. Source: Nightjar's bandit,
carried from chains to trees, with the tables' prediction as the prior of every arm; docs/architecture/scheduler.md.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from adaserve_jax.scheduler.controllers.base import ArmReport, Controller, Decision, Feedback, Load, SoloSpeed, arm_name
from adaserve_jax.scheduler.controllers.chain_costs import is_of_its_chain
from adaserve_jax.scheduler.controllers.joint import Correction, JointController, Pick
from adaserve_jax.scheduler.controllers.nightjar import SwitchTable, doubling
from adaserve_jax.scheduler.cost_model import OUTLIER, CostTable
from adaserve_jax.types import Limits

MIN_DWELL = 8
"""Fewest steps that speculation stays off if turning it on takes longer than a plain step, unless that keeps fewer
sequences on pace. If drafts lag by little, on and off may alternate: chains are free beside prompts that fill the
same bucket.
"""
STEP_NOISE, STEP_PRIOR, STEP_LATELY = 0.05, 1.0, 5.0
"""Seconds of a shape: size of noise, and weights in steps. They hardly scatter."""
TOKEN_NOISE, TOKEN_PRIOR, TOKEN_LATELY = 0.15, 64.0, 400.0
"""Tokens of a shape: size of noise, and weights in expected accepted nodes. They do scatter."""
HALF_LIFE = 256
"""Steps of a size of batch after which the weight of its measurements halves, so that what was given up is tried
again."""
LEAST_EXPECTED = 0.05
"""Expected accepted nodes below which a step says nothing about tokens."""


class OptionRatios:
    """Ratios of measured to predicted for O options, as factors that correct predictions.

    factor: f64[O], kept up to date, 1 for an option without measurements.
    """

    def __init__(self, options: int, *, noise: float, prior: float, lately: float):
        """Start without measurements of O options.

        noise: distance from 1 up to which a factor corrects nothing. prior: weight of the prediction itself. lately:
        weight over which the moving average forgets all but 1 / e; until then it is the plain mean.
        """
        self.factor = np.ones(options)
        self._noise = noise
        self._correcting: set[int] = set()
        self._prior, self._lately_weight = prior, lately
        self._weight = [0.0] * options
        self._lately = [1.0] * options

    def learn(self, option: int, ratio: float, weight: float) -> None:
        """Take in one measurement of that weight; a ratio counts as no more than OUTLIER, and no less than 1 / it."""
        ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        self._weight[option] += weight
        rate = weight / min(self._weight[option], weight + self._lately_weight)
        self._lately[option] += rate * (ratio - self._lately[option])
        self._set(option)

    @property
    def corrects(self) -> bool:
        """True if any factor is not 1."""
        return bool(self._correcting)

    def fade(self, share: float) -> None:
        """Multiply the weight of all measurements by `share`."""
        for option, weight in enumerate(self._weight):
            if weight:
                self._weight[option] = weight * share
                self._set(option)

    def _set(self, option: int) -> None:
        weight = self._weight[option]
        off = weight / (weight + self._prior) * (self._lately[option] - 1)
        corrects = abs(off) > self._noise
        self.factor[option] = 1 + off if corrects else 1.0
        (self._correcting.add if corrects else self._correcting.discard)(option)


class ShapeBucket:
    """Measurements of shapes at sizes of batch that share them. best: shape last thought best."""

    def __init__(self, shapes: int):
        self.seconds = OptionRatios(shapes, noise=STEP_NOISE, prior=STEP_PRIOR, lately=STEP_LATELY)
        self.tokens = OptionRatios(shapes, noise=TOKEN_NOISE, prior=TOKEN_PRIOR, lately=TOKEN_LATELY)
        self._correction = Correction(self.seconds.factor, self.tokens.factor)
        self.best: int | None = None
        self._steps = 0

    @property
    def correction(self) -> Correction | None:
        """Factors on the tables; None where the tables are right but for noise."""
        return self._correction if self.seconds.corrects or self.tokens.corrects else None

    def advance(self) -> None:
        """Advance by one step."""
        self._steps += 1
        if self._steps % HALF_LIFE == 0:
            self.seconds.fade(0.5)
            self.tokens.fade(0.5)


@dataclass(frozen=True, slots=True)
class _Playing:
    """The pick of the step in flight. best: the pick without the dwell."""

    bucket: ShapeBucket
    pick: Pick
    best: Pick


class CorrectedController(Controller):
    """Bandit over shapes, for each size of batch: the best one by the tables, corrected by what it has shown."""

    reads_prompts: ClassVar[bool] = True

    def __init__(
        self, joint: JointController, limits: Limits, switch: SwitchTable, *, plain_step_s: float
    ):  # fmt: skip
        """Set up around a joint controller. plain_step_s: seconds of one token of one sequence without speculation."""
        self._plain_step_s = plain_step_s
        self._joint = joint
        self._limits = limits
        self._switch = switch
        self._sizes = doubling(limits.max_requests)
        self._buckets: list[ShapeBucket | None] = [None] * len(self._sizes)
        self._on = True
        self._since_change = MIN_DWELL
        self._playing: _Playing | None = None

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
        if switch_s is not None and best.shape and self._must_dwell(switch_s):
            off = weighed.pick(0)
            pick = off if off.on_pace >= best.on_pace else best
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
        depth = pick.decision.depth
        if is_of_its_chain(feedback, depth) and feedback.predicted_s > 0:
            bucket.seconds.learn(pick.shape, feedback.step_s / feedback.predicted_s, 1.0)
            if feedback.expected > LEAST_EXPECTED:
                bucket.tokens.learn(pick.shape, feedback.accepted / feedback.expected, feedback.expected)
        bucket.advance()

    def arms(self) -> ArmReport:
        """Return the shape last thought best at each size of batch that occurred."""
        shapes, met = self._joint.shapes, zip(self._sizes, self._buckets, strict=True)
        best = {str(size): bucket.best for size, bucket in met if bucket is not None and bucket.best is not None}
        named = {size: arm_name(int(shapes.depth[arm]), int(shapes.width[arm])) for size, arm in best.items()}
        return ArmReport(named)

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
        return self._since_change < MIN_DWELL and switch_s > self._plain_step_s

    def _prompts_only(self, load: Load) -> Decision:
        """Decide a step of prompts; they are fed to the draft unless none was last thought best for so many rows."""
        decision = self._joint.weigh(load).pick().decision
        bucket = self._buckets[bisect_left(self._sizes, load.num_prefill)] if load.num_prefill else None
        return replace(decision, feed_draft=False) if bucket is not None and bucket.best == 0 else decision
