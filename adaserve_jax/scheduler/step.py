"""The step loop: plan, speculate, select, verify, commit, then expand or contract memory.

The engine and the simulator both run this code. A step has two halves, because a simulated replica
advances its clock between verification and commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adaserve_jax.scheduler.commit import StepUpdates
from adaserve_jax.scheduler.elastic import expand_or_contract
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.types import CandidateTrees, DraftTrees, Executor, LogitEdits, StepOutcome, StepPlan, StopCheck


@dataclass(frozen=True, eq=False)
class VerifiedStep:
    """A step that ran on the device and is not committed. edits: what was asked of the target's logits."""

    plan: StepPlan
    candidates: CandidateTrees
    trees: DraftTrees
    outcome: StepOutcome
    edits: LogitEdits | None = None


@dataclass(frozen=True, eq=False)
class StepResult:
    """A committed step. ended_s: when it was committed, on the clock of the step loop."""

    step: VerifiedStep
    updates: StepUpdates
    ended_s: float


def begin_step(
    scheduler: Scheduler, executor: Executor, clock: Callable[[], float],
    edit: Callable[[StepPlan, DraftTrees], LogitEdits | None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> VerifiedStep | None:  # fmt: skip
    """Plan, speculate, select and verify one step, which is in flight until `end_step`; None if nothing can run.

    The clock is read for the plan, and again for the selection, so that the time that drafting took counts. `edit` is
    called between selection and verification; it returns the step's edits of logits, if any. `meanwhile` is called
    while the device verifies, if there is a step.
    """
    plan = scheduler.plan(clock())
    if plan is None:
        return None
    candidates = CandidateTrees.empty(plan.num_decode) if plan.draft is None else executor.speculate(plan)
    trees = scheduler.select(plan, candidates, clock())
    edits = None if edit is None else edit(plan, trees)
    return VerifiedStep(plan, candidates, trees, executor.verify(plan, trees, edits, meanwhile), edits)


def end_step(
    scheduler: Scheduler, executor: Executor, clock: Callable[[], float], step: VerifiedStep,
    stop_check: StopCheck | None = None, observe: Callable[[StepResult], None] | None = None,
) -> StepResult:  # fmt: skip
    """Commit the step in flight, then expand or contract memory where that is due.

    observe: called with the committed step before memory changes; it may end sequences.
    """
    now = clock()
    updates = scheduler.commit(step.plan, step.trees, step.candidates, step.outcome, now, stop_check)
    result = StepResult(step, updates, now)
    if observe is not None:
        observe(result)
    if expand_or_contract(scheduler.elastic_memory, executor, clock):
        scheduler.pause()
    return result
