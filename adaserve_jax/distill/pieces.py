"""Which piece of training is next, and whether there is time for it. Knows no request and no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from adaserve_jax.distill.records import Record, pack
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.updates import DraftUpdates, PieceKind
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.decoder import Params

# When a piece of training may run: what it will take, and what share of the time it has taken. Knows no draft.

TIME_RATE = 0.2
"""Weight of a new piece in the expected seconds of its kind."""
MOST_RISE = 2.0
"""What a piece took counts up to so many times what was expected: one that met something else says little of its kind.
"""
FORGET_RATE = 0.02
"""Share of the expected seconds that is forgotten whenever a piece is refused because of them."""
LEAST_S = 1e-5
"""What any piece is expected to take, at least."""


class PieceTimes:
    """Expected seconds of a piece of training, by kind. first_s: measured before requests came.

    A kind that does not run shows nothing of how long it takes, so what is expected of it returns to what was measured,
    never below, while it is refused.
    """

    def __init__(self, first_s: Mapping[str, float]):
        self._first_s = {kind: max(seconds, LEAST_S) for kind, seconds in first_s.items()}
        self._expected_s = dict(self._first_s)

    def expected_s(self, kind: str) -> float:
        return self._expected_s[kind]

    def took(self, kind: str, seconds: float) -> None:
        before = self._expected_s[kind]
        self._expected_s[kind] += TIME_RATE * (min(seconds, MOST_RISE * before) - before)

    def refused(self, kind: str) -> None:
        """It would have run but for what is expected of it."""
        before, first = self._expected_s[kind], self._first_s[kind]
        self._expected_s[kind] = min(before, max(first, (1 - FORGET_RATE) * before))


class Allowance:
    """Keeps training to `share` of the time in which requests run: a piece is a debt, which that time pays back. So in
    any stretch of it, training takes no more than that share and one piece."""

    def __init__(self, share: float):
        self._share = share
        self._debt_s = 0.0
        self._busy_since: float | None = None

    def pass_time(self, now: float, *, busy: bool) -> None:
        """Until now requests ran, if they did when this was last called. busy: whether they run from now on."""
        if self._busy_since is not None:
            self._debt_s = max(0.0, self._debt_s - self._share * (now - self._busy_since))
        self._busy_since = now if busy else None

    @property
    def is_open(self) -> bool:
        """Whether a piece may begin while requests run."""
        return self._share > 0 and not self._debt_s

    def spend(self, seconds: float) -> None:
        """A piece has delayed requests."""
        self._debt_s += seconds


class Pieces:
    """Those of drafts in turn, run one at a time. times: seconds that each kind took when it was measured.

    count, train_s: those that ran, and their seconds; delay_s, delay_max_s: of those that ran while requests did, and
    of the longest.
    """

    def __init__(self, drafts: Sequence[DraftUpdates], config: LearnConfig, times: Mapping[str, float]) -> None:
        self.count = 0
        self.train_s = self.delay_s = self.delay_max_s = 0.0
        self._drafts = drafts
        self._longest_s = config.learn_delay_ms / 1e3
        self._times = PieceTimes(times)
        self._allowance = Allowance(config.learn_share)
        self._run: Iterator[PieceKind] | None = None
        self._running = 0
        """Index of the draft whose `run` that is, or was."""
        self._next: PieceKind | None = None

    @property
    def is_due(self) -> bool:
        return self._next is not None or any(draft.due for draft in self._drafts)

    def pass_time(self, now: float, *, busy: bool) -> None:
        """Until now requests ran, if they did when this was last called. busy: whether they run from now on."""
        self._allowance.pass_time(now, busy=busy)

    def run(self, spare_s: float | None, clock: Callable[[], float]) -> bool:
        """Run the next one, where there is any and time for it; False: nothing ran. spare_s as `Learner.work` has it.
        clock: that of `pass_time`."""
        if self._next is None:
            self._begin()
        kind = self._next
        if kind is None or (spare_s is not None and not self._fits(kind, spare_s)):
            return False
        assert self._run is not None
        started = clock()
        self._next = next(self._run, None)
        self._took(kind, clock() - started, delayed=spare_s is not None)
        return True

    def _begin(self) -> None:
        """Look after the drafts in turn, from the one after that which had the last piece."""
        for offset in range(1, len(self._drafts) + 1):
            index = (self._running + offset) % len(self._drafts)
            if self._drafts[index].due:
                self._run, self._running = self._drafts[index].run(), index
                self._next = next(self._run, None)  # announces the first piece, and does nothing yet
                return

    def _fits(self, kind: PieceKind, spare_s: float) -> bool:
        """Whether a piece may run although requests do."""
        if not self._allowance.is_open:
            return False
        if self._times.expected_s(kind) > min(spare_s, self._longest_s):
            self._times.refused(kind)
            return False
        return True

    def _took(self, kind: PieceKind, seconds: float, *, delayed: bool) -> None:
        """delayed: while requests ran."""
        self._times.took(kind, seconds)
        self.count += 1
        self.train_s += seconds
        if delayed:
            self._allowance.spend(seconds)
            self.delay_s += seconds
            self.delay_max_s = max(self.delay_max_s, seconds)

    def stop(self) -> None:
        """Leave what is under way."""
        self._run, self._next = None, None


# What each kind of piece of training takes on this machine, measured before requests come. Knows no requests.

TIMED_RUNS = 2
"""Of each kind; the quicker one counts."""


def measure_pieces(trainer: Trainer, num_records: int, serve: Callable[[Params], None]) -> dict[str, float]:
    """Seconds of each kind of piece. trainer: whose weights are its good ones, as they are again afterwards.
    num_records: of one optimiser step. serve: takes weights as `DraftUpdates` hands them on."""
    num_tokens, rng = trainer.programs.num_tokens, np.random.default_rng(0)
    records = [_full_record(num_tokens, trainer.programs.top_k)] * num_records
    batch = pack(records[:1], num_tokens, rng)[0]
    pieces: dict[PieceKind, Callable[[], object]] = {
        "pack": lambda: pack(records, num_tokens, rng),
        "accumulate": lambda: trainer.accumulate(batch),
        "apply": trainer.apply,
        "check": lambda: trainer.evaluate(batch),
        "copy": trainer.back_to_good,
        "publish": lambda: serve(trainer.weights()),
    }
    taken: dict[PieceKind, list[float]] = {kind: [] for kind in pieces}
    for _ in range(TIMED_RUNS):
        for kind, run in pieces.items():
            started = time.perf_counter()
            run()
            taken[kind].append(time.perf_counter() - started)
    return {kind: min(seconds) for kind, seconds in taken.items()}


def _full_record(num_tokens: int, top_k: int) -> Record:
    """A text as long as a micro-step, with a row wherever there can be one."""
    position = np.arange(num_tokens - 1, dtype=np.int32)
    ids = np.tile(np.arange(top_k, dtype=np.int32), (len(position), 1))
    log_p = np.full(ids.shape, -np.log(top_k + 1), np.float32)
    return Record(np.zeros(num_tokens, np.int32), position, ids, log_p)
