"""Scoring of prompts on random loads: every position once and in order, within the sampled positions of a step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.scheduler.step import begin_step, end_step
from tests.scheduler.harness import VOCAB, Run, expected_text, limits_of, random_load, request_of
from tests.slow import slow_after


@pytest.mark.parametrize(
    ("policy", "max_tree_tokens"),
    slow_after(2, [("adaserve", 8), ("spec:4", 8), ("ar", 24), ("adaserve", 48), ("nightjar", 24)], several=True),
)
def test_every_position_of_a_prompt_is_scored_once(policy: str, max_tree_tokens: int) -> None:
    """With few pages, so that many are preempted, and prompts that all begin alike, so that pages are found again."""
    limits = limits_of(max_tree_tokens=max_tree_tokens, num_pages=32)
    run = Run.of(limits, policy=policy, prefix_cache=True)
    text = np.random.default_rng(0).integers(0, VOCAB, 90).astype(np.int32)
    load = [
        replace(
            each,
            prompt_ids=text[: len(each.prompt_ids)],
            sampling=replace(each.sampling, prompt_logprobs=index % 4 if index % 3 else None),
        )
        for index, each in enumerate(random_load(5, 24, 40.0))
    ]
    known = {each.sequence_id: each for each in load}
    found: dict[str, list[int]] = defaultdict(list)
    waiting, preempted = list(load), 0
    while waiting or run.scheduler.has_work:
        while waiting and waiting[0].arrival_s <= run.clock.now():
            run.add(waiting.pop(0))
        step = begin_step(run.scheduler, run.executor, run.clock.now)
        if step is None:
            run.clock.advance(max(waiting[0].arrival_s - run.clock.now(), 1e-3))
            continue
        plan, trees, ids = step.plan, step.trees, run.scheduler.sequence_ids(step.plan)
        run.take(end_step(run.scheduler, run.executor, run.clock.now, step).updates)
        run.scheduler.check_integrity()
        sampled = trees.num_nodes + int(plan.prefill_final.sum())
        if plan.scored is not None:
            scored, first = plan.scored, 0
            sampled += scored.num_positions
            starts = plan.prefill_counts.cumsum() - plan.prefill_counts
            for row, count, top in zip(scored.rows.tolist(), scored.counts.tolist(), scored.tops.tolist(), strict=True):
                asked = known[ids[row]]
                at = scored.at[first : first + count] - starts[row - plan.num_decode] + plan.ctx_len[row]
                assert scored.token[first : first + count].tolist() == asked.prompt_ids[at + 1].tolist()
                assert top == asked.sampling.prompt_logprobs
                found[ids[row]] += at.tolist()
                first += count
            assert first == scored.num_positions
        assert sampled <= max_tree_tokens and sampled - trees.num_nodes + plan.tree_token_cap <= max_tree_tokens
    for name, asked in known.items():
        wanted = [] if asked.sampling.prompt_logprobs is None else list(range(len(asked.prompt_ids) - 1))
        assert found[name] == wanted
        assert run.text[name] == expected_text(asked, limits.max_context)[0]
        preempted += run.last[name].metrics.preemptions
    assert preempted > 0 and run.scheduler.stats.cache_hit_tokens > 0


def test_a_long_prompt_leaves_half_of_the_positions_to_trees() -> None:
    run = Run.of(limits_of(max_tree_tokens=48), policy="spec:4")
    run.add(request_of("decoding", tokens=100))
    while not run.text.get("decoding"):
        run.step()
    plain = request_of("scored", prompt=200, tokens=2)
    run.add(replace(plain, sampling=replace(plain.sampling, prompt_logprobs=0)))
    chunks = []
    while not run.text.get("scored"):
        plan, trees = run.step()
        if plan.scored is not None:
            chunks.append((int(plan.prefill_counts[0]), trees.num_nodes))
    assert sum(count for count, _ in chunks) == 200
    assert max(count for count, _ in chunks) == 1 + (48 - 2) // 2
    assert min(nodes for _, nodes in chunks) > 1, "speculation went on"


def test_without_trees_prompts_have_all_positions() -> None:
    run = Run.of(limits_of(max_tree_tokens=48), policy="ar")
    asked = request_of("scored", prompt=200, tokens=2)
    run.add(replace(asked, sampling=replace(asked.sampling, prompt_logprobs=0)))
    counts = []
    while not run.text.get("scored"):
        counts.append(int(run.step()[0].prefill_counts.sum()))
    assert counts == [48, 48, 48, 48, 8]


def test_who_does_not_ask_has_chunks_as_long_as_a_step() -> None:
    run = Run.of(limits_of(max_tree_tokens=48), policy="ar")
    run.add(request_of("plain", prompt=200, tokens=2))
    plan, _ = run.step()
    assert plan.scored is None and plan.prefill_counts.tolist() == [64]


def test_a_sequence_that_is_aborted_in_flight_is_scored_no_further() -> None:
    run = Run.of(limits_of(max_tree_tokens=48), policy="ar")
    asked = request_of("scored", prompt=200, tokens=2)
    run.add(replace(asked, sampling=replace(asked.sampling, prompt_logprobs=0)))
    plan, _ = run.step(lambda _: run.scheduler.abort("scored"))
    assert np.array_equal(plan.scored.counts, [48]) and not run.scheduler.has_work


@pytest.mark.parametrize(("prompt_logprobs", "feasible"), [(None, True), (0, False)])
def test_a_target_is_judged_by_the_chunks_that_scoring_allows(prompt_logprobs: int | None, feasible: bool) -> None:
    """64 tokens in one step of 64 ms, or in 8 steps of 16 ms."""
    run = Run.of(limits_of(max_tree_tokens=8), policy="ar")
    asked = request_of("targeted", prompt=64, ttft_slo_s=0.1)
    run.serve([replace(asked, sampling=replace(asked.sampling, prompt_logprobs=prompt_logprobs))])
    metrics = run.last["targeted"].metrics
    assert metrics is not None and metrics.slo_feasible is feasible and metrics.ttft_met is feasible
