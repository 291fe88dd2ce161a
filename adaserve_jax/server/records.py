"""Records of ended choices, written to the file of --records on a thread of its own.

`ChoiceStamper` and `RecordMaker` turn what observers get into what is stored; `tracing` uses them too.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import adaserve_jax
from adaserve_jax.engine.client import EngineInfo
from adaserve_jax.errors import EngineDeadError
from adaserve_jax.results.record_store import RecordStore
from adaserve_jax.results.records import ServedRecord, ServerRun, served_record
from adaserve_jax.server.observers import ChoiceText, EndedChoice
from adaserve_jax.server.state import ServerState

WRITE_EVERY_S = 0.25
PRUNE_EVERY_S = 60.0
MAX_WAITING = 10_000
"""Choices that wait while the file cannot be written; more are dropped."""
CLOSE_TIMEOUT_S = 5.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Choices that stay in the file: those that ended less than `age_s` ago, and of those the newest `max_bytes`."""

    age_s: float
    max_bytes: int


@dataclass(frozen=True)
class StampedChoice:
    """Ended choice with the run of the engine that served it.

    clock_s: Unix time minus the engine's clock. That is the machine's monotonic clock, the same in all processes.
    """

    ended: EndedChoice
    run: ServerRun
    clock_s: float


class ChoiceStamper:
    """Stamp ended choices with their run, on the event loop."""

    def __init__(self, state: ServerState):
        self._state = state
        self._engine: tuple[EngineInfo, int] | None = None  # that of the run, and the number of restarts before it
        self._run: ServerRun | None = None

    def stamp(self, ended: EndedChoice) -> StampedChoice:
        """Return the choice with its run. Raises EngineDeadError when no engine was ever ready."""
        clock_s = ended.ended_unix_s - time.monotonic()
        return StampedChoice(ended, self._current_run(ended.ended_unix_s), clock_s)

    def _current_run(self, now_unix_s: float) -> ServerRun:
        """Return the run of the engine, or of the last one once that is dead."""
        try:
            info = self._state.info
        except EngineDeadError:
            if self._run is None:
                raise
            return self._run
        stats = self._state.client.stats()
        engine = replace(info, adapters=()), stats.restarts  # adapters come and go while it serves
        if self._run is None or (
            engine != self._engine and stats.back_in_s is None
        ):  # else the run is still the dead one's
            self._engine = engine
            self._run = ServerRun(
                uuid.uuid4().hex, now_unix_s, adaserve_jax.__version__, info.jax_version, info.device, info.policy,
                self._state.model_name, info.target, info.draft, info.baseline_s,
            )  # fmt: skip
        return self._run


class RecordMaker:
    """Make records of stamped choices, on one thread.

    decode: returns the text of a prompt's token ids; None: records have no texts.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None = None):
        self._decode = decode
        self._drafted = 0
        self._accepted = 0

    def make(self, stamped: StampedChoice) -> ServedRecord:
        """Return the record, with the acceptance rate of all choices so far."""
        ended, metrics = stamped.ended, stamped.ended.measured
        arrival_unix_s = ended.ended_unix_s if ended.metrics is None else metrics.arrival_s + stamped.clock_s
        self._drafted += metrics.drafted_tokens
        self._accepted += metrics.accepted_tokens
        prompt, output = self._texts(ended.text)
        return served_record(
            metrics,
            run=stamped.run,
            model=ended.origin.model,
            request_id=ended.origin.request_id,
            choice=ended.index,
            key=ended.origin.key,
            ending=ended.ending,
            error_code=ended.error_code,
            arrival_unix_s=arrival_unix_s,
            ended_unix_s=ended.ended_unix_s,
            acceptance_rate=self._accepted / self._drafted if self._drafted else 0.0,
            prompt=prompt,
            output=output,
        )

    def _texts(self, text: ChoiceText | None) -> tuple[str | None, str | None]:
        """Return prompt and output, as far as they are recorded."""
        if text is None or self._decode is None:
            return None, None
        output = _without_surrogates(text.output)
        try:
            return _without_surrogates(self._decode(text.prompt_ids)), output
        except Exception:
            _log.exception("a prompt cannot be decoded; its record goes without")
            return None, output


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which no file takes."""
    return text.encode(errors="replace").decode()


class BatchThread(Generic[T]):
    """Thread that calls `work(items)` every `every_s` seconds with the items put since, also with none.

    `work` returns the items that it wants to get again. If it raises, its items are dropped and the thread goes on.
    dropped: called with a number of items that were never worked off, from either thread. limit: most items that wait
    or are worked on; more are dropped.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[list[T]], list[T]],
        dropped: Callable[[int], None],
        *,
        every_s: float,
        limit: int,
    ):
        self._work = work
        self._dropped = dropped
        self._every_s = every_s
        self._limit = limit
        self._waiting: deque[T] = deque()
        self._taken: list[T] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Add an item within microseconds; call it from one thread."""
        if self._closing.is_set() or len(self._waiting) + len(self._taken) >= self._limit:
            self._dropped(1)
        else:
            self._waiting.append(item)

    def close(self, timeout_s: float) -> bool:
        """Work off the waiting items once more and drop what is left. Return whether that ended in time."""
        self._closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._work_once()
        self._work_once()
        left = len(self._taken) + len(self._waiting)
        if left:
            _log.warning("%s: %d items were not written before the end", self._thread.name, left)
            self._dropped(left)

    def _work_once(self) -> None:
        taken = self._taken + [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._taken = taken
        try:
            self._taken = self._work(taken)
        except Exception:
            _log.exception("%s failed on %d items", self._thread.name, len(taken))
            self._dropped(len(taken))
            self._taken = []


class Recorder:
    """Observer that adds a record of each choice to `store`, which it owns from now on.

    When the file cannot be written, the next batch tries again; choices that find no room meanwhile are counted as
    dropped.
    """

    def __init__(
        self,
        state: ServerState,
        store: RecordStore,
        retention: Retention,
        *,
        every_s: float = WRITE_EVERY_S,
        limit: int = MAX_WAITING,
    ):
        self._store = store
        self._retention = retention
        self._stamper = ChoiceStamper(state)
        self._maker = RecordMaker(state.decode)
        self._failing = False
        self._prune_at_s = 0.0
        self._dropped = state.metrics.records_dropped.inc
        self._thread: BatchThread[StampedChoice | ServedRecord] = BatchThread(
            "records", self._write, self._dropped, every_s=every_s, limit=limit
        )

    def observe(self, ended: EndedChoice) -> None:
        self._thread.put(self._stamper.stamp(ended))

    def close(self) -> None:
        """Write the waiting records, within a few seconds."""
        if self._thread.close(CLOSE_TIMEOUT_S):
            self._store.close()

    def _write(self, items: list[StampedChoice | ServedRecord]) -> list[StampedChoice | ServedRecord]:
        """Add a batch, then prune; return the batch when the file cannot be written now."""
        choices = [self._maker.make(item) if isinstance(item, StampedChoice) else item for item in items]
        try:
            if choices:
                self._store.add(choices)
        except sqlite3.OperationalError as error:  # a full disk, a lock: it may pass
            self._log_failure(error)
            self._prune()  # a full disk may get room by it
            return [*choices]
        except sqlite3.Error as error:
            self._log_failure(error)
            self._dropped(len(choices))
            return []
        if choices and self._failing:
            self._failing = False
            _log.warning("records are written to %s again", self._store.path)
        self._prune()
        return []

    def _prune(self) -> None:
        now, kept = time.monotonic(), self._retention
        if now < self._prune_at_s:
            return
        self._prune_at_s = now + PRUNE_EVERY_S
        try:
            if self._store.prune(before_unix_s=time.time() - kept.age_s, max_bytes=kept.max_bytes):
                self._prune_at_s = now
        except sqlite3.Error as error:
            self._log_failure(error)

    def _log_failure(self, error: sqlite3.Error) -> None:
        """Log the first failure since the file could be written."""
        if not self._failing:
            self._failing = True
            _log.warning(
                "cannot write records to %s: %s; the server goes on and tries again; adaserve_records_dropped_total "
                "counts those that it has no room to keep",
                self._store.path,
                error,
            )
