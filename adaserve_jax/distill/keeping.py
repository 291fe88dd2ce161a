"""Keeps what was learned in learn_folder, so that a restart goes on from it: a folder per draft. Knows no requests.

A thread of its own writes; training waits only while it copies what is to be written to the host.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaserve_jax.distill.checkpoint import Snapshot
from adaserve_jax.distill.kept_file import Kept, KeptFile
from adaserve_jax.distill.record_file import Source, load_records, save_records
from adaserve_jax.distill.records import Record
from adaserve_jax.distill.updates import DraftUpdates
from adaserve_jax.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)
SAVE_EVERY_S = 60.0
RECORDS = "records.npz"
TOPICS = "topics.json"


@dataclass(frozen=True)
class RecordFiles:
    """The texts that drafts learn from, on disk. A file that cannot be written or read is logged, and learning goes on
    without it. top_k: tokens per row. source: what the rows are of; those of another are not learned from."""

    top_k: int
    vocab_size: int
    source: Source

    def save(self, folder: Path, records: Sequence[Record]) -> None:
        try:
            save_records(folder / RECORDS, records, top_k=self.top_k, source=self.source)
        except OSError as error:
            _log.error("records could not be written to %s: %s", folder, error)

    def load(self, folder: Path, draft: int) -> list[Record]:
        """As records of this draft."""
        path = folder / RECORDS
        try:
            if not path.exists():
                return []
            return load_records(path, top_k=self.top_k, vocab_size=self.vocab_size, draft=draft, source=self.source)
        except CheckpointError as error:
            _log.error("%s", error)
            return []


class Keeper:
    """Of the drafts of one learner. Not thread-safe."""

    def __init__(
        self, folder: Path, drafts: Sequence[DraftUpdates], clock: Callable[[], float], *,
        beside: Kept | None = None, records: RecordFiles | None = None,
    ) -> None:  # fmt: skip
        """beside: what is kept with them, of a router's topics. records: None: no text is on the disk."""
        self._folder = folder
        self._drafts = drafts
        self._clock = clock
        self._beside = None if beside is None else KeptFile(folder / TOPICS, beside)
        self._records = records
        self._saved_at = clock()
        self._saved = [0] * len(drafts)
        self._writer = ThreadPoolExecutor(1, "learn-saver")
        self._writing: Future[None] | None = None
        self._copied = threading.Event()

    def load(self) -> None:
        """Go on from what is there; its versions serve from now on. Raises CheckpointError: it cannot be read, or is
        about other drafts. ConfigError: it cannot be written to, or texts that are not to be kept not removed."""
        import orbax.checkpoint  # noqa: F401  takes seconds, which no step should wait for later

        for index, draft in enumerate(self._drafts):
            folder = self._folder / draft.name
            self._make(folder)
            if self._records is not None:
                draft.buffer.extend(self._records.load(folder, index))
            state = draft.trainer.load(folder)
            if state is None:
                continue
            try:
                draft.go_on_from(state)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{folder}: its checkpoint is not one of a draft that learned while it served ({error!r}); move it "
                    "away, or choose another learn_folder"
                ) from error
            self._saved[index] = draft.version
            _log.info("draft %s goes on from version %d in %s", draft.name, draft.version, folder)
        if self._beside is not None:
            self._beside.load()

    def _make(self, folder: Path) -> None:
        """A folder that is there, with no text in it that is not to be kept."""
        try:
            for each in (self._folder, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            unwanted = [
                *folder.glob(f".{RECORDS}.*"),
                *self._folder.glob(f".{TOPICS}.*"),
            ]  # of writes that were cut off
            if self._records is None:
                unwanted.append(folder / RECORDS)
            for path in unwanted:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"learn_folder: {folder} cannot be made ready ({error}); choose another folder"
            ) from error

    @property
    def is_copying(self) -> bool:
        """Whether trainers must be left as they are."""
        return self._is_writing and not self._copied.is_set()

    @property
    def wakes_in_s(self) -> float | None:
        """Seconds until `save_if_due` has confirmed versions to write, or to see that they were written; None: it never
        has."""
        if self._is_writing:
            return 0.0
        return max(0.0, self._saved_at + SAVE_EVERY_S - self._clock()) if self._new() else None

    def save_if_due(self) -> None:
        """Begin to write what is new and confirmed, once SAVE_EVERY_S have passed."""
        if not self._is_writing and self._clock() - self._saved_at >= SAVE_EVERY_S:
            self._begin()

    def close(self) -> None:
        """Write what is new. An update under way is left; a version on probation counts as good. What fails is logged,
        and keeps nothing else from being written."""
        if self._writing is not None:
            wait([self._writing])
        for draft in self._drafts:
            try:
                draft.settle()
            except Exception:
                _log.exception("draft %s: its last update could not be left; the good version is kept", draft.name)
        try:
            self._begin()
        finally:
            self._writer.shutdown()
        if self._records is not None:
            for draft in self._drafts:
                self._records.save(self._folder / draft.name, list(draft.buffer))

    def _begin(self) -> None:
        self._saved_at = self._clock()
        new = self._new()
        if new or self._beside is not None:
            states = [self._drafts[index].state() for index in new]
            texts = [list(self._drafts[index].buffer) for index in new]
            self._copied.clear()
            self._writing = self._writer.submit(self._save, new, states, texts)

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _new(self) -> list[int]:
        return [index for index, draft in enumerate(self._drafts) if draft.good_version != self._saved[index]]

    def _save(self, drafts: list[int], states: list[dict[str, Any]], texts: list[list[Record]]) -> None:
        """In the writer's thread. What cannot be written is logged, and learning goes on."""
        try:
            snapshots = [self._drafts[index].trainer.snapshot() for index in drafts]
            self._copied.set()
            for index, state, snapshot, records in zip(drafts, states, snapshots, texts, strict=True):
                self._save_draft(index, state, snapshot)
                if self._records is not None:
                    self._records.save(self._folder / self._drafts[index].name, records)
            if self._beside is not None:
                self._beside.save()
        except Exception:
            _log.exception("what was learned could not be written to %s", self._folder)

    def _save_draft(self, index: int, state: dict[str, Any], snapshot: Snapshot) -> None:
        draft = self._drafts[index]
        try:
            snapshot.save(self._folder / draft.name, state["version"], state)
        except CheckpointError as error:
            _log.error("what draft %s learned could not be written: %s", draft.name, error)
        except Exception:
            _log.exception("what draft %s learned could not be written", draft.name)
        else:
            self._saved[index] = state["version"]
