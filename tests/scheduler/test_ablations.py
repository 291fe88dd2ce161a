"""Ablations: names, what each adds to the one before, and that all of them serve."""

from dataclasses import fields
from itertools import pairwise

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.policies import ABLATIONS, HALVES, LADDER, ORDERS, POLICIES, expand_groups, find_policy
from tests.scheduler.harness import Run, limits_of


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
