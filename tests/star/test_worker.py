"""The loop on a clock that the test turns: what it measures, and that nothing a target says ends it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from adaserve_jax.star.messages import Load, Refused, Tree
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.stats import BusyMeter
from adaserve_jax.star.service.worker import BATCH_LIMIT_S, Worker
from tests.clock import Clock
from tests.star.streams import HANG_S
from tests.star.toys import ToyDevice, ToyPages, close, draft, hello, limits, opened


class Stream:
    """Keeps what it is sent."""

    def __init__(self, identity: str = "anybody") -> None:
        self.identity = identity
        self.sent: list[Any] = []
        self.frames = 0
        self.ended = threading.Event()
        self.news = threading.Condition()

    def send(self, frame) -> None:
        with self.news:
            self.sent += frame
            self.frames += 1
            self.news.notify_all()

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    def frame_taken(self) -> None:
        pass

    def end(self) -> None:
        self.ended.set()

    def wait(self, frames: int) -> list[Any]:
        """What was sent, once so many frames were."""
        with self.news:
            assert self.news.wait_for(lambda: self.frames >= frames, HANG_S)
            return list(self.sent)


def test_the_busy_share_is_of_the_last_seconds():
    meter = BusyMeter(2.0, 10.0)
    assert meter.share(10.0) == 0.0
    meter.add(10.0, 10.25)
    assert meter.share(10.5) == 0.5, "of the half second that there is"
    meter.add(10.5, 11.5)
    assert meter.share(12.0) == 0.625
    assert meter.share(12.25) == 0.5, "the first is over"
    assert meter.share(13.5) == 0.0 and meter.share(20.0) == 0.0


class Timed(ToyDevice):
    """Every batch takes a quarter of a second of the clock. meanwhile: called in the middle of the next one."""

    clock: Clock
    meanwhile = None

    def run(self, batch):
        self.clock.now_s += 0.125
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self.clock.now_s += 0.125
        return super().run(batch)


def begun() -> tuple[Worker, DraftCore, Clock, Timed]:
    bounds, room, clock = limits(), ToyPages(), Clock()
    device = Timed(room, bounds)
    device.clock = clock
    core = DraftCore(bounds, room)
    worker = Worker(core, device, clock=clock)
    worker.start()
    return worker, core, clock, device


def test_what_the_loop_measures():
    worker, core, *_ = begun()
    stream = Stream()
    worker.receive(
        stream, [hello("a"), opened(1, 1, [1, 2]), opened(2, 1, [3]), draft(1, 1, 1, 2, []), draft(2, 1, 1, 1, [])]
    )
    welcome, load, *answers = stream.wait(2)
    assert load == Load(0.0, 0.0, 2, 1), "nothing ran yet"
    trees = [each for each in answers if isinstance(each, Tree)]
    assert [(tree.session, tree.queue_s, tree.service_s) for tree in trees] == [(1, 0.0, 0.25), (2, 0.0, 0.25)]
    assert answers[-1] == Load(1.0, 0.0, 2, 1), "a quarter second later, all of it busy"
    assert worker.stop(HANG_S)
    seen = worker.snapshot
    assert (seen.worker.searches, seen.worker.search_s, seen.worker.rows_searched) == (1, 0.25, 2)
    assert seen.worker.rows == {2: 1} and seen.core.rounds == 2 and seen.worker.frames == 1
    assert (welcome.max_depth, core.num_sessions, seen.waiting, seen.holding) == (4, 2, 0, 2)


def test_what_comes_during_a_batch_waits_from_then_on():
    worker, _, _, device = begun()
    one, other = Stream(), Stream()
    worker.receive(other, [hello("b")])
    other.wait(1)
    device.meanwhile = lambda: worker.receive(other, [opened(1, 1, [3]), draft(1, 1, 1, 1, [])])
    worker.receive(one, [hello("a"), opened(1, 1, [1, 2]), draft(1, 1, 1, 2, [])])
    trees = [each for each in other.wait(2) if isinstance(each, Tree)]
    assert [(tree.queue_s, tree.service_s) for tree in trees] == [(0.125, 0.25)]
    assert worker.stop(HANG_S)


def test_a_batch_that_does_not_end_counts_as_hung_until_it_does():
    worker, _, clock, device = begun()
    stream, seen = Stream(), []

    def hang() -> None:
        for seconds in (BATCH_LIMIT_S - 1.0, 2.0):
            clock.now_s += seconds
            seen.append(worker.hangs)

    device.meanwhile = hang
    worker.receive(stream, [hello("a"), opened(1, 1, [1, 2]), draft(1, 1, 1, 2, [])])
    stream.wait(2)
    assert seen == [False, True] and not worker.hangs and worker.alive
    clock.now_s += 2 * BATCH_LIMIT_S
    assert not worker.hangs, "nothing runs"
    assert worker.stop(HANG_S)


def test_the_load_is_told_every_quarter_second_at_most():
    worker, _, clock, _ = begun()
    stream = Stream()
    worker.receive(stream, [hello("a")])
    stream.wait(1)
    for frames, later_s in enumerate((0.1, 0.1, 0.1), 2):
        clock.now_s += later_s
        worker.receive(stream, [draft(1, 1, 1, 0, [1])])
        stream.wait(frames)
    assert [type(each).__name__ for each in stream.sent] == ["Welcome", "Load", "Resync", "Resync", "Resync", "Load"]
    assert worker.stop(HANG_S)


def test_between_two_batches_messages_are_taken_in_up_to_a_number(monkeypatch):
    monkeypatch.setattr("adaserve_jax.star.service.worker.MAX_MESSAGES_PER_TURN", 5)
    bounds, room = limits(), ToyPages()
    clock = Clock()
    worker = Worker(DraftCore(bounds, room), ToyDevice(room, bounds), clock=clock)
    stream = Stream()
    for frame in ([hello("a"), opened(1, 1, [1]), draft(1, 1, 1, 1, [])], [close(2)] * 3, [close(2)], []):
        worker.receive(stream, frame)
    clock.now_s += 1.0  # so that the turn takes a snapshot
    worker.turn()
    seen = worker.snapshot.worker
    assert seen.frames == 2 and seen.searches == 1, "six messages: a frame is taken whole"


def test_nothing_that_is_said_ends_the_loop(monkeypatch):
    worker, core, *_ = begun()
    good, bad = Stream(), Stream()
    worker.receive(bad, [hello("bad")])
    bad.wait(1)
    receive = core.receive

    def broken(target_id, messages, now):
        if target_id.endswith("bad"):
            raise ValueError("of a bug")
        return receive(target_id, messages, now)

    monkeypatch.setattr(core, "receive", broken)
    worker.receive(bad, [opened(1, 1, [1])])
    worker.receive(good, [hello("good"), opened(1, 1, [1]), draft(1, 1, 1, 1, [])])
    assert any(isinstance(each, Tree) for each in good.wait(2))
    assert bad.ended.is_set() and not good.ended.is_set()
    assert worker.stop(HANG_S)
    assert good.ended.is_set() and [each.code for each in good.sent if isinstance(each, Refused)] == ["shutting_down"]


def test_a_stream_that_has_ended_begins_no_more():
    bounds, room = limits(), ToyPages()
    core = DraftCore(bounds, room)
    worker = Worker(core, ToyDevice(room, bounds), clock=Clock())
    late, again = Stream(), Stream()
    late.end()
    worker.receive(again, [hello("a"), opened(1, 1, [1])])
    worker.receive(late, [hello("a")])
    worker.turn()
    assert core.targets == ["anybody/a"] and again.frames == 1 and not again.ended.is_set()
    worker.disconnect(again)
    worker.receive(late, [hello("a")])
    worker.turn()
    assert core.targets == []


class Failing(ToyDevice):
    """Batches fail while `fails` is set; what they fed is lost."""

    fails = False

    def run(self, batch):
        if self.fails:
            for row in batch.rows:
                self.kv.setdefault(row.key, [])[row.start :] = [-1] * len(row.tokens)
            raise RuntimeError("of the device")
        return super().run(batch)


def test_only_failures_one_after_another_end_the_loop(caplog):
    bounds, room = limits(), ToyPages()
    device, stream = Failing(room, bounds), Stream()
    worker = Worker(DraftCore(bounds, room), device, clock=Clock())
    worker.receive(stream, [hello("a"), opened(1, 1, [1, 2])])
    for number in range(1, 12):
        device.fails = number % 3 > 0
        worker.receive(stream, [draft(1, 1, number, 2, [])])
        worker.turn()
    assert caplog.text.count("a batch of 1 rows failed: RuntimeError") == 8
    with pytest.raises(RuntimeError, match="of the device"):
        worker.receive(stream, [draft(1, 1, 12, 2, [])])
        worker.turn()
