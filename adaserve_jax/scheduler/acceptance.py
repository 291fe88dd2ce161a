"""What the draft has been worth: expected acceptance by depth and rank, learned from every verification.

Knows nothing of requests, costs or policies.
"""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.tree.acceptance_table import MODES, ChanceTable, Learned
from adaserve_jax.types import CandidateTrees, DraftTrees

PRIOR_FIRST = 0.7
"""Assumed acceptance of the draft's first choice before anything is measured."""
MEAN_RATE = 0.1
DECAY = 0.97
PRIOR_TOKENS = 4.0
"""Weight of the assumption that f is calibrated, in accepted tokens."""
FORGET = 0.005
"""Share of what was learned that each step without speculation gives back to the prior, so that it is tried again."""


class LearnedAcceptance:
    """Moving averages by (depth, rank in the beam): of f over all candidates, and of accepted over expected (f) among
    those verified. Their product estimates acceptance without bias towards the nodes that selection chose."""

    def __init__(self, max_depth: int, max_width: int):
        self._prior = acceptance_of_nodes(PRIOR_FIRST, max_depth, max_width)
        self._mean_f = self._prior.copy()
        self._accepted = np.full_like(self._prior, PRIOR_TOKENS)
        self._expected = np.full_like(self._prior, PRIOR_TOKENS)
        self.updates = 0
        """Times that the averages moved."""

    def expected(self) -> np.ndarray:
        """f64[max_depth, max_width], chance that a node is accepted, by depth and rank; non-increasing in depth."""
        chance = np.clip(self._mean_f * self._accepted / self._expected, 0.0, 1.0)
        return np.minimum.accumulate(chance, axis=0)

    def observe(
        self, candidates: CandidateTrees, width: int, speculates: np.ndarray, trees: DraftTrees, accepted: np.ndarray,
        edited: np.ndarray | None = None,
    ) -> float:  # fmt: skip
        """Learn from one verification. speculates: bool[num_decode]; accepted: bool[N], per packed node; edited:
        bool[R], rows whose logits were changed, which say nothing of others. Returns nodes that were expected to be
        accepted of those verified, theirs too, roots left out, by what had been learned before."""
        log_f = candidates.log_f
        speculating = np.count_nonzero(speculates)
        if not speculating or not log_f.size:
            return 0.0
        # roots, of depth 0, fall into a row of cells of their own, which is dropped
        levels, ranks = self._prior.shape
        cell = trees.depth * ranks
        if width > 1:
            cell += trees.candidate % width
        size = (levels + 1) * ranks
        claimed = np.bincount(cell, trees.f, size)[ranks:].reshape(levels, ranks)
        expected = float((claimed * self._accepted / self._expected).sum())
        if edited is not None and edited.any():
            speculates = speculates & ~edited[: len(speculates)]
            speculating = np.count_nonzero(speculates)
            if not speculating:
                return expected
            others = ~edited[trees.row]
            cell, accepted = cell[others], accepted[others]
            claimed = np.bincount(cell, trees.f[others], size)[ranks:].reshape(levels, ranks)

        self.updates += 1
        if speculating < len(speculates):
            log_f = log_f[speculates]
        depth = log_f.shape[1] // width
        mean = (np.add.reduce(np.exp(log_f), axis=0, dtype=np.float64) / speculating).reshape(depth, width)
        self._mean_f[:depth, :width] += MEAN_RATE * (mean - self._mean_f[:depth, :width])
        self._accepted *= DECAY
        self._expected *= DECAY
        self._accepted += np.bincount(cell, accepted, size)[ranks:].reshape(levels, ranks)
        self._expected += claimed
        self._accepted += (1 - DECAY) * PRIOR_TOKENS
        self._expected += (1 - DECAY) * PRIOR_TOKENS
        return expected

    def forget(self) -> None:
        """Move towards the prior by one step's share."""
        self.updates += 1
        self._mean_f += FORGET * (self._prior - self._mean_f)
        self._accepted += FORGET * (PRIOR_TOKENS - self._accepted)
        self._expected += FORGET * (PRIOR_TOKENS - self._expected)


def acceptance_of_nodes(first: float, max_depth: int, max_width: int) -> np.ndarray:
    """f64[max_depth, max_width], chance that a node is accepted, by depth and rank, where the draft's first choice is
    right with chance `first` everywhere, its second one where the first is wrong, and so on."""
    levels = np.arange(max_depth)[:, None]
    ranks = np.arange(max_width)[None, :]
    return first ** (levels + 1) * (1 - first) ** ranks


# Fits the table of chances to counted outcomes: cells with few outcomes lean on their kin, and chances never
# fall as the draft grows surer. Pure functions of arrays [2, D, ranks, bins]; the order of axes is that of
# `tree.chances`.

PSEUDO_OUTCOMES = 12.0
"""What a prior weighs, at each level of the hierarchy, in outcomes."""
UNSEEN_WEIGHT = 1e-3
"""Weight in the isotonic fit of a cell without outcomes: it follows its neighbours."""
_LEAST = 1e-4


def fit(prior: np.ndarray, outcomes: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """f32[2, D, ranks, bins], chances that a child is accepted after its parent was, by cell.

    From coarse to fine, each level leaning on the one above by PSEUDO_OUTCOMES: the prior, moved in log-odds to what
    a rank has shown over all depths and bins; then to what a (rank, bin) has shown over all depths; then the cell's own
    outcomes. Without outcomes it is the prior. Both features (log q, and the gap of perturbed scores) grow as the draft
    grows surer, so chances do not fall along the bins. outcomes, accepted: counts f64, decayed or not.
    """
    log_odds = _log_odds(prior.astype(np.float64))
    for pooled in ((1, 3), (1,)):
        log_odds += _shift(_chance(log_odds), outcomes, accepted, pooled)
    chance = (accepted + PSEUDO_OUTCOMES * _chance(log_odds)) / (outcomes + PSEUDO_OUTCOMES)
    return np.clip(non_decreasing(chance, outcomes + UNSEEN_WEIGHT), 0.0, 1.0).astype(np.float32)


def non_decreasing(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The non-decreasing sequences along the last axis that are nearest to `value` in squares weighted by `weight` > 0.

    The largest, over starts up to a bin, of the least, over ends from it, of the weighted means between them: what
    pooling adjacent violators gives, for all rows at once.
    """
    fitted = value.copy()
    falling = (value[..., 1:] < value[..., :-1]).any(axis=-1)
    fitted[falling] = _pooled(value[falling], weight[falling])
    return fitted


def _pooled(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`non_decreasing` for rows [N, bins]."""
    bins = value.shape[1]
    weight = np.ascontiguousarray(weight.T)  # rows last: numpy is fast along them
    total, mass = np.cumsum(value.T * weight, axis=0), np.cumsum(weight, axis=0)
    fitted = np.full_like(total, -np.inf)
    for start in range(bins):
        before = (total[start - 1], mass[start - 1]) if start else (0.0, 0.0)
        mean = (total[start:] - before[0]) / (mass[start:] - before[1])
        least = np.minimum.accumulate(mean[::-1], axis=0)[::-1]
        np.maximum(fitted[start:], least, out=fitted[start:])
    return fitted.T


def _shift(chance: np.ndarray, outcomes: np.ndarray, accepted: np.ndarray, pooled: tuple[int, ...]) -> np.ndarray:
    """By how much to move the log-odds of each group, the cells along the axes `pooled`, as its outcomes say."""
    count = outcomes.sum(axis=pooled, keepdims=True)
    stated = (outcomes * chance).sum(axis=pooled, keepdims=True)
    stated = np.divide(stated, count, out=np.full(count.shape, 0.5), where=count > 0)
    shown = (accepted.sum(axis=pooled, keepdims=True) + PSEUDO_OUTCOMES * stated) / (count + PSEUDO_OUTCOMES)
    return _log_odds(shown) - _log_odds(stated)


def _log_odds(chance: np.ndarray) -> np.ndarray:
    bounded = np.clip(chance, _LEAST, 1 - _LEAST)
    return np.log(bounded / (1 - bounded))


def _chance(log_odds: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-log_odds))


# Expected calibration error: how far stated chances are from what happened. Defined in docs/metrics.md.
#
# The scripts under benchmarks/ hold it against `honest_error`.

NUM_BINS = 15
"""Equal intervals of the stated chance."""


class CalibrationSums:
    """What the error is computed from: f64[3, groups, NUM_BINS], how many, sum of what was stated, how many happened.

    Sums of two times may be subtracted, which gives the error of what lies between them.
    """

    def __init__(self, groups: int):
        self.sums = np.zeros((3, groups, NUM_BINS))

    def add(
        self, group: np.ndarray, stated: np.ndarray, happened: np.ndarray, number: np.ndarray | None = None
    ) -> None:
        """Count in. group: i[N]; stated: f[N], chances in [0, 1]; number: f[N], of how many each was stated, None: of
        one; happened: f[N] or bool[N], of how many it came true."""
        index = group * NUM_BINS + np.minimum((stated * NUM_BINS).astype(np.intp), NUM_BINS - 1)
        size = self.sums[0].size
        weights = (number, stated if number is None else stated * number, happened)
        for total, weight in zip(self.sums, weights, strict=True):
            total += np.bincount(index, weight, size).reshape(total.shape)


def honest_error(sums: np.ndarray) -> np.ndarray:
    """f64[groups], nan likewise: the error that honest chances would show on average over as many, by chance alone."""
    count, stated, _ = sums
    spread = np.sqrt(2 / np.pi * stated * (1 - np.divide(stated, count, out=np.zeros_like(stated), where=count > 0)))
    number = count.sum(axis=-1)
    return np.divide(spread.sum(axis=-1), number, out=np.full(len(number), np.nan), where=number > 0)


def expected_calibration_error(sums: np.ndarray) -> np.ndarray:
    """f64[groups], nan for a group that saw nothing: |stated - happened|, summed by bin, over how many there are."""
    count, stated, happened = sums
    number = count.sum(axis=-1)
    gap = np.abs(stated - happened).sum(axis=-1)
    return np.divide(gap, number, out=np.full(len(number), np.nan), where=number > 0)


# Learns the chances of the acceptance table from what verifications show, and measures how honest they are.
#
# Knows no request, policy or file; the plan carries a new table to the draft.

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
