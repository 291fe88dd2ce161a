"""The one thread of a draft service that owns core and device: takes frames in, runs batches, hands answers out.

Connections put frames into its inbox from threads of their own, also while the device computes. Knows no gRPC.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from adaserve_jax.star.messages import LOAD_EVERY_S, Close, FromService, FromTarget, Hello, Load, Refused
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.dispatch import Batch
from adaserve_jax.star.service.session import ROWS_EDGES, BusyMeter, Snapshot, WorkerStats
from adaserve_jax.star.wire import WireError
from adaserve_jax.types import CandidateTrees

# Whose stream is whose: the connections of targets, as the worker sees them. Knows no gRPC and no session.

Frame = Sequence[FromTarget | WireError]
M = TypeVar("M", bound=FromTarget)


class Connection(Protocol):
    """One stream of a target, as the worker sees it. identity: who its peer is, by token or certificate."""

    @property
    def identity(self) -> str: ...

    def send(self, frame: Sequence[FromService]) -> None:
        """Hand a frame over; returns at once, never raises, and drops it where the stream has ended."""
        ...

    def taken(self) -> None:
        """One frame of it has been taken in."""
        ...

    def end(self) -> None:
        """Send what was handed over, then end the stream. Safe to call twice."""
        ...


class Streams:
    """One for each target that has said Hello. load: of the service, as of a time; targets are told it now and then."""

    def __init__(self, load: Callable[[float], Load]) -> None:
        self._load = load
        self._streams: dict[str, Connection] = {}
        self._targets: dict[Connection, str] = {}
        self._load_sent_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def of(self, target_id: str) -> Connection | None:
        return self._streams.get(target_id)

    def target_of(self, stream: Connection) -> str | None:
        return self._targets.get(stream)

    def add(self, target_id: str, stream: Connection) -> None:
        """The target's, which has none."""
        self._streams[target_id] = stream
        self._targets[stream] = target_id

    def remove(self, stream: Connection) -> str | None:
        """Nothing is sent on it any more; returns whose it was."""
        target_id = self._targets.pop(stream, None)
        if target_id is not None:
            del self._streams[target_id]
            self._load_sent_s.pop(target_id, None)
        return target_id

    def send(self, target_id: str, frame: list[FromService], now: float) -> None:
        """Nothing happens where the target has no stream."""
        stream = self._streams.get(target_id)
        if stream is None:
            return
        if now - self._load_sent_s.get(target_id, -math.inf) >= LOAD_EVERY_S:
            self._load_sent_s[target_id] = now
            frame = [*frame, self._load(now)]
        stream.send(frame)

    def end_all(self) -> None:
        for stream in list(self._targets):
            stream.end()


def named(message: M, stream: Connection) -> M:
    """Targets with other credentials are others, whatever they call themselves."""
    if isinstance(message, Hello):
        return replace(message, target_id=f"{stream.identity}/{message.target_id}")
    return message


BUSY_WINDOW_S = 2.0
"""Load.busy is of the last so many seconds."""
EXPIRE_EVERY_S = 1.0
LOOK_EVERY_S = 0.2
"""How often the snapshot is replaced, at least."""
MOST_FAILURES = 3
"""Of batches one after another, until the service ends."""
MOST_MESSAGES = 1024
"""Taken in between two batches, up to the end of their frame, so that a flood does not keep the device waiting."""
_log = logging.getLogger(__name__)


class Device(Protocol):
    """What runs batches (`star.model.DraftModel`)."""

    def run(self, batch: Batch) -> CandidateTrees | None: ...


class Worker:
    """Runs a core on a device. on_death: called from the thread when it ends because the device fails on and on."""

    def __init__(
        self, core: DraftCore, device: Device, *, on_death: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._core, self._device, self._on_death, self._clock = core, device, on_death, clock
        self._inbox: queue.SimpleQueue[tuple[Connection, Frame | None, float] | None] = queue.SimpleQueue()
        self._streams = Streams(self._load)
        self._stats = WorkerStats()
        self._stopping = False
        self._failures = 0  # of batches one after another
        self.died = False
        """Whether the device's failures ended it."""
        self._began_s = now = clock()
        self._busy = BusyMeter(BUSY_WINDOW_S, now)
        self._expired_s = self._looked_s = now
        self.snapshot = self._snapshot(now)
        """The newest; replaced, never changed."""
        self._thread = threading.Thread(target=self._run, name="draft-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.died

    def heard(self, stream: Connection, frame: Frame) -> None:
        """A frame has come. Any thread; returns at once."""
        self._inbox.put((stream, frame, self._clock()))

    def lost(self, stream: Connection) -> None:
        """The stream has ended. Any thread; nothing is heard of it afterwards."""
        self._inbox.put((stream, None, self._clock()))

    def stop(self, timeout_s: float) -> bool:
        """Tell all targets that the service ends, and end once the batch on the device is done; whether it has."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the loop ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            _log.exception("the draft service ends")
            self.died = True
            self._on_death()
        finally:
            self._say_goodbye()

    def _turn(self) -> None:
        """Take in what has come, run one batch, or wait for something to come."""
        taken = 0
        while taken < MOST_MESSAGES and (messages := self._take(block_s=None)):
            taken += messages
        now = self._clock()
        if now - self._expired_s >= EXPIRE_EVERY_S:
            self._core.expire(now)
            self._expired_s = now
        batch = None if self._stopping else self._core.next_batch(now)
        for target_id, frame in self._core.given_up():
            self._streams.send(target_id, frame, now)
        if batch is not None:
            self._serve(batch)
        elif not self._stopping:
            self._take(block_s=LOOK_EVERY_S)
            self._stats.idle_s += self._clock() - now
        if now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now = self._clock()
            self.snapshot = self._snapshot(now)

    def _serve(self, batch: Batch) -> None:
        found, error = None, None
        try:
            found = self._device.run(batch)
        except Exception as raised:
            error = raised
        now = self._clock()
        self._note(batch, now)
        answers = self._core.done(batch, found, now) if error is None else self._core.failed(batch, now)
        for target_id, frame in answers:
            self._streams.send(target_id, frame, now)
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        _log.error("a batch of %d rows failed: %s", len(batch.rows), type(error).__name__, exc_info=error)
        if self._failures >= MOST_FAILURES:
            raise error

    def _note(self, batch: Batch, now: float) -> None:
        taken_s, stats = now - batch.started_s, self._stats
        self._busy.add(batch.started_s, now)
        stats.service_s += taken_s
        if batch.depth:
            stats.searches += 1
            stats.search_s += taken_s
            stats.rows_searched += len(batch.rows)
            stats.rows[next((edge for edge in ROWS_EDGES if edge >= len(batch.rows)), math.inf)] += 1

    def _take(self, block_s: float | None) -> int:
        """Take in one frame; its messages, 1 at least, and 0 where none came. block_s: how long to wait for it; None:
        not at all."""
        try:
            item = self._inbox.get(block=block_s is not None, timeout=block_s)
        except queue.Empty:
            return 0
        if item is None:
            self._stopping = True
            return 1
        stream, frame, came_s = item
        if frame is None:
            self._gone(stream)
            return 1
        self._try(stream, frame, came_s)
        stream.taken()
        return max(len(frame), 1)

    # ---- what comes ----

    def _try(self, stream: Connection, frame: Frame, came_s: float) -> None:
        """Nothing that a target says ends the service."""
        try:
            self._heard(stream, frame, came_s)
        except Exception as error:
            _log.error("a frame of %d messages failed: %s; its stream ends", len(frame), type(error).__name__)
            self._stats.nonsense["target"] += 1
            self._gone(stream)
            stream.end()

    def _heard(self, stream: Connection, frame: Frame, now: float) -> None:
        """now: when it came, which a batch may have made long ago; what waits, and until when, counts from then."""
        self._stats.frames += 1
        target_id = self._streams.target_of(stream)
        if target_id is None:
            target_id = self._greeted(stream, frame, now)
            if target_id is None:
                return
        errors = [each for each in frame if isinstance(each, WireError)]
        said = [named(each, stream) for each in frame if not isinstance(each, WireError)]
        # What makes no sense ends its session, after what made sense before it; what names none is only counted.
        replies = self._core.receive(target_id, [*said, *(Close(each.session) for each in errors)], now)
        for error in errors:
            self._stats.nonsense["session" if error.session else "target"] += 1
            self._core.stats.refused[error.code] += 1
            if error.session:
                replies.append(Refused(error.code, str(error), error.session, error.epoch))
        if replies:
            self._streams.send(target_id, replies, now)
        if any(isinstance(reply, Refused) and reply.session == 0 for reply in replies):
            self._gone(stream)  # it gets nothing as it is
            stream.end()

    def _greeted(self, stream: Connection, frame: Frame, now: float) -> str | None:
        """The first frame of a stream begins with Hello: its target's id here. Another stream of the same target is
        half dead, or the target would not have come again."""
        hello = frame[0] if frame else None
        if not isinstance(hello, Hello):
            self._stats.nonsense["target"] += 1
            why = str(hello) if isinstance(hello, WireError) else "the first message of a stream must be Hello"
            stream.send([Refused("invalid", why)])
            stream.end()
            return None
        target_id = named(hello, stream).target_id
        before = self._streams.of(target_id)
        if before is not None:
            self._gone(before)
            before.end()
        self._streams.add(target_id, stream)
        return target_id

    def _gone(self, stream: Connection) -> None:
        target_id = self._streams.remove(stream)
        if target_id is not None:
            self._core.gone(target_id, self._clock())

    # ---- what goes ----

    def _load(self, now: float) -> Load:
        core = self._core
        return Load(self._busy.share(now), core.backlog_s(), core.num_sessions, len(self._streams))

    def _say_goodbye(self) -> None:
        for target_id, frame in self._core.stop():
            stream = self._streams.of(target_id)
            if stream is not None:
                stream.send(frame)
        self._streams.end_all()

    def _snapshot(self, now: float) -> Snapshot:
        core, stats = self._core, self._stats
        copied = replace(core.stats, refused=Counter(core.stats.refused))
        loop_s = now - self._began_s
        ours = replace(stats, loop_s=loop_s, rows=Counter(stats.rows), nonsense=Counter(stats.nonsense))
        return Snapshot(self._load(now), copied, ours, core.num_waiting, core.num_holding)
