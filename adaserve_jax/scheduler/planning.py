"""From the running batch to a StepPlan: rows, chunks, catch-up and pages. Decides by the controller; runs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load
from adaserve_jax.scheduler.queue import wait_ratio
from adaserve_jax.scheduler.slo import need_rate
from adaserve_jax.scheduler.state import (
    DRAFT_COMPUTED,
    FIRST_SCHEDULED_S,
    FIRST_TOKEN_S,
    MAX_TOTAL,
    NUM_COMPUTED,
    NUM_PAGES,
    NUM_TOKENS,
    PROMPT_LEN,
    RequestState,
)
from adaserve_jax.types import DraftPlan, StepPlan

_NO_TOKENS = np.zeros(0, np.int32)
PREFILL_RATE = 0.02
"""Weight of a step in the moving average of prefill tokens per step."""


@dataclass(frozen=True, eq=False)
class Pace:
    """What the targets of the decode rows are judged by.

    first_token_s, tpot_slo_s: f64[R]; num_decoded, horizon: i64[R], tokens.
    """

    first_token_s: np.ndarray
    tpot_slo_s: np.ndarray
    num_decoded: np.ndarray
    horizon: np.ndarray

    def need_rate(self, now: float) -> np.ndarray:
        """f64[R], tokens per second, as of `now`."""
        return need_rate(now - self.first_token_s, self.tpot_slo_s, self.num_decoded, self.horizon)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A plan with what selection and commit need to know of its rows.

    remaining: i64[num_decode], tokens to max_total. made_s: when it was planned. slots: i64[R].
    """

    plan: StepPlan
    slots: np.ndarray
    pace: Pace
    remaining: np.ndarray
    wait_ratio: float
    made_s: float


class Planner:
    """Plans one step after another.

    max_catchup: most tokens that the draft is fed in a step. max_prefill: most prefill tokens of a step. horizon: h,
    tokens. uses_draft: whether plans have one.
    """

    def __init__(
        self, batch: Batch, controller: Controller, *, max_catchup: int, max_prefill: int, horizon: int,
        uses_draft: bool,
    ):  # fmt: skip
        self._batch = batch
        self._limits = batch.limits
        self._controller = controller
        self._max_catchup = max_catchup
        self._max_prefill = max_prefill
        self._prefill_per_step = 0.0
        self._horizon = horizon
        self._uses_draft = uses_draft

    def plan(self, now: float, step: int) -> PlannedStep | None:
        """Admit, preempt, decide; None when nothing can run."""
        batch = self._batch
        if not batch.make_room():
            batch.admit(now, self._starter(now))
        if not batch.running:
            return None
        decode, prefill = self._rows()
        pace, remaining, lag = self._measure(decode, now)
        # a row whose draft lags by more than one step can catch up decodes plainly until it has
        can_speculate = remaining > 1 + (lag - 1) // self._max_catchup if self._uses_draft else np.zeros(len(lag), bool)
        waiting = max((wait_ratio(s, now) for s in prefill if not s.num_output), default=0.0)
        load = Load(
            need_rate=pace.need_rate(now),
            draft_lag=lag,
            can_speculate=can_speculate,
            num_prefill=len(prefill),
            prefill_tokens=min(sum(state.pending for state in prefill), self._max_prefill),
            wait_ratio=max(waiting, batch.queue.most_urgent_wait(now)),
        )
        decision = self._controller.decide(load)
        chunks = _share_out(prefill, min(decision.prefill_tokens, self._limits.max_tokens - len(decode)))
        self._prefill_per_step += PREFILL_RATE * (sum(chunks) - self._prefill_per_step)
        slots = decode
        if chunks:
            slots = np.concatenate([decode, np.array([state.slot for state in prefill[: len(chunks)]], np.int64)])
        times = batch.table.times
        new = slots[np.isnan(times[slots, FIRST_SCHEDULED_S])]
        times[new, FIRST_SCHEDULED_S] = now
        counts = batch.table.counts.take(slots, axis=0)
        draft = self._plan_draft(decision, slots, counts, load, chunks) if self._uses_draft else None
        plan = self._assemble(step, slots, counts, chunks, draft, decision)
        return PlannedStep(plan, slots, pace, remaining, load.wait_ratio, now)

    def _rows(self) -> tuple[np.ndarray, list[RequestState]]:
        """Slots of the decode rows, i64[num_decode], and the prefill rows by rank."""
        batch = self._batch
        slots = batch.slots
        counts = batch.table.counts.take(slots, axis=0)
        decodes = counts[:, NUM_TOKENS] == counts[:, NUM_COMPUTED] + 1
        prefill = [batch.running[row] for row in np.flatnonzero(~decodes)]
        return slots[decodes], sorted(prefill, key=lambda state: state.rank)

    def _starter(self, now: float) -> Callable[[RequestState], bool]:
        """Whether one more request may start: those that run with hope, and it, can all be kept on pace. One that is
        late already asks for its root only; one without a target always may. Measured when it is first asked; every
        yes counts for the next."""
        rates: list[float] = []
        others = -1

        def may_start(state: RequestState) -> bool:
            nonlocal rates, others
            if state.request.tpot_slo_s is None:
                return True
            if others < 0:
                decode, prefill = self._rows()
                needed = self._measure(decode, now)[0].need_rate(now)
                starting = [_pace_rate(running) for running in prefill]
                known = [*needed.tolist(), *starting]
                rates = [rate for rate in known if 0 < rate < math.inf]
                others = len(known) - len(rates)
            rate = 0.0 if self._batch.queue.is_late(state) else _pace_rate(state)
            more, beside = ([*rates, rate], others) if rate else (rates, others + 1)
            if not self._controller.sustains(np.array(more), beside, self._prefill_per_step):
                return False
            rates, others = more, beside
            return True

        return may_start

    def _measure(self, decode: np.ndarray, now: float) -> tuple[Pace, np.ndarray, np.ndarray]:
        """Pace, tokens to max_total, and tokens that the draft lacks, of the decode rows, given by slot."""
        table = self._batch.table
        counts = table.counts.take(decode, axis=0)
        num_tokens = counts[:, NUM_TOKENS]
        remaining = counts[:, MAX_TOTAL] - num_tokens
        first_token_s = table.times[decode, FIRST_TOKEN_S]
        pace = Pace(
            first_token_s=np.where(np.isnan(first_token_s), now, first_token_s),
            tpot_slo_s=table.tpot_slo_s.take(decode),
            num_decoded=np.maximum(num_tokens - counts[:, PROMPT_LEN] - 1, 0),
            horizon=np.minimum(np.maximum(remaining, 1), self._horizon),
        )
        return pace, remaining, num_tokens - counts[:, DRAFT_COMPUTED]

    def _plan_draft(
        self, decision: Decision, slots: np.ndarray, held: np.ndarray, load: Load, chunks: list[int]
    ) -> DraftPlan | None:
        """Who speculates and what the draft is fed: those that speculate, shortest lag first; then the lagging rows,
        with half of what is left when prompts wait too; then the prefill chunks. held: i64[R, NUM_COUNTS]."""
        num_decode = len(slots) - len(chunks)
        counts = np.zeros(len(slots), np.int64)
        speculates = np.zeros(num_decode, bool)
        room = self._max_catchup
        if decision.depth:
            speculates = self._speculating(slots[:num_decode], held[:num_decode], load, decision.depth)
            counts[:num_decode] = np.where(speculates, load.draft_lag, 0)
            room -= int(counts.sum())
            lagging = room // 2 if chunks else room
            behind = load.can_speculate & ~speculates & (load.draft_lag > 1)
            for index in np.flatnonzero(behind).tolist():
                counts[index] = min(int(load.draft_lag[index]), lagging)
                lagging -= int(counts[index])
                room -= int(counts[index])
        draft_ctx = held[:, DRAFT_COMPUTED]
        if decision.feed_draft:
            for index, chunk in enumerate(chunks, num_decode):
                counts[index] = min(int(held[index, NUM_COMPUTED]) + chunk - int(draft_ctx[index]), room)
                room -= int(counts[index])
        if not counts.any():
            return None
        return DraftPlan(
            depth=decision.depth if speculates.any() else 0,
            width=max(decision.width, 1),
            catchup_tokens=self._batch.table.gather(slots, draft_ctx, counts),
            catchup_counts=counts.astype(np.int32),
            draft_ctx=draft_ctx.astype(np.int32),
            speculates=speculates,
        )

    def _speculating(self, slots: np.ndarray, held: np.ndarray, load: Load, depth: int) -> np.ndarray:
        """bool[num_decode]: rows whose whole lag fits this step's catch-up and whose tree's pages are held."""
        speculates = load.can_speculate
        if int(load.draft_lag.sum()) > self._max_catchup:
            order = np.argsort(np.where(speculates, load.draft_lag, self._max_catchup + 1), kind="stable")
            fits = speculates[order] & (np.cumsum(load.draft_lag[order]) <= self._max_catchup)
            speculates = np.zeros(load.num_decode, bool)
            speculates[order] = fits
        # the deepest node that selection may take is emitted beside one more token
        ends = np.minimum(held[:, NUM_TOKENS] + depth, held[:, MAX_TOTAL] - 1)
        lacking = speculates & (ends > held[:, NUM_PAGES] * self._limits.page_size)
        if not lacking.any():
            return speculates
        got = speculates.copy()
        got[lacking] = self._batch.reserve(slots[lacking], ends[lacking])
        return got

    def _assemble(
        self, step: int, slots: np.ndarray, held: np.ndarray, chunks: list[int], draft: DraftPlan | None,
        decision: Decision,
    ) -> StepPlan:  # fmt: skip
        table = self._batch.table
        num_decode = len(slots) - len(chunks)
        prefill_counts = np.array(chunks, np.int32)
        starts = held[num_decode:, NUM_COMPUTED]
        final = prefill_counts == held[num_decode:, NUM_TOKENS] - starts
        most = min(self._limits.max_tree_tokens - int(final.sum()), self._limits.max_tokens - sum(chunks))
        speculating = draft is not None and draft.depth > 0
        return StepPlan(
            step=step,
            slots=slots.astype(np.int32),
            num_decode=num_decode,
            root_token=table.token_ids[slots[:num_decode], held[:num_decode, NUM_TOKENS] - 1],
            ctx_len=held[:, NUM_COMPUTED].astype(np.int32),
            page_table=table.page_table.take(slots, axis=0),
            sampling=table.row_sampling(slots),
            prefill_tokens=table.gather(slots[num_decode:], starts, prefill_counts) if chunks else _NO_TOKENS,
            prefill_counts=prefill_counts,
            prefill_final=final,
            draft=draft,
            budget=min(decision.budget, most) if speculating else num_decode,
        )


def _pace_rate(state: RequestState) -> float:
    """Tokens per second that keep a request on its target from the start; 0 without one."""
    target = state.request.tpot_slo_s
    return 0.0 if target is None else 1.0 / target


def _share_out(prefill: list[RequestState], tokens: int) -> list[int]:
    """Chunk lengths for the first of `prefill`, in order, until `tokens` are given away."""
    chunks: list[int] = []
    for state in prefill:
        if tokens <= 0:
            break
        chunks.append(min(state.pending, tokens))
        tokens -= chunks[-1]
    return chunks
