"""Learns the chances of the acceptance table from what verifications show, and measures how honest they are.

Knows no request, policy or file; the plan carries a new table to the draft.
"""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.results.calibration_error import CalibrationSums, expected_calibration_error
from adaserve_jax.scheduler.chance_fit import fit
from adaserve_jax.tree.chances import MODES, ChanceTable, Learned
from adaserve_jax.types import CandidateTrees, DraftTrees

HALF_LIFE = 4_000.0
"""Outcomes of a mode after which an outcome counts half."""
REFIT_STEPS = 32
"""Steps that brought outcomes between two fits."""
FIRST_STEPS = 8
"""Steps before the first fit; each later one takes twice as many, up to REFIT_STEPS."""
PREDICTIONS = ("raw", "loaded", "online")
"""What is measured side by side: the draft's probability, the table of the start, the table in force."""


class Calibrator:
    """Conditional acceptance, that of a node whose parent was accepted, counted by mode, depth, rank and bin.

    Verified nodes are no random sample: selection takes those of large f. But f depends on the draft alone, never on
    what the target will say, so given its cell a node is accepted as often as any other node *that is verified* of that
    cell; and of those the chances speak. What is learned of a cell therefore holds for the paths that selection takes
    through it, and moves when selection does, which forgetting follows.

    Outcomes are collected, and taken in together every REFIT_STEPS steps, sooner at first; errors are prequential: each
    outcome is held against the table that was in force when it came, before it is learned from. learn: whether the
    table changes at all. Not thread-safe; `errors` and `outcomes` may be read from anywhere.
    """

    def __init__(self, table: ChanceTable, *, learn: bool = True, half_life: float = HALF_LIFE):
        self._edges = table.edges
        self._loaded = table.chance
        self._learned = table.learned or Learned(
            table.chance.astype(np.float64), np.zeros(table.chance.shape), np.zeros(table.chance.shape)
        )
        self._learns = learn
        self._half_life = half_life
        self._steps = FIRST_STEPS
        self._cells = self._loaded.size // len(MODES)
        self._batch: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._unsent = False
        self.chance = table.chance
        self.sums = CalibrationSums(len(PREDICTIONS) * len(MODES))
        self.outcomes: dict[str, int] = {}
        self.errors: dict[str, dict[str, float]] = {}

    @property
    def table(self) -> ChanceTable:
        """The table in force and what it was learned from."""
        return ChanceTable(self.chance, self._edges, self._learned)

    @property
    def unsent(self) -> np.ndarray | None:
        """f32[2, D, ranks, bins]: chances that the draft does not have yet."""
        return self.chance if self._unsent else None

    def mark_sent(self) -> None:
        self._unsent = False

    def observe(
        self, candidates: CandidateTrees, trees: DraftTrees, accepted: np.ndarray, temperature: np.ndarray,
        edited: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Take in one verification. accepted: bool[N], per packed node; temperature: f32[R], of the rows; edited:
        bool[R], rows that teach nothing, since what changed their logits is theirs alone."""
        if candidates.cell is None or candidates.log_q is None:
            return
        known = (trees.parent >= 0) & accepted.take(trees.parent)
        if edited is not None:
            known &= ~edited.take(trees.row)
        judged = np.flatnonzero(known)
        if not len(judged):
            return
        row = trees.row.take(judged)
        flat = row * candidates.cell.shape[1] + trees.candidate.take(judged)
        cell = candidates.cell.take(flat) + self._cells * (temperature.take(row) > 0)
        self._batch.append((cell, candidates.log_q.take(flat), accepted.take(judged)))
        if len(self._batch) >= self._steps:
            self._steps = min(2 * self._steps, REFIT_STEPS)
            self.take_in()

    def new_version(self) -> None:
        """The draft has other weights from now on: what was seen of the old ones counts no more but through the table
        in force, on which the new evidence builds, and the first fits come soon again."""
        self.take_in()
        self._steps = FIRST_STEPS
        if self._learns:
            nothing = np.zeros(self.chance.shape)
            self._learned = Learned(self.chance.astype(np.float64), nothing, nothing)

    def take_in(self) -> None:
        """Measure and learn from all that was observed; nothing without outcomes."""
        if not self._batch:
            return
        cell, log_q, hit = (np.concatenate(part) for part in zip(*self._batch, strict=True))
        self._batch.clear()
        shape = self.chance.shape
        seen, taken = (np.bincount(cell, weight, self._loaded.size).reshape(shape) for weight in (None, hit))
        self._measure(cell // self._cells, np.exp(log_q), hit, seen, taken)
        if not self._learns:
            return
        learned = self._learned
        keep = 0.5 ** (seen.sum(axis=(1, 2, 3), keepdims=True) / self._half_life)
        self._learned = Learned(learned.prior, keep * learned.outcomes + seen, keep * learned.accepted + taken)
        self.chance = self.chance.copy()
        for mode in np.flatnonzero(seen.any(axis=(1, 2, 3))):
            this = slice(mode, mode + 1)
            self.chance[this] = fit(learned.prior[this], self._learned.outcomes[this], self._learned.accepted[this])
        self._unsent = True

    def _measure(self, mode: np.ndarray, q: np.ndarray, hit: np.ndarray, seen: np.ndarray, taken: np.ndarray) -> None:
        """mode, q, hit: [N], of each outcome; seen, taken: [2, D, ranks, bins], outcomes and acceptances by cell."""
        self.sums.add(mode, q, hit)
        cells = np.flatnonzero(seen)
        group, number, happened = cells // self._cells, seen.take(cells), taken.take(cells)
        for chance in (self._loaded, self.chance):
            group = group + len(MODES)
            self.sums.add(group, chance.take(cells), happened, number)
        self.errors = errors_by_mode(self.sums.sums)
        counts = self.sums.sums[0, : len(MODES)].sum(axis=-1)
        self.outcomes = {name: int(count) for name, count in zip(MODES, counts, strict=True) if count}


def errors_by_mode(sums: np.ndarray) -> dict[str, dict[str, float]]:
    """Expected calibration errors by mode and prediction, modes that saw nothing left out."""
    error = expected_calibration_error(sums).reshape(len(PREDICTIONS), len(MODES))
    return {
        mode: dict(zip(PREDICTIONS, error[:, index].tolist(), strict=True))
        for index, mode in enumerate(MODES)
        if not math.isnan(error[0, index])
    }
