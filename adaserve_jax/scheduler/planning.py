"""From the running batch to a StepPlan: rows, chunks, catch-up and pages. Decides by the controller; runs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load
from adaserve_jax.scheduler.draft_planning import DraftPlanner
from adaserve_jax.scheduler.queue import wait_ratio
from adaserve_jax.scheduler.slo import need_rate
from adaserve_jax.scheduler.state import RequestState
from adaserve_jax.types import DraftPlan, StepPlan

_NO_TOKENS, _NO_ROWS = np.zeros(0, np.int32), np.zeros(0, bool)
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

    def due_s(self, now: float) -> np.ndarray:
        """f64[R], seconds from `now` until each row's next token is due; 0 where it is late, inf without a target."""
        return np.maximum(self.first_token_s + (self.num_decoded + 1) * self.tpot_slo_s - now, 0.0)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A plan with what selection and commit need to know of its rows.

    remaining: i64[num_decode], tokens to max_total. made_s: when it was planned. slots: i64[R]. decided_depth: of the
    draft, whether or not any row could use it.
    """

    plan: StepPlan
    slots: np.ndarray
    pace: Pace
    remaining: np.ndarray
    wait_ratio: float
    made_s: float
    decided_depth: int


class Planner:
    """Plans one step after another. draft: the draft's part of it. max_prefill: most prefill tokens of a step. horizon:
    h, tokens."""

    def __init__(self, batch: Batch, controller: Controller, draft: DraftPlanner, *, max_prefill: int, horizon: int):
        self._batch = batch
        self._limits = batch.limits
        self._controller = controller
        self._draft = draft
        self._max_prefill = max_prefill
        self._prefill_per_step = 0.0
        self._horizon = horizon

    def plan(self, now: float, step: int) -> PlannedStep | None:
        """Admit, preempt, decide; None when nothing can run."""
        batch = self._batch
        if not batch.make_room():
            batch.admit(now, self._starter(now))
        if not batch.running:
            return None
        decode, prefill = self._rows()
        pace, remaining, lag = self._measure(decode, now)
        waiting = max((wait_ratio(s, now) for s in prefill if not s.num_output), default=0.0)
        load = Load(
            need_rate=pace.need_rate(now),
            draft_lag=self._draft.lag_in_step(lag),
            can_speculate=self._draft.can_speculate(remaining, lag),
            num_prefill=len(prefill),
            prefill_tokens=min(sum(state.pending for state in prefill), self._max_prefill),
            wait_ratio=max(waiting, batch.queue.most_urgent_wait(now)),
            context=np.concatenate(
                [batch.table.num_computed[decode], np.array([state.num_computed for state in prefill], np.int64)]
            ),
            can_draft=self._draft.can_draft,
        )
        decision = self._controller.decide(load)
        decision.check(self._limits, load)
        chunks = _share_out(prefill, min(decision.prefill_tokens, self._limits.max_tokens - len(decode)))
        self._prefill_per_step += PREFILL_RATE * (sum(chunks) - self._prefill_per_step)
        slots = decode
        if chunks:
            slots = np.concatenate([decode, np.array([state.slot for state in prefill[: len(chunks)]], np.int64)])
        scheduled_s = batch.table.first_scheduled_s[slots]
        batch.table.first_scheduled_s[slots[scheduled_s != scheduled_s]] = now
        due_s = pace.due_s(now) if self._draft.remote else None
        draft = self._draft.plan(decision, slots, load.can_speculate, lag, chunks, due_s)
        plan = self._assemble(step, slots, chunks, draft, decision)
        return PlannedStep(plan, slots, pace, remaining, load.wait_ratio, now, decision.depth)

    def pace(self, now: float) -> Pace | None:
        """Of the requests that run; None while any of them waits for its prompt to be computed."""
        decode, prefill = self._rows()
        return None if prefill else self._measure(decode, now)[0]

    def _rows(self) -> tuple[np.ndarray, list[RequestState]]:
        """Slots of the decode rows, i64[num_decode], and the prefill rows by rank."""
        running, slots, table = self._batch.running, self._batch.slots, self._batch.table
        decodes = table.num_tokens[slots] - table.num_computed[slots] == 1
        if np.count_nonzero(decodes) == len(slots):
            return slots.copy(), []
        prefill = [running[row] for row in (~decodes).nonzero()[0]]
        return slots[decodes], sorted(prefill, key=lambda state: state.rank)

    def _starter(self, now: float) -> Callable[[RequestState], bool] | None:
        """Whether one more request may start: those that run with hope, and it, can all be kept on pace. One that is
        late already, or whose target is out of reach, asks for its root only; one without a target always may. Measured
        when it is first asked; every yes counts for the next. None where the controller leaves `sustains` as it is, and
        so always says yes."""
        if type(self._controller).sustains is Controller.sustains:
            return None
        rates: list[float] = []
        others = -1

        def may_start(state: RequestState) -> bool:
            nonlocal rates, others
            if state.is_untargeted:
                return True
            if others < 0:
                decode, prefill = self._rows()
                needed = self._measure(decode, now)[0].need_rate(now)
                starting = [self._pace_rate(running, now) for running in prefill]
                known = [*needed.tolist(), *starting]
                rates = [rate for rate in known if 0 < rate < math.inf]
                others = len(known) - len(rates)
            rate = 0.0 if self._batch.queue.is_late(state) else _pace_rate(state.request.tpot_slo_s)
            more, beside = ([*rates, rate], others) if rate else (rates, others + 1)
            can_draft = self._draft.can_draft
            if not self._controller.sustains(np.array(more), beside, self._prefill_per_step, can_draft=can_draft):
                return False
            rates, others = more, beside
            return True

        return may_start

    def _pace_rate(self, state: RequestState, now: float) -> float:
        """Of a running request whose prompt is not computed yet; 0 also where its target is given up, or will be."""
        table = self._batch.table
        return 0.0 if table.misses_ttft(state.slot, now) else _pace_rate(float(table.tpot_slo_s[state.slot]))

    def _measure(self, decode: np.ndarray, now: float) -> tuple[Pace, np.ndarray, np.ndarray]:
        """Pace, tokens to max_total, and tokens that the draft lacks, of the decode rows, given by slot."""
        table = self._batch.table
        num_tokens = table.num_tokens[decode]
        remaining = table.max_total[decode] - num_tokens
        first_token_s = table.first_token_s[decode]
        first_token_s[first_token_s != first_token_s] = now  # none yet: NaN
        pace = Pace(
            first_token_s=first_token_s,
            tpot_slo_s=table.tpot_slo_s[decode],
            num_decoded=np.maximum(num_tokens - table.prompt_len[decode] - 1, 0),
            horizon=np.minimum(np.maximum(remaining, 1), self._horizon),
        )
        return pace, remaining, num_tokens - table.draft_computed[decode]

    def _assemble(
        self, step: int, slots: np.ndarray, chunks: list[int], draft: DraftPlan | None, decision: Decision
    ) -> StepPlan:
        table = self._batch.table
        num_decode = len(slots) - len(chunks)
        num_tokens, num_computed = table.num_tokens[slots], table.num_computed[slots]
        prefill_counts, prefill_tokens, final = _NO_TOKENS, _NO_TOKENS, _NO_ROWS
        if chunks:
            prefill_counts = np.array(chunks, np.int32)
            prefill_tokens = table.gather(slots[num_decode:], num_computed[num_decode:], prefill_counts)
            final = prefill_counts == (num_tokens - num_computed)[num_decode:]
        most = min(
            self._limits.max_tree_tokens - int(np.count_nonzero(final)), self._limits.max_tokens - len(prefill_tokens)
        )
        speculating = draft is not None and draft.depth > 0
        return StepPlan(
            step=step,
            slots=slots.astype(np.int32),
            num_decode=num_decode,
            root_token=table.token_ids[slots[:num_decode], num_tokens[:num_decode] - 1],
            ctx_len=num_computed.astype(np.int32),
            page_table=table.page_table.take(slots, axis=0),
            sampling=table.row_sampling(slots),
            prefill_tokens=prefill_tokens,
            prefill_counts=prefill_counts,
            prefill_final=final,
            draft=draft,
            budget=min(decision.budget, most) if speculating else num_decode,
        )


def _pace_rate(tpot_slo_s: float | None) -> float:
    """Tokens per second that keep a request on its target from the start; 0 without one."""
    return 0.0 if tpot_slo_s is None else 1.0 / tpot_slo_s


def _share_out(prefill: list[RequestState], tokens: int) -> list[int]:
    """Chunk lengths for the first of `prefill`, in order, until `tokens` are given away."""
    chunks: list[int] = []
    for state in prefill:
        if tokens <= 0:
            break
        chunks.append(min(state.pending, tokens))
        tokens -= chunks[-1]
    return chunks
