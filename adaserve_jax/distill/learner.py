"""Learner: watches served texts, trains the drafts on them in idle time, and saves what they learned.

It runs in the step loop's thread: `stepped` after every step, `work` between steps. An error in it ends learning, never
serving. `records` collects texts, `updates` trains a draft and decides when a version may serve, and `pieces` decides
when training may run.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections import abc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adaserve_jax.distill.checkpoint import RecordFormat, TopicsFile
from adaserve_jax.distill.footprint import choose_length
from adaserve_jax.distill.heads import FIRST_POSITION, HeadTarget
from adaserve_jax.distill.pieces import PieceScheduler, measure_pieces
from adaserve_jax.distill.records import Record, TextRecorder, Watcher
from adaserve_jax.distill.routing import DraftRouter
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.updates import DraftUpdates, RecordBuffer
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.decoder import LORA_A, LORA_B
from adaserve_jax.results.provenance import weights_hash
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.scheduler.commit import StepUpdates
from adaserve_jax.stats import LearningStats
from adaserve_jax.types import CandidateTrees, DraftTrees, Progress, Sequence, StepOutcome, StepPlan

if TYPE_CHECKING:
    from adaserve_jax.distill.programs import TrainPrograms
    from adaserve_jax.models.decoder import Params
    from adaserve_jax.runtime.executor import ModelExecutor

SAVE_EVERY_S = 60.0
RECORDS = "records.npz"
TOPICS = "topics.json"
COUNTED = ("version", "updates", "refused", "rolled_back")
"""Fields of LearningStats that `DraftUpdates` counts by the same name."""
_log = logging.getLogger(__name__)


class Learner:
    """Trains the drafts of one executor on served texts. Call `prepare` once, before requests come; only `stats` is
    safe in any thread."""

    def __init__(
        self, executor: ModelExecutor, config: LearnConfig, calibrator: Calibrator | None = None,
        clock: Callable[[], float] = time.monotonic, *, seed: int = 0, topics: DraftRouter | None = None,
    ) -> None:  # fmt: skip
        """Set up a learner; nothing is compiled or read yet.

        calibrator: notified of new versions. seed: of draws from the buffer and the choice of held-out prompts. topics:
        a router whose learned topics are saved in learn_folder too.
        """
        self._executor = executor
        self._calibrator = calibrator
        self._clock = clock
        self._seed = seed
        self._topics = topics
        self._names = executor.draft_names
        assert executor.local_drafter is not None, "a LearnConfig comes with a draft"
        models = executor.target, executor.local_drafter.model
        self._teaches_head = executor.local_drafter.model.config.is_head
        top_k = min(config.learn_top_k, *(model.config.vocab_size for model in models))
        self._config = config = replace(config, learn_top_k=top_k)
        first = FIRST_POSITION if self._teaches_head else 0
        self._recorder = TextRecorder(top_k, held_out_share=config.learn_held_out, seed=seed, first=first)
        only_wrong = config.learn_positions == "wrong"
        self._watcher = Watcher(self._recorder, executor.capture, only_wrong=only_wrong)
        self._drafts: list[DraftUpdates] = []
        self._keeper: CheckpointSaver | None = None
        self._pieces: PieceScheduler  # set by `prepare`
        self.programs: TrainPrograms
        """Compiled programs of training, set by `prepare`."""
        self._drafted, self._accepted = (np.zeros(len(self._names), np.int64) for _ in range(2))
        self.failed = False
        """True once an error has ended learning."""

    def prepare(self, progress: Progress | None = None, programs: TrainPrograms | None = None) -> None:
        """Compile training, and load the checkpoints of learn_folder, whose versions serve from now on.

        programs: compiled for another learner of the same drafts; None: choose their length and compile them. Raises
        CheckpointError, ConfigError.
        """
        config, drafter = self._config, self._executor.local_drafter
        assert drafter is not None, "a LearnConfig comes with a draft"
        if programs is None:
            programs = choose_length(
                drafter.model.config, config, self._executor.resolved.dtype, counter=self._executor.compile_counter,
                progress=progress, target=self._head_target(),
            )  # fmt: skip
        self.programs = programs
        target = weights_hash(self._executor.target_folder)
        for index, name in enumerate(self._names):
            buffer = RecordBuffer(config.learn_buffer, config.learn_held_out, config.learn_tenant_share)
            trainer = Trainer(programs, self._executor.draft_params(index), target)
            rng = np.random.default_rng((self._seed, index))
            self._drafts.append(
                DraftUpdates(name, trainer, buffer, config, programs.num_tokens, self._serve_as(index), rng)
            )
        self._pieces = PieceScheduler(self._drafts, config, self._measure_pieces())
        if config.learn_folder is not None:
            vocab_size = self._executor.target.config.vocab_size
            texts = RecordFormat(config.learn_top_k, vocab_size, target, config.learn_temperature)
            self._keeper = CheckpointSaver(
                Path(config.learn_folder), self._drafts, self._clock, topics=self._topics,
                records=texts if config.learn_keep_records else None,
            )  # fmt: skip
            calibrator, self._calibrator = self._calibrator, None  # its table was saved with these versions
            self._keeper.load()
            self._calibrator = calibrator

    def _head_target(self) -> HeadTarget | None:
        """Return what a head reads of the target while it is trained; None for a draft model."""
        target = self._executor.target
        if not self._teaches_head:
            return None
        # room for adapters is left out: they are exchanged in place, and heads learn from the model alone
        params = {name: w for name, w in target.params.items() if not name.endswith((LORA_A, LORA_B))}
        return HeadTarget(target.config, params, target.placement)

    def _measure_pieces(self) -> dict[str, float]:
        """Measure the seconds of each kind of piece; warn of those that exceed learn_delay_ms."""
        executor = self._executor
        seconds = measure_pieces(
            self._drafts[0].trainer, self._config.learn_every,
            lambda _: executor.set_draft(executor.draft_params(0), 0),  # the weights that serve already
            self._clock,
        )  # fmt: skip
        longest_s = self._config.learn_delay_ms / 1e3
        seconds["accumulate"] = min(seconds["accumulate"], longest_s)  # as measured when the length was chosen
        long = [f"{kind} {1e3 * taken:.0f} ms" for kind, taken in seconds.items() if taken > longest_s]
        if long:
            _log.warning(
                "learning waits for times without requests, since some of it takes longer than learn_delay_ms (%g): %s",
                self._config.learn_delay_ms, ", ".join(long),
            )  # fmt: skip
        return seconds

    def added(self, choice: Sequence, *, learn: bool = True, tenant: str = "") -> None:
        """Begin to watch a choice. learn: whether its text may be learned from. tenant: account of the request."""
        with self._contained():
            if learn and not self.failed and choice.adapter and self._teaches_head:
                self._watcher.leave_out("adapter")  # a head is taught with features of the model without it
            elif learn and not self.failed:
                if self._watcher.is_waiting:  # perhaps for an earlier text with the same id
                    self._take_in()
                self._watcher.begin(choice, tenant)
            else:
                self._watcher.leave_out("failed" if learn else "opt_out")

    def dropped(self, choice_id: str, reason: str) -> None:
        """Stop watching a choice that ended outside a step; ignore one that is not watched."""
        with self._contained():
            if not self.failed:
                self._watcher.drop(choice_id, reason)

    def stepped(
        self, plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome,
        choice_ids: abc.Sequence[str], updates: StepUpdates, *, capture: bool,
    ) -> None:  # fmt: skip
        """Take in a committed step. Never waits for the device: what is captured is fetched after the next step.

        choice_ids: sequence id of each row. capture: whether to capture the target's scores of this step.
        """
        with self._contained():
            if self.failed:
                return
            self._take_in()
            self._count(plan, trees, candidates, outcome)
            if capture:
                self._watcher.ask(plan, trees, candidates, outcome, choice_ids)
            self._watcher.end(updates)

    def _take_in(self) -> None:
        for record in self._watcher.take_in():
            self._drafts[record.draft].add(record)

    def _count(self, plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome) -> None:
        """Count drafted and accepted tokens by draft, without those that only text already seen proposed."""
        if plan.draft is None or trees.num_nodes == plan.num_decode:
            return
        drafted = (trees.candidate >= 0) & (trees.candidate < candidates.token.shape[1])
        hits = outcome.accepted & drafted
        drafts = plan.draft.drafts
        if drafts is None:
            self._drafted[0] += np.count_nonzero(drafted)
            self._accepted[0] += np.count_nonzero(hits)
        else:
            number, whose = len(self._names), drafts[trees.row]
            self._drafted += np.bincount(whose[drafted], minlength=number)
            self._accepted += np.bincount(whose[hits], minlength=number)

    def work(self, slack_s: float | None) -> bool:
        """Run at most one piece of training; return False if none ran.

        While requests run, a piece that is expected to take longer than learn_delay_ms waits, until no request runs if
        need be, and so do all that follow it. slack_s: seconds by which the next step may be delayed; None: no request
        runs.
        """
        with self._contained():
            return not self.failed and self._work(slack_s)
        return False

    def _work(self, slack_s: float | None) -> bool:
        self._pieces.allowance.pass_time(self._clock(), busy=slack_s is not None)
        if self._keeper is not None:
            self._keeper.save_if_due()
        if slack_s is None:
            self._take_in()
        elif slack_s <= 0:
            return False
        copying = self._keeper is not None and self._keeper.is_copying
        if copying or not self._executor.draft_resident:
            return False
        return self._pieces.run(slack_s, self._clock)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do while no request runs."""
        return self.failed or not (self._watcher.is_waiting or self._pieces.is_due or self.idle_for_s == 0)

    @property
    def idle_for_s(self) -> float | None:
        """Seconds until an idle learner has something to do; None: not before requests come."""
        return None if self.failed or self._keeper is None else self._keeper.idle_for_s

    def _serve_as(self, draft: int) -> Callable[[Params], None]:
        def serve(params: Params) -> None:
            self._executor.set_draft(params, draft)
            if self._calibrator is not None:
                self._calibrator.new_version()

        return serve

    def stats(self) -> LearningStats:
        """Return current statistics. Safe in any thread."""
        drafts, pieces, recorder = self._drafts, self._pieces, self._recorder
        counts = {name: {draft.name: getattr(draft, name) for draft in drafts} for name in COUNTED}
        return LearningStats(
            **counts,
            drafted_tokens=dict(zip(self._names, self._drafted.tolist(), strict=True)),
            accepted_tokens=dict(zip(self._names, self._accepted.tolist(), strict=True)),
            held_out_acceptance={draft.name: draft.acceptance for draft in drafts if draft.acceptance is not None},
            loss={draft.name: draft.loss for draft in drafts if draft.loss is not None},
            records={draft.name: len(draft.buffer) for draft in drafts},
            held_out={draft.name: draft.buffer.num_held_out for draft in drafts},
            left_out=dict(self._watcher.left_out),
            micro_steps=pieces.count, train_s=pieces.train_s, delay_s=pieces.delay_s, delay_max_s=pieces.delay_max_s,
            target_tokens=recorder.kept,
            lost={"no_room": recorder.no_room, "not_finite": recorder.not_finite},
        )  # fmt: skip

    def close(self) -> None:
        """Drop unfinished training, save the rest, even after learning failed, and release what training held. Only
        without requests."""
        with self._contained():
            if not self.failed:
                self._take_in()
        with self._contained():
            if self._keeper is not None:
                self._keeper.close()
        self.release()

    def release(self) -> None:
        """Release the memory of training and the folder, without writing. Again: nothing."""
        for draft in self._drafts:
            draft.trainer.close()
        if self._keeper is not None:
            self._keeper.unlock()

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Turn an error into the end of learning: the versions in force go on serving."""
        try:
            yield
        except Exception:
            _log.exception("learning has stopped; the versions of drafts that serve now go on serving")
            self.failed = True
            self._pieces.stop()
            self._watcher.stop("failed")


class CheckpointSaver:
    """Saves what the drafts of one learner learned, a folder per draft, so that a restart goes on from it.

    A thread of its own writes one draft after the other, so that the host has room for the state of one; training waits
    only while that is copied. Not thread-safe.
    """

    def __init__(
        self, folder: Path, drafts: abc.Sequence[DraftUpdates], clock: Callable[[], float], *,
        topics: DraftRouter | None = None, records: RecordFormat | None = None,
    ) -> None:  # fmt: skip
        """Set up saving in learn_folder; `load` makes the folders. records: None: no text reaches the disk."""
        self._folder = folder
        self._drafts = drafts
        self._clock = clock
        self._topics = TopicsFile(folder / TOPICS, topics) if topics is not None and topics.to_state() else None
        self._records = records
        self._saved_at = clock()
        self._saved = [0] * len(drafts)
        self._to_save: list[int] = []
        """Drafts of this round of saving that are not written yet."""
        self._writer = ThreadPoolExecutor(1, "learn-saver")
        self._writing: Future[None] | None = None
        self._copied = threading.Event()
        self._locks = ExitStack()

    def load(self) -> None:
        """Lock the folders until `unlock`, and load what was saved; those versions serve from now on.

        Raises CheckpointError if a checkpoint cannot be read or is of other drafts, ConfigError if the folder cannot be
        written, or another engine learns into it.
        """
        with ExitStack() as locks:
            self._load(locks)
            self._locks = locks.pop_all()

    def _load(self, locks: ExitStack) -> None:
        import orbax.checkpoint  # noqa: F401  takes seconds, which no step should wait for later

        for index, draft in enumerate(self._drafts):
            folder = self._folder / draft.name
            self._make(folder, locks)
            if self._records is not None and (folder / RECORDS).exists():
                try:
                    draft.buffer.extend(self._records.load(folder / RECORDS, index))
                except CheckpointError as error:
                    _log.error("%s", error)
            state = draft.trainer.load(folder)
            if state is None:
                continue
            try:
                draft.restore(state)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{folder}: its checkpoint is not one of a draft that learned while it served ({error!r}); move it "
                    "away, or choose another learn_folder"
                ) from error
            self._saved[index] = draft.version
            _log.info("draft %s goes on from version %d in %s", draft.name, draft.version, folder)
        if self._topics is not None:
            self._topics.load()

    def _make(self, folder: Path, locks: ExitStack) -> None:
        """Make a folder, lock it, and remove cut-off writes and texts that must not be kept."""
        try:
            for each in (self._folder, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = locks.enter_context((self._folder / f".{folder.name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process too
            unwanted = [*folder.glob(f".{RECORDS}.*"), *self._folder.glob(f".{TOPICS}.*")]
            if self._records is None:
                unwanted.append(folder / RECORDS)
            for path in unwanted:
                path.unlink(missing_ok=True)
        except BlockingIOError:
            raise ConfigError(
                f"learn_folder: another engine learns into {folder}; end it, or choose another folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"learn_folder: {folder} cannot be made ready ({error}); choose another folder"
            ) from error

    @property
    def is_copying(self) -> bool:
        """True while trainers must not change, since the writer copies their state."""
        return self._is_writing and not self._copied.is_set()

    @property
    def idle_for_s(self) -> float | None:
        """Seconds until `save_if_due` has something to do; None: not before another version is confirmed."""
        if self._is_writing or self._to_save:
            return 0.0
        return max(0.0, self._saved_at + SAVE_EVERY_S - self._clock()) if self._new() else None

    def save_if_due(self) -> None:
        """Begin to write the next confirmed version that is new, once SAVE_EVERY_S have passed since the first one."""
        if self._is_writing:
            return
        if not self._to_save and self._clock() - self._saved_at >= SAVE_EVERY_S:
            self._begin_round()
        if self._to_save and not self._is_writing:  # topics are written first
            self._begin(self._to_save.pop(0))

    def close(self) -> None:
        """Write what is new. An unfinished update is dropped; a version on probation counts as good. An error is logged
        and does not keep the rest from being written."""
        with closing(self._locks):
            if self._writing is not None:
                wait([self._writing])
            for draft in self._drafts:
                try:
                    draft.settle()
                except Exception:
                    _log.exception("draft %s: its last update could not be left; the good version is kept", draft.name)
            try:
                self._begin_round()
                for index in self._to_save:
                    self._begin(index)
            finally:
                self._writer.shutdown()
            for index, draft in enumerate(self._drafts):
                if index not in self._to_save:
                    self._save_records(draft.name, list(draft.buffer))

    def unlock(self) -> None:
        """Let other engines learn into the folders."""
        self._locks.close()

    def _begin_round(self) -> None:
        self._saved_at, self._to_save = self._clock(), self._new()
        if self._topics is not None:
            self._writing = self._writer.submit(self._topics.save)

    def _begin(self, index: int) -> None:
        draft = self._drafts[index]
        self._copied.clear()
        self._writing = self._writer.submit(self._save, index, draft.state(), list(draft.buffer))

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _new(self) -> list[int]:
        return [index for index, draft in enumerate(self._drafts) if draft.good_version != self._saved[index]]

    def _save(self, index: int, state: dict[str, Any], records: list[Record]) -> None:
        """Write a checkpoint in the writer's thread; log what fails, so that learning goes on."""
        draft = self._drafts[index]
        try:
            snapshot = draft.trainer.snapshot()
            self._copied.set()
            snapshot.save(self._folder / draft.name, state["version"], state)
            self._saved[index] = state["version"]
        except Exception:
            _log.exception("what draft %s learned could not be written", draft.name)
        self._save_records(draft.name, records)

    def _save_records(self, name: str, records: list[Record]) -> None:
        """Write the records of a draft if they are to be kept; log what fails."""
        if self._records is not None:
            try:
                self._records.save(self._folder / name / RECORDS, records)
            except (OSError, MemoryError) as error:
                _log.error("records could not be written to %s: %s", self._folder / name, error)
