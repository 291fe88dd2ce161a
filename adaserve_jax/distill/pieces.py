"""Scheduling of training pieces: which piece runs next, and whether there is time for it beside requests.

A piece is what training does without interruption: a micro-step, an optimiser step, a check, a copy of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from adaserve_jax.distill.records import Record, pack
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.updates import DraftUpdates, PieceKind
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.decoder import Params

TIME_RATE = 0.2
"""Weight of a new piece in the expected seconds of its kind."""
MAX_RISE = 2.0
"""Cap of a measured time, as a multiple of the expected one, against outliers."""
FORGET_RATE = 0.02
"""Share by which the expected seconds fall whenever a piece is refused because of them."""
MIN_EXPECTED_S = 1e-5
TIMED_RUNS = 2
"""Measured runs of each kind of piece; the quicker one counts."""


class PieceTimes:
    """Expected seconds of a piece of training, by kind. first_s: measured before requests came.

    A kind that is refused is not measured either, so its expected time slowly returns to `first_s`.
    """

    def __init__(self, first_s: Mapping[str, float]):
        self._first_s = {kind: max(seconds, MIN_EXPECTED_S) for kind, seconds in first_s.items()}
        self._expected_s = dict(self._first_s)

    def expected_s(self, kind: str) -> float:
        return self._expected_s[kind]

    def took(self, kind: str, seconds: float) -> None:
        before = self._expected_s[kind]
        self._expected_s[kind] += TIME_RATE * (min(seconds, MAX_RISE * before) - before)

    def refused(self, kind: str) -> None:
        """Lower the expected seconds of a kind that was refused because of them."""
        before, first = self._expected_s[kind], self._first_s[kind]
        self._expected_s[kind] = min(before, max(first, (1 - FORGET_RATE) * before))


class Allowance:
    """Limits training to `share` of the time in which requests run.

    The seconds of a piece are a debt that busy time pays back, so in any interval training takes at most that share and
    one piece more.
    """

    def __init__(self, share: float):
        self._share = share
        self._debt_s = 0.0
        self._busy_since: float | None = None

    def pass_time(self, now: float, *, busy: bool) -> None:
        """Account for the time since the last call. busy: whether requests run from now on."""
        if self._busy_since is not None:
            self._debt_s = max(0.0, self._debt_s - self._share * (now - self._busy_since))
        self._busy_since = now if busy else None

    @property
    def is_open(self) -> bool:
        """True if a piece may begin while requests run."""
        return self._share > 0 and not self._debt_s

    def spend(self, seconds: float) -> None:
        self._debt_s += seconds


class PieceScheduler:
    """Runs pieces of training one at a time, with the drafts taking turns.

    times: measured seconds of each kind of piece. count: pieces that ran. train_s: their seconds. delay_s, delay_max_s:
    seconds of those that ran while requests did, in all and of the longest.
    """

    def __init__(self, drafts: Sequence[DraftUpdates], config: LearnConfig, times: Mapping[str, float]) -> None:
        self.count = 0
        self.train_s = self.delay_s = self.delay_max_s = 0.0
        self.allowance = Allowance(config.learn_share)
        self._drafts = drafts
        self._longest_s = config.learn_delay_ms / 1e3
        self._times = PieceTimes(times)
        self._run: Iterator[PieceKind] | None = None
        self._running = 0
        """Index of the draft of the current or last run."""
        self._next: PieceKind | None = None

    @property
    def is_due(self) -> bool:
        return self._next is not None or any(draft.due for draft in self._drafts)

    def run(self, slack_s: float | None, clock: Callable[[], float]) -> bool:
        """Run the next piece if there is one and time for it; return False if none ran. slack_s: see `Learner.work`."""
        if self._next is None:
            self._begin()
        kind = self._next
        if kind is None or (slack_s is not None and not self._fits(kind, slack_s)):
            return False
        assert self._run is not None
        started = clock()
        self._next = next(self._run, None)
        self._took(kind, clock() - started, delayed=slack_s is not None)
        return True

    def _begin(self) -> None:
        """Begin the next run that is due, taking drafts in turn."""
        for offset in range(1, len(self._drafts) + 1):
            index = (self._running + offset) % len(self._drafts)
            if self._drafts[index].due:
                self._run, self._running = self._drafts[index].run(), index
                self._next = next(self._run, None)  # announces the first piece, and does nothing yet
                return

    def _fits(self, kind: PieceKind, slack_s: float) -> bool:
        """Return True if a piece may run beside requests."""
        if not self.allowance.is_open:
            return False
        if self._times.expected_s(kind) > min(slack_s, self._longest_s):
            self._times.refused(kind)
            return False
        return True

    def _took(self, kind: PieceKind, seconds: float, *, delayed: bool) -> None:
        """Count a piece that ran. delayed: requests ran meanwhile."""
        self._times.took(kind, seconds)
        self.count += 1
        self.train_s += seconds
        if delayed:
            self.allowance.spend(seconds)
            self.delay_s += seconds
            self.delay_max_s = max(self.delay_max_s, seconds)

    def stop(self) -> None:
        self._run, self._next = None, None


def measure_pieces(
    trainer: Trainer, num_records: int, serve: Callable[[Params], None], clock: Callable[[], float]
) -> dict[str, float]:
    """Measure the seconds of each kind of piece on this machine, before requests come.

    trainer: its weights are the good ones, before and after. num_records: of one optimiser step. clock: of the learner.
    """
    num_tokens, rng = trainer.programs.num_tokens, np.random.default_rng(0)
    records = [_full_record(num_tokens, trainer.programs.top_k)] * num_records
    batch = pack(records[:1], num_tokens, rng)[0]
    pieces: dict[PieceKind, Callable[[], object]] = {
        "pack": lambda: pack(records, num_tokens, rng),
        "accumulate": lambda: trainer.accumulate(batch),
        "apply": trainer.apply,
        "check": lambda: trainer.evaluate(batch),
        "copy": trainer.restore_good,
        "publish": lambda: serve(trainer.weights()),
    }
    taken: dict[PieceKind, list[float]] = {kind: [] for kind in pieces}
    for _ in range(TIMED_RUNS):
        for kind, run in pieces.items():
            started = clock()
            run()
            taken[kind].append(clock() - started)
    return {kind: min(seconds) for kind, seconds in taken.items()}


def _full_record(num_tokens: int, top_k: int) -> Record:
    """Make a record that fills a micro-step, with a row at every position that can have one."""
    position = np.arange(num_tokens - 1, dtype=np.int32)
    ids = np.tile(np.arange(top_k, dtype=np.int32), (len(position), 1))
    log_p = np.full(ids.shape, -np.log(top_k + 1), np.float32)
    return Record(np.zeros(num_tokens, np.int32), position, ids, log_p)
