"""Plan of a step: which sequences run, how much of each prompt, what the draft is fed, and how many tree tokens may be
verified.

The planner admits and preempts, asks the controller for depth, width, most tree tokens and prefill tokens, and lays out
a StepPlan. Symbols: docs/equations.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from adaserve_jax.memory.residency import Residency
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load, checked
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.output_lengths import LOWER, OutputLengths
from adaserve_jax.scheduler.queue import wait_ratio
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.scheduler.slo import deadline_rate, need_rate
from adaserve_jax.types import DraftPlan, Limits, ScoredPrompts, StepPlan

if TYPE_CHECKING:  # numba is imported where text drafts alone
    from adaserve_jax.scheduler.text_drafter import TextDrafter, TextTrees

_NO_TOKENS, _NO_ROWS = np.zeros(0, np.int32), np.zeros(0, bool)
PREFILL_RATE = 0.02
"""Weight of a step in the moving average of prefill tokens per step."""
CROWDED_SHARE = 0.5
"""Share of the slots above which the engine counts as loaded."""
HOLD_S = 3.0
"""Seconds for which the engine counts as loaded after the last loaded step."""
TARGET_SHARE = 0.9
"""Share of a TPOT target within which background work must leave a sequence, because chance and arrivals may make
the next tokens slower than the last.
"""
SLACK_SHARE = 0.5
"""Share of the least slack that background work may use before the next step."""
DEADLINE_RESERVE = 0.05
"""Share of the time from arrival to a deadline that pacing keeps in reserve: a sequence paced exactly ends a step too
late."""
PROMPT_SHARE = 0.9
"""Share of its patience within which a prompt counts as in time: its last step still has to run."""
PROMPTS_AHEAD = 64
"""Waiting prompts that are looked at. More are hardly computed within their targets."""
DUE_SHARE = 0.6
"""Share of the budget that keeping all sequences on pace may take when one more asks to start that is not late."""
LATE_SHARE = 0.2
"""The same, while others have a pace, when the one that asks is late for its TTFT target or deadline: its prompt would
earn nothing, and make the steps long in which others must keep their pace.
"""
PROMPT_STEPS = 2.5
"""Steps within which the prompt of a sequence with neither TTFT target nor deadline must fit beside the others' pace,
and those before it that are not computed yet: so it starts where its prompt disturbs nobody. Fewer keep more room for a
burst, and let it wait longer.
"""
MOST_PATIENT_S = 90.0
"""Seconds after which a sequence with neither TTFT target nor deadline has waited enough, and asks like one in time,
whatever its prompt.
"""
PACE_RATE = 0.1
"""Weight of a new step in the moving averages of its seconds and of its tokens per row."""


@dataclass(frozen=True, eq=False)
class Pace:
    """Progress of the decode rows against their TPOT targets and deadlines.

    start_s, tpot_slo_s, paced_tpot_s: f64[R]; the last two are inf without a target. start_s: time of the token from
    which the target counts, the first or the closing mark of the thinking. paced_tpot_s: the target less a reserve.
    num_decoded: i64[R], output tokens after that first one. horizon: i64[R], tokens within which a row shall be on its
    target. deadline_s: f64[R], time by which the last token is due, inf without a deadline. tokens_left: i64[R],
    planned until then, at least 1.
    """

    start_s: np.ndarray
    tpot_slo_s: np.ndarray
    paced_tpot_s: np.ndarray
    num_decoded: np.ndarray
    horizon: np.ndarray
    deadline_s: np.ndarray
    tokens_left: np.ndarray

    def need_rate(self, now: float) -> np.ndarray:
        """Return f64[R], tokens per second that put each row on its targets less the reserve, as of `now`."""
        paced = need_rate(now - self.start_s, self.paced_tpot_s, self.num_decoded, self.horizon)
        return np.maximum(paced, deadline_rate(now, self.deadline_s, self.tokens_left))

    def due_s(self, now: float) -> np.ndarray:
        """Return f64[R], seconds from `now` until each row's next token is due; 0 if it is late, inf without a
        target.
        """
        paced = self.start_s + (self.num_decoded + 1) * self.tpot_slo_s - now
        return np.maximum(np.minimum(paced, (self.deadline_s - now) / self.tokens_left), 0.0)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A plan with what selection and commit need to know of its rows.

    slots: i64[R]. remaining: i64[num_decode], tokens to max_total. wait_ratio: as in `Load`. made_s:
    when it was planned. decided_depth: depth that the controller chose, even if no row could use it. text: trees of
    text already seen, where the step may verify any.
    """

    plan: StepPlan
    slots: np.ndarray
    pace: Pace
    remaining: np.ndarray
    wait_ratio: float
    made_s: float
    decided_depth: int
    text: TextTrees | None = None


class Planner:
    """Planner of one step after another."""

    def __init__(
        self, batch: Batch, controller: Controller, draft: DraftPlanner, text: TextDrafter | None = None,
        *, lengths: OutputLengths, max_prefill: int, horizon: int, decision_limits: Limits,
        text_without_draft: bool = True, extends_horizon: bool = False,
    ):  # fmt: skip
        """Set up for one batch.

        text: proposes from text already seen. lengths: what outputs still write. max_prefill: most prefill tokens of
        a step. horizon: h, tokens within which a sequence may catch up. decision_limits: bounds of decisions.
        text_without_draft: steps for which the controller decides depth 0 verify trees of
        text alone. extends_horizon: a sequence may catch up until the least length that it can be expected to have, if
        that is later.
        """
        self._batch = batch
        self._text = text
        self._lengths = lengths
        self._extends_horizon = extends_horizon
        self._limits = batch.limits
        self._decision_limits = decision_limits
        self._text_without_draft = text_without_draft
        self._controller = controller
        self._draft = draft
        self._max_prefill = max_prefill
        self._prefill_per_step = 0.0
        self._horizon = horizon

    def plan(self, now: float, step: int) -> PlannedStep | None:
        """Admit, preempt, decide and lay out a step; return None if nothing can run."""
        batch = self._batch
        if not batch.grow_decode_rows():
            batch.admit(now, self._starter(now))
        if not batch.running:
            return None
        decode, prefill = self._rows()
        pace, remaining, lag = self._measure(decode, now)
        from_text = None if self._text is None else self._text.propose(decode, remaining)
        can_speculate = self._draft.can_speculate(remaining, lag)
        if self._limits.draft_is_head:
            can_speculate &= batch.table.num_tokens[decode] > 1  # it reads the feature of the token before
        if from_text is not None:
            can_speculate &= ~from_text.covered
        free_positions = self._limits.max_tree_tokens - len(decode) - len(prefill)
        waiting = max((wait_ratio(s, now) for s in prefill if not s.num_output), default=0.0)
        load = Load(
            need_rate=pace.need_rate(now),
            draft_lag=self._draft.lag_in_step(lag),
            can_speculate=can_speculate,
            num_prefill=len(prefill),
            prefill_tokens=sum(_cut_chunks(prefill, self._max_prefill, free_positions)),
            wait_ratio=max(waiting, batch.queue.most_urgent_wait(now)),
            context=np.concatenate(
                [batch.table.num_computed[decode], np.array([state.num_computed for state in prefill], np.int64)]
            ),
            can_draft=self._draft.can_draft,
            suffix_f=None if from_text is None else from_text.f,
            due_s=pace.due_s(now) if self._draft.remote or self._controller.reads_due else None,
            tpot_slo_s=pace.tpot_slo_s,
            prompt_rates=self._prompt_rates(prefill, now) if self._controller.reads_prompts else None,
        )
        decision = checked(self._controller.decide(load), self._decision_limits, load)
        if from_text is not None and not decision.depth and self._text_without_draft:
            decision = replace(decision, tree_token_cap=self._limits.max_tree_tokens)
        if decision.depth or from_text is not None:
            free_positions //= 2  # a long prompt would else stop speculation
        most = min(decision.prefill_tokens, self._limits.max_tokens - len(decode))
        chunks = _cut_chunks(prefill, most, free_positions)
        self._prefill_per_step += PREFILL_RATE * (sum(chunks) - self._prefill_per_step)
        slots = decode
        if chunks:
            slots = np.concatenate([decode, np.array([state.slot for state in prefill[: len(chunks)]], np.int64)])
        scheduled_s = batch.table.first_scheduled_s[slots]
        batch.table.first_scheduled_s[slots[scheduled_s != scheduled_s]] = now
        due_s = load.due_s if self._draft.remote else None
        draft = self._draft.plan(decision, slots, load.can_speculate, lag, chunks, due_s)
        scored = _scored_prompts(prefill[: len(chunks)], chunks, len(decode)) if chunks else None
        if decision.tree_token_cap <= len(decode):
            from_text = None
        plan = self._assemble(step, slots, chunks, draft, decision, scored, from_text=from_text is not None)
        return PlannedStep(plan, slots, pace, remaining, load.wait_ratio, now, decision.depth, from_text)

    def _prompt_rates(self, prefill: list[SequenceState], now: float) -> np.ndarray:
        """Return `Load.prompt_rates` of the prompts that run, and then of the first ones that wait.

        A sequence without a target for its first token has no rate, but those behind it wait for its tokens.
        """
        prompts = [*prefill, *self._batch.queue.first_on_time(PROMPTS_AHEAD)]
        tokens = np.cumsum([state.num_uncached for state in prompts])
        rates: list[float] = []
        for state, ahead in zip(prompts, tokens.tolist(), strict=True):
            if state.patience_s is not None and not state.num_output:  # a preempted one has had its first token
                left_s = state.sequence.arrival_s + PROMPT_SHARE * state.patience_s - now
                rates.append(ahead / left_s if left_s > 0 else math.inf)
        return np.sort(np.array(rates))

    def pace(self, now: float) -> Pace | None:
        """Return the pace of the running sequences; None while any of their prompts is not computed."""
        decode, prefill = self._rows()
        return None if prefill else self._measure(decode, now)[0]

    def _rows(self) -> tuple[np.ndarray, list[SequenceState]]:
        """Return the slots of the decode rows, i64[num_decode], and the prefill rows by rank."""
        running, slots, table = self._batch.running, self._batch.slots, self._batch.table
        decodes = table.num_tokens[slots] - table.num_computed[slots] == 1
        if np.count_nonzero(decodes) == len(slots):
            return slots.copy(), []
        prefill = [running[row] for row in (~decodes).nonzero()[0]]
        return slots[decodes], sorted(prefill, key=lambda state: state.rank)

    def _starter(self, now: float) -> Callable[[SequenceState], bool] | None:
        """Return a function that says whether one more sequence may start; None if the controller admits everything.

        It may start if it and the running sequences that still can meet their targets can all be kept on pace. A
        sequence that is late, or whose target is out of reach, counts with its root only; one without a target may
        always start. The running rows are measured when the function is first asked, and every yes counts for the next
        question.
        """
        if type(self._controller).sustains is Controller.sustains:
            return None
        rates: list[float] = []
        others = -1
        by_flow: list[tuple[int, float]] = []

        def may_start(state: SequenceState) -> bool:
            nonlocal rates, others
            if state.is_untargeted:
                if others >= 0:  # the running rows are measured already, without it
                    others += 1
                    by_flow.append((state.flow, 0.0))
                return True
            if others < 0:
                decode, prefill = self._rows()
                needed = self._measure(decode, now)[0].need_rate(now)
                starting = [self._start_rate(running, now) for running in prefill]
                known = [*needed.tolist(), *starting]
                flows = self._batch.table.flow[np.concatenate([decode, [s.slot for s in prefill]]).astype(int)]
                by_flow.extend(zip(flows.tolist(), known, strict=True))
                rates = [rate for rate in known if 0 < rate < math.inf]
                others = len(known) - len(rates)
            is_late = self._batch.queue.is_late(state)
            rate = 0.0 if is_late else self._pace_rate(state, state.tpot_slo_s, state.deadline_s, now)
            more, beside = ([*rates, rate], others) if rate else (rates, others + 1)
            can_draft, reserve = self._draft.can_draft, self._reserve(state, by_flow)
            asked = np.array([*more, *(each for each in reserve if each)]), beside + reserve.count(0.0)
            share, prefill_tokens = DUE_SHARE, self._prefill_per_step
            if rates and is_late:
                share = LATE_SHARE
            elif rates and state.patience_s is None and now - state.sequence.arrival_s < MOST_PATIENT_S:
                whole = (self._pending_prompts() + state.num_uncached) / PROMPT_STEPS
                prefill_tokens = max(prefill_tokens, min(whole, self._max_prefill))
            if not self._controller.sustains(*asked, prefill_tokens, share, can_draft=can_draft):
                return False
            by_flow.append((state.flow, rate))
            rates, others = more, beside
            return True

        return may_start

    def _pending_prompts(self) -> int:
        """Return the tokens of the running sequences' prompts that are not computed."""
        table, slots = self._batch.table, self._batch.slots
        pending = table.num_tokens[slots] - table.num_computed[slots]
        return int(pending[pending > 1].sum())

    def _reserve(self, state: SequenceState, running: list[tuple[int, float]]) -> list[float]:
        """Return the rates, of running sequences by flow, for which a start leaves room: none where shares are not kept
        fair or the sequence's flow runs no more than its share; otherwise as much again as the other flows need.
        """
        if self._batch.shares is None:
            return []
        if not self._batch.shares.over_share(np.array([flow for flow, _ in running], np.int64))[state.flow]:
            return []
        return [rate if 0 < rate < math.inf else 0.0 for flow, rate in running if flow != state.flow]

    def _start_rate(self, state: SequenceState, now: float) -> float:
        """Return the rate that a running sequence needs whose prompt is not computed; 0 if its target was or will be
        dropped.
        """
        table = self._batch.table
        if table.misses_ttft(state.slot, now):
            return 0.0
        return self._pace_rate(state, float(table.tpot_slo_s[state.slot]), float(table.deadline_s[state.slot]), now)

    def _pace_rate(self, state: SequenceState, tpot_slo_s: float | None, deadline_s: float, now: float) -> float:
        """Return the tokens per second that keep a sequence on the targets in force; 0 without any, or if the deadline
        has passed. deadline_s: inf without one.
        """
        paced = 0.0 if tpot_slo_s is None else 1.0 / tpot_slo_s
        if deadline_s == math.inf:
            return paced
        left_s = _paced_deadline_s(state, deadline_s, now) - now
        return max(paced, self._tokens_left(state) / left_s) if left_s > 0 else 0.0

    def _least_left(self, slot: int) -> int:
        """Return the fewest tokens that a running sequence can be expected to write still; 0 where it is unknown."""
        state = self._batch.table.states[slot]
        assert state is not None, "decode rows run"
        name, written = state.sequence.slo_class, state.num_output
        return self._lengths.learned_left(name, state.prompt_len, written, LOWER) or 0

    def _tokens_left(self, state: SequenceState) -> int:
        most = max(state.max_total - state.num_tokens, 1)
        return self._lengths.left(state.sequence.slo_class, state.prompt_len, state.num_output, most)

    def _measure(self, decode: np.ndarray, now: float) -> tuple[Pace, np.ndarray, np.ndarray]:
        """Return pace, tokens to max_total, and tokens that the draft lacks, of the decode rows in these slots."""
        table = self._batch.table
        num_tokens = table.num_tokens[decode]
        remaining = table.max_total[decode] - num_tokens
        start_s = table.pace_start_s[decode]
        start_s[start_s != start_s] = now  # no token yet: NaN
        deadline_s, tokens_left = table.deadline_s[decode], np.ones(len(decode), np.int64)
        for row in np.flatnonzero(deadline_s < np.inf).tolist():
            state = table.states[decode[row]]
            assert state is not None, "decode rows run"
            deadline_s[row] = _paced_deadline_s(state, float(deadline_s[row]), now)
            tokens_left[row] = self._tokens_left(state)
        horizon: int | np.ndarray = self._horizon
        if self._extends_horizon:
            least = [self._least_left(slot) for slot in decode.tolist()]
            horizon = np.maximum(horizon, np.array(least, np.int64))
        pace = Pace(
            start_s=start_s,
            tpot_slo_s=table.tpot_slo_s[decode],
            paced_tpot_s=table.paced_tpot_s[decode],
            num_decoded=np.maximum(num_tokens - table.pace_tokens[decode], 0),
            horizon=np.minimum(np.maximum(remaining, 1), horizon),
            deadline_s=deadline_s,
            tokens_left=tokens_left,
        )
        return pace, remaining, num_tokens - table.draft_computed[decode]

    def _assemble(
        self, step: int, slots: np.ndarray, chunks: list[int], draft: DraftPlan | None, decision: Decision,
        scored: ScoredPrompts | None, *, from_text: bool,
    ) -> StepPlan:  # fmt: skip
        """Lay out the arrays of a step. from_text: text already seen proposes trees."""
        table = self._batch.table
        num_decode = len(slots) - len(chunks)
        num_tokens, num_computed = table.num_tokens[slots], table.num_computed[slots]
        prefill_counts, prefill_tokens, final = _NO_TOKENS, _NO_TOKENS, _NO_ROWS
        if chunks:
            prefill_counts = np.array(chunks, np.int32)
            prefill_tokens = table.gather(slots[num_decode:], num_computed[num_decode:], prefill_counts)
            final = prefill_counts == (num_tokens - num_computed)[num_decode:]
        sampled = int(np.count_nonzero(final)) + (0 if scored is None else scored.num_positions)
        most = min(self._limits.max_tree_tokens - sampled, self._limits.max_tokens - len(prefill_tokens))
        speculating = from_text or (draft is not None and draft.depth > 0)
        adapters = table.adapter[slots]
        return StepPlan(
            step=step,
            slots=slots.astype(np.int32),
            num_decode=num_decode,
            root_token=table.token_ids[slots[:num_decode], num_tokens[:num_decode] - 1],
            ctx_len=num_computed.astype(np.int32),
            page_table=table.page_table.take(slots, axis=0),
            sampling=table.sampling.take(slots),
            prefill_tokens=prefill_tokens,
            prefill_counts=prefill_counts,
            prefill_final=final,
            draft=draft,
            tree_token_cap=min(decision.tree_token_cap, most) if speculating else num_decode,
            scored=scored,
            adapters=adapters if adapters.any() else None,
        )


def _paced_deadline_s(state: SequenceState, deadline_s: float, now: float) -> float:
    """Return the time by which pacing ends a sequence: its deadline less the reserve, which is at most half of the time
    that is left."""
    return deadline_s - min(DEADLINE_RESERVE * (state.sequence.e2e_slo_s or 0.0), max(deadline_s - now, 0.0) / 2)


def _cut_chunks(prefill: list[SequenceState], tokens: int, positions: int) -> list[int]:
    """Return chunk lengths for the first of `prefill`, in order, until `tokens` are given out.

    positions: sampled positions that scored prompts may take, beside one for each sequence. A position after which the
    log probability of the prompt's next token is reported takes one, as a tree node does.
    """
    chunks: list[int] = []
    for state in prefill:
        if tokens <= 0:
            break
        chunk = min(state.pending, tokens)
        if state.has_unscored:
            already_scored = max(state.num_scored - state.num_computed, 0)
            chunk = min(chunk, already_scored + 1 + positions)
            positions -= max(chunk - already_scored - 1, 0)
        chunks.append(chunk)
        tokens -= chunk
    return chunks


def _scored_prompts(prefill: list[SequenceState], chunks: list[int], num_decode: int) -> ScoredPrompts | None:
    """Return the positions of these chunks that are scored; None if there are none.

    prefill: sequences of the rows from `num_decode` on, as many as chunks.
    """
    if not any(state.has_unscored for state in prefill):
        return None
    rows: list[tuple[int, int, int]] = []
    at, token = [], []
    first = 0
    for row, (state, chunk) in enumerate(zip(prefill, chunks, strict=True), num_decode):
        computed = state.num_computed
        begin, end = max(computed, state.num_scored), min(computed + chunk, state.prompt_len - 1)
        if begin < end:
            rows.append((row, end - begin, state.sequence.sampling.prompt_logprobs or 0))
            at.append(np.arange(begin, end, dtype=np.int32) + (first - computed))
            token.append(state.token_ids[begin + 1 : end + 1])
        first += chunk
    if not rows:
        return None
    row_ids, counts, tops = np.array(rows, np.int32).T
    return ScoredPrompts(row_ids, counts, tops, np.concatenate(at), np.concatenate(token))


class DraftPlanner:
    """Planner of the draft's part of a step, for a local draft or a draft service."""

    def __init__(
        self, batch: Batch, cost: CostTable, *, used: bool, calibrated: bool = True,
        calibrator: Calibrator | None = None, residency: Residency | None = None, several_drafts: bool = False,
        remote: bool = False,
    ):  # fmt: skip
        """Set up for one draft.

        cost: its limit of catch-up tokens bounds what the draft is fed in a step, or with a draft service what the step
        waits for; a service is fed any number of tokens while the target goes on. used: plans have a draft at all.
        calibrator: source of new chances, which plans carry to the draft. residency: whether the draft is on the
        device; None: always. several_drafts: plans name the draft model of each row. remote: a draft service drafts.
        """
        self._batch = batch
        self._limits = batch.limits
        self._cost = cost
        self.used = used
        """True if plans may have a draft."""
        self._calibrated = calibrated
        self._calibrator = calibrator
        self._residency = residency
        self._several_drafts = several_drafts
        self.remote = remote
        self.is_away = False
        """True while no draft service can be asked."""

    @property
    def is_resident(self) -> bool:
        """False from an expansion into the draft's memory until the draft is back."""
        return self._residency is None or self._residency.draft_is_here

    @property
    def can_draft(self) -> bool:
        """False while plans have a draft that cannot be asked now."""
        return not self.used or (self.is_resident and not self.is_away)

    def can_speculate(self, remaining: np.ndarray, lag: np.ndarray) -> np.ndarray:
        """Return bool[num_decode], rows that can use a draft.

        A row whose draft needs several steps to catch up decodes without a tree until then, and can use the draft only
        if tokens are left afterwards. remaining, lag: i64[num_decode], tokens to the end and tokens that the draft
        lacks.
        """
        if not (self.used and self.can_draft):
            return np.zeros(len(lag), bool)
        catching_up = (lag - 1) // self._cost.max_catchup_tokens
        return remaining > 1 + (np.minimum(catching_up, 1) if self.remote else catching_up)

    def lag_in_step(self, lag: np.ndarray) -> np.ndarray:
        """Return the part of the lag that a step waits for."""
        return np.minimum(lag, self._limits.max_depth + 1) if self.remote else lag

    def plan(
        self, decision: Decision, slots: np.ndarray, can_speculate: np.ndarray, lag: np.ndarray, chunks: list[int],
        due_s: np.ndarray | None,
    ) -> DraftPlan | None:  # fmt: skip
        """Return the draft's part of a step; None if the draft is neither searched nor fed.

        Rows that speculate are fed first, shortest lag first; then lagging rows, with half of what is left if prompts
        wait too; then the prefill chunks.

        slots: i64[R]. can_speculate: bool[num_decode]. lag: i64[num_decode], tokens that the draft lacks. chunks:
        prefill tokens of the last rows. due_s: f64[num_decode], as in `DraftPlan`.
        """
        if not (self.used and self.can_draft and (decision.depth or decision.feed_draft)):
            return None
        num_decode = len(slots) - len(chunks)
        counts = np.zeros(len(slots), np.int64)
        speculates = np.zeros(num_decode, bool)
        room = self._cost.max_catchup_tokens
        if decision.depth:
            speculates = self._speculating(slots[:num_decode], can_speculate, lag, decision.depth)
            np.multiply(lag, speculates, out=counts[:num_decode])
            room -= int(counts.sum())
        if self.remote:
            room = len(slots) * self._limits.max_context
        if decision.depth and np.count_nonzero(speculates) < num_decode:
            lagging = room // 2 if chunks else room
            behind = can_speculate & ~speculates & (lag > 1)
            for index in behind.nonzero()[0].tolist():
                counts[index] = min(int(lag[index]), lagging)
                lagging -= int(counts[index])
                room -= int(counts[index])
        draft_ctx = self._batch.table.draft_computed[slots]
        if decision.feed_draft and chunks:
            behind = self._batch.table.num_computed[slots] - draft_ctx
            for index, chunk in enumerate(chunks, num_decode):
                ahead = 1 if self._limits.draft_is_head else chunk
                counts[index] = min(int(behind[index]) + ahead, room)
                room -= int(counts[index])
        if not np.count_nonzero(counts):
            return None
        return DraftPlan(
            depth=decision.depth if np.count_nonzero(speculates) else 0,
            width=max(decision.width, 1),
            catchup_tokens=self._batch.table.gather(slots, draft_ctx, counts),
            catchup_counts=counts.astype(np.int32),
            draft_ctx=draft_ctx.astype(np.int32),
            speculates=speculates,
            calibrated=self._calibrated,
            chances=self._calibrator.unsent if self._calibrator is not None else None,
            drafts=self._batch.table.draft[slots] if self._several_drafts else None,
            due_s=due_s,
        )

    def _speculating(self, slots: np.ndarray, can: np.ndarray, lag: np.ndarray, depth: int) -> np.ndarray:
        """Return bool[num_decode], rows whose lag fits this step's catch-up and that hold the pages of their trees."""
        speculates, most = can, self._cost.max_catchup_tokens
        if int(lag.sum()) > most:
            order = np.argsort(np.where(speculates, lag, most + 1), kind="stable")
            fits = speculates[order] & (np.cumsum(lag[order]) <= most)
            speculates = np.zeros(len(lag), bool)
            speculates[order] = fits
        table = self._batch.table
        # the deepest node that selection may take is emitted beside one more token
        ends = np.minimum(table.num_tokens[slots] + depth, table.max_total[slots] - 1)
        lacking = speculates & (ends > table.num_pages[slots] * self._limits.page_size)
        if not np.count_nonzero(lacking):
            return speculates
        got = speculates.copy()
        got[lacking] = self._batch.reserve(slots[lacking], ends[lacking])
        return got


def row_slack_s(
    decode_time_s: np.ndarray, tpot_slo_s: np.ndarray, num_decoded: np.ndarray, horizon: np.ndarray, token_s: float
) -> np.ndarray:
    """Return f64[R], seconds that a row may stand still and be on its target again within `horizon` tokens.

    Assumes one token every `token_s`: the slack is 0 where `need_rate` is 1 / token_s. inf without a target, below 0 if
    the row is late anyway.
    """
    return tpot_slo_s * (num_decoded + horizon) - decode_time_s - horizon * token_s


class SlackTracker:
    """Estimate of how long the step loop may do something else without endangering a TPOT target."""

    def __init__(self, capacity: int):
        """Start without steps. capacity: most sequences that can run at once."""
        self._crowded = CROWDED_SHARE * capacity
        self._loaded_s = -math.inf
        self._step_s = self._tokens = 0.0

    def observe(self, now: float, running: int, waiting: int, step_s: float, emitted: np.ndarray) -> None:
        """Take in a step that ended.

        waiting: sequences left without a slot. emitted: i32[num_decode], tokens.
        """
        if waiting or running > self._crowded:
            self._loaded_s = now
        if len(emitted):
            rate = PACE_RATE if self._tokens else 1.0
            self._step_s += rate * (step_s - self._step_s)
            self._tokens += rate * (int(emitted.sum()) / len(emitted) - self._tokens)

    def is_loaded(self, now: float) -> bool:
        """Return whether sequences waited for a slot, or more than half of the slots were taken, less than HOLD_S
        ago.
        """
        return now - self._loaded_s < HOLD_S

    def seconds(self, pace: Pace, now: float) -> float:
        """Return the seconds that the row with the least slack leaves; 0 before the first decode step if a target
        runs.
        """
        if not (np.isfinite(pace.tpot_slo_s) | np.isfinite(pace.deadline_s)).any():
            return math.inf
        if not self._tokens:
            return 0.0
        token_s = self._step_s / self._tokens
        target_s = TARGET_SHARE * pace.tpot_slo_s
        slack = row_slack_s(now - pace.start_s, target_s, pace.num_decoded, pace.horizon, token_s)
        slack = np.minimum(slack, pace.deadline_s - now - pace.tokens_left * token_s)
        return max(SLACK_SHARE * float(slack.min()), 0.0)
