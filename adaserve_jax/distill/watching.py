"""Which sampled positions of a step say what the target thought of a text, as arrays. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaserve_jax.runtime.overruled import overruled
from adaserve_jax.types import CandidateTrees, DraftTrees, StepOutcome, StepPlan


@dataclass(frozen=True, eq=False)
class Sampled:
    """M positions of one step. at: i32[M], indices of its sampled positions, tree nodes in packed order, then the ends
    of prompts in row order. row: i32[M], whose of choice_ids; position: i32[M], of the token that was fed, from 0 in
    its text. overruled: bool[M], whether the target's next token was none of those that the draft proposed there."""

    choice_ids: Sequence[str]
    at: np.ndarray
    row: np.ndarray
    position: np.ndarray
    overruled: np.ndarray

    @classmethod
    def of(
        cls, plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome,
        choice_ids: Sequence[str], watched: np.ndarray, *, only_overruled: bool,
    ) -> Sampled:  # fmt: skip
        """The accepted nodes of the watched rows (bool[R]), roots among them, and the ends of their prompts."""
        nodes = np.flatnonzero(outcome.accepted)
        row = trees.row[nodes]
        position = plan.ctx_len[row] + trees.depth[nodes]
        # packed row after row, parents before children: a row's last accepted node is where its walk stopped
        wrong = overruled(plan, trees, candidates, outcome)[row]
        wrong[:-1] &= row[1:] != row[:-1]
        final = np.flatnonzero(plan.prefill_final)
        if len(final) and not only_overruled:
            ends = plan.num_decode + final
            nodes = np.concatenate([nodes, trees.num_nodes + np.arange(len(final))])
            row = np.concatenate([row, ends])
            position = np.concatenate([position, plan.ctx_len[ends] + plan.prefill_counts[final] - 1])
            wrong = np.concatenate([wrong, np.zeros(len(final), bool)])
        kept = np.flatnonzero(watched[row] & wrong if only_overruled else watched[row])
        at, row, position = (part[kept].astype(np.int32) for part in (nodes, row, position))
        return cls(choice_ids, at, row, position, wrong[kept])
