"""What a verified step changes: progress, output tokens, ends of requests, and what is learned for the next plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.planning import PlannedStep
from adaserve_jax.scheduler.state import (
    ACCEPTED_TOKENS,
    DRAFT_COMPUTED,
    DRAFTED_TOKENS,
    FIRST_TOKEN_S,
    LAST_TOKEN_S,
    MAX_TOTAL,
    NUM_COMPUTED,
    NUM_TOKENS,
    PROMPT_LEN,
    VERIFY_STEPS,
    RequestState,
)
from adaserve_jax.scheduler.updates import StepUpdates
from adaserve_jax.types import (
    CandidateTrees,
    DraftTrees,
    FinishReason,
    RequestUpdate,
    StepOutcome,
    StepStats,
    StopCheck,
)


@dataclass(frozen=True, eq=False)
class Verified:
    """Draft tokens of each decode row, its root left out: i64[num_decode]."""

    drafted: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, trees: DraftTrees, accepted: np.ndarray, num_decode: int, stats: StepStats) -> Verified:
        """accepted: bool[N], per packed node, roots True. Counts the totals too."""
        if len(trees.row) == num_decode:
            nothing = np.zeros(num_decode, np.int64)
            return cls(nothing, nothing)
        drafted = trees.candidate >= 0
        hits = drafted & accepted
        verified = cls(
            np.bincount(trees.row[drafted], minlength=num_decode), np.bincount(trees.row[hits], minlength=num_decode)
        )
        _count_depths(trees.depth[hits], len(trees.row) - num_decode, stats)
        return verified


def apply_outcome(
    batch: Batch,
    planned: PlannedStep,
    candidates: CandidateTrees,
    verified: Verified,
    outcome: StepOutcome,
    now: float,
    stop_check: StopCheck | None,
    stats: StepStats,
) -> StepUpdates:
    """Advance every row that still runs, free what finished, and return the new tokens, stamped `now`."""
    table, num_decode, slots = batch.table, planned.plan.num_decode, planned.slots
    counts = outcome.counts.astype(np.int64)
    progress = table.counts.take(slots, axis=0)
    progress[:num_decode, NUM_COMPUTED] += counts[:num_decode]
    progress[num_decode:, NUM_COMPUTED] += planned.plan.prefill_counts
    progress[:num_decode, VERIFY_STEPS] += 1
    progress[:num_decode, DRAFTED_TOKENS] += verified.drafted
    progress[:num_decode, ACCEPTED_TOKENS] += verified.accepted
    draft_end = _draft_end(planned, candidates)
    if draft_end is not None:
        progress[:, DRAFT_COMPUTED] = draft_end

    states = [table.states[slot] for slot in slots.tolist()]
    token_ids = outcome.tokens
    if None in states:  # aborted while the step was in flight
        alive = np.array([state is not None for state in states])
        slots, counts, progress, token_ids = slots[alive], counts[alive], progress[alive], token_ids[alive]
    running = [state for state in states if state is not None]
    kept, reasons = _cut(running, progress, token_ids, counts, stop_check, table.has_stop_ids[slots])
    table.write_tokens(slots, progress[:, NUM_TOKENS], token_ids, kept)
    progress[:, NUM_TOKENS] += kept
    table.counts[slots] = progress
    if not counts.all():
        emits = np.flatnonzero(counts)
        running = [running[row] for row in emits.tolist()]
        reasons = {int(np.searchsorted(emits, row)): reason for row, reason in reasons.items()}
        slots, kept, token_ids = slots[emits], kept[emits], token_ids[emits]
    _stamp(batch, slots, now, stats)
    stats.generation_tokens += int(kept.sum())
    sequence = table.sequence.take(slots)
    ended = {
        row: finish(batch, running[row], reason, token_ids[row, : kept[row]].tolist(), stats)
        for row, reason in sorted(reasons.items())
    }
    return StepUpdates([state.request.request_id for state in running], sequence, token_ids, kept, ended)


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


def _cut(
    states: list[RequestState], progress: np.ndarray, token_ids: np.ndarray, counts: np.ndarray,
    stop_check: StopCheck | None, has_stop_ids: np.ndarray,
) -> tuple[np.ndarray, dict[int, FinishReason]]:  # fmt: skip
    """How much of each row's new tokens plain decoding would have emitted, up to the first stop token, stop string, or
    the length limit: i64[R], and why the rows end that do."""
    room = progress[:, MAX_TOTAL] - progress[:, NUM_TOKENS]
    kept = np.minimum(counts, room)
    reasons: dict[int, FinishReason] = dict.fromkeys(np.flatnonzero((counts >= room) & (counts > 0)).tolist(), "length")
    asked = counts > 0 if stop_check is not None else has_stop_ids & (counts > 0)
    for row in np.flatnonzero(asked).tolist():
        request, new = states[row].request, token_ids[row, : kept[row]].tolist()
        if not request.stop_token_ids.isdisjoint(new):
            first = next(position for position, token in enumerate(new) if token in request.stop_token_ids)
            new, reasons[row] = new[: first + 1], "stop"
        keep = None if stop_check is None else stop_check(request.request_id, new)
        if keep is not None:
            new, reasons[row] = new[:keep], "stop"
        kept[row] = len(new)
    return kept, reasons


def _stamp(batch: Batch, slots: np.ndarray, now: float, stats: StepStats) -> None:
    """These rows emitted tokens at `now`."""
    times = batch.table.times
    times[slots, LAST_TOKEN_S] = now
    started = slots[np.isnan(times[slots, FIRST_TOKEN_S])]
    if len(started):
        times[started, FIRST_TOKEN_S] = now
        stats.prompt_tokens += int(batch.table.counts[started, PROMPT_LEN].sum())


def _draft_end(planned: PlannedStep, candidates: CandidateTrees) -> np.ndarray | None:
    """Tokens in the draft's KV after the step, i64[R]; None when the draft did not run or failed."""
    draft = planned.plan.draft
    if draft is None or (draft.depth > 0 and candidates.log_f.shape[1] == 0):
        return None
    return draft.draft_ctx + draft.catchup_counts


def _count_depths(accepted_depth: np.ndarray, drafted: int, stats: StepStats) -> None:
    stats.spec_steps += 1
    stats.draft_tokens += drafted
    stats.accepted_tokens += len(accepted_depth)
    per_depth = np.bincount(accepted_depth).tolist()
    totals = stats.accepted_per_position
    totals.extend([0] * (len(per_depth) - 1 - len(totals)))
    for depth, count in enumerate(per_depth[1:]):
        totals[depth] += count
