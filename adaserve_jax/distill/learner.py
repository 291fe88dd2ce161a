"""The learner: watches what is served, trains the drafts on it in spare time, and lets versions that passed serve.

Runs in the step loop's thread: `stepped` after every step, `work` between steps. What goes wrong in here ends learning,
never serving. Which texts are kept, how a draft is trained and when a version may serve is decided next door.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import abc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adaserve_jax.distill.checkpoint import Kept, KeptFile, Snapshot, Source, load_records, save_records
from adaserve_jax.distill.footprint import choose_length
from adaserve_jax.distill.pieces import Pieces, measure_pieces
from adaserve_jax.distill.records import Record, Recorder, Watcher
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.updates import Buffer, DraftUpdates
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.results.provenance import model_hash
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.scheduler.commit import StepUpdates
from adaserve_jax.stats import LearningStats
from adaserve_jax.types import CandidateTrees, DraftTrees, Progress, Sequence, StepOutcome, StepPlan

if TYPE_CHECKING:
    from adaserve_jax.models.decoder import Params
    from adaserve_jax.runtime.executor import ModelExecutor

# Keeps what was learned in learn_folder, so that a restart goes on from it: a folder per draft. Knows no
# requests.
#
# A thread of its own writes; training waits only while it copies what is to be written to the host.

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

    def save(self, folder: Path, records: abc.Sequence[Record]) -> None:
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
        self, folder: Path, drafts: abc.Sequence[DraftUpdates], clock: Callable[[], float], *,
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
    def idle_for_s(self) -> float | None:
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


_log = logging.getLogger(__name__)


class Learner:
    """Learns for the drafts of one executor. Call `prepare` once, before requests come; all but `stats` from one thread
    at a time.

    calibrator: told of new versions; None: nobody is. seed: of what is drawn from the buffer, and of who is held out.
    beside: what else is kept in learn_folder.
    """

    def __init__(
        self, executor: ModelExecutor, config: LearnConfig, calibrator: Calibrator | None = None,
        clock: Callable[[], float] = time.monotonic, *, seed: int = 0, beside: Kept | None = None,
    ) -> None:  # fmt: skip
        self._executor = executor
        self._config = config
        self._calibrator = calibrator
        self._clock = clock
        self._seed = seed
        self._beside = beside
        self._names = executor.draft_names
        self._top_k = min(config.learn_top_k, executor.target.config.vocab_size)
        recorder = Recorder(self._top_k, held_out_share=config.learn_held_out, seed=seed)
        only_overruled = config.learn_positions == "overruled"
        self._watcher = Watcher(recorder, executor.capture, only_overruled=only_overruled)
        self._drafts: list[DraftUpdates] = []
        self._keeper: Keeper | None = None
        self._pieces: Pieces  # made by `prepare`, once all drafts are there
        self._drafted, self._accepted = (np.zeros(len(self._names), np.int64) for _ in range(2))
        self.failed = False
        """Whether learning has ended because something went wrong."""

    def prepare(self, progress: Progress | None = None) -> None:
        """Compile what training needs, and go on from the checkpoints in learn_folder, whose versions serve from now
        on. Raises CheckpointError, ConfigError."""
        config, drafter = self._config, self._executor.local_drafter
        assert drafter is not None, "a LearnConfig comes with a draft"
        programs = choose_length(
            drafter.model.config, config, self._executor.resolved.dtype, counter=self._executor.compile_counter,
            progress=progress,
        )  # fmt: skip
        target = model_hash(self._executor.target_folder)
        for index, name in enumerate(self._names):
            buffer = Buffer(config.learn_buffer, config.learn_held_out, config.learn_tenant_share)
            trainer = Trainer(programs, self._executor.draft_params(index), target)
            rng = np.random.default_rng((self._seed, index))
            self._drafts.append(
                DraftUpdates(name, trainer, buffer, config, programs.num_tokens, self._serve_as(index), rng)
            )
        self._pieces = Pieces(self._drafts, config, self._measured())
        if config.learn_folder is not None:
            source = Source(target, config.learn_temperature)
            texts = RecordFiles(self._top_k, self._executor.target.config.vocab_size, source)
            self._keeper = Keeper(
                Path(config.learn_folder), self._drafts, self._clock, beside=self._beside,
                records=texts if config.learn_keep_records else None,
            )  # fmt: skip
            calibrator, self._calibrator = self._calibrator, None  # it begins with the table of what is read here
            self._keeper.load()
            self._calibrator = calibrator

    def _measured(self) -> dict[str, float]:
        """Seconds of each kind of piece."""

        def serve(_: Params) -> None:
            self._executor.set_draft(self._executor.draft_params(0), 0)  # the weights that serve anyway

        seconds = measure_pieces(self._drafts[0].trainer, self._config.learn_every, serve)
        longest_s = self._config.learn_delay_ms / 1e3
        seconds["accumulate"] = min(seconds["accumulate"], longest_s)  # as it was when its length was chosen
        long = [f"{kind} {1e3 * taken:.0f} ms" for kind, taken in seconds.items() if taken > longest_s]
        if long:
            _log.warning(
                "learning waits for times without requests, since some of it takes longer than learn_delay_ms (%g): %s",
                self._config.learn_delay_ms, ", ".join(long),
            )  # fmt: skip
        return seconds

    # ---- what is served ----

    def added(self, choice: Sequence, *, learn: bool = True, tenant: str = "") -> None:
        """A choice of a user's request is going to run. learn: whether its text may be learned from. tenant: whose it
        is."""
        with self._contained():
            if learn and not self.failed:
                if self._watcher.is_waiting:  # maybe for a text that had the same id
                    self._take_in()
                self._watcher.begin(choice, tenant)
            else:
                self._watcher.leave_out("failed" if learn else "opt_out")

    def dropped(self, choice_id: str, reason: str) -> None:
        """A choice has ended outside a step. Nothing happens where it is not watched."""
        with self._contained():
            if not self.failed:
                self._watcher.drop(choice_id, reason)

    def stepped(
        self, plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome,
        choice_ids: abc.Sequence[str], updates: StepUpdates, *, capture: bool,
    ) -> None:  # fmt: skip
        """A step was committed. choice_ids: of its rows. capture: whether to ask what the target thought in it, which
        is fetched after the next step. Runs nothing that the step loop would have to wait for."""
        with self._contained():
            if self.failed:
                return
            self._take_in()
            self._count(plan, trees, outcome)
            if capture:
                self._watcher.ask(plan, trees, candidates, outcome, choice_ids)
            self._watcher.end(updates)

    def _take_in(self) -> None:
        for record in self._watcher.take_in():
            self._drafts[record.draft].add(record)

    def _count(self, plan: StepPlan, trees: DraftTrees, outcome: StepOutcome) -> None:
        """Drafted and accepted tokens, by draft."""
        if trees.num_nodes == plan.num_decode:
            return
        drafted = trees.parent >= 0
        hits = outcome.accepted & drafted
        drafts = None if plan.draft is None else plan.draft.drafts
        if drafts is None:
            self._drafted[0] += trees.num_nodes - plan.num_decode
            self._accepted[0] += np.count_nonzero(hits)
        else:
            number, whose = len(self._names), drafts[trees.row]
            self._drafted += np.bincount(whose[drafted], minlength=number)
            self._accepted += np.bincount(whose[hits], minlength=number)

    # ---- between steps ----

    def work(self, spare_s: float | None) -> bool:
        """Do at most one piece of training, where there is time for one. spare_s: by how many seconds the next step may
        be put off; None: nothing runs. False: nothing was done. While requests run, a piece that is expected to take
        longer than learn_delay_ms waits, if need be until nothing runs, and so does all that comes after it."""
        with self._contained():
            return not self.failed and self._work(spare_s)
        return False

    def _work(self, spare_s: float | None) -> bool:
        self._pieces.pass_time(self._clock(), busy=spare_s is not None)
        if self._keeper is not None:
            self._keeper.save_if_due()
        if spare_s is None:
            self._take_in()
        elif spare_s <= 0:
            return False
        copying = self._keeper is not None and self._keeper.is_copying
        if copying or not self._executor.draft_resident:
            return False
        return self._pieces.run(spare_s, self._clock)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to do while nothing runs."""
        if self.failed:
            return True
        return not (self._watcher.is_waiting or self._pieces.is_due or self.idle_for_s == 0)

    @property
    def idle_for_s(self) -> float | None:
        """For how long that can be left so; None: until requests come."""
        return None if self.failed or self._keeper is None else self._keeper.idle_for_s

    def _serve_as(self, draft: int) -> Callable[[Params], None]:
        def serve(params: Params) -> None:
            self._executor.set_draft(params, draft)
            if self._calibrator is not None:
                self._calibrator.new_version()

        return serve

    # ---- the rest ----

    def stats(self) -> LearningStats:
        """As of now. Safe in any thread."""
        drafts = {draft.name: draft for draft in self._drafts}
        pieces = self._pieces
        return LearningStats(
            version={name: draft.version for name, draft in drafts.items()},
            drafted_tokens=dict(zip(self._names, self._drafted.tolist(), strict=True)),
            accepted_tokens=dict(zip(self._names, self._accepted.tolist(), strict=True)),
            held_out_acceptance={name: draft.acceptance for name, draft in drafts.items()
                                 if draft.acceptance is not None},
            loss={name: draft.loss for name, draft in drafts.items() if draft.loss is not None},
            updates={name: draft.updates for name, draft in drafts.items()},
            refused={name: draft.refused for name, draft in drafts.items()},
            rolled_back={name: draft.rolled_back for name, draft in drafts.items()},
            records={name: len(draft.buffer) for name, draft in drafts.items()},
            held_out={name: draft.buffer.num_held_out for name, draft in drafts.items()},
            left_out=dict(self._watcher.left_out),
            micro_steps=pieces.count,
            train_s=pieces.train_s,
            delay_s=pieces.delay_s,
            delay_max_s=pieces.delay_max_s,
            target_tokens=self._watcher.rows_kept,
            lost=self._watcher.rows_lost,
        )  # fmt: skip

    def close(self) -> None:
        """Leave what is under way, and keep the rest where learn_folder says, also what was learned before learning
        failed. Only without requests."""
        with self._contained():
            if not self.failed:
                self._take_in()
        with self._contained():
            if self._keeper is not None:
                self._keeper.close()

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """What is raised in here is no reason to stop serving: the versions in force stay, and learning ends."""
        try:
            yield
        except Exception:
            _log.exception("learning has stopped; the versions of drafts that serve now go on serving")
            self.failed = True
            self._pieces.stop()
            self._watcher.stop("failed")
