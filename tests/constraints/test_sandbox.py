"""Work is done, refused when late, and kept waiting only so long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from adaserve_jax.constraints.sandbox import BoundedWork
from adaserve_jax.errors import QueueFullError


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_results_and_errors_come_back():
    work = BoundedWork(stack_bytes=1 << 20, limit_s=30, at_once=1)
    assert [work.run(lambda: 7), work.run(lambda: None)] == [7, None]
    with pytest.raises(KeyError, match="why"):
        work.run(lambda: {}["why"])
    assert work.run(lambda: 8) == 8  # its place is free again


def test_the_stack_is_as_large_as_asked_and_other_threads_keep_theirs():
    before = threading.stack_size()
    work = BoundedWork(stack_bytes=1 << 20, limit_s=30, at_once=1)
    assert work.run(threading.stack_size) in (before, 1 << 20)  # read while the thread starts
    assert threading.stack_size() == before


def test_a_thread_that_cannot_start_takes_no_place():
    work = BoundedWork(stack_bytes=1, limit_s=0.05, at_once=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="size"):
            work.run(lambda: 7)


def test_late_work_is_left_and_keeps_its_place_until_it_ends(gate: threading.Event):
    work = BoundedWork(stack_bytes=1 << 20, limit_s=0.05, at_once=1)
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        work.run(lambda: (gate.wait(30), ended.set()))
    with pytest.raises(QueueFullError, match="retry later"):
        work.run(lambda: 1)
    gate.set()
    assert ended.wait(30)
    patient = BoundedWork(stack_bytes=1 << 20, limit_s=30, at_once=1)
    assert patient.run(lambda: 2) == 2
