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

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load, checked
from adaserve_jax.scheduler.draft_planner import DraftPlanner
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
        self.batch = batch
        self._text = text
        self._lengths = lengths
        self._extends_horizon = extends_horizon
        self._limits = batch.limits
        self._decision_limits = decision_limits
        self._text_without_draft = text_without_draft
        self._controller = controller
        self._draft = draft
        self.max_prefill = max_prefill
        self.prefill_per_step = 0.0
        self._horizon = horizon

    def plan(self, now: float, step: int) -> PlannedStep | None:
        """Admit, preempt, decide and lay out a step; return None if nothing can run."""
        batch = self.batch
        if not batch.grow_decode_rows():
            batch.admit(now, self._admission(now))
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
            prefill_tokens=sum(_cut_chunks(prefill, self.max_prefill, free_positions)),
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
        self.prefill_per_step += PREFILL_RATE * (sum(chunks) - self.prefill_per_step)
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
        prompts = [*prefill, *self.batch.queue.first_on_time(PROMPTS_AHEAD)]
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

    def sustains(self, rates: np.ndarray, others: int, prefill_tokens: float, share: float) -> bool:
        """Return `Controller.sustains` of these rates, with the draft as it is."""
        return self._controller.sustains(rates, others, prefill_tokens, share, can_draft=self._draft.can_draft)

    def _rows(self) -> tuple[np.ndarray, list[SequenceState]]:
        """Return the slots of the decode rows, i64[num_decode], and the prefill rows by rank."""
        running, slots, table = self.batch.running, self.batch.slots, self.batch.table
        decodes = table.num_tokens[slots] - table.num_computed[slots] == 1
        if np.count_nonzero(decodes) == len(slots):
            return slots.copy(), []
        prefill = [running[row] for row in (~decodes).nonzero()[0]]
        return slots[decodes], sorted(prefill, key=lambda state: state.rank)

    def _admission(self, now: float) -> Callable[[SequenceState], bool] | None:
        """Return `PaceAdmission.may_start` of this plan; None if the controller admits everything."""
        if type(self._controller).sustains is Controller.sustains:
            return None
        return PaceAdmission(self, now).may_start

    def running_rates(self, now: float) -> list[tuple[int, float]]:
        """Return flow and rate of each running sequence: tokens per second that it needs, 0 without a target in force,
        inf if it is hopeless. One whose prompt is not computed needs the pace of its targets."""
        table, (decode, prefill) = self.batch.table, self._rows()
        rates = self._measure(decode, now)[0].need_rate(now).tolist()
        for state in prefill:
            slot = state.slot
            targets = float(table.tpot_slo_s[slot]), float(table.deadline_s[slot])
            rates.append(0.0 if table.misses_ttft(slot, now) else self.pace_rate(state, *targets, now))
        slots = [*decode.tolist(), *(state.slot for state in prefill)]
        return list(zip(table.flow[slots].tolist(), rates, strict=True))

    def pace_rate(self, state: SequenceState, tpot_slo_s: float | None, deadline_s: float, now: float) -> float:
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
        state = self.batch.table.states[slot]
        assert state is not None, "decode rows run"
        name, written = state.sequence.slo_class, state.num_output
        return self._lengths.learned_left(name, state.prompt_len, written, LOWER) or 0

    def _tokens_left(self, state: SequenceState) -> int:
        most = max(state.max_total - state.num_tokens, 1)
        return self._lengths.left(state.sequence.slo_class, state.prompt_len, state.num_output, most)

    def _measure(self, decode: np.ndarray, now: float) -> tuple[Pace, np.ndarray, np.ndarray]:
        """Return pace, tokens to max_total, and tokens that the draft lacks, of the decode rows in these slots."""
        table = self.batch.table
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
        table = self.batch.table
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


class PaceAdmission:
    """Judge of one plan's starts: whether one more sequence may start beside those that run.

    It may if it and the running sequences that still can meet their targets can all be kept on pace. A sequence that is
    late, or whose target is out of reach, counts with its root only; one without a target may always start. The running
    rows are measured when the first question comes, and every yes counts for the next one.
    """

    def __init__(self, planner: Planner, now: float):
        self._planner = planner
        self._now = now
        self._running: list[tuple[int, float]] | None = None
        """Flow and rate of each sequence that runs or was told to start, as from `Planner.running_rates`."""

    def may_start(self, state: SequenceState) -> bool:
        """Return whether a waiting sequence may start, and count it if so."""
        if state.is_untargeted:
            if self._running is not None:  # else it is measured with the others, once it runs
                self._running.append((state.flow, 0.0))
            return True
        planner, now = self._planner, self._now
        if self._running is None:
            self._running = planner.running_rates(now)
        is_late = planner.batch.queue.is_late(state)
        own = 0.0 if is_late else planner.pace_rate(state, state.tpot_slo_s, state.deadline_s, now)
        running = [rate for _, rate in self._running]
        share, prefill_tokens = DUE_SHARE, planner.prefill_per_step
        if any(map(_is_paced, running)):
            if is_late:
                share = LATE_SHARE
            elif state.patience_s is None and now - state.sequence.arrival_s < MOST_PATIENT_S:
                prefill_tokens = max(prefill_tokens, min(self._prompt_share(state), planner.max_prefill))
        rates = [*running, own, *self._reserve(state)]
        paced = np.array([rate for rate in rates if _is_paced(rate)])
        if not planner.sustains(paced, len(rates) - len(paced), prefill_tokens, share):
            return False
        self._running.append((state.flow, own))
        return True

    def _prompt_share(self, state: SequenceState) -> float:
        """Return the prompt tokens per step with which its prompt, and those that run, are computed in PROMPT_STEPS."""
        table, slots = self._planner.batch.table, self._planner.batch.slots
        pending = table.num_tokens[slots] - table.num_computed[slots]
        return (int(pending[pending > 1].sum()) + state.num_uncached) / PROMPT_STEPS

    def _reserve(self, state: SequenceState) -> list[float]:
        """Return the rates for which a start leaves room: none where shares are not kept fair or the sequence's flow
        runs no more than its share; otherwise as much again as the other flows need.
        """
        shares, running = self._planner.batch.shares, self._running or []
        if shares is None or not shares.over_share(np.array([flow for flow, _ in running], np.int64))[state.flow]:
            return []
        return [rate for flow, rate in running if flow != state.flow]


def _is_paced(rate: float) -> bool:
    """Return whether a rate is that of a target in force that can still be met."""
    return 0 < rate < math.inf


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
