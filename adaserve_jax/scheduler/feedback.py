"""What a committed step tells the controller that decided it. Knows no table and no request."""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.commit import Verified
from adaserve_jax.scheduler.controllers.base import Feedback
from adaserve_jax.types import CandidateTrees, StepOutcome, StepPlan


def rows_with_drafts(plan: StepPlan, candidates: CandidateTrees) -> np.ndarray | None:
    """bool[num_decode], rows that asked for candidates and got any, which of a draft service not all need; None where
    there are none."""
    draft = plan.draft
    if draft is None or not draft.depth or not candidates.log_f.size:
        return None
    if not draft.is_remote:
        return draft.speculates
    found = draft.speculates & (candidates.log_f > -np.inf).any(axis=1)
    return found if found.any() else None


def feedback_of(
    plan: StepPlan, drafted: np.ndarray | None, verified: Verified, outcome: StepOutcome, step_s: float,
    predicted_s: float, expected: float,
) -> Feedback:  # fmt: skip
    """drafted: bool[num_decode], rows that got a draft; None: none did."""
    draft, counts = plan.draft, outcome.counts[: plan.num_decode]
    decoded = int(counts.sum())
    rows = emitted = catchup_tokens = 0
    if draft is not None:
        fed = draft.catchup_counts[: plan.num_decode]
        catchup_tokens = draft.waited_tokens if draft.is_remote else int(fed.sum())
    if drafted is not None:
        rows = int(np.count_nonzero(drafted))
        emitted = decoded if rows == plan.num_decode else int(counts[drafted].sum())
    return Feedback(
        rows=rows,
        drafted=verified.num_drafted,
        accepted=verified.num_accepted,
        emitted=emitted,
        decode_rows=plan.num_decode,
        decoded=decoded,
        prefill_tokens=plan.num_prefill_tokens,
        catchup_tokens=catchup_tokens,
        step_s=step_s,
        predicted_s=predicted_s,
        expected=expected,
    )
