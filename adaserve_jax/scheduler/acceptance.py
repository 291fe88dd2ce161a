"""What the draft has been worth: expected acceptance by depth and rank, learned from every verification.

Knows nothing of requests, costs or policies.
"""

from __future__ import annotations

import numpy as np

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
        claimed = np.bincount(cell, trees.path_prob, size)[ranks:].reshape(levels, ranks)
        expected = float((claimed * self._accepted / self._expected).sum())
        if edited is not None and edited.any():
            speculates = speculates & ~edited[: len(speculates)]
            speculating = np.count_nonzero(speculates)
            if not speculating:
                return expected
            others = ~edited[trees.row]
            cell, accepted = cell[others], accepted[others]
            claimed = np.bincount(cell, trees.path_prob[others], size)[ranks:].reshape(levels, ranks)

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
