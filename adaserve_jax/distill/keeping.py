"""Keeps what was learned in learn_folder, so that a restart goes on from it: a folder per draft. Knows no requests.

A thread of its own writes; training waits only while it copies what is to be written to the host.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adaserve_jax.distill.record_file import load_records, save_records
from adaserve_jax.distill.records import Record
from adaserve_jax.distill.updates import DraftUpdates
from adaserve_jax.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)
SAVE_EVERY_S = 60.0
RECORDS = "records.npz"


class Kept(Protocol):
    """What else is kept, with the first draft."""

    def to_state(self) -> dict[str, Any]: ...
    def from_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RecordFiles:
    """The texts that drafts learn from, on disk. A file that cannot be written or read is logged, and learning goes on
    without it. top_k: tokens per row."""

    top_k: int
    vocab_size: int

    def save(self, folder: Path, records: Sequence[Record]) -> None:
        try:
            save_records(folder / RECORDS, records, top_k=self.top_k)
        except OSError as error:
            _log.error("records could not be written to %s: %s", folder, error)

    def load(self, folder: Path, draft: int) -> list[Record]:
        """As records of this draft."""
        path = folder / RECORDS
        try:
            kept = path.exists()
            return load_records(path, top_k=self.top_k, vocab_size=self.vocab_size, draft=draft) if kept else []
        except CheckpointError as error:
            _log.error("%s", error)
            return []


class Keeper:
    """Of the drafts of one learner. Not thread-safe."""

    def __init__(
        self, folder: Path, drafts: Sequence[DraftUpdates], clock: Callable[[], float], *,
        beside: Kept | None = None, records: RecordFiles | None = None,
    ) -> None:  # fmt: skip
        """beside: what goes with them, as what a router knows of topics. records: None: no text reaches the disk."""
        self._folder = folder
        self._drafts = drafts
        self._clock = clock
        self._beside = beside
        self._records = records
        self._saved_at = clock()
        self._saved = [0] * len(drafts)
        self._writer = ThreadPoolExecutor(1, "learn-saver")
        self._writing: Future[None] | None = None
        self._copied = threading.Event()

    def load(self) -> None:
        """Go on from what is there; its versions serve from now on. Raises CheckpointError: it cannot be read, or is
        about other drafts. ConfigError: it cannot be written to."""
        import orbax.checkpoint  # noqa: F401  takes seconds, which no step should wait for later

        for index, draft in enumerate(self._drafts):
            folder = self._folder / draft.name
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"learn_folder: {folder} cannot be made ({error}); choose another folder") from error
            if self._records is not None:
                draft.buffer.extend(self._records.load(folder, index))
            state = draft.trainer.load(folder)
            if state is None:
                continue
            try:
                draft.go_on_from(state)
                if index == 0 and self._beside is not None:
                    self._beside.from_state(state["beside"])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{folder}: its checkpoint is not one of a draft that learned while it served ({error!r}); move it "
                    "away, or choose another learn_folder"
                ) from error
            self._saved[index] = draft.version
            _log.info("draft %s goes on from version %d in %s", draft.name, draft.version, folder)

    @property
    def is_copying(self) -> bool:
        """Whether trainers must be left as they are."""
        return self._is_writing and not self._copied.is_set()

    @property
    def has_new(self) -> bool:
        """Whether there are confirmed versions that are not written, or being written."""
        return bool(self._new()) and not self._is_writing

    def save_if_due(self) -> None:
        """Between updates: begin to write confirmed versions that are new, once SAVE_EVERY_S have passed."""
        if not self._is_writing and self._clock() - self._saved_at >= SAVE_EVERY_S:
            self._begin()

    def close(self) -> None:
        """Write what is new. An update under way is left; a version on probation counts as good."""
        for draft in self._drafts:
            draft.settle()
        self._begin()
        self._writer.shutdown()
        if self._records is not None:
            for draft in self._drafts:
                self._records.save(self._folder / draft.name, list(draft.buffer))

    def _begin(self) -> None:
        self._saved_at = self._clock()
        new = self._new()
        if new:
            states = [self._drafts[index].state() for index in new]
            if new[0] == 0:
                states[0]["beside"] = {} if self._beside is None else self._beside.to_state()
            texts = [list(self._drafts[index].buffer) for index in new]
            self._copied.clear()
            self._writing = self._writer.submit(self._save, new, states, texts)

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _new(self) -> list[int]:
        return [index for index, draft in enumerate(self._drafts) if draft.good_version != self._saved[index]]

    def _save(self, drafts: list[int], states: list[dict[str, Any]], texts: list[list[Record]]) -> None:
        """What cannot be written is logged, and learning goes on."""
        snapshots = [self._drafts[index].trainer.snapshot() for index in drafts]
        self._copied.set()
        for index, state, snapshot, records in zip(drafts, states, snapshots, texts, strict=True):
            draft = self._drafts[index]
            folder = self._folder / draft.name
            if self._records is not None:
                self._records.save(folder, records)
            try:
                snapshot.save(folder, state["version"], state)
            except CheckpointError as error:
                _log.error("what draft %s learned could not be written: %s", draft.name, error)
            else:
                self._saved[index] = state["version"]
