"""Commits of whole steps as array operations, beside the same steps told row by row, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from adaserve_jax.sim.replica import TokenTimes
from adaserve_jax.types import CandidateTrees
from tests.scheduler.harness import Run, limits_of, random_load, request_of


@dataclass
class Plain:
    """What is known of one request, in plain Python."""

    tokens: list[int]
    max_total: int
    computed: int = 0
    drafted_to: int = 0
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    first_s: float | None = None
    last_s: float | None = None
    times: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, state) -> Plain:
        metrics = state.metrics()
        return cls(
            state.token_ids[: state.num_tokens].tolist(), state.max_total, state.num_computed, state.draft_computed,
            metrics.verify_steps, metrics.drafted_tokens, metrics.accepted_tokens,
            {number: count for number, count in enumerate(metrics.accepted_steps) if count}, metrics.first_token_s,
            metrics.last_token_s,
        )  # fmt: skip

    def same(self, state) -> bool:
        other = Plain.of(state)
        other.times = self.times
        return self == other


def replay(plain, running, plan, trees, candidates, outcome, now, stop_check):
    """The rules of a commit, a row after the other; `running`: ids in row order, None where a row was aborted."""
    updates = []
    for row, name in enumerate(running):
        if name is None:
            continue
        told, request = plain[name]
        count = int(outcome.counts[row])
        if plan.draft is not None and not (plan.draft.depth and not candidates.log_f.shape[1]):
            told.drafted_to = int(plan.draft.draft_ctx[row]) + int(plan.draft.catchup_counts[row])
        if row < plan.num_decode:
            told.computed += count
            told.verify_steps += 1
            nodes = [n for n in range(trees.num_nodes) if trees.row[n] == row and trees.candidate[n] >= 0]
            hits = sum(bool(outcome.accepted[node]) for node in nodes)
            told.drafted += len(nodes)
            told.accepted += hits
            if nodes:
                told.steps[hits] = told.steps.get(hits, 0) + 1
        else:
            told.computed += int(plan.prefill_counts[row - plan.num_decode])
        if not count:
            continue
        new, reason = [], None
        for token in outcome.tokens[row, :count].tolist():
            new.append(token)
            if token in request.stop_token_ids:
                reason = "stop"
                break
            if len(told.tokens) + len(new) == told.max_total:
                reason = "length"
                break
        keep = stop_check(name, new) if stop_check else None
        if keep is not None:
            new, reason = new[:keep], "stop"
        told.tokens += new
        told.first_s = now if told.first_s is None else told.first_s
        told.last_s = now
        told.times += [now] * len(new)
        updates.append((name, tuple(new), reason))
    return updates


@pytest.mark.parametrize(
    ("policy", "num_pages", "stops"),
    [("ar", 16, True), ("spec:3", 16, False), ("spec:3", 256, True), ("adaserve", 16, True), ("adaserve", 256, False)],
)
def test_a_step_is_what_its_rows_are_one_by_one(policy, num_pages, stops):
    """Chunked prompts, stop tokens and strings, ends by length, aborts in flight, drafts that fail, preemption."""
    run = Run.of(limits_of(num_pages=num_pages), policy=policy, prefix_cache=False)
    scheduler, executor, clock = run.scheduler, run.executor, run.clock
    rng = np.random.default_rng(7)
    stop_check = (lambda name, ids: 1 if any(token % 41 == 3 for token in ids) else None) if stops else None
    load = random_load(11, 24, 120.0)
    states, plain, times, ended = {}, {}, TokenTimes(), set()
    for request in load:
        scheduler.add(request)
        states[request.sequence_id] = scheduler._states[request.sequence_id]
        plain[request.sequence_id] = (Plain.of(states[request.sequence_id]), request)
    sequence = {request.sequence_id: index for index, request in enumerate(load)}
    aborted = 0
    while scheduler.has_work:
        plan = scheduler.plan(clock.now())
        for told, request in plain.values():
            state = states[request.sequence_id]
            if not state.num_computed:  # preempted
                told.computed, told.drafted_to = 0, 0
        by_slot = {state.slot: name for name, state in states.items() if state.is_running}
        rows = [by_slot[slot] for slot in plan.slots.tolist()]
        candidates = CandidateTrees.empty(plan.num_decode)
        if plan.draft is not None and (not plan.draft.depth or rng.random() < 0.9):
            candidates = executor.speculate(plan)
        trees = scheduler.select(plan, candidates, clock.now())
        outcome = executor.verify(plan, trees)
        if rng.random() < 0.05:
            name = rows[int(rng.integers(len(rows)))]
            scheduler.abort(name)
            ended.add(name)
            rows[rows.index(name)] = None
            aborted += 1
        expected = replay(plain, rows, plan, trees, candidates, outcome, clock.now(), stop_check)
        updates = scheduler.commit(plan, trees, candidates, outcome, clock.now(), stop_check)
        assert [(u.sequence_id, u.token_ids, u.finish_reason) for u in updates] == expected
        assert [int(s) for s in updates.numbers] == [sequence[name] for name, _, _ in expected]
        assert updates.counts.tolist() == [len(tokens) for _, tokens, _ in expected]
        assert list(updates.ended.values()) == [u for u in updates if u.finish_reason is not None]
        times.take(updates, clock.now())
        for update in updates.ended.values():
            ended.add(update.sequence_id)
            told, request = plain[update.sequence_id]
            offsets = tuple(at - told.times[0] for at in told.times)
            assert times.pop(sequence[update.sequence_id]) == offsets
            assert update.metrics.output_tokens == len(told.tokens) - len(request.prompt_ids) == len(offsets)
        assert all(told.same(states[name]) for name, (told, _) in plain.items())
        scheduler.check_integrity()
    assert ended == set(states)
    assert aborted > 0
    if num_pages == 16:
        assert scheduler.stats.preemptions > 0


def test_updates_come_one_by_one_and_those_that_end_by_index():
    run = Run.of(limits_of(), policy="ar")
    for name in "abc":
        run.scheduler.add(request_of(name, tokens=1 if name == "b" else 9))
    plan = run.scheduler.plan(1.0)
    candidates = CandidateTrees.empty(plan.num_decode)
    trees = run.scheduler.select(plan, candidates, 1.0)
    outcome = run.executor.verify(plan, trees)
    updates = run.scheduler.commit(plan, trees, candidates, outcome, 1.0)
    _, second, _ = updates
    assert [update.finish_reason for update in updates] == [None, "length", None]
    assert updates.ended == {1: second}
