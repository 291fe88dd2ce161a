"""The learner: watches what is served, trains the drafts on it in spare time, and lets versions that passed serve.

Runs in the step loop's thread: `stepped` after every step, `work` between steps. What goes wrong in here ends learning,
never serving. Which texts are kept, how a draft is trained and when a version may serve is decided next door.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adaserve_jax.distill.buffer import Buffer
from adaserve_jax.distill.keeping import Keeper, RecordFiles
from adaserve_jax.distill.kept_file import Kept
from adaserve_jax.distill.lengths import choose_length
from adaserve_jax.distill.measuring import measure_pieces
from adaserve_jax.distill.pieces import Pieces
from adaserve_jax.distill.record_file import Source
from adaserve_jax.distill.records import Recorder
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.updates import DraftUpdates
from adaserve_jax.distill.watching import Watcher
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.results.provenance import model_hash
from adaserve_jax.scheduler.calibration import Calibrator
from adaserve_jax.scheduler.updates import StepUpdates
from adaserve_jax.stats import LearningStats
from adaserve_jax.types import CandidateTrees, DraftTrees, Progress, Request, StepOutcome, StepPlan

if TYPE_CHECKING:
    from adaserve_jax.models.decoder import Params
    from adaserve_jax.runtime.executor import ModelExecutor

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

    def added(self, choice: Request, *, learn: bool = True, tenant: str = "") -> None:
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
        choice_ids: Sequence[str], updates: StepUpdates, *, capture: bool,
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
    def rests(self) -> bool:
        """Whether there is nothing left to do while nothing runs."""
        if self.failed:
            return True
        return not (self._watcher.is_waiting or self._pieces.is_due or self.wakes_in_s == 0)

    @property
    def wakes_in_s(self) -> float | None:
        """For how long that can be left so; None: until requests come."""
        return None if self.failed or self._keeper is None else self._keeper.wakes_in_s

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
