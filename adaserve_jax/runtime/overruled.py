"""Where the target overruled the draft: the verdict of a step, row by row. Knows no device."""

from __future__ import annotations

import numpy as np

from adaserve_jax.types import CandidateTrees, DraftTrees, StepOutcome, StepPlan


def overruled(plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome) -> np.ndarray:
    """Which rows' walks stopped at a node that the draft had candidates to follow, none of them the target's token.

    bool[num_decode]. What the draft proposed counts, not what was selected of it: a stop where nothing was proposed, or
    at a proposed token that was not verified, is no error of the draft. The position to learn from is that of the node
    where the walk stopped, which predicts the token. Source: Online speculative decoding (docs/equations.md).
    """
    num_decode = plan.num_decode
    if not candidates.token.shape[1] or not num_decode:
        return np.zeros(num_decode, bool)
    last = walk_ends(trees, outcome, num_decode)
    depth = trees.depth[last]
    drawn = outcome.tokens[np.arange(num_decode), depth]
    there = (candidates.parent == trees.candidate[last][:, None]) & (candidates.log_f > -np.inf)
    right = there & (candidates.token == drawn[:, None])
    emitted = outcome.counts[:num_decode] > depth  # not where the step was cut before that token
    return there.any(axis=1) & ~right.any(axis=1) & emitted


def walk_ends(trees: DraftTrees, outcome: StepOutcome, num_decode: int) -> np.ndarray:
    """Where each row's walk stopped: its last accepted node, which may be its root. i64[num_decode], indices of nodes,
    which are packed row after row, parents before children."""
    walked = np.flatnonzero(outcome.accepted)
    return walked[np.searchsorted(trees.row[walked], np.arange(num_decode), side="right") - 1]
