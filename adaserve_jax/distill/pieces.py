"""Which piece of training is next, and whether there is time for it. Knows no request and no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from adaserve_jax.distill.schedule import Allowance, PieceTimes
from adaserve_jax.distill.updates import DraftUpdates, PieceKind
from adaserve_jax.learn_config import LearnConfig


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
