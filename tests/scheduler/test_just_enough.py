"""JITServe's just-enough service: chains and chunks by hand, and learned bounds on output lengths."""

import math
from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.scheduler.controllers.just_enough import JustEnough
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import CostSamples
from tests.scheduler.harness import Run, costs_of, limits_of, request_of
from tests.scheduler.test_controllers import load_of


def controller(limits=None, samples=None) -> JustEnough:
    limits = limits or limits_of()
    costs = CostTable(samples or costs_of(limits), limits)
    return JustEnough(limits, ChainCosts(limits, costs, LearnedAcceptance(limits.max_depth, limits.max_width)))


@pytest.mark.parametrize(
    ("need", "depth"), [(0.0, 0), (60.0, 0), (90.0, 1), (110.0, 2), (120.0, 3), (130.0, 4), (500.0, 4), (math.inf, 0)]
)
def test_the_shortest_chain_that_is_enough(need, depth):
    """Tokens per second: 1 in 16 ms, 62.5; 1.7 in 18, 94; 2.19 in 19, 115; 2.533 in 20, 127; 2.7731 in 21, 132."""
    decision = controller().decide(load_of(1, need=need))
    assert (decision.depth, decision.width, decision.tree_token_cap) == (depth, min(depth, 1), 1 + depth)


def test_without_a_draft_to_ask_there_is_no_chain():
    assert controller().decide(load_of(1, need=90.0, speculate=False)).depth == 0


def test_prompts_have_what_targets_leave():
    """10 ms and 0.05 ms a token, by edges: 128 tokens of prompts beside one row take a step of 22.8 ms, 44 tokens per
    second. At a need of 30 the step of 35.6 ms is too long, and 252 is the largest of the chunks tried that fits 256.
    """
    limits = limits_of(token_edges=(1, 8, 64, 128, 256, 512), max_tree_tokens=64, max_context=2048)
    verify = {(edge, 1): 0.01 + 5e-5 * edge for edge in limits.token_edges}
    samples = CostSamples(verify, {64: 0.0}, {(1, 1): 0.001, (1, 4): 0.001})
    chosen = controller(limits, samples)
    assert chosen.decide(load_of(1, need=0.0, prefill=2000)).prefill_tokens == 511
    chunks = np.unique(np.linspace(128, 511, 16).round())
    decision = chosen.decide(load_of(1, need=30.0, prefill=2000))
    assert (decision.depth, decision.prefill_tokens) == (0, chunks[chunks <= 255].max())
    # 1.7 tokens in 1 + 22.8 ms are 71 a second: a need of 60 takes a chain of 1 beside the least chunk
    decision = chosen.decide(load_of(1, need=60.0, prefill=2000))
    assert (decision.depth, decision.prefill_tokens) == (1, chunks[chunks <= 254].max())
    assert chosen.decide(load_of(0, prefill=700)).prefill_tokens == 512
    assert chosen.decide(load_of(1, need=30.0, prefill=40)).prefill_tokens == 40


def test_nodes_beyond_what_targets_need_are_not_verified():
    """Verification is free up to 64 tokens, but a target of a token per 12 ms needs a chain, not all of it."""
    run = Run.of(limits_of(), policy="jitserve", knee=64)
    run.serve([request_of("paced", tokens=60, tpot_slo_s=0.012), request_of("easy", tokens=60)])
    metrics = {name: update.metrics for name, update in run.last.items()}
    assert metrics["paced"].tpot_s <= 0.012 < 0.016 <= metrics["easy"].tpot_s
    assert metrics["easy"].drafted_tokens == 0 < metrics["paced"].drafted_tokens


def test_a_running_request_may_catch_up_until_the_length_that_it_can_be_expected_to_have():
    """Before anything is learned the horizon is 32 tokens. After twenty requests of 100 tokens it is what is left to
    100, whatever this request's own limit is."""
    run = Run.of(limits_of(max_context=512), policy="jitserve")
    paced = replace(request_of("first", tokens=300), tpot_slo_s=0.05)
    run.add(paced)
    run.step()
    run.step()
    assert run.scheduler._planner.pace(run.clock.now()).horizon.tolist() == [32]
    run.scheduler.abort("first")
    run.serve([request_of(f"r{index}", tokens=100) for index in range(20)])
    run.add(replace(paced, sequence_id="second"))
    while len(run.text.get("second", [])) < 4:
        run.step()
    written = len(run.text["second"])
    assert run.scheduler._planner.pace(run.clock.now()).horizon.tolist() == [100 - written]
