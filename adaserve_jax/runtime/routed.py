"""A step whose rows have different drafts, as steps whose rows have one each; and their candidates, put together.

Knows neither models nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from adaserve_jax.types import CandidateTrees, RowSampling, StepPlan


def part_of(plan: StepPlan, rows: np.ndarray) -> StepPlan:
    """What the draft does for some rows (increasing, i64[n]): a plan of these alone. Of what the target does, only the
    decode rows are counted, since no draft looks at the rest."""
    draft = plan.draft
    assert draft is not None
    ends = draft.catchup_counts.cumsum()
    tokens = [draft.catchup_tokens[ends[row] - draft.catchup_counts[row] : ends[row]] for row in rows.tolist()]
    decode = rows[rows < plan.num_decode]
    return replace(
        plan,
        slots=plan.slots[rows],
        num_decode=len(decode),
        root_token=plan.root_token[decode],
        ctx_len=plan.ctx_len[rows],
        page_table=plan.page_table[rows],
        sampling=RowSampling(*(getattr(plan.sampling, each.name)[rows] for each in fields(RowSampling))),
        draft=replace(
            draft,
            catchup_tokens=np.concatenate(tokens),
            catchup_counts=draft.catchup_counts[rows],
            draft_ctx=draft.draft_ctx[rows],
            speculates=draft.speculates[decode],
            drafts=None,
        ),
    )


def put_together(num_decode: int, parts: Sequence[tuple[np.ndarray, CandidateTrees]]) -> CandidateTrees:
    """The candidates of all decode rows, from those of some each (i64[n], and their trees of one shape). Rows of no
    part have none."""
    first = parts[0][1]
    shape = (num_decode, first.token.shape[1])
    token, parent, cell = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    log_f, log_q = np.full(shape, -np.inf, np.float32), np.full(shape, -np.inf, np.float32)
    for rows, found in parts:
        assert found.cell is not None and found.log_q is not None
        token[rows], parent[rows], cell[rows] = found.token, found.parent, found.cell
        log_f[rows], log_q[rows] = found.log_f, found.log_q
    return CandidateTrees(token, parent, log_f, first.depth, cell, log_q)
