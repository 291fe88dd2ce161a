"""With speculation off, a scheduler that has a draft does what one without a draft does, and nothing else."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from adaserve_jax.scheduler.controllers.nightjar import NightjarController
from adaserve_jax.types import Executor, StepPlan
from tests.scheduler.harness import Run, limits_of, random_load


class Recorder:
    """Notes what is asked of an executor."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.calls: list[str] = []
        self.plans: list[StepPlan] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name != "know":  # the simulated machine is told of requests; nothing runs
                self.calls.append(name)
            if name == "verify":
                self.plans.append(arguments[0])
            return getattr(self._executor, name)(*arguments)

        return call


def recorded(policy: str, max_depth: int) -> tuple[Recorder, Run]:
    """A load of prompts and decodes, pages running short, with `nightjar` held to its arm 0."""
    run = Run.of(limits_of(max_depth=max_depth, max_width=max_depth, num_pages=34), policy=policy)
    recorder = Recorder(run.executor)
    run.executor = recorder  # type: ignore[assignment]
    controller = run.scheduler.controller
    if isinstance(controller, NightjarController):
        controller._last = 0
        controller.choose = lambda bucket, load: 0  # type: ignore[method-assign]
    batch = run.scheduler.batch

    def one_page_ahead_at_most(step: int) -> None:
        """Before a plan, a request has the pages of its tokens but the newest one, which may need another."""
        for state in batch.running:
            needed = batch.pool.pages_for(state.num_tokens)
            assert needed - 1 <= state.num_pages <= needed, step

    run.serve(random_load(3, 30, rate=60.0), before_step=one_page_ahead_at_most)
    return recorder, run


@pytest.mark.parametrize("policy", ["off", "nightjar"])
def test_the_draft_costs_nothing_while_speculation_is_off(policy: str) -> None:
    """No draft call, no page ahead of a tree, one verification a step; and every plan is that of an engine that has no
    draft, on the same clock."""
    recorder, run = recorded(policy, max_depth=4)
    assert set(recorder.calls) == {"verify"} and len(recorder.calls) == run.steps
    assert all(plan.draft is None and plan.tree_token_cap == plan.num_decode for plan in recorder.plans)
    assert any(plan.num_decode == 0 for plan in recorder.plans)  # prompts alone are not fed to it either
    assert run.scheduler.stats.preemptions > 0 and run.scheduler.stats.draft_s == 0

    plain, without = recorded(policy, max_depth=0)
    assert run.clock.now() == without.clock.now() and run.text == without.text
    for ours, theirs in zip(recorder.plans, plain.plans, strict=True):
        for field in fields(StepPlan):
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            if field.name == "sampling":
                assert all(map(np.array_equal, mine, other))
            else:
                assert np.array_equal(mine, other), field.name
