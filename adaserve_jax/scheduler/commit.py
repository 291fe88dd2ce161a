"""What a verified step changes: progress, output tokens, ends of requests, and what is learned for the next plans."""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.planning import PlannedStep
from adaserve_jax.scheduler.state import RequestState
from adaserve_jax.types import (
    CandidateTrees,
    DraftTrees,
    FinishReason,
    RequestUpdate,
    StepOutcome,
    StepStats,
    StopCheck,
)


def apply_outcome(
    batch: Batch,
    planned: PlannedStep,
    trees: DraftTrees,
    candidates: CandidateTrees,
    outcome: StepOutcome,
    now: float,
    stop_check: StopCheck | None,
    stats: StepStats,
) -> list[RequestUpdate]:
    """Advance every row that still runs, free what finished, and return the new tokens, stamped `now`."""
    plan = planned.plan
    drafted = trees.candidate >= 0
    drafted_per_row = np.bincount(trees.row[drafted], minlength=plan.num_decode).tolist()
    hits = drafted & outcome.accepted
    accepted_per_row = np.bincount(trees.row[hits], minlength=plan.num_decode).tolist()
    draft_end = _draft_end(planned, candidates)
    tokens, counts = outcome.tokens.tolist(), outcome.counts.tolist()
    updates: list[RequestUpdate] = []
    for index, state in enumerate(planned.rows):
        if not state.is_running:
            continue
        count = counts[index]
        if draft_end is not None:
            state.draft_computed = draft_end[index]
        if index < plan.num_decode:
            state.num_computed += count
            state.verify_steps += 1
            state.drafted_tokens += drafted_per_row[index]
            state.accepted_tokens += accepted_per_row[index]
        else:
            state.num_computed += int(plan.prefill_counts[index - plan.num_decode])
        if count:
            updates.append(_emit(batch, state, tokens[index][:count], now, stop_check, stats))
    if len(hits) > plan.num_decode:
        _count_depths(trees.depth[hits], int(drafted.sum()), stats)
    return updates


def finish(
    batch: Batch, state: RequestState, reason: FinishReason, token_ids: list[int], stats: StepStats
) -> RequestUpdate:
    """End a request: its slot and pages return, and its last update carries the metrics."""
    if state.is_running:
        batch.release(state)
    else:
        batch.queue.remove(state)
    stats.finished[reason] = stats.finished.get(reason, 0) + 1
    return RequestUpdate(state.request.request_id, tuple(token_ids), reason, state.metrics())


def _emit(
    batch: Batch, state: RequestState, token_ids: list[int], now: float, stop_check: StopCheck | None, stats: StepStats
) -> RequestUpdate:
    """Append what plain decoding would have emitted: up to the first stop token, stop string, or the length limit."""
    request = state.request
    room = state.max_total - state.num_tokens
    reason: FinishReason | None = "length" if len(token_ids) >= room else None
    token_ids = token_ids[:room]
    for position, token in enumerate(token_ids):
        if token in request.stop_token_ids:
            token_ids, reason = token_ids[: position + 1], "stop"
            break
    if stop_check is not None:
        keep = stop_check(request.request_id, token_ids)
        if keep is not None:
            token_ids, reason = token_ids[:keep], "stop"
    if state.first_token_s is None:
        stats.prompt_tokens += state.prompt_len
    state.append(token_ids, now)
    stats.generation_tokens += len(token_ids)
    if reason is None:
        return RequestUpdate(request.request_id, tuple(token_ids))
    return finish(batch, state, reason, token_ids, stats)


def _draft_end(planned: PlannedStep, candidates: CandidateTrees) -> list[int] | None:
    """Tokens in the draft's KV after the step, per row; None when the draft did not run or failed."""
    draft = planned.plan.draft
    if draft is None or (draft.depth > 0 and candidates.log_f.shape[1] == 0):
        return None
    return (draft.draft_ctx + draft.catchup_counts).tolist()


def _count_depths(accepted_depth: np.ndarray, drafted: int, stats: StepStats) -> None:
    stats.spec_steps += 1
    stats.draft_tokens += drafted
    stats.accepted_tokens += len(accepted_depth)
    per_depth = np.bincount(accepted_depth).tolist()
    totals = stats.accepted_per_position
    totals.extend([0] * (len(per_depth) - 1 - len(totals)))
    for depth, count in enumerate(per_depth[1:]):
        totals[depth] += count
