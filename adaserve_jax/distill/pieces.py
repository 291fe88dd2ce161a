"""Which piece of training is next, and whether there is time for it. Knows no request, no text and no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adaserve_jax.distill.schedule import Allowance, PieceTimes
from adaserve_jax.distill.updates import DraftUpdates, PieceKind
from adaserve_jax.learn_config import LearnConfig


class Pieces:
    """Those of drafts in turn, run one at a time. drafts: may grow before the first.

    times: what pieces are expected to take. longest_s: most that one may delay a step, learn_delay_ms. count, train_s:
    those that ran, and their seconds; delay_s, delay_max_s: of those that ran while requests did, and of the longest.
    """

    def __init__(self, drafts: Sequence[DraftUpdates], config: LearnConfig) -> None:
        self.times = PieceTimes({})
        self.longest_s = config.learn_delay_ms / 1e3
        self.allowance = Allowance(config.learn_share)
        self.count = 0
        self.train_s = self.delay_s = self.delay_max_s = 0.0
        self._drafts = drafts
        self._run: Iterator[PieceKind] | None = None
        self._running = 0
        """Index of the draft whose `run` that is, or was."""
        self._next: PieceKind | None = None

    @property
    def is_due(self) -> bool:
        return self._next is not None or any(draft.due for draft in self._drafts)

    def find(self, spare_s: float | None) -> PieceKind | None:
        """The next one, where there is any and time for it; spare_s as `Learner.work` has it."""
        if self._next is None:
            self._begin()
        kind = self._next
        return kind if kind is not None and (spare_s is None or self._fits(kind, spare_s)) else None

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
        if not self.allowance.is_open:
            return False
        if self.times.expected_s(kind) > min(spare_s, self.longest_s):
            self.times.refused(kind)
            return False
        return True

    def run(self) -> None:
        """Run the one that was found."""
        assert self._run is not None
        self._next = next(self._run, None)

    def took(self, kind: PieceKind, seconds: float, *, delayed: bool) -> None:
        """So long; delayed: while requests ran."""
        self.times.took(kind, seconds)
        self.count += 1
        self.train_s += seconds
        if delayed:
            self.allowance.spend(seconds)
            self.delay_s += seconds
            self.delay_max_s = max(self.delay_max_s, seconds)

    def stop(self) -> None:
        """Leave what is under way."""
        self._run, self._next = None, None
