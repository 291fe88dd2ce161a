"""Candidate trees from text already seen, beside those of the draft: proposals, merging, and learned chances.

A source of text costs no device time, so that it proposes before anything is decided: the controller sees what its
trees are worth, and rows for which no draft could bring more are left out of the draft's work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from adaserve_jax.scheduler.acceptance import Calibrator, LearnedAcceptance
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.stats import StepStats
from adaserve_jax.suffix.kernels import BINS, merge_rows
from adaserve_jax.suffix.source import SuffixSource, TextRows
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.types import CandidateTrees, DraftTrees

_NO_EDGES = np.full((2, BINS - 1), np.inf, np.float32)
"""Bin edges that `ChanceTable` asks for, [2, BINS - 1]. None is used: the source assigns cells itself."""


@dataclass(frozen=True, eq=False)
class TextTrees:
    """Trees of a source of text for the decode rows of a step.

    f: f64[num_decode, C], of each row's candidates, best first, 0 for absent ones. covered: bool[num_decode], rows for
    which no tree of the draft is expected to bring as much.
    """

    candidates: CandidateTrees
    f: np.ndarray
    covered: np.ndarray


@dataclass(frozen=True, eq=False)
class MergedTrees:
    """Candidates of both sources as one tree per row: first the draft's columns, then those that only text proposed.

    A token under the same parent is one node, with the larger chance of the two. text_column: i32[R, C], column in
    the candidates of text, -1 for nodes that it did not propose. num_drafted: columns of the draft.
    """

    candidates: CandidateTrees
    text_column: np.ndarray
    num_drafted: int

    def drafted_columns(self, trees: DraftTrees) -> np.ndarray:
        """Return i32[N], the draft's column of each packed node; -1 for roots and nodes of text alone."""
        return np.where(trees.candidate < self.num_drafted, trees.candidate, -1)

    def text_columns(self, trees: DraftTrees) -> np.ndarray:
        """Return i32[N], the column of text of each packed node; -1 for roots and nodes of the draft alone."""
        column = self.text_column[trees.row, np.maximum(trees.candidate, 0)]
        return np.where(trees.candidate < 0, -1, column)


def merge(drafted: CandidateTrees, proposed: CandidateTrees) -> MergedTrees:
    """Merge the candidates of the draft and those of text, of the same rows."""
    rows, width = proposed.token.shape
    num_drafted = drafted.token.shape[1]
    if not num_drafted:
        own = np.arange(width, dtype=np.int32)
        return MergedTrees(proposed, np.where(proposed.log_f > -np.inf, own, np.int32(-1)), 0)
    shape = (rows, num_drafted + width)
    token, parent, log_f = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
    text_column = np.full(shape, -1, np.int32)
    # copies in rows, because a kernel is compiled again for arrays that are read-only, as those from a device may be,
    # or lie in columns
    given = drafted.token, drafted.parent, drafted.log_f, drafted.depth, proposed.token, proposed.parent, proposed.log_f
    merge_rows(*(each.copy("C") for each in given), token, parent, log_f, text_column)
    depth = np.concatenate([drafted.depth, proposed.depth])
    return MergedTrees(CandidateTrees(token, parent, log_f, depth), text_column, num_drafted)


@cache
def compile_kernels() -> None:
    """Compile the kernels, or load them from numba's cache, so that no step waits for it; once per process."""
    source = SuffixSource(1, 1, 4)  # room for the text that is kept, or it is not indexed
    one, no_token = np.ones(1, np.int64), np.zeros((1, 2), np.int32)
    seed, choice, temperature = np.zeros(1, np.uint64), np.zeros(1, np.int32), np.zeros(1, np.float32)
    rows = TextRows(no_token, 0 * one, one, one, one, seed, choice, temperature, [""])
    source.keep(no_token[0], "")
    candidates = source.propose(rows, source.prior)
    merge(candidates, candidates)


class TextDrafter:
    """Drafter of one scheduler from a source of text, with the chances that its proposals are accepted."""

    def __init__(self, batch: Batch, acceptance: LearnedAcceptance, source: SuffixSource, *, learn: bool = True):
        """Set up over a batch. acceptance: of the draft, to tell which rows it need not serve. learn: False keeps the
        chances of the start.
        """
        compile_kernels()
        self._batch = batch
        self._acceptance = acceptance
        self.source = source
        self.calibrator = Calibrator(ChanceTable(self.source.prior, _NO_EDGES), learn=learn)

    def propose(self, slots: np.ndarray, remaining: np.ndarray) -> TextTrees | None:
        """Return the trees of the decode rows in `slots`, which hold the pages of all their nodes; None without any.

        slots, remaining: i64[num_decode]; remaining: tokens to each row's end.
        """
        if not len(slots):
            return None
        table, limits = self._batch.table, self._batch.limits
        states, sampling = (table.states[slot] for slot in slots.tolist()), table.sampling
        candidates = self.source.propose(
            TextRows(
                table.token_ids, slots, table.number[slots], table.num_tokens[slots],
                # the deepest node that may be taken is emitted beside one more token
                np.minimum(remaining - 1, limits.suffix_depth), sampling.seed[slots], sampling.choice[slots],
                sampling.temperature[slots], ["" if state is None else state.sequence.cache_salt for state in states],
            ),
            self.calibrator.chance,
        )  # fmt: skip
        there = candidates.log_f > -np.inf
        if not there.any():
            return None
        deepest = np.where(there, candidates.depth, 0).max(axis=1)
        proposed = deepest.nonzero()[0]
        holds = self._batch.reserve_for_trees(slots[proposed], table.num_tokens[slots[proposed]] + deepest[proposed])
        short = proposed[~holds]
        if len(short):
            room = table.num_pages[slots[short]] * limits.page_size - table.num_tokens[slots[short]]
            log_f = candidates.log_f.copy()
            log_f[short] = np.where(candidates.depth <= room[:, None], log_f[short], np.float32(-np.inf))
            candidates = replace(candidates, log_f=log_f)
        f = -np.sort(-np.exp(candidates.log_f.astype(np.float64)), axis=1)
        return TextTrees(candidates, f, f.sum(axis=1) >= max(float(self._acceptance.expected().sum()), 1e-9))

    def merge(self, drafted: CandidateTrees, proposed: TextTrees) -> MergedTrees:
        """Merge the draft's candidates with those proposed for the same step."""
        return merge(drafted, proposed.candidates)

    def keep(self, state: SequenceState) -> None:
        """Keep the text of a sequence that ended, for others of its salt, unless its request says no."""
        if state.sequence.keeps_text:
            self.source.keep(state.token_ids[: state.num_tokens], state.sequence.cache_salt)

    def observe(
        self, proposed: TextTrees, columns: np.ndarray, trees: DraftTrees, accepted: np.ndarray,
        temperature: np.ndarray, edited: np.ndarray | None, stats: StepStats,
    ) -> None:  # fmt: skip
        """Learn from a verification, and count it.

        columns: i32[N], of `MergedTrees.text_columns`. accepted: bool[N]. temperature: f32[R]. edited: bool[R], rows
        whose logits were changed.
        """
        stats.suffix_tokens += int(np.count_nonzero(columns >= 0))
        stats.suffix_accepted_tokens += int(np.count_nonzero(accepted & (columns >= 0)))
        self.calibrator.observe(proposed.candidates, trees, accepted, temperature, edited, columns)
