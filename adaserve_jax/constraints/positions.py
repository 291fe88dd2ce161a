"""The sampled positions of a step, as trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.types import DraftTrees, LogitEdits, StepPlan


@dataclass(frozen=True, eq=False)
class Positions:
    """Tree nodes, then the ends of prompts as trees of one node, N of them. row, token, parent, depth: i32[N]; parent
    is a position too, -1 for a root."""

    row: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    depth: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan, trees: DraftTrees) -> Positions:
        final = np.flatnonzero(plan.prefill_final)
        last = plan.prefill_counts.cumsum()[final] - 1
        root = np.zeros(len(final), np.int32)
        return cls(
            np.concatenate([trees.row, final + plan.num_decode]).astype(np.int32),
            np.concatenate([trees.token, plan.prefill_tokens[last]]),
            np.concatenate([trees.parent, root - 1]),
            np.concatenate([trees.depth, root]),
        )

    def spans(self, num_rows: int) -> list[int]:
        """[R + 1]: row r has the positions from spans[r] to spans[r + 1]."""
        return np.searchsorted(self.row, np.arange(num_rows + 1)).tolist()


def edited_rows(edits: LogitEdits, plan: StepPlan, trees: DraftTrees) -> np.ndarray:
    """bool[R]: rows of which anything changes at any sampled position."""
    edited = np.zeros(plan.num_rows, bool)
    edited[Positions.of(plan, trees).row[edits.changed]] = True
    return edited
