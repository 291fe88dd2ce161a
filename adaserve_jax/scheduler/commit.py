"""What a verified step changes: progress, output tokens, ends of requests, and what is learned for the next plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast, overload

import numpy as np

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.planner import PlannedStep
from adaserve_jax.scheduler.sequence import SequenceState, SlotTable
from adaserve_jax.stats import StepStats
from adaserve_jax.types import (
    CandidateTrees,
    DraftTrees,
    FinishReason,
    SequenceUpdate,
    StepOutcome,
    StopCheck,
)

# What a step brought its requests: columns for those who count, updates one by one for those who stream.


@dataclass(frozen=True, eq=False)
class StepUpdates(Sequence[SequenceUpdate]):
    """A sequence of the updates of one step, made when they are asked for. U: requests that got tokens or ended.

    requests: [U]. sequence: i64[U], each request's number in the order in which they were added. token_ids:
    i32[U, D], the first counts[u] new; counts: i64[U]. ended: the updates that end their request, in order, by index.
    """

    requests: list[SequenceState]
    sequence: np.ndarray
    token_ids: np.ndarray
    counts: np.ndarray
    ended: dict[int, SequenceUpdate]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[SequenceUpdate]:
        tokens, counts = self.token_ids.tolist(), self.counts.tolist()
        for index, state in enumerate(self.requests):
            update = self.ended.get(index)
            if update is None:
                update = SequenceUpdate(state.request.sequence_id, tuple(tokens[index][: counts[index]]))
            yield update

    @overload
    def __getitem__(self, index: int) -> SequenceUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> list[SequenceUpdate]: ...
    def __getitem__(self, index: int | slice) -> SequenceUpdate | list[SequenceUpdate]:
        return list(self)[index]


@dataclass(frozen=True, eq=False)
class Verified:
    """Draft tokens, roots left out. drafted, accepted: i64[num_decode], of each decode row. num_drafted: of all.
    accepted_depths: i32[num_accepted], of each accepted one, from 1."""

    drafted: np.ndarray
    accepted: np.ndarray
    num_drafted: int
    accepted_depths: np.ndarray

    @property
    def num_accepted(self) -> int:
        return len(self.accepted_depths)

    @classmethod
    def of(cls, trees: DraftTrees, accepted: np.ndarray, num_decode: int) -> Verified:
        """accepted: bool[N], per packed node, roots True."""
        num_drafted = len(trees.row) - num_decode
        if not num_drafted:
            nothing = np.zeros(num_decode, np.int64)
            return cls(nothing, nothing, 0, np.zeros(0, np.int32))
        hits = accepted & (trees.candidate >= 0)
        drafted = np.bincount(trees.row, minlength=num_decode) - 1
        return cls(drafted, np.bincount(trees.row[hits], minlength=num_decode), num_drafted, trees.depth[hits])

    def count(self, stats: StepStats) -> None:
        """Add to the totals."""
        if not self.num_drafted:
            return
        stats.spec_steps += 1
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
    """Advance every row that still runs, free what finished, and return the new tokens, stamped `now`."""
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
    kept, reasons = _cut(table, slots, running, token_ids, counts, stop_check)
    table.write_tokens(slots, token_ids)
    table.num_tokens[slots] += kept
    if batch.prefixes is not None:
        batch.prefixes.learn(computed)
    started = table.stamp(slots, now)
    stats.prompt_tokens += int(table.prompt_len[started].sum())
    stats.generation_tokens += int(kept.sum())
    sequence = table.sequence[slots]
    ended = {
        row: finish(batch, running[row], reason, token_ids[row, : kept[row]].tolist(), stats)
        for row, reason in sorted(reasons.items())
    }
    return StepUpdates(running, sequence, token_ids, kept, ended)


def finish(
    batch: Batch, state: SequenceState, reason: FinishReason, token_ids: list[int], stats: StepStats
) -> SequenceUpdate:
    """End a request: its slot and pages return, and its last update carries the metrics."""
    if state.is_running:
        batch.release(state)
    else:
        batch.queue.remove(state)
    stats.finished[reason] = stats.finished.get(reason, 0) + 1
    return SequenceUpdate(state.request.sequence_id, tuple(token_ids), reason, state.metrics())


def _advance(
    table: SlotTable, planned: PlannedStep, candidates: CandidateTrees, verified: Verified, counts: np.ndarray
) -> None:
    """Count what every row's KV holds now, and what was verified. An aborted row's slot is nobody's: it may be counted
    too, since whoever gets it brings counts of their own."""
    plan, slots = planned.plan, planned.slots
    decode = slots[: plan.num_decode]
    table.num_computed[decode] += counts[: plan.num_decode]
    if len(decode) < len(slots):
        table.num_computed[slots[plan.num_decode :]] += plan.prefill_counts
    table.verify_steps[decode] += 1
    if verified.num_drafted:
        table.drafted_tokens[decode] += verified.drafted
        table.accepted_tokens[decode] += verified.accepted
    draft = plan.draft
    # it ran, and did not fail; of a service it counts what it was told, which is told again where that was lost
    if draft is not None and (draft.depth == 0 or candidates.log_f.shape[1] or draft.is_remote):
        table.draft_computed[slots] = draft.draft_ctx + draft.catchup_counts


def _cut(
    table: SlotTable, slots: np.ndarray, states: list[SequenceState], token_ids: np.ndarray, counts: np.ndarray,
    stop_check: StopCheck | None,
) -> tuple[np.ndarray, dict[int, FinishReason]]:  # fmt: skip
    """How much of each row's new tokens plain decoding would have emitted, up to the first stop token, stop string, or
    the length limit: i64[U], and why the rows end that do."""
    room = table.max_total[slots] - table.num_tokens[slots]
    kept = np.minimum(counts, room)
    reasons: dict[int, FinishReason] = dict.fromkeys((counts >= room).nonzero()[0].tolist(), "length")
    asked = range(len(slots)) if stop_check is not None else table.has_stop_ids[slots].nonzero()[0].tolist()
    for row in asked:
        request, new = states[row].request, token_ids[row, : kept[row]].tolist()
        if not request.stop_token_ids.isdisjoint(new):
            first = next(position for position, token in enumerate(new) if token in request.stop_token_ids)
            new, reasons[row] = new[: first + 1], "stop"
        keep = None if stop_check is None else stop_check(request.sequence_id, new)
        if keep is not None:
            new, reasons[row] = new[:keep], "stop"
        kept[row] = len(new)
    return kept, reasons
