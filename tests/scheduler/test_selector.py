"""What the selector leaves out: nodes without room, nodes beyond the budget."""

import numpy as np
import pytest

from adaserve_jax.scheduler.selector import _within_reach
from adaserve_jax.types import CandidateTrees
from tests.scheduler.harness import Run, limits_of, request_of


def test_depths_without_room_have_no_candidates():
    """A node of depth d is emitted beside d other tokens: with 2 left, depth 1 is the deepest."""
    parent = np.broadcast_to(np.array([-1, 0, 1], np.int32), (3, 3))
    candidates = CandidateTrees(np.zeros((3, 3), np.int32), parent, np.zeros((3, 3), np.float32), np.array([1, 2, 3]))
    kept = _within_reach(candidates, np.array([9, 1, 2]))
    assert np.isfinite(kept.log_f).sum(axis=1).tolist() == [3, 0, 1]


@pytest.mark.parametrize("policy", ["tetris:4", "specinfer"])
def test_roots_are_charged_to_the_budget_of_rules_without_needs(policy):
    run = Run.of(limits_of(max_tree_tokens=12), policy=policy)
    for name in "abcdef":
        run.add(request_of(name, tokens=40))
    full = 0
    while run.scheduler.has_work:
        plan, trees = run.step()
        if plan.num_decode:
            assert trees.num_nodes <= plan.tree_token_cap
            full += trees.num_nodes == plan.tree_token_cap
    assert full > 3, "the budget is what holds them back"


@pytest.mark.parametrize("policy", ["adaserve", "ladder-slo"])
def test_prompts_take_nothing_of_a_budget_that_is_not_chosen_again(policy):
    """By eq. 8 and 9: the bucket that is paid for holds the trees and the prompts computed beside them."""
    run = Run.of(limits_of(max_tree_tokens=12), policy=policy, eq8_eq9=True)
    for name in "abc":
        run.add(request_of(name, tokens=60))
    while len(run.text) < 3:
        run.step()
    run.add(request_of("long", prompt=200))
    beside = []
    for _ in range(8):
        plan, trees = run.step()
        if plan.num_prefill_tokens and plan.draft is not None and plan.draft.depth:
            beside.append((trees.num_nodes, plan.tree_token_cap))
    assert len(beside) > 2
    assert all(nodes == budget > 3 for nodes, budget in beside)


SEARCHED = """
from adaserve_jax.scheduler.controllers.baselines import FixedController
from adaserve_jax.scheduler.policies import Policy

chains = Policy(
    "chains of 4, as much of them as pays", lambda parts: FixedController(parts.limits, 4), selector="SELECTOR",
    search_budget=True, needs_draft=True,
)
"""


@pytest.mark.parametrize("selector", ["slo", "slo-equal"])
def test_a_searched_budget_may_leave_room_for_all_candidates(tmp_path, selector):
    """Each node beyond the roots of eight rows costs a millisecond of 16, and one in eight is accepted."""
    (tmp_path / "searched.py").write_text(SEARCHED.replace("SELECTOR", selector))
    run = Run.of(limits_of(), policy=str(tmp_path / "searched.py"), acceptance=0.125, knee=8)
    for row in range(8):
        run.add(request_of(f"r{row}", tokens=60))
    verified = []
    while run.scheduler.has_work:
        plan, trees = run.step()
        if plan.num_decode == 8 and plan.draft is not None and plan.draft.depth == 4:
            verified.append(trees.num_nodes)
    assert max(verified[20:]) < 8 * (1 + 4)
