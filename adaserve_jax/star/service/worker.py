"""The worker thread of a draft service, which owns core and device: it takes frames in, runs batches, sends answers.

Connections put frames into its inbox from threads of their own, also while the device computes. Independent of gRPC.
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
from typing import Protocol

from adaserve_jax.star.messages import LOAD_EVERY_S, Close, FromService, FromTarget, Hello, Load, Refused
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.dispatch import DraftBatch
from adaserve_jax.star.service.stats import ROWS_EDGES, BusyMeter, ServiceSnapshot, WorkerStats
from adaserve_jax.star.wire import WireError
from adaserve_jax.types import CandidateTrees

Frame = Sequence[FromTarget | WireError]

BUSY_WINDOW_S = 2.0
"""Window of Load.busy."""
EXPIRE_EVERY_S = 1.0
SNAPSHOT_EVERY_S = 0.2
"""Longest age of the snapshot, while no batch is longer."""
MAX_FAILURES = 3
"""Failed batches in a row after which the service ends."""
BATCH_LIMIT_S = 60.0
"""Seconds of one batch beyond which the device counts as hung: a batch takes milliseconds."""
MAX_MESSAGES_PER_TURN = 1024
"""Messages taken in between two batches, up to the end of their frame, so that a flood does not stall the device."""
_log = logging.getLogger(__name__)


class Connection(Protocol):
    """One stream of a target. identity: of its peer, by token or certificate, without a slash."""

    @property
    def identity(self) -> str: ...
    @property
    def has_ended(self) -> bool:
        """True from the first call of `end`."""
        ...

    def send(self, frame: Sequence[FromService]) -> None:
        """Queue a frame. Return at once and never raise; the frame is dropped if the stream has ended."""
        ...

    def frame_taken(self) -> None:
        """Count one of its frames as processed."""
        ...

    def end(self) -> None:
        """Send the queued frames, then end the stream. Safe to call twice."""
        ...


class TargetStreams:
    """The stream of each target that sent Hello. load: returns the service's load, which is sent along now and then."""

    def __init__(self, load: Callable[[float], Load]) -> None:
        self._load = load
        self.by_target: dict[str, Connection] = {}
        self.target_ids: dict[Connection, str] = {}
        self._load_sent_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.by_target)

    def add(self, target_id: str, stream: Connection) -> None:
        """Add the stream of a target that has none."""
        self.by_target[target_id] = stream
        self.target_ids[stream] = target_id

    def remove(self, stream: Connection) -> str | None:
        """Remove a stream and return its target's id."""
        target_id = self.target_ids.pop(stream, None)
        if target_id is not None:
            del self.by_target[target_id]
            self._load_sent_s.pop(target_id, None)
        return target_id

    def send(self, target_id: str, frame: list[FromService], now: float) -> None:
        """Send a frame, with the load if it is due; do nothing if the target has no stream."""
        stream = self.by_target.get(target_id)
        if stream is None:
            return
        if now - self._load_sent_s.get(target_id, -math.inf) >= LOAD_EVERY_S:
            self._load_sent_s[target_id] = now
            frame = [*frame, self._load(now)]
        stream.send(frame)

    def end_all(self) -> None:
        for stream in list(self.target_ids):
            stream.end()


class Device(Protocol):
    """Runs batches; `service.model.DraftModel` implements it."""

    def run(self, batch: DraftBatch) -> CandidateTrees | None: ...


class Worker:
    """Runs a core on a device. on_death: called in the thread when repeated failures of the device end it."""

    def __init__(
        self, core: DraftCore, device: Device, *, on_death: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._core, self._device, self._on_death, self._clock = core, device, on_death, clock
        self._inbox: queue.SimpleQueue[tuple[Connection, Frame | None, float] | None] = queue.SimpleQueue()
        self._streams = TargetStreams(self._load)
        self._stats = WorkerStats()
        self._stopping = False
        self._failures = 0  # failed batches in a row
        self.died = False
        """True if failures ended the thread."""
        self._batch_began_s: float | None = None
        self._began_s = now = clock()
        self._busy = BusyMeter(BUSY_WINDOW_S, now)
        self._expired_s = self._snapshot_s = now
        self.snapshot = self._snapshot(now)
        """Latest snapshot; replaced, never changed."""
        self._thread = threading.Thread(target=self._run, name="draft-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.died

    @property
    def hangs(self) -> bool:
        """True while a batch runs for longer than BATCH_LIMIT_S."""
        began_s = self._batch_began_s
        return began_s is not None and self._clock() - began_s > BATCH_LIMIT_S

    def receive(self, stream: Connection, frame: Frame) -> None:
        """Queue a received frame. Called from any thread; returns at once."""
        self._inbox.put((stream, frame, self._clock()))

    def disconnect(self, stream: Connection) -> None:
        """Queue the end of a stream. Called by the thread that calls `receive`, after its last frame."""
        self._inbox.put((stream, None, self._clock()))

    def stop(self, timeout_s: float) -> bool:
        """Refuse all targets and end after the running batch; return whether the thread ended in time."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the loop ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turn()
        except Exception:
            _log.exception("the draft service ends")
            self.died = True
            self._on_death()
        finally:
            self._refuse_all()
            self.snapshot = self._snapshot(self._clock())

    def turn(self) -> None:
        """Process received frames, then run one batch or wait for a frame. The thread calls this in a loop."""
        taken = 0
        while taken < MAX_MESSAGES_PER_TURN and (messages := self._take(block_s=None)):
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
            self._take(block_s=SNAPSHOT_EVERY_S)
            self._stats.idle_s += self._clock() - now
        if now - self._snapshot_s >= SNAPSHOT_EVERY_S:
            self._snapshot_s = now = self._clock()
            self.snapshot = self._snapshot(now)

    def _serve(self, batch: DraftBatch) -> None:
        found, error = None, None
        self._batch_began_s = self._clock()
        try:
            found = self._device.run(batch)
        except Exception as raised:
            error = raised
        self._batch_began_s = None
        now = self._clock()
        self._measure(batch, now)
        answers = self._core.done(batch, found, now) if error is None else self._core.failed(batch, now)
        for target_id, frame in answers:
            self._streams.send(target_id, frame, now)
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        _log.error("a batch of %d rows failed: %s", len(batch.rows), type(error).__name__, exc_info=error)
        if self._failures >= MAX_FAILURES:
            raise error

    def _measure(self, batch: DraftBatch, now: float) -> None:
        taken_s, stats = now - batch.started_s, self._stats
        self._busy.add(batch.started_s, now)
        stats.service_s += taken_s
        if batch.depth:
            stats.searches += 1
            stats.search_s += taken_s
            stats.rows_searched += len(batch.rows)
            stats.rows[next((edge for edge in ROWS_EDGES if edge >= len(batch.rows)), math.inf)] += 1

    def _take(self, block_s: float | None) -> int:
        """Process one item of the inbox; return its number of messages, at least 1, or 0 without an item.

        block_s: how long to wait for it; None: not at all.
        """
        try:
            item = self._inbox.get(block=block_s is not None, timeout=block_s)
        except queue.Empty:
            return 0
        if item is None:
            self._stopping = True
            return 1
        stream, frame, came_s = item
        if frame is None:
            self._remove(stream)
            return 1
        self._process(stream, frame, came_s)
        stream.frame_taken()
        return max(len(frame), 1)

    # ---- frames ----

    def _process(self, stream: Connection, frame: Frame, came_s: float) -> None:
        """Process a frame; an internal error ends its stream, not the service."""
        try:
            self._receive(stream, frame, came_s)
        except Exception as error:
            _log.error("a frame of %d messages failed: %s; its stream ends", len(frame), type(error).__name__)
            self._stats.nonsense["target"] += 1
            self._remove(stream)
            stream.end()

    def _receive(self, stream: Connection, frame: Frame, now: float) -> None:
        """Process a frame that came at `now`, perhaps before the end of the latest batch; waits count from then."""
        self._stats.frames += 1
        # A Hello's target id begins with the peer's identity, so that no target can take another's name.
        frame = [
            replace(each, target_id=f"{stream.identity}/{each.target_id}") if isinstance(each, Hello) else each
            for each in frame
        ]
        target_id = self._streams.target_ids.get(stream)
        if target_id is None:
            target_id = self._begin(stream, frame, now)
            if target_id is None:
                return
        errors = [each for each in frame if isinstance(each, WireError)]
        messages = [each for each in frame if not isinstance(each, WireError)]
        # An invalid message ends its session, after the valid ones before it; one without a session is only counted.
        replies = self._core.receive(target_id, [*messages, *(Close(each.session) for each in errors)], now)
        for error in errors:
            self._stats.nonsense["session" if error.session else "target"] += 1
            if error.session:
                self._core.stats.refused[error.code] += 1
                replies.append(Refused(error.code, str(error), error.session, error.epoch))
        if replies:
            self._streams.send(target_id, replies, now)
        if any(isinstance(reply, Refused) and reply.session == 0 for reply in replies):
            self._remove(stream)  # the target was refused
            stream.end()

    def _begin(self, stream: Connection, frame: Frame, now: float) -> str | None:
        """Begin a stream, whose first message must be Hello, and return its target's id; None if it has ended.

        An earlier stream of the same target is ended: the target would not connect again if it were alive.
        """
        if stream.has_ended:
            return None  # its target may have connected again
        hello = frame[0] if frame else None
        if not isinstance(hello, Hello):
            self._stats.nonsense["target"] += 1
            why = str(hello) if isinstance(hello, WireError) else "the first message of a stream must be Hello"
            stream.send([Refused("invalid", why)])
            stream.end()
            return None
        before = self._streams.by_target.get(hello.target_id)
        if before is not None:
            self._remove(before)
            before.end()
        self._streams.add(hello.target_id, stream)
        return hello.target_id

    def _remove(self, stream: Connection) -> None:
        target_id = self._streams.remove(stream)
        if target_id is not None:
            self._core.disconnect(target_id, self._clock())

    # ---- state ----

    def _load(self, now: float) -> Load:
        core = self._core
        return Load(self._busy.share(now), core.backlog_s(), core.num_sessions, len(self._streams))

    def _refuse_all(self) -> None:
        for target_id, frame in self._core.stop():
            stream = self._streams.by_target.get(target_id)
            if stream is not None:
                stream.send(frame)
        self._streams.end_all()

    def _snapshot(self, now: float) -> ServiceSnapshot:
        core, stats = self._core, self._stats
        copied = replace(core.stats, refused=Counter(core.stats.refused))
        loop_s = now - self._began_s
        own = replace(stats, loop_s=loop_s, rows=Counter(stats.rows), nonsense=Counter(stats.nonsense))
        return ServiceSnapshot(self._load(now), copied, own, core.num_waiting, core.num_holding)
