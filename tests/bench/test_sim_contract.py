"""The simulated executor refuses what no executor could do, so that a scheduler that plans it fails its tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.bench.plan import default_rates
from adaserve_jax.errors import ConfigError, IntegrityError
from adaserve_jax.types import SLO, CandidateTrees, DraftTrees, StepPlan
from adaserve_jax.workloads.items import Workload, WorkloadItem
from tests.scheduler.harness import Run, limits_of, request_of


def planned(policy: str = "spec:2") -> tuple[Run, StepPlan]:
    """Two requests that have emitted, and the plan of their next step."""
    run = Run.of(limits_of(), policy=policy)
    for name in "ab":
        run.add(request_of(name))
    while len(run.text) < 2:
        run.step()
    plan = run.scheduler.plan(run.clock.now())
    assert plan is not None
    return run, plan


def trees_of(run: Run, plan: StepPlan) -> DraftTrees:
    candidates = CandidateTrees.empty(plan.num_decode) if plan.draft is None else run.executor.speculate(plan)
    return run.scheduler.select(plan, candidates, run.clock.now())


def test_a_plan_without_a_draft_cannot_be_drafted() -> None:
    run, plan = planned("ar")
    with pytest.raises(IntegrityError, match="speculate needs a plan with a draft"):
        run.executor.speculate(plan)


def test_a_row_whose_draft_lags_cannot_speculate() -> None:
    run, plan = planned()
    assert plan.draft is not None
    behind = replace(plan.draft, catchup_counts=plan.draft.catchup_counts - 1)
    with pytest.raises(IntegrityError, match=r"catch-up|KV"):
        run.executor.speculate(replace(plan, draft=behind))


def test_a_step_beyond_the_limits_is_refused() -> None:
    run, plan = planned()
    trees = trees_of(run, plan)
    run.executor._limits = limits_of(max_tree_tokens=trees.num_nodes - 1)
    with pytest.raises(
        IntegrityError, match=f"the step of {trees.num_nodes} tokens, {trees.num_nodes} sampled, breaks"
    ):
        run.executor.verify(plan, trees)


def test_trees_bring_each_root_once_and_in_order() -> None:
    run, plan = planned()
    trees = trees_of(run, plan)
    wrong = np.where(trees.parent < 0, trees.token + 1, trees.token).astype(np.int32)
    with pytest.raises(IntegrityError, match="each row's root once, in row order"):
        run.executor.verify(plan, replace(trees, token=wrong))


def test_the_draft_must_be_where_it_is_used_and_pages_go_somewhere_else() -> None:
    run, plan = planned()
    with pytest.raises(IntegrityError, match="move_pages is called while the draft is resident; it must be expanded"):
        run.executor.move_pages(np.array([1]), np.array([2]))
    run.executor.expand()
    with pytest.raises(IntegrityError, match="a plan has a draft while the draft is expanded; it must be resident"):
        run.executor.speculate(plan)
    with pytest.raises(IntegrityError, match="pages are moved onto each other"):
        run.executor.move_pages(np.array([1, 2]), np.array([2, 3]))


def test_a_warm_up_tells_how_far_it_is() -> None:
    run, told = Run.of(limits_of()), []
    run.executor.warm_up(lambda *said: told.append(said))
    assert told == [("simulated programs", 1, 1)]


def test_rates_are_around_what_one_request_alone_would_take() -> None:
    """20 ms a token and 10 tokens on average: 5 requests a second one by one; half of it, and half more."""
    items = tuple(WorkloadItem("p", (), tokens, "chat", SLO(), 1.0, None, None) for tokens in (8, 12))
    assert default_rates(Workload("w", "0", items), 0.02) == (2.5, 7.5)
    with pytest.raises(ConfigError, match="the time of one token alone is not known"):
        default_rates(Workload("w", "0", items), 0.0)
