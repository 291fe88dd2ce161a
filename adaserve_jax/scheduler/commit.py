"""Commit of a verified step: progress, new tokens, finished sequences, and what the controller is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.base import Feedback
from adaserve_jax.scheduler.planner import PlannedStep
from adaserve_jax.scheduler.sequence import SequenceState, SlotTable
from adaserve_jax.stats import StepStats
from adaserve_jax.types import (
    CandidateTrees,
    DraftTrees,
    FinishReason,
    SequenceUpdate,
    StepOutcome,
    StepPlan,
    StopCheck,
)


@dataclass(frozen=True, eq=False)
class StepUpdates:
    """Updates of one step: columns for readers that count; iterating makes one update after the other, to stream.

    U sequences got tokens. states: [U]. numbers: i64[U], `SequenceState.number`. token_ids: i32[U, max_tree_depth + 1],
    of which the first counts[u] are new; counts: i64[U]. ended: the updates that end their sequence, by index in
    ascending order.
    """

    states: list[SequenceState]
    numbers: np.ndarray
    token_ids: np.ndarray
    counts: np.ndarray
    ended: dict[int, SequenceUpdate]

    def __iter__(self) -> Iterator[SequenceUpdate]:
        tokens, counts = self.token_ids.tolist(), self.counts.tolist()
        for index, state in enumerate(self.states):
            update = self.ended.get(index)
            if update is None:
                update = SequenceUpdate(state.sequence.sequence_id, tuple(tokens[index][: counts[index]]))
            yield update


@dataclass(frozen=True, eq=False)
class Verified:
    """Verification of the draft tokens of a step, roots left out.

    drafted, accepted: i64[num_decode], tokens of each decode row. num_drafted: their sum. accepted_depths:
    i32[num_accepted], depth of each accepted token, from 1.
    """

    drafted: np.ndarray
    accepted: np.ndarray
    num_drafted: int
    accepted_depths: np.ndarray

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens of all rows."""
        return len(self.accepted_depths)

    @classmethod
    def of(cls, trees: DraftTrees, accepted: np.ndarray, num_decode: int) -> Verified:
        """Count the nodes of `trees`; accepted is bool[N], per packed node, roots True."""
        num_drafted = len(trees.row) - num_decode
        if not num_drafted:
            nothing = np.zeros(num_decode, np.int64)
            return cls(nothing, nothing, 0, np.zeros(0, np.int32))
        hits = accepted & (trees.candidate >= 0)
        drafted = np.bincount(trees.row, minlength=num_decode) - 1
        return cls(drafted, np.bincount(trees.row[hits], minlength=num_decode), num_drafted, trees.depth[hits])

    def count(self, stats: StepStats) -> None:
        """Add this step to the totals."""
        if not self.num_drafted:
            return
        stats.spec_steps += 1
        stats.drafts += int(np.count_nonzero(self.drafted))
        stats.draft_tokens += self.num_drafted
        stats.accepted_tokens += self.num_accepted
        per_depth = np.bincount(self.accepted_depths).tolist()
        totals = stats.accepted_per_position
        totals.extend([0] * (len(per_depth) - 1 - len(totals)))
        for depth, count in enumerate(per_depth[1:]):
            totals[depth] += count


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
    """Advance every row that still runs, release what finished, and return the new tokens, stamped `now`."""
    table, slots, token_ids = batch.table, planned.slots, outcome.tokens
    counts = outcome.counts.astype(np.int64)
    _advance(table, planned, candidates, verified, counts)
    states = [table.states[slot] for slot in slots.tolist()]
    emits, computed = counts > 0, slots
    if None in states:  # aborted while the step was in flight
        runs = np.array([state is not None for state in states])
        emits &= runs
        computed = slots[runs]
    if np.count_nonzero(emits) < len(slots):
        rows = emits.nonzero()[0]
        states = [states[row] for row in rows.tolist()]
        slots, counts, token_ids = slots[rows], counts[rows], token_ids[rows]
    running = cast(list[SequenceState], states)
    kept, reasons = _cut_at_end(table, slots, running, token_ids, counts, stop_check)
    table.write_tokens(slots, token_ids)
    table.num_tokens[slots] += kept
    if batch.prefixes is not None:
        batch.prefixes.enter_full_pages(computed)
    started = table.stamp(slots, now)
    table.read_marks(slots, token_ids, kept, now)
    stats.prompt_tokens += int(table.prompt_len[started].sum())
    stats.generation_tokens += int(kept.sum())
    if batch.shares is not None:
        batch.shares.charge(table.flow[slots], kept)
    numbers = table.number[slots]
    ended = {
        row: finish(batch, running[row], reason, token_ids[row, : kept[row]].tolist(), stats)
        for row, reason in sorted(reasons.items())
    }
    return StepUpdates(running, numbers, token_ids, kept, ended)


def finish(
    batch: Batch, state: SequenceState, reason: FinishReason, token_ids: list[int], stats: StepStats
) -> SequenceUpdate:
    """End a sequence: release slot and pages, and return its last update, which carries the metrics."""
    batch.remove(state)
    stats.finished[reason] = stats.finished.get(reason, 0) + 1
    return SequenceUpdate(state.sequence.sequence_id, tuple(token_ids), reason, state.metrics())


def _advance(
    table: SlotTable, planned: PlannedStep, candidates: CandidateTrees, verified: Verified, counts: np.ndarray
) -> None:
    """Count the tokens whose KV every row holds now, and what was verified.

    The slot of an aborted row may be counted too: the next sequence in it brings counts of its own.
    """
    plan, slots = planned.plan, planned.slots
    decode = slots[: plan.num_decode]
    table.num_computed[decode] += counts[: plan.num_decode]
    if len(decode) < len(slots):
        table.num_computed[slots[plan.num_decode :]] += plan.prefill_counts
    table.verify_steps[decode] += 1
    if verified.num_drafted:
        table.drafted_tokens[decode] += verified.drafted
        table.accepted_tokens[decode] += verified.accepted
        rows = verified.drafted.nonzero()[0]
        table.accepted_steps[decode[rows], verified.accepted[rows]] += 1
    if plan.scored is not None:
        for row, count in zip(plan.scored.rows.tolist(), plan.scored.counts.tolist(), strict=True):
            if (state := table.states[slots[row]]) is not None:
                state.num_scored += count
    draft = plan.draft
    # the draft ran and did not fail; a draft service is sent again whatever it lost, so what it was sent counts
    if draft is not None and (draft.depth == 0 or candidates.log_f.shape[1] or draft.is_remote):
        table.draft_computed[slots] = draft.draft_ctx + draft.catchup_counts


def _cut_at_end(
    table: SlotTable, slots: np.ndarray, states: list[SequenceState], token_ids: np.ndarray, counts: np.ndarray,
    stop_check: StopCheck | None,
) -> tuple[np.ndarray, dict[int, FinishReason]]:  # fmt: skip
    """Cut each row's new tokens where plain decoding ends: at a stop token, a stop string, or the length limit.

    Returns i64[U], tokens kept, and the finish reasons of the rows that end, by index.
    """
    room = table.max_total[slots] - table.num_tokens[slots]
    kept = np.minimum(counts, room)
    reasons: dict[int, FinishReason] = dict.fromkeys((counts >= room).nonzero()[0].tolist(), "length")
    asked = range(len(slots)) if stop_check is not None else table.has_stop_ids[slots].nonzero()[0].tolist()
    for row in asked:
        sequence, new = states[row].sequence, token_ids[row, : kept[row]].tolist()
        if not sequence.stop_token_ids.isdisjoint(new):
            first = next(position for position, token in enumerate(new) if token in sequence.stop_token_ids)
            new, reasons[row] = new[: first + 1], "stop"
        keep = None if stop_check is None else stop_check(sequence.sequence_id, new)
        if keep is not None:
            new, reasons[row] = new[:keep], "stop"
        kept[row] = len(new)
    return kept, reasons


def rows_with_drafts(plan: StepPlan, candidates: CandidateTrees) -> np.ndarray | None:
    """Return bool[num_decode], rows that asked for candidates and got some; None if there are none.

    A draft service may answer for some of the rows only.
    """
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
    """Return what the controller learns from a step; drafted is bool[num_decode] of `rows_with_drafts`."""
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
