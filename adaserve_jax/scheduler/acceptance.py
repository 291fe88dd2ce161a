"""Acceptance of draft tokens, learned from every verification, in three forms.

`LearnedAcceptance` averages acceptance by depth and rank, which controllers plan with. `Calibrator` learns the table of
chances from which f is made (`types.py` defines chance and f) and measures its calibration error. `AdapterAcceptance`
learns how far rows of a LoRA adapter are from that table.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np

from adaserve_jax.tree.acceptance_table import MODES, ChanceTable, Learned
from adaserve_jax.types import CandidateTrees, DraftTrees

PRIOR_FIRST = 0.7
"""Assumed acceptance of the draft's first choice before anything is measured."""
MEAN_RATE = 0.1
"""Weight of a new step in the moving average of f."""
DECAY = 0.97
"""Share of the accepted and expected tokens that stays after a step."""
PRIOR_TOKENS = 4.0
"""Weight, in accepted tokens, of the assumption that f is calibrated."""
FORGET = 0.005
"""Share of what was learned that each step without speculation gives back to the prior, so that speculation is tried
again.
"""
PSEUDO_OUTCOMES = 12.0
"""Weight of a prior, in outcomes, at each level of the hierarchy of a fit."""
UNSEEN_WEIGHT = 1e-3
"""Weight in the isotonic fit of a cell without outcomes: it follows its neighbours."""
_LEAST = 1e-4
NUM_BINS = 15
"""Equal intervals of the stated probability in a calibration error."""
HALF_LIFE = 4_000.0
"""Outcomes of a mode after which an older outcome counts half."""
REFIT_STEPS = 32
"""Steps with outcomes between two fits."""
FIRST_STEPS = 8
"""Steps before the first fit; each later one takes twice as many, up to REFIT_STEPS."""
ADAPTER_PRIOR = 24.0
"""Weight, in outcomes, of the assumption that an adapter's rows are accepted as the table says."""
ADAPTER_HALF_LIFE = 1_000.0
"""Outcomes of an adapter after which an older one counts half."""
MOST_POWER = 4.0
"""Bound of the power to which an adapter's f is raised, and of its inverse."""
_POWERS = np.geomspace(1 / MOST_POWER, MOST_POWER, 65)
PREDICTIONS = ("raw", "loaded", "online")
"""Predictions that are measured side by side: the draft's probability, the table of the start, the table in force."""


class LearnedAcceptance:
    """Moving averages by (depth, rank in the beam) of f over all candidates, and of accepted over expected among
    verified ones.

    Their product estimates acceptance without bias towards the nodes that selection chose.
    """

    def __init__(self, max_depth: int, max_width: int):
        self._prior = acceptance_of_nodes(PRIOR_FIRST, max_depth, max_width)
        self._mean_f = self._prior.copy()
        self._accepted = np.full_like(self._prior, PRIOR_TOKENS)
        self._expected = np.full_like(self._prior, PRIOR_TOKENS)
        self._observed = 0
        self.updates = 0
        """Number of times that the averages moved."""

    def expected(self) -> np.ndarray:
        """Return f64[max_depth, max_width], f by depth and rank; non-increasing in depth."""
        chance = np.clip(self._mean_f * self._accepted / self._expected, 0.0, 1.0)
        return np.minimum.accumulate(chance, axis=0)

    def observe(
        self, candidates: CandidateTrees, width: int, speculates: np.ndarray, trees: DraftTrees, accepted: np.ndarray,
        edited: np.ndarray | None = None, columns: np.ndarray | None = None,
    ) -> float:  # fmt: skip
        """Learn from one verification; return the expected number of accepted nodes among those verified, edited rows
        included and roots left out, by what had been learned before.

        width: of the beam search. speculates: bool[num_decode]. accepted: bool[N], per packed node. edited: bool[R],
        rows whose logits were changed; their acceptance says nothing about other rows. columns: i32[N], of the packed
        nodes in `candidates`, -1 for nodes of another source, which are left out; None: all nodes are of these
        candidates.
        """
        log_f = candidates.log_f
        if columns is not None:
            own = (trees.candidate < 0) | (columns >= 0)
            columns, accepted, trees = columns[own], accepted[own], _only(trees, own)
            f = np.where(columns < 0, 1.0, np.exp(log_f[trees.row, columns])) if log_f.size else trees.f
            trees = replace(trees, f=f)
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
        self._observed += 1
        rate = max(MEAN_RATE, 1 / (1 + self._observed))
        self._mean_f[:depth, :width] += rate * (mean - self._mean_f[:depth, :width])
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


def _only(trees: DraftTrees, kept: np.ndarray) -> DraftTrees:
    """Return the packed nodes in `kept`, bool[N]; their parents are not renumbered."""
    return DraftTrees(*(getattr(trees, each.name)[kept] for each in fields(trees)))


def acceptance_of_nodes(first: float, max_depth: int, max_width: int) -> np.ndarray:
    """Return f64[max_depth, max_width], f by depth and rank for a draft whose first choice is right with chance
    `first`.

    The second choice is right where the first is wrong, and so on.
    """
    levels = np.arange(max_depth)[:, None]
    ranks = np.arange(max_width)[None, :]
    return first ** (levels + 1) * (1 - first) ** ranks


def fit(prior: np.ndarray, outcomes: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Return the table of chances, f32[2, D, ranks, bins], that counted outcomes suggest.

    From coarse to fine, each level leans on the one above by PSEUDO_OUTCOMES: the prior, moved in log-odds to what a
    rank has shown over all depths and bins; then to what a (rank, bin) has shown over all depths; then the cell's own
    outcomes. Without outcomes the result is the prior. Both features (log q, and the gap of perturbed scores) grow as
    the draft grows surer, so chances do not fall along the bins. Axes are those of `tree.acceptance_table`. outcomes,
    accepted: counts, f64, decayed or not.
    """
    log_odds = _log_odds(prior.astype(np.float64))
    for pooled in ((1, 3), (1,)):
        log_odds += _shift(_chance(log_odds), outcomes, accepted, pooled)
    chance = (accepted + PSEUDO_OUTCOMES * _chance(log_odds)) / (outcomes + PSEUDO_OUTCOMES)
    return np.clip(non_decreasing(chance, outcomes + UNSEEN_WEIGHT), 0.0, 1.0).astype(np.float32)


def non_decreasing(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the non-decreasing sequences along the last axis that are nearest to `value` in squares weighted by
    `weight` > 0.

    Computed as the largest, over starts up to a bin, of the least, over ends from it, of the weighted means between
    them: the result of pooling adjacent violators, for all rows at once.
    """
    fitted = value.copy()
    falling = (value[..., 1:] < value[..., :-1]).any(axis=-1)
    fitted[falling] = _pooled(value[falling], weight[falling])
    return fitted


def _pooled(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return `non_decreasing` for rows [N, bins]."""
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
    """Return how far the outcomes move the log-odds of each group, the cells along the axes `pooled`."""
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


class CalibrationSums:
    """Sums behind a calibration error, f64[3, groups, NUM_BINS]: counts, sums of stated probabilities, counts of
    successes.

    Sums of two times may be subtracted, which gives the error between them.
    """

    def __init__(self, groups: int):
        self.sums = np.zeros((3, groups, NUM_BINS))

    def add(
        self, group: np.ndarray, stated: np.ndarray, happened: np.ndarray, number: np.ndarray | None = None
    ) -> None:
        """Count predictions.

        group: i[N]. stated: f[N], probabilities in [0, 1]. happened: f[N] or bool[N], how many came true. number: f[N],
        for how many outcomes each was stated; None: one.
        """
        index = group * NUM_BINS + np.minimum((stated * NUM_BINS).astype(np.intp), NUM_BINS - 1)
        size = self.sums[0].size
        weights = (number, stated if number is None else stated * number, happened)
        for total, weight in zip(self.sums, weights, strict=True):
            total += np.bincount(index, weight, size).reshape(total.shape)


def expected_calibration_error(sums: np.ndarray) -> np.ndarray:
    """Return f64[groups], |stated - happened| summed by bin over the number of outcomes; nan for an empty group.

    Defined in docs/metrics.md.
    """
    count, stated, happened = sums
    number = count.sum(axis=-1)
    gap = np.abs(stated - happened).sum(axis=-1)
    return np.divide(gap, number, out=np.full(len(number), np.nan), where=number > 0)


class Calibrator:
    """Online calibration of chances, by mode, depth, rank and bin of the draft's confidence.

    Verified nodes are no random sample, because selection prefers large f. But f depends on the draft alone, never on
    what the target will say: given its cell, a node is accepted as often as any other verified node of that cell. What
    is learned of a cell therefore holds for the paths that selection takes through it. It moves when selection moves,
    which forgetting follows.

    Outcomes are collected and learned from every REFIT_STEPS steps, sooner at first. Errors are prequential: each
    outcome is compared with the table in force when it came. `errors` and `outcomes` may be read from any thread; the
    rest is not thread-safe.
    """

    def __init__(self, table: ChanceTable, *, learn: bool = True, half_life: float = HALF_LIFE):
        """Start from a table. learn: False keeps it as it is; half_life: outcomes after which an older one counts
        half.
        """
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
        """Chances that the draft does not have yet, f32[2, D, ranks, bins]; None if it has the latest."""
        return self.chance if self._unsent else None

    def mark_sent(self) -> None:
        """Record that the draft has the latest chances."""
        self._unsent = False

    def observe(
        self, candidates: CandidateTrees, trees: DraftTrees, accepted: np.ndarray, temperature: np.ndarray,
        edited: np.ndarray | None = None, columns: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Take in one verification.

        accepted: bool[N], per packed node. temperature: f32[R]. edited: bool[R], rows whose logits were changed; they
        teach nothing. columns: i32[N], of the packed nodes in `candidates`, -1 for nodes of another source; None: all
        nodes are of these candidates.
        """
        if candidates.cell is None or candidates.log_q is None:
            return
        columns = trees.candidate if columns is None else columns
        judged = _judged(trees, accepted, edited, columns)
        if not len(judged):
            return
        row = trees.row.take(judged)
        flat = row * candidates.cell.shape[1] + columns.take(judged)
        cell = candidates.cell.take(flat) + self._cells * (temperature.take(row) > 0)
        self._batch.append((cell, candidates.log_q.take(flat), accepted.take(judged)))
        if len(self._batch) >= self._steps:
            self._steps = min(2 * self._steps, REFIT_STEPS)
            self.take_in()

    def new_version(self) -> None:
        """Start a new version of the draft's weights.

        What was seen of the old ones counts only through the table in force, on which new outcomes build, and the first
        fits come soon again.
        """
        self.take_in()
        self._steps = FIRST_STEPS
        if self._learns:
            nothing = np.zeros(self.chance.shape)
            self._learned = Learned(self.chance.astype(np.float64), nothing, nothing)

    def take_in(self) -> None:
        """Measure and learn from all outcomes collected so far."""
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
        """Add outcomes to the errors.

        mode, q, hit: [N], of each outcome. seen, taken: [2, D, ranks, bins], outcomes and acceptances by cell.
        """
        self.sums.add(mode, q, hit)
        cells = np.flatnonzero(seen)
        group, number, happened = cells // self._cells, seen.take(cells), taken.take(cells)
        for chance in (self._loaded, self.chance):
            group = group + len(MODES)
            self.sums.add(group, chance.take(cells), happened, number)
        self.errors = errors_by_mode(self.sums.sums)
        counts = self.sums.sums[0, : len(MODES)].sum(axis=-1)
        self.outcomes = {name: int(count) for name, count in zip(MODES, counts, strict=True) if count}


def _judged(trees: DraftTrees, accepted: np.ndarray, edited: np.ndarray | None, columns: np.ndarray) -> np.ndarray:
    """Return the packed nodes of which a verification tells: those of the candidates, behind accepted parents, in rows
    whose logits were not changed. Arguments as in `Calibrator.observe`.
    """
    known = (columns >= 0) & accepted.take(trees.parent)
    if edited is not None:
        known &= ~edited.take(trees.row)
    return np.flatnonzero(known)


class AdapterAcceptance:
    """Acceptance of each LoRA adapter, as the power to which f of its rows is raised.

    The table of chances is learned from all rows together, but an adapter moves the target away from the draft, each in
    its own way. A power keeps f at most 1 and never rising along a path. Slot 0 is the model alone.
    """

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}
        """By slot, f64[3, NUM_BINS]: verified nodes behind accepted ones by bin of their chance, the sums of their
        chances, and how many were accepted.
        """
        self._power: dict[int, float] = {}

    @property
    def is_needed(self) -> bool:
        """True once a row went through an adapter."""
        return max(self._sums, default=0) > 0

    def power(self, slot: int) -> float:
        """Return the power of f: above 1 where fewer nodes are accepted than the table says."""
        return self._power.get(slot, 1.0)

    def corrected(self, candidates: CandidateTrees, slots: np.ndarray) -> CandidateTrees:
        """Return the candidates with the f of each row's adapter. slots: i32[num_decode]."""
        found, index = np.unique(slots, return_inverse=True)
        power = np.array([self.power(slot) for slot in found.tolist()], np.float32)
        return replace(candidates, log_f=candidates.log_f * power[index, None])

    def observe(
        self, candidates: CandidateTrees, trees: DraftTrees, accepted: np.ndarray, slots: np.ndarray,
        edited: np.ndarray | None = None, columns: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Take in one verification. candidates: before `corrected`. slots: i32[num_decode]. The others as in
        `Calibrator.observe`.
        """
        columns = trees.candidate if columns is None else columns
        judged = _judged(trees, accepted, edited, columns)
        row, column = trees.row[judged], columns[judged]
        parent = candidates.parent[row, column]
        above = np.where(parent < 0, np.float32(0), candidates.log_f[row, np.maximum(parent, 0)])
        chance = np.exp(np.minimum(candidates.log_f[row, column] - above, 0.0), dtype=np.float64)
        group = np.minimum((chance * NUM_BINS).astype(np.intp), NUM_BINS - 1)
        hit, slot = accepted[judged], slots[row]
        for each in np.unique(slot).tolist():
            own = slot == each
            weights = (None, chance[own], hit[own])
            seen = np.stack([np.bincount(group[own], weight, NUM_BINS) for weight in weights])
            before = self._sums.get(each, np.zeros(seen.shape))
            self._sums[each] = sums = 0.5 ** (seen[0].sum() / ADAPTER_HALF_LIFE) * before + seen
            self._power[each] = _power_of(*sums)

    def forget(self, slot: int) -> None:
        """Forget an adapter that has left its slot."""
        self._sums.pop(slot, None)
        self._power.pop(slot, None)


def _power_of(count: np.ndarray, stated: np.ndarray, accepted: np.ndarray) -> float:
    """Return the power of the chances at which as many nodes are expected as were accepted; all f64[NUM_BINS]."""
    total = count.sum()
    shown = (accepted.sum() + ADAPTER_PRIOR * stated.sum() / total) / (total + ADAPTER_PRIOR)
    chance = np.divide(stated, count, out=np.ones(NUM_BINS), where=count > 0)
    expected = (count * chance ** _POWERS[:, None]).sum(axis=1) / total
    return float(np.interp(-shown, -expected, _POWERS))


def errors_by_mode(sums: np.ndarray) -> dict[str, dict[str, float]]:
    """Return expected calibration errors by mode and prediction, without modes that saw nothing."""
    error = expected_calibration_error(sums).reshape(len(PREDICTIONS), len(MODES))
    return {
        mode: dict(zip(PREDICTIONS, error[:, index].tolist(), strict=True))
        for index, mode in enumerate(MODES)
        if not math.isnan(error[0, index])
    }
