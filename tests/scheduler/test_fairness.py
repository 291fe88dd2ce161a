"""Fair shares among tenants: counters by hand, the order of the queue, and a flood that leaves the others alone."""

from __future__ import annotations

import numpy as np
import pytest

from adaserve_jax.scheduler.fairness import TenantShares
from adaserve_jax.scheduler.queue import WaitingQueue, order_key
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.types import SamplingParams, Sequence
from benchmarks.adaserve.fair_tenants import attainment, tenants_trace
from tests.scheduler.harness import Run, expected_text, limits_of, random_load, request_of
from tests.slow import slow_after


class Waiting:
    """A queue with fair shares, and the names of requests in the order in which they start."""

    def __init__(self) -> None:
        self.shares = TenantShares()
        self.queue = WaitingQueue("arrival", self.shares)
        self._added = 0

    def add(self, name: str, tenant: str, arrival_s: float, prompt: int = 10, slo_class: str = "chat") -> SequenceState:
        sequence = Sequence(
            name, np.ones(prompt, np.int32), SamplingParams(), 0, arrival_s, tenant=tenant, slo_class=slo_class
        )
        state = SequenceState(
            sequence, max_total=100, order_key=order_key(sequence, "arrival", None), number=self._added,
            flow=self.shares.open(sequence),
        )  # fmt: skip
        self._added += 1
        self.queue.add(state)
        return state

    def start(self, now: float) -> str:
        state = self.queue.peek(now)
        assert state is not None
        self.queue.take(state, now)
        return state.sequence.sequence_id


def test_a_prompt_token_counts_one_and_an_output_token_two() -> None:
    """Prompts of 10 and 5 start: 10 and 5. Then 3 tokens for the one and 4, in two rows, for the other: 16 and 13."""
    waiting = Waiting()
    first, second = waiting.add("a", "A", 0.0, 10), waiting.add("b", "B", 0.0, 5)
    assert [waiting.start(1.0), waiting.start(1.0)] == ["a", "b"]
    waiting.shares.charge(np.array([first.flow, second.flow, second.flow]), np.array([3, 1, 3]))
    assert waiting.shares.counters.tolist() == [16.0, 13.0]


def test_the_tenant_that_was_served_less_goes_first() -> None:
    """A's first prompt charges 10, so B goes next, and B's 20 let A go twice before B again."""
    waiting = Waiting()
    for number in range(4):
        waiting.add(f"a{number}", "A", 0.1 * number, 10)
    for number in range(2):
        waiting.add(f"b{number}", "B", 1.0 + number, 20)
    assert [waiting.start(5.0) for _ in range(6)] == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_what_waits_is_listed_by_rank_whoever_sent_it() -> None:
    waiting = Waiting()
    for name, tenant, arrival_s in (("a0", "A", 0.0), ("a1", "A", 2.0), ("b0", "B", 1.0), ("b1", "B", 3.0)):
        waiting.add(name, tenant, arrival_s)
    assert [state.sequence.sequence_id for state in waiting.queue.first_on_time(3)] == ["a0", "b0", "a1"]


def test_idle_time_saves_up_no_share() -> None:
    """A is at 10 + 2 x 45 = 100 when B comes: B begins at 100. A ends; C comes and is lifted to B's 100."""
    waiting = Waiting()
    first = waiting.add("a", "A", 0.0, 10)
    waiting.start(0.0)
    waiting.shares.charge(np.array([first.flow]), np.array([45]))
    second = waiting.add("b", "B", 1.0, 10)
    assert waiting.shares.counters[second.flow] == 100.0
    waiting.shares.close(first.flow)
    third = waiting.add("c", "C", 2.0, 10)
    assert waiting.shares.counters[third.flow] == 100.0


def test_after_a_pause_the_counter_starts_from_the_flow_that_ended_last() -> None:
    waiting = Waiting()
    first = waiting.add("a", "A", 0.0, 30)
    waiting.start(0.0)
    waiting.shares.close(first.flow)
    second = waiting.add("b", "B", 9.0)
    assert waiting.shares.counters[second.flow] == 30.0


def test_shares_are_kept_inside_a_class_and_a_backlog_does_not_go_before_another_class() -> None:
    """A waits with three requests since 0 s. After its first start at 5 s the next counts as come at 5 s, behind the
    other class's request of 4 s."""
    waiting = Waiting()
    for number in range(3):
        waiting.add(f"a{number}", "A", 0.0)
    waiting.add("other", "A", 4.0, slo_class="batch")
    assert [waiting.start(5.0) for _ in range(4)] == ["a0", "other", "a1", "a2"]
    assert waiting.shares.counters.tolist() == [30.0, 10.0]


@pytest.mark.parametrize("policy", slow_after(2, ["adaserve", "niyama", "ar", "priority"]))
def test_every_request_ends_with_its_text_under_fair_shares(policy: str) -> None:
    limits = limits_of(num_pages=48)
    run = Run.of(limits, policy=policy, fair_tenants=True)
    load = random_load(3, 30, 30.0)
    tagged = [Sequence(**{**vars(each), "tenant": "AB"[index % 5 == 0]}) for index, each in enumerate(load)]
    run.serve(tagged)
    for request in tagged:
        assert run.text[request.sequence_id] == expected_text(request, limits.max_context)[0]


def test_strict_priorities_know_no_tenants() -> None:
    """With one place: what A sent is more urgent, though B has had nothing yet."""
    run = Run.of(limits_of(max_requests=1), policy="priority", fair_tenants=True)
    run.serve([request_of("before", tenant="A")])
    now = run.clock.now()
    run.serve([
        request_of("b", tenant="B", priority=5, arrival_s=now), request_of("a", tenant="A", arrival_s=now),
    ])  # fmt: skip
    begun = {name: run.last[name].metrics.first_scheduled_s for name in "ab"}
    assert begun["a"] < begun["b"] and not run.scheduler.stats.preemptions


@pytest.mark.slow
def test_a_flood_costs_others_at_most_two_points_of_attainment() -> None:
    usual, _ = attainment(tenants_trace(3.0, 1.0, 30.0), fair=True)
    flooded = tenants_trace(3.0, 10.0, 30.0)
    assert attainment(flooded, fair=True)[0] >= usual - 0.02
    assert attainment(flooded, fair=False)[0] < usual - 0.02, "not a flood"
