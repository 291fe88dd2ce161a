import numpy as np
import pytest

from adaserve_jax.scheduler.queue import AGEING_S, PROMOTION_PERIOD, WaitingQueue, order_key, wait_ratio
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.types import SamplingParams, Sequence


def state_of(sequence, *, arrival_s=0.0, ttft_slo_s=None, priority=0, ordering="deadline"):
    request = Sequence(
        f"r{sequence}",
        np.ones(4, np.int32),
        SamplingParams(),
        seed=0,
        arrival_s=arrival_s,
        ttft_slo_s=ttft_slo_s,
        priority=priority,
    )
    return SequenceState(
        request,
        max_total=20,
        order_key=order_key(request, ordering, ttft_slo_s),
        number=sequence,
        patience_s=ttft_slo_s,
    )


def drain(queue, now=0.0):
    names = []
    while (state := queue.peek(now)) is not None:
        queue.take(state, now)
        names.append(state.number)
    return names


def test_priority_then_deadline_then_arrival():
    queue = WaitingQueue("deadline")
    queue.add(state_of(0, arrival_s=0.0))
    queue.add(state_of(1, arrival_s=0.1, ttft_slo_s=2.0))
    queue.add(state_of(2, arrival_s=0.2, ttft_slo_s=0.5))
    queue.add(state_of(3, arrival_s=0.3, priority=-1))
    queue.add(state_of(4, arrival_s=0.4, priority=1, ttft_slo_s=0.1))
    assert drain(queue, 0.4) == [3, 2, 1, 0, 4]


def test_arrival_ordering_ignores_deadlines():
    queue = WaitingQueue("arrival")
    for sequence, ttft_slo_s in enumerate((None, 5.0, 0.1)):
        queue.add(state_of(sequence, arrival_s=sequence / 10, ttft_slo_s=ttft_slo_s, ordering="arrival"))
    assert drain(queue, 100.0) == [0, 1, 2]


def test_preempted_requests_come_first_and_late_ones_last():
    queue = WaitingQueue("deadline")
    queue.add(state_of(0, ttft_slo_s=0.5))
    queue.add(state_of(1, arrival_s=0.9, ttft_slo_s=0.5))
    queue.put_back(state_of(2, arrival_s=0.95))
    assert queue.most_urgent_wait(1.0) == pytest.approx(2.0)
    assert drain(queue, 1.0) == [2, 1, 0]
    assert queue.most_urgent_wait(1.0) == 0.0


def test_late_ones_behind_a_patient_one_go_behind_those_on_time():
    """Nothing is passed over for a request whose own first token will not come in time."""
    queue = WaitingQueue("deadline")
    patient = state_of(0)
    late, hopeful = (
        state_of(number, arrival_s=arrival_s, ttft_slo_s=2.0) for number, arrival_s in ((1, 8.5), (2, 10.5))
    )
    for state in (patient, late, hopeful):
        queue.add(state)
    now = 11.0
    assert queue.peek(now) is patient
    assert next(queue.instead_of(patient, now)) is hopeful
    assert queue.is_late(late) and not queue.is_late(hopeful)
    assert queue.first_on_time(3) == [patient, hopeful]
    queue.take(hopeful, now)
    assert next(queue.instead_of(patient, now)) is late


def test_a_late_request_is_admitted_while_hopeful_ones_keep_coming():
    """Every PROMOTION_PERIOD-th admission takes the longest-waiting request, so its wait is bounded in admissions."""
    queue = WaitingQueue("deadline")
    late = [state_of(sequence, arrival_s=sequence / 100, ttft_slo_s=0.1) for sequence in range(3)]
    for state in late:
        queue.add(state)
    admitted = []
    for step in range(3 * PROMOTION_PERIOD):
        now = 10.0 + step
        queue.add(state_of(100 + step, arrival_s=now, ttft_slo_s=1.0))
        admitted.append(queue.peek(now))
        queue.take(admitted[-1], now)
    assert [admitted.index(state) for state in late] == [PROMOTION_PERIOD * (i + 1) - 1 for i in range(3)]


def test_low_priority_is_overtaken_for_a_bounded_time():
    queue = WaitingQueue("arrival")
    queue.add(state_of(0, arrival_s=0.0, priority=2, ordering="arrival"))
    overtaken = 0
    for step in range(1000):
        queue.add(state_of(1 + step, arrival_s=float(step), ordering="arrival"))
        state = queue.peek(float(step))
        queue.take(state, float(step))
        if state.number == 0:
            break
        overtaken += 1
    assert overtaken == 2 * AGEING_S  # one arrival a second; on a tie the earlier request goes first


def test_remove_and_wait_ratio():
    queue = WaitingQueue("deadline")
    first, second = state_of(0), state_of(1, ttft_slo_s=4.0)
    queue.add(first)
    queue.add(second)
    queue.remove(first)
    assert len(queue) == 1
    with pytest.raises(ValueError, match="'r0' does not wait"):
        queue.remove(first)
    assert wait_ratio(second, 2.0) == pytest.approx(0.5)


def waiting(number, ordering, *, prompt, output=1.0, arrival_s=0.0, ttft_slo_s=4.0, prompt_s=0.0):
    request = Sequence(
        f"r{number}", np.ones(prompt, np.int32), SamplingParams(), seed=0, arrival_s=arrival_s, ttft_slo_s=ttft_slo_s
    )
    return SequenceState(
        request, max_total=5000, order_key=order_key(request, ordering, ttft_slo_s, output), number=number,
        patience_s=ttft_slo_s,
        prompt_s=prompt_s,
    )  # fmt: skip


def test_hybrid_ordering_is_between_the_earliest_deadline_and_the_shortest_prompt():
    """Due at 4, 4.5 and 5 s; 8 ms a token of 500, 100 and 100 put them back to 8, 5.3 and 5.8."""
    queue = WaitingQueue("hybrid")
    for number, (arrival_s, prompt) in enumerate(((0.0, 500), (0.5, 100), (1.0, 100))):
        queue.add(waiting(number, "hybrid", prompt=prompt, arrival_s=arrival_s))
    assert drain(queue, 1.0) == [1, 2, 0]


def test_goodput_ordering_prefers_what_earns_most_per_step():
    """Steps: 100, 100 and 10. A prompt of 800 beside 800 earned by output waits 5 s; of 200, 8 s; of 80 beside 80, 5 s,
    but it came 1 s later."""
    queue = WaitingQueue("goodput")
    for number, (prompt, output, arrival_s) in enumerate(((200, 100, 0.0), (800, 100, 0.0), (80, 10, 1.0))):
        queue.add(waiting(number, "goodput", prompt=prompt, output=output, arrival_s=arrival_s))
    assert drain(queue, 1.0) == [1, 2, 0]


@pytest.mark.parametrize("ordering", ["deadline", "hybrid", "goodput"])
def test_those_in_danger_are_relegated_wherever_they_stand_in_the_order(ordering):
    """A request counts as late when six times its prompt no longer fit, at the earliest after half of its target; the
    longer prompt is given up first."""
    for prompt_s, late_s in ((0.0, 4.0), (0.1, 3.4), (0.2, 2.8), (0.5, 2.0)):
        for now, is_last in ((1.0 + late_s - 0.01, False), (1.0 + late_s + 0.01, True)):
            queue = WaitingQueue(ordering)
            queue.add(waiting(0, ordering, prompt=10, ttft_slo_s=None))
            queue.add(waiting(1, ordering, prompt=400, arrival_s=1.0, prompt_s=prompt_s))
            queue.add(waiting(2, ordering, prompt=900, arrival_s=3.0, ttft_slo_s=None))
            assert (drain(queue, now)[-1] == 1) is is_last
