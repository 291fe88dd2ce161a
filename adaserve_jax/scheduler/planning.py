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
from adaserve_jax.scheduler.state import RequestState
from adaserve_jax.types import DraftPlan, StepPlan

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

    remaining: i64[num_decode], tokens to max_total. made_s: when it was planned.
    """

    plan: StepPlan
    rows: list[RequestState]
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
        decode = [state for state in batch.running if state.pending == 1]
        prefill = sorted((state for state in batch.running if state.pending > 1), key=lambda state: state.rank)
        pace, remaining, lag = self._measure(decode, now)
        # a row whose draft lags by more than one step can catch up decodes plainly until it has
        can_speculate = remaining > 1 + (lag - 1) // self._max_catchup
        waiting = max((wait_ratio(s, now) for s in prefill if not s.num_output), default=0.0)
        load = Load(
            need_rate=pace.need_rate(now),
            draft_lag=lag,
            can_speculate=can_speculate & self._uses_draft,
            num_prefill=len(prefill),
            prefill_tokens=min(sum(state.pending for state in prefill), self._max_prefill),
            wait_ratio=max(waiting, batch.queue.most_urgent_wait(now)),
            context=np.array([state.num_computed for state in decode + prefill], np.int64),
        )
        decision = self._controller.decide(load)
        chunks = _share_out(prefill, min(decision.prefill_tokens, self._limits.max_tokens - len(decode)))
        self._prefill_per_step += PREFILL_RATE * (sum(chunks) - self._prefill_per_step)
        rows = decode + prefill[: len(chunks)]
        for state in rows:
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now
        draft = self._plan_draft(decision, rows, load, chunks) if self._uses_draft else None
        plan = self._assemble(step, rows, chunks, draft, decision)
        return PlannedStep(plan, rows, pace, remaining, load.wait_ratio, now)

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
                decode = [running for running in self._batch.running if running.pending == 1]
                needed = self._measure(decode, now)[0].need_rate(now)
                starting = [_pace_rate(running) for running in self._batch.running if running.pending > 1]
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

    def _measure(self, decode: list[RequestState], now: float) -> tuple[Pace, np.ndarray, np.ndarray]:
        """Pace, tokens to max_total, and tokens that the draft lacks, of the decode rows."""
        counts = np.array(
            [(s.num_output, s.max_total - s.num_tokens, s.num_tokens - s.draft_computed) for s in decode], np.int64
        ).reshape(-1, 3)
        slots = np.array([state.slot for state in decode], np.int64)
        pace = Pace(
            first_token_s=np.array([now if s.first_token_s is None else s.first_token_s for s in decode], np.float64),
            tpot_slo_s=self._batch.table.tpot_slo_s[slots],
            num_decoded=np.maximum(counts[:, 0] - 1, 0),
            horizon=np.clip(counts[:, 1], 1, self._horizon),
        )
        return pace, counts[:, 1], counts[:, 2]

    def _plan_draft(
        self, decision: Decision, rows: list[RequestState], load: Load, chunks: list[int]
    ) -> DraftPlan | None:
        """Who speculates and what the draft is fed: those that speculate, shortest lag first; then the lagging rows,
        with half of what is left when prompts wait too; then the prefill chunks."""
        num_decode = len(rows) - len(chunks)
        counts = np.zeros(len(rows), np.int64)
        speculates = np.zeros(num_decode, bool)
        room = self._max_catchup
        if decision.depth:
            speculates = self._speculating(rows, load, decision.depth)
            counts[:num_decode] = np.where(speculates, load.draft_lag, 0)
            room -= int(counts.sum())
            lagging = room // 2 if chunks else room
            for index in np.flatnonzero(~speculates & load.can_speculate & (load.draft_lag > 1)):
                counts[index] = min(int(load.draft_lag[index]), lagging)
                lagging -= int(counts[index])
                room -= int(counts[index])
        if decision.feed_draft:
            for index, chunk in enumerate(chunks, num_decode):
                state = rows[index]
                counts[index] = min(state.num_computed + chunk - state.draft_computed, room)
                room -= int(counts[index])
        if not counts.any():
            return None
        return DraftPlan(
            depth=decision.depth if speculates.any() else 0,
            width=max(decision.width, 1),
            catchup_tokens=_gather(
                [
                    state.tokens(state.draft_computed, state.draft_computed + count)
                    for state, count in zip(rows, counts.tolist(), strict=True)
                    if count
                ]
            ),
            catchup_counts=counts.astype(np.int32),
            draft_ctx=np.array([state.draft_computed for state in rows], np.int32),
            speculates=speculates,
        )

    def _speculating(self, rows: list[RequestState], load: Load, depth: int) -> np.ndarray:
        """bool[num_decode]: rows whose whole lag fits this step's catch-up and whose tree's pages are held."""
        order = np.argsort(np.where(load.can_speculate, load.draft_lag, self._max_catchup + 1), kind="stable")
        fits = load.can_speculate[order] & (np.cumsum(load.draft_lag[order]) <= self._max_catchup)
        speculates = np.zeros(load.num_decode, bool)
        speculates[order] = fits
        page_size = self._limits.page_size
        for index in np.flatnonzero(speculates).tolist():
            state = rows[index]
            # the deepest node that selection may take is emitted beside one more token
            end = min(state.num_tokens + depth, state.max_total - 1)
            if end > state.num_pages * page_size:
                speculates[index] = self._batch.reserve(state, end)
        return speculates

    def _assemble(
        self, step: int, rows: list[RequestState], chunks: list[int], draft: DraftPlan | None, decision: Decision
    ) -> StepPlan:
        num_decode = len(rows) - len(chunks)
        decode, prefill = rows[:num_decode], rows[num_decode:]
        final = np.array([c == s.pending for c, s in zip(chunks, prefill, strict=True)], bool)
        most = min(self._limits.max_tree_tokens - int(final.sum()), self._limits.max_tokens - sum(chunks))
        speculating = draft is not None and draft.depth > 0
        slots = np.array([state.slot for state in rows], np.int32)
        return StepPlan(
            step=step,
            slots=slots,
            num_decode=num_decode,
            root_token=np.array([state.last_token for state in decode], np.int32),
            ctx_len=np.array([state.num_computed for state in rows], np.int32),
            page_table=self._batch.table.page_table[slots],
            sampling=self._batch.table.row_sampling(slots),
            prefill_tokens=_gather(
                [s.tokens(s.num_computed, s.num_computed + c) for s, c in zip(prefill, chunks, strict=True)]
            ),
            prefill_counts=np.array(chunks, np.int32),
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


def _gather(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
