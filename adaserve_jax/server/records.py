"""Keeps a record of every choice that ends, in the file of --records. Neither event loop nor engine waits for it."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import adaserve_jax
from adaserve_jax.engine.client import EngineInfo
from adaserve_jax.errors import EngineDeadError
from adaserve_jax.results.record_store import RecordStore
from adaserve_jax.results.records import ServedRecord, ServerRun, served_record, unstarted_metrics
from adaserve_jax.server.observers import ChoiceText, EndedChoice
from adaserve_jax.server.state import ServerState

# Turns what observers are told into what is kept: adds the engine's names, wall-clock times, and the text if
# asked.
#
# Runs on the threads of records and traces; the event loop only notes what passes with time.


@dataclass(frozen=True)
class Noted:
    """An end as the event loop noted it. clock_s: what was added to the engine's clock at that moment gives Unix time.

    The engine's clock is the machine's monotonic one, the same in all processes, so that it is read here.
    """

    ended: EndedChoice
    run: ServerRun
    clock_s: float


class Notes:
    """Notes ends, on the event loop."""

    def __init__(self, state: ServerState):
        self._state = state
        self._engine: tuple[EngineInfo, int] | None = None  # of the run: and how many were there before
        self._run: ServerRun | None = None

    def of(self, ended: EndedChoice) -> Noted:
        """Raises EngineDeadError when no engine was ever ready."""
        clock_s = ended.ended_unix_s - time.monotonic()
        return Noted(ended, self._current(ended.ended_unix_s), clock_s)

    def _current(self, now_unix_s: float) -> ServerRun:
        """The run of the engine there is; of the last one, once it is dead."""
        try:
            info = self._state.info
        except EngineDeadError:
            if self._run is None:
                raise
            return self._run
        engine = info, self._state.client.stats().restarts
        if self._run is None or engine != self._engine:
            self._engine = engine
            self._run = ServerRun(
                uuid.uuid4().hex, now_unix_s, adaserve_jax.__version__, info.jax_version, info.device, info.policy,
                self._state.model_name, info.target, info.draft, info.baseline_s,
            )  # fmt: skip
        return self._run


class Served:
    """Makes records of notes, on one thread, and knows the acceptance so far.

    decode: the text of a prompt's token ids; None: texts are left out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None = None):
        self._decode = decode
        self._drafted = 0
        self._accepted = 0

    def of(self, noted: Noted) -> ServedRecord:
        ended, metrics = noted.ended, noted.ended.metrics
        if metrics is None:
            arrival_unix_s = ended.ended_unix_s
            metrics = unstarted_metrics(ended.tpot_slo_s, ended.ttft_slo_s, ended.slo_class, ended.error_code)
        else:
            arrival_unix_s = metrics.arrival_s + noted.clock_s
        self._drafted += metrics.drafted_tokens
        self._accepted += metrics.accepted_tokens
        prompt, output = self._texts(ended.text)
        return served_record(
            metrics,
            run=noted.run,
            request_id=ended.request_id,
            choice=ended.index,
            key=ended.key,
            ending=ended.ending,
            error_code=ended.error_code,
            arrival_unix_s=arrival_unix_s,
            ended_unix_s=ended.ended_unix_s,
            acceptance_rate=self._accepted / self._drafted if self._drafted else 0.0,
            prompt=prompt,
            output=output,
        )

    def _texts(self, text: ChoiceText | None) -> tuple[str | None, str | None]:
        """Prompt and output, as far as they are to be kept."""
        if text is None or self._decode is None:
            return None, None
        output = _storable(text.output)
        try:
            return _storable(self._decode(text.prompt_ids)), output
        except Exception:
            _log.exception("a prompt cannot be decoded; its record goes without")
            return None, output


def _storable(text: str) -> str:
    """Without lone surrogates, which no file takes."""
    return text.encode(errors="replace").decode()


# Work that must not hold up the event loop: what is put in is handed over in batches, on a thread of its own.
#
# Bounded: what finds no room is counted and forgotten. Knows nothing of what is put in.

T = TypeVar("T")


class Batches(Generic[T]):
    """Calls work(items) every `every_s` seconds, with none too; it returns those that it wants to be given again.

    put: from one thread. dropped(count): items that were never worked off, called from either thread. limit: items that
    wait or are worked on. A `work` that raises loses its batch, and the thread goes on.
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
        """Returns at once, within microseconds."""
        if self._closing.is_set() or len(self._waiting) + len(self._taken) >= self._limit:
            self._dropped(1)
        else:
            self._waiting.append(item)

    def close(self, timeout_s: float) -> bool:
        """Work off what waits; what is wanted again then counts as dropped. Returns whether that ended in time."""
        self._closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._turn()
        self._turn()
        left = len(self._taken) + len(self._waiting)
        if left:
            self._dropped(left)

    def _turn(self) -> None:
        taken = self._taken + [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._taken = taken
        try:
            self._taken = self._work(taken)
        except Exception:
            _log.exception("%s failed on %d items", self._thread.name, len(taken))
            self._dropped(len(taken))
            self._taken = []


EVERY_S = 0.25
"""Between two batches."""
PRUNE_EVERY_S = 60.0
LIMIT = 10_000
"""Choices that wait while the file cannot be written."""
CLOSE_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """What stays in the file: choices that ended less than `age_s` ago, and of those the newest `max_bytes`."""

    age_s: float
    max_bytes: int


class Recorder:
    """An observer. The store is its own from now on: one thread uses it, and `close` closes it.

    A file that cannot be written now is tried again with the next batch; choices that find no room meanwhile are
    counted as dropped.
    """

    def __init__(
        self,
        state: ServerState,
        store: RecordStore,
        retention: Retention,
        *,
        every_s: float = EVERY_S,
        limit: int = LIMIT,
    ):
        self._store = store
        self._retention = retention
        self._notes = Notes(state)
        self._served = Served(state.decode)
        self._failing = False
        self._prune_at_s = 0.0
        self._dropped = state.metrics.records_dropped.inc
        self._batches: Batches[Noted | ServedRecord] = Batches(
            "records", self._write, self._dropped, every_s=every_s, limit=limit
        )

    def observe(self, ended: EndedChoice) -> None:
        self._batches.put(self._notes.of(ended))

    def close(self) -> None:
        """Write what waits, within a few seconds."""
        if self._batches.close(CLOSE_S):
            self._store.close()

    def _write(self, items: list[Noted | ServedRecord]) -> list[Noted | ServedRecord]:
        """Add a batch, then prune; returns the batch when the file cannot be written now."""
        choices = [self._served.of(item) if isinstance(item, Noted) else item for item in items]
        try:
            if choices:
                self._store.add(choices)
        except sqlite3.OperationalError as error:  # a full disk, a lock: it may pass
            self._failed(error)
            return [*choices]
        except sqlite3.Error as error:
            self._failed(error)
            self._dropped(len(choices))
            return []
        if choices:
            self._worked()
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
            self._failed(error)

    def _failed(self, error: sqlite3.Error) -> None:
        """Say it once, until it works again."""
        if not self._failing:
            self._failing = True
            _log.warning(
                "cannot write records to %s: %s; the server goes on, adaserve_records_dropped_total counts losses",
                self._store.path,
                error,
            )

    def _worked(self) -> None:
        if self._failing:
            self._failing = False
            _log.warning("records are written to %s again", self._store.path)
