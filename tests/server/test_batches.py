"""The thread between the event loop and slow work: order, bounds, what is tried again, what is lost, the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from adaserve_jax.server.records import BatchThread
from tests.waiting import wait_until


class Worked:
    """Work that notes what it gets; `answer` returns the items that it wants again."""

    def __init__(self, answer: Callable[[list[int]], list[int]] = lambda items: []):
        self.done: list[int] = []
        self.given: list[list[int]] = []
        self.dropped = 0
        self.answer = answer

    def work(self, items: list[int]) -> list[int]:
        self.given.append(items)
        again = self.answer(items)
        self.done += [item for item in items if item not in again]
        return again

    def drop(self, count: int) -> None:
        self.dropped += count

    def batches(self, limit: int = 100) -> BatchThread[int]:
        return BatchThread("worked", self.work, self.drop, every_s=0.01, limit=limit)


def test_items_come_in_order_and_the_end_waits_for_them():
    worked = Worked()
    batches = worked.batches()
    for item in range(50):
        batches.put(item)
    assert batches.close(5.0)
    assert (worked.done, worked.dropped) == (list(range(50)), 0)
    batches.put(51)
    assert (len(worked.done), worked.dropped) == (50, 1)


def test_what_is_wanted_again_comes_first():
    busy = threading.Event()
    worked = Worked(lambda items: [] if busy.is_set() else items)
    batches = worked.batches()
    batches.put(1)
    wait_until(lambda: [1] in worked.given)
    batches.put(2)
    busy.set()
    wait_until(lambda: len(worked.done) == 2)
    assert batches.close(5.0)
    assert (worked.done, worked.dropped) == ([1, 2], 0)


def test_what_finds_no_room_is_counted_and_so_is_what_is_left_at_the_end():
    worked = Worked(lambda items: items)
    batches = worked.batches(limit=3)
    batches.put(0)
    wait_until(lambda: [0] in worked.given)
    for item in range(1, 6):
        batches.put(item)
    assert worked.dropped == 3
    assert batches.close(5.0)
    assert (worked.done, worked.dropped) == ([], 6)


def test_work_that_raises_loses_its_batch_only(caplog):
    def answer(items: list[int]) -> list[int]:
        if 13 in items:
            raise ValueError("thirteen")
        return []

    worked = Worked(answer)
    batches = worked.batches()
    with caplog.at_level(logging.ERROR):
        batches.put(13)
        wait_until(lambda: worked.dropped == 1)
        batches.put(14)
        assert batches.close(5.0)
    assert worked.done == [14] and "worked failed on 1 items" in caplog.text


def test_the_end_does_not_wait_for_work_that_hangs():
    free = threading.Event()

    def answer(items: list[int]) -> list[int]:
        if items:
            free.wait(10)
        return []

    worked = Worked(answer)
    batches = worked.batches()
    batches.put(1)
    assert not batches.close(0.05)
    free.set()
    assert batches.close(5.0)
