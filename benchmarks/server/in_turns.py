"""A policy for `soak.py`: chains for some steps, then none for as many, so that the draft's memory comes and goes."""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.scheduler.controllers.base import Controller, Decision, Feedback, Load
from adaserve_jax.scheduler.controllers.baselines import fill
from adaserve_jax.scheduler.policies import Parts, Policy
from adaserve_jax.types import Limits

STEPS = 400


@dataclass
class InTurns(Controller):
    """Drafts chains of 2 for STEPS steps, then nothing for as many."""

    limits: Limits
    step: int = 0

    def decide(self, load: Load) -> Decision:
        return fill(self.limits, load, depth=2 * (self.step // STEPS % 2 == 0), width=1)

    def learn(self, feedback: Feedback) -> None:
        self.step += 1


def build(parts: Parts) -> Controller:
    return InTurns(parts.limits)


in_turns = Policy("chains of 2 for 400 steps, then none for 400", build, selector="equal", elastic=True)
