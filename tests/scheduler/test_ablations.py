"""Ablations: names, what each adds to the one before, and that all of them serve."""

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler import selection
from adaserve_jax.scheduler.policies import ABLATIONS, HALVES, LADDER, ORDERS, POLICIES, expand_groups, find_policy
from adaserve_jax.types import CandidateTrees
from tests.scheduler.harness import Run, limits_of, random_load
from tests.slow import slow_after


def test_groups_stand_for_their_policies_each_once():
    assert expand_groups(("ar", "orders", "adaserve", "ladder")) == ("ar", *ORDERS, *LADDER[:-1])
    assert expand_groups(("halves",)) == HALVES == ("half-model", "half-bandit", "adaserve")
    assert LADDER[-1] == ORDERS[-1] == "adaserve"
    with pytest.raises(ConfigError, match=r"unknown policy 'ladders'; did you mean 'ladder-"):
        find_policy("ladders", 4)
    with pytest.raises(ConfigError, match="policy ladder-slo needs a draft"):
        find_policy("ladder-slo", 0)


def test_each_step_of_the_ladder_changes_what_it_says():
    steps = [ABLATIONS[name] for name in LADDER[:-1]]
    differences = [
        {f.name for f in fields(one) if getattr(one, f.name) != getattr(two, f.name)} - {"about"}
        for one, two in pairwise(steps)
    ]
    assert differences == [
        {"selector"}, {"selector"}, {"calibrated"}, {"controller", "search_budget", "needs_draft"}, {"controller"},
    ]  # fmt: skip
    for name, part in [(name, "slo_order") for name in ORDERS[:-1]] + [(name, "controller") for name in HALVES[:-1]]:
        ours = POLICIES["adaserve"]
        differing = {f.name for f in fields(ours) if getattr(ours, f.name) != getattr(ABLATIONS[name], f.name)}
        assert differing == {"about", part}


def test_the_first_steps_take_c1_and_c2_as_the_papers_policy_does():
    for name in ("adaserve-paper", "ladder-equal", "ladder-calibrated"):
        controller = Run.of(limits_of(), policy=name, eq8_c1=4, eq9_c2=1).scheduler.controller
        assert (controller.depth_offset, controller.width_offset) == (4, 1), name


def test_eq_8_and_9_replace_our_controller_only():
    ladder = Run.of(limits_of(), policy="ladder-budget", eq8_eq9=True).scheduler
    assert ladder._selector._search_budget
    assert not Run.of(limits_of(), policy="adaserve", eq8_eq9=True).scheduler._selector._search_budget


@pytest.mark.parametrize("name", slow_after(4, ABLATIONS))
def test_every_ablation_serves_to_the_end(name):
    run = Run.of(limits_of(max_depth=3, num_pages=64), policy=name)
    load = random_load(5, 14, rate=40.0)
    run.serve(load)
    assert set(run.last) == {request.sequence_id for request in load}


def test_equal_rest_by_hand():
    """Two requests with four and two candidates, one taken already of the first: the rest goes round by round."""
    log_f = np.array([[-0.1, -0.2, -0.3, -0.4], [-0.7, -0.9, -np.inf, -np.inf]])
    parent = np.tile(np.array([-1, 0, 1, 2], np.int32), (2, 1))
    depth = np.arange(1, 5, dtype=np.int32)
    ranked = selection.rank(CandidateTrees(parent, parent, log_f.astype(np.float32), depth))
    counts = [selection.equal_rest(ranked, np.array([1, 0]), left).sum(axis=1).tolist() for left in (-1, 0, 1, 2, 3, 9)]
    assert counts == [[1, 0], [1, 0], [2, 0], [2, 1], [3, 1], [4, 2]]
