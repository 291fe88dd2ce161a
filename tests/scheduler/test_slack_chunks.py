"""Prefill chunks by the slack of decodes: Niyama's by hand, SlidingServe's by hand and by loops over all pairs."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.scheduler.controllers.slack_chunks import LEAST_CHUNK, SlackChunks, SlidingChunks
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import CostSamples
from tests.scheduler.harness import Run, limits_of, request_of
from tests.scheduler.test_controllers import load_of

STAIRS = {64: 0.025, 128: 0.030, 256: 0.040, 512: 0.070}


def controller(kind, stairs=STAIRS):
    limits = limits_of(token_edges=tuple(stairs), max_tree_tokens=64, max_context=2048)
    samples = CostSamples({(edge, 1): seconds for edge, seconds in stairs.items()}, {}, {})
    return kind(limits, CostTable(samples, limits))


def load(due_s, tpot_slo_s=math.inf, *, prefill=2000):
    due_s = np.atleast_1d(np.asarray(due_s, np.float64))
    tpot_slo_s = np.broadcast_to(np.asarray(tpot_slo_s, np.float64), due_s.shape)
    return replace(load_of(len(due_s), prefill=prefill), due_s=due_s, tpot_slo_s=tpot_slo_s)


@pytest.mark.parametrize(
    ("due_s", "prefill", "chunk"),
    [
        ([math.inf], 2000, 511),  # nobody has a target: the largest step
        ([0.070], 2000, 511),
        ([0.069], 2000, 255),
        ([0.069, 0.035], 2000, LEAST_CHUNK),  # two rows: 126 tokens fit the 30 ms step, which is less than the least
        ([0.0], 2000, LEAST_CHUNK),
        ([0.0], 50, 50),
        ([0.045], 200, 200),
    ],
)
def test_niyama_takes_the_largest_chunk_that_ends_before_a_token_is_due(due_s, prefill, chunk):
    decision = controller(SlackChunks).decide(load(due_s, prefill=prefill))
    assert (decision.depth, decision.tree_token_cap) == (0, len(due_s))
    assert decision.prefill_tokens == chunk


def test_without_decodes_prompts_have_the_whole_step():
    assert controller(SlackChunks).decide(load([])).prefill_tokens == 512
    assert controller(SlidingChunks).decide(load([])).prefill_tokens == 512


def test_slidingserve_keeps_slack_for_the_next_step():
    """Due in 70 ms and again 25 ms later: 511 tokens now leave 25 ms, in which no step of prompts ends. 255 + 255 in 80
    ms are more per second than 127 + 255 in 70, and 127 + 511 would end after 100."""
    due = load([0.070], 0.025)
    assert controller(SlackChunks).decide(due).prefill_tokens == 511
    assert controller(SlidingChunks).decide(due).prefill_tokens == 255


def test_slidingserve_without_a_pair_that_fits_takes_the_least():
    assert controller(SlidingChunks).decide(load([0.020], 0.030)).prefill_tokens == LEAST_CHUNK


def test_slidingserve_chooses_the_best_of_all_pairs():
    rng = np.random.default_rng(0)
    chosen = set()
    for _ in range(200):
        edges = (128, 200, 300, 512, 1024)
        stairs = dict(zip(edges, np.cumsum(rng.uniform(0.005, 0.03, len(edges))).tolist(), strict=True))
        due_s, tpot_slo_s = rng.uniform(0.02, 0.2, 3), rng.uniform(0.02, 0.1, 3)
        best, first = -1.0, 0
        for one, two in itertools.product(edges, edges):
            now, after = stairs[one], stairs[one] + stairs[two]
            if now <= due_s.min() and after <= (due_s + tpot_slo_s).min():
                rate = (one - 3 + two - 3) / after
                best, first = max((best, first), (rate, one - 3), key=lambda pair: pair)
        found = controller(SlidingChunks, stairs).decide(load(due_s, tpot_slo_s)).prefill_tokens
        assert found == max(first, LEAST_CHUNK)
        chosen.add(found)
    assert len(chosen) >= 4


@pytest.mark.parametrize("policy", ["niyama", "slidingserve"])
def test_a_long_prompt_comes_in_smaller_chunks_beside_a_target(policy):
    def largest_chunk(tpot_slo_s):
        run = Run.of(limits_of(token_edges=(8, 64, 256, 512), max_context=1024), policy=policy)
        run.add(request_of("paced", prompt=4, tokens=100, tpot_slo_s=tpot_slo_s))
        run.step()
        run.add(request_of("long", prompt=900, tokens=1))
        return max(run.step()[0].num_prefill_tokens for _ in range(3))

    assert largest_chunk(0.03) < largest_chunk(None)
