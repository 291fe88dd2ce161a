"""Keeps a record of every choice that ends, in the file of --records. Neither event loop nor engine waits for it."""

from __future__ import annotations

import logging
import sqlite3
import time
from dataclasses import dataclass

from adaserve_jax.results.record_store import RecordStore
from adaserve_jax.results.served import ServedChoice
from adaserve_jax.server.batches import Batches
from adaserve_jax.server.observers import EndedChoice
from adaserve_jax.server.served import Noted, Notes, Served
from adaserve_jax.server.state import ServerState

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
        self._batches: Batches[Noted | ServedChoice] = Batches(
            "records", self._write, self._dropped, every_s=every_s, limit=limit
        )

    def observe(self, ended: EndedChoice) -> None:
        self._batches.put(self._notes.of(ended))

    def close(self) -> None:
        """Write what waits, within a few seconds."""
        if self._batches.close(CLOSE_S):
            self._store.close()

    def _write(self, items: list[Noted | ServedChoice]) -> list[Noted | ServedChoice]:
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
