"""Where the target overruled the draft: the verdict of a step, row by row. Knows no device."""

from __future__ import annotations

import numpy as np

from adaserve_jax.types import CandidateTrees, DraftTrees, StepOutcome, StepPlan


def overruled(plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome) -> np.ndarray:
    """The nodes at which walks stopped although the draft had candidates to follow, none of them the target's token.

    i64[n], indices of packed nodes, of rows in order. What the draft proposed counts, not what was selected of it: a
    stop where nothing was proposed, or at a proposed token that was not verified, is no error of the draft. The
    position to learn from is that of the node, which predicts the token. Source: Online speculative decoding
    (docs/equations.md).
    """
    num_decode = plan.num_decode
    if not candidates.token.shape[1] or not num_decode:
        return np.zeros(0, np.int64)
    walked = np.flatnonzero(outcome.accepted)  # packed row after row, parents before children
    last = walked[np.searchsorted(trees.row[walked], np.arange(num_decode), side="right") - 1]
    depth = trees.depth[last]
    drawn = outcome.tokens[np.arange(num_decode), depth]
    there = (candidates.parent == trees.candidate[last][:, None]) & (candidates.log_f > -np.inf)
    right = there & (candidates.token == drawn[:, None])
    emitted = outcome.counts[:num_decode] > depth  # not where the step was cut before that token
    return last[there.any(axis=1) & ~right.any(axis=1) & emitted]
