"""The checks that every other test of the scheduler leans on see what they are there to see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from adaserve_jax.errors import IntegrityError
from adaserve_jax.scheduler.sequence import SequenceState
from tests.scheduler.harness import Run, limits_of, request_of


def waiting_state() -> SequenceState:
    return SequenceState(request_of("d"), max_total=30, order_key=0.0, number=9)


def hold_a_page_less(run: Run) -> None:
    run.scheduler.batch.running[0].num_pages -= 1


def lose_a_slot(run: Run) -> None:
    run.scheduler.batch.table.bind(waiting_state(), np.zeros(0, np.int32))


def swap_two_requests(run: Run) -> None:
    run.scheduler.batch.running.reverse()


def name_a_page_beyond(run: Run) -> None:
    state = run.scheduler.batch.running[0]
    run.scheduler.batch.table.page_table[state.slot, state.num_pages] = 1


def count_apart(run: Run) -> None:
    state = run.scheduler.batch.running[0]
    state.counts = state.counts.copy()


def compute_more_than_there_is(run: Run) -> None:
    state = run.scheduler.batch.running[0]
    state.draft_computed = state.num_tokens + 1


def compute_beyond_the_pages(run: Run) -> None:
    state = run.scheduler.batch.running[0]
    state.num_computed = state.num_pages * 8 + 1
    state.num_tokens = state.num_computed + 1


def queue_what_nobody_asked(run: Run) -> None:
    run.scheduler.batch.queue.add(waiting_state())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (hold_a_page_less, "counts other holders of pages than the running sequences"),
        (lose_a_slot, "a slot is held twice or lost"),
        (swap_two_requests, "do not refer to each other"),
        (name_a_page_beyond, "sequence 'a' has page ids beyond its pages"),
        (count_apart, "sequence 'a' runs on counts or tokens outside the slot table"),
        (compute_more_than_there_is, "sequence 'a' counts more computed tokens than it has"),
        (compute_beyond_the_pages, "sequence 'a' has KV beyond its pages"),
        (queue_what_nobody_asked, "a sequence is neither running nor waiting, or both"),
    ],
)
def test_damage_is_told(damage: Callable[[Run], None], message: str) -> None:
    run = Run.of(limits_of(), policy="ar", prefix_cache=False)
    for name in "abc":
        run.add(request_of(name))
    run.step()
    run.scheduler.check_integrity()
    damage(run)
    with pytest.raises(IntegrityError, match=message):
        run.scheduler.check_integrity()


def test_a_whole_page_that_was_not_entered_is_told() -> None:
    run = Run.of(limits_of(), policy="ar")
    run.add(request_of("a", prompt=30))
    run.step()
    (state,) = run.scheduler.batch.running
    state.num_tokens, state.num_computed = 33, 32
    with pytest.raises(IntegrityError, match="full pages of sequence 'a' were not entered"):
        run.scheduler.check_integrity()


def test_rows_of_a_step_in_flight_keep_their_places_when_one_is_aborted() -> None:
    run = Run.of(limits_of(), policy="ar")
    for name in "abc":
        run.add(request_of(name))
    plan = run.scheduler.plan(0.0)
    assert plan is not None and run.scheduler.sequence_ids(plan) == ["a", "b", "c"]
    run.scheduler.abort("b")
    assert run.scheduler.sequence_ids(plan) == ["a", "", "c"]
