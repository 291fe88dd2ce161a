"""State of sequences between admission and end: one `SequenceState` each, and the `SlotTable` of the running ones."""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.sampling import ANSWERING, ROW_SAMPLING, RowSampling
from adaserve_jax.scheduler.slo import is_demanding, paced_tpot_s
from adaserve_jax.types import Limits, Sequence

NO_SLOT = -1

(
    NUM_TOKENS,
    NUM_COMPUTED,
    DRAFT_COMPUTED,
    NUM_PAGES,
    PROMPT_LEN,
    MAX_TOTAL,
    VERIFY_STEPS,
    DRAFTED_TOKENS,
    ACCEPTED_TOKENS,
    PACE_TOKENS,
    NUM_COUNTS,
) = range(11)
"""Indices into the counts of a sequence; the last is their number."""
COMPUTED = slice(NUM_COMPUTED, DRAFT_COMPUTED + 1)
"""The counts of tokens that the target and the draft have computed."""
FIRST_SCHEDULED_S, FIRST_TOKEN_S, LAST_TOKEN_S, PACE_START_S, NUM_TIMES = range(5)
"""Indices into the times of a sequence, which are NaN until they happen; the last is their number."""
_PARAMETERS = tuple(name for name in ROW_SAMPLING if name != "choice")
"""Columns of `RowSampling` that are fields of `SamplingParams`."""


class _Count:
    """Descriptor that reads and writes one count of a sequence as a Python int."""

    def __init__(self, entry: int):
        self._entry = entry

    def __get__(self, state: SequenceState, owner: type) -> int:
        return int(state.counts[self._entry])

    def __set__(self, state: SequenceState, value: int) -> None:
        state.counts[self._entry] = value


class _Time:
    """Descriptor that reads one time of a sequence, in seconds; None until it happened."""

    def __init__(self, entry: int):
        self._entry = entry

    def __get__(self, state: SequenceState, owner: type) -> float | None:
        value = float(state.times[self._entry])
        return None if math.isnan(value) else value


class SequenceState:
    """Tokens, progress, timings and counts of one sequence.

    Invariant: pending = num_tokens - num_computed >= 1. With 1 pending token the sequence is a decode row and that
    token is the root of its next tree; with more it is a prefill row. num_computed and draft_computed count the tokens
    whose KV the target and the draft hold.

    counts i64[NUM_COUNTS], times f64[NUM_TIMES] and token_ids i32[at least num_tokens] are arrays of the sequence's own
    while it waits. While it runs they are views of its slot in the `SlotTable`, which advances all rows of a step at
    once. slot and num_pages are valid only then. page_keys holds the keys of its full pages that the prefix cache asked
    for so far. cached_tokens counts the prompt tokens found there when it came, and once it was scheduled those found
    then. num_scored counts the positions of the prompt after which its next token has been scored; all of them if the
    request does not ask.

    The TPOT target in force counts time from PACE_START_S, and tokens behind the first PACE_TOKENS (prompt included):
    from the first token, and from the closing mark once a sequence with a thinking target has ended its thinking.
    text_state tells how far such a sequence is (`sampling.Thinking`); it is ANSWERING for all others. thinking_tokens
    counts its output up to the closing mark, and is 0 until that comes.
    """

    __slots__ = (
        "accepted_steps", "least_tpot_s", "cached_tokens", "counts", "flow", "num_scored", "page_keys", "patience_s",
        "preemptions", "prompt_s", "rank", "sequence", "slot", "text_state", "thinking_tokens", "times", "token_ids",
        "_asked", "_feasible",
    )  # fmt: skip

    num_tokens = _Count(NUM_TOKENS)
    num_computed = _Count(NUM_COMPUTED)
    draft_computed = _Count(DRAFT_COMPUTED)
    num_pages = _Count(NUM_PAGES)
    prompt_len = _Count(PROMPT_LEN)
    max_total = _Count(MAX_TOTAL)
    first_scheduled_s = _Time(FIRST_SCHEDULED_S)
    first_token_s = _Time(FIRST_TOKEN_S)

    def __init__(
        self, sequence: Sequence, *, max_total: int, order_key: float, number: int, asked: Sequence | None = None,
        feasible: bool | None = None, patience_s: float | None = None, prompt_s: float = 0.0, flow: int = 0,
        least_tpot_s: float = 0.0,
    ):  # fmt: skip
        """Set up a sequence that waits.

        sequence: as it is scheduled; targets that are out of reach are taken out. max_total: most tokens, prompt and
        output together. order_key: seconds; lower is served sooner. number: position in the order of arrival. asked:
        the sequence as it came, where its targets differ. feasible: whether its targets are; None without targets.
        patience_s: seconds from arrival within which its first token must come for its targets; None: none says.
        prompt_s: seconds that its prompt takes alone. flow: index of what its tenant sends in its class, where shares
        are kept fair. least_tpot_s: seconds per token that the machine would give it alone; 0: unknown.
        """
        self.sequence = sequence
        self.flow = flow
        self._asked = sequence if asked is None else asked
        self._feasible = feasible
        self.patience_s = patience_s
        """Seconds from arrival within which the first token must come for the targets; None without any that says."""
        self.prompt_s = prompt_s
        self.least_tpot_s = least_tpot_s
        self.rank = (order_key, number)
        """Total order of service. The lower rank is served sooner and preempted later."""
        self.slot = NO_SLOT
        self.preemptions = 0
        self.page_keys: list[bytes] = []
        self.cached_tokens = 0
        self.token_ids = np.asarray(sequence.prompt_ids, np.int32)
        prompt_len = len(self.token_ids)
        self.num_scored = prompt_len - 1 if sequence.sampling.prompt_logprobs is None else 0
        self.counts = np.array([prompt_len, 0, 0, 0, prompt_len, max_total, 0, 0, 0, prompt_len + 1], np.int64)
        self.times = np.full(NUM_TIMES, np.nan)
        self.accepted_steps = np.zeros(0, np.int64)
        """Steps that verified candidates, by how many of them were accepted."""
        thinking = None if self._asked.thinking_tpot_slo_s is None else sequence.sampling.thinking
        self.text_state = ANSWERING if thinking is None else thinking.state
        self.thinking_tokens = 0

    @property
    def number(self) -> int:
        """Position in the order in which sequences were added."""
        return self.rank[1]

    @property
    def pending(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_uncached(self) -> int:
        """Tokens that are still to be computed; of a prompt that waits, without those found in the prefix cache."""
        return self.pending - (0 if self.is_running or self.preemptions else self.cached_tokens)

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def has_unscored(self) -> bool:
        """True while tokens of the prompt are still to be scored."""
        return self.num_scored < self.prompt_len - 1

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens that may come from cached pages, because no logits are needed after them."""
        return self.num_scored if self.has_unscored else self.num_tokens - 1

    @property
    def is_untargeted(self) -> bool:
        """True if the sequence came without a TPOT target or deadline; one that is out of reach counts."""
        asked = self._asked
        return asked.tpot_slo_s is None and asked.thinking_tpot_slo_s is None and asked.e2e_slo_s is None

    @property
    def tpot_slo_s(self) -> float | None:
        """Return the TPOT target of the part of the output that the next token belongs to, as it is scheduled."""
        return self.sequence.thinking_tpot_slo_s if self.text_state >= 0 else self.sequence.tpot_slo_s

    @property
    def is_demanding(self) -> bool:
        """True if a target per token, of the thinking or the answer, takes most of the machine."""
        targets_s = (self.sequence.tpot_slo_s, self.sequence.thinking_tpot_slo_s)
        return any(each is not None and is_demanding(each, self.least_tpot_s) for each in targets_s)

    @property
    def deadline_s(self) -> float:
        """Return the time by which the last token is due; inf without a deadline."""
        e2e_slo_s = self.sequence.e2e_slo_s
        return math.inf if e2e_slo_s is None else self.sequence.arrival_s + e2e_slo_s

    @property
    def is_running(self) -> bool:
        return self.slot != NO_SLOT

    def forget_kv(self) -> None:
        """Keep every token and no KV, as preemption by recomputation does."""
        self.num_computed = 0
        self.draft_computed = 0
        self.preemptions += 1

    def read_marks(self, token_ids: list[int], now: float) -> None:
        """Follow the text through its newest tokens, which came at `now`; at the closing mark the pace begins anew."""
        thinking = self.sequence.sampling.thinking
        assert thinking is not None
        for place, token in enumerate(token_ids):
            before, self.text_state = self.text_state, thinking.after(self.text_state, token)
            if self.text_state == ANSWERING:
                if before >= 0:
                    num_tokens = self.num_tokens - len(token_ids) + place + 1
                    self.thinking_tokens = num_tokens - self.prompt_len
                    self.counts[PACE_TOKENS] = num_tokens
                    self.times[PACE_START_S] = now
                return

    def metrics(self) -> RequestMetrics:
        """Return timings and counts so far, with the targets that the sequence came with."""
        asked, counts = self._asked, self.counts.tolist()
        first_scheduled_s, first_token_s, last_token_s, pace_start_s = (
            None if math.isnan(t) else t for t in self.times.tolist()
        )
        thinking_tokens, thinking_last_s = self.thinking_tokens, pace_start_s if self.thinking_tokens else None
        if self.text_state >= 0:
            thinking_tokens, thinking_last_s = self.num_output, last_token_s
        return RequestMetrics(
            arrival_s=asked.arrival_s,
            first_scheduled_s=first_scheduled_s,
            first_token_s=first_token_s,
            last_token_s=last_token_s,
            prompt_tokens=counts[PROMPT_LEN],
            output_tokens=counts[NUM_TOKENS] - counts[PROMPT_LEN],
            verify_steps=counts[VERIFY_STEPS],
            drafted_tokens=counts[DRAFTED_TOKENS],
            accepted_tokens=counts[ACCEPTED_TOKENS],
            accepted_steps=tuple(self.accepted_steps.tolist()),
            preemptions=self.preemptions,
            cached_tokens=0 if first_scheduled_s is None else self.cached_tokens,
            tpot_slo_s=asked.tpot_slo_s,
            ttft_slo_s=asked.ttft_slo_s,
            slo_class=asked.slo_class,
            slo_feasible=self._feasible,
            thinking_tpot_slo_s=asked.thinking_tpot_slo_s,
            thinking_tokens=thinking_tokens,
            thinking_last_s=thinking_last_s,
            e2e_slo_s=asked.e2e_slo_s,
        )


class SlotTable:
    """State of all running sequences as arrays by slot, so that a plan and a commit take a few array operations.

    S = limits.max_requests. page_table is i32[S, max_pages_per_request] with unused entries 0. counts i64[NUM_COUNTS,
    S] and times f64[NUM_TIMES, S] are also available row by row under the names of their entries, as i64[S] and f64[S]
    views. token_ids is i32[S, W]; W is at least the most tokens of any running sequence plus those of one step, and
    entries beyond a sequence's num_tokens are undefined. states[slot] is the sequence that holds the slot.
    """

    def __init__(self, limits: Limits, *, gives_up: bool = False):
        """Set up an empty table. gives_up: drop TPOT target and deadline of a sequence that missed its TTFT target."""
        size = limits.max_requests
        self._gives_up = gives_up
        self.page_table = np.zeros((size, limits.max_pages_per_request), np.int32)
        self.counts = np.zeros((NUM_COUNTS, size), np.int64)
        (
            self.num_tokens, self.num_computed, self.draft_computed, self.num_pages, self.prompt_len, self.max_total,
            self.verify_steps, self.drafted_tokens, self.accepted_tokens, self.pace_tokens,
        ) = self.counts  # fmt: skip
        self.times = np.full((NUM_TIMES, size), np.nan)
        self.first_scheduled_s, self.first_token_s, self.last_token_s, self.pace_start_s = self.times
        self.accepted_steps = np.zeros((size, limits.max_tree_depth + 1), np.int64)
        """i64[S, 1 + depth]: steps of each slot that verified candidates, by how many were accepted."""
        self.token_ids = np.empty((size, 0), np.int32)
        self._most_emitted = limits.max_tree_depth + 1
        self.states: list[SequenceState | None] = [None] * size
        self.sampling = RowSampling.greedy(size)
        """Sampling parameters of the slots; gather those of a step with its `take`."""
        self.tpot_slo_s = np.full(size, np.inf)
        """Seconds per token that the scheduler aims at now; inf without a target or after it was dropped."""
        self.paced_tpot_s = np.full(size, np.inf)
        """Seconds per token that pacing aims at for `tpot_slo_s`, less a reserve."""
        self.deadline_s = np.full(size, np.inf)
        """Time by which the last token is due; inf without a deadline or after it was dropped."""
        self._before_answer: set[int] = set()
        """Slots with a thinking target whose texts have not begun to answer."""
        self._ttft_due_s = np.full(size, np.inf)
        self.has_stop_ids = np.zeros(size, bool)
        self.draft = np.zeros(size, np.int32)
        """Index of the draft model that speculates for the sequence."""
        self.adapter = np.zeros(size, np.int32)
        """Slot of the adapter that the sequence's tokens go through; 0: none."""
        self.number = np.zeros(size, np.int64)
        self.flow = np.zeros(size, np.int64)
        self._max_context = limits.max_context
        self._free = list(range(size - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def bind(self, state: SequenceState, pages: np.ndarray) -> None:
        """Give `state` a free slot and its first pages."""
        slot = state.slot = self._free.pop()
        sequence = state.sequence
        self.sampling.seed[slot], self.sampling.choice[slot] = sequence.seed, sequence.choice
        for name in _PARAMETERS:
            getattr(self.sampling, name)[slot] = getattr(sequence.sampling, name)
        ttft_slo_s = sequence.ttft_slo_s if self._gives_up else None
        self._ttft_due_s[slot] = np.inf if ttft_slo_s is None else sequence.arrival_s + ttft_slo_s
        self.deadline_s[slot] = state.deadline_s
        self._aim(state)
        if state.text_state != ANSWERING:
            self._before_answer.add(slot)
        self.has_stop_ids[slot] = bool(sequence.stop_token_ids)
        self.draft[slot] = sequence.draft
        self.adapter[slot] = sequence.adapter
        self.number[slot] = state.number
        self.flow[slot] = state.flow
        self.states[slot] = state
        self._move_in(state)
        self.num_pages[slot] = len(pages)
        self.page_table[slot, : len(pages)] = pages

    def grow(self, slots: np.ndarray, missing: np.ndarray, pages: np.ndarray) -> None:
        """Append missing[i] of `pages` (i32[sum(missing)]) to the page list of slots[i]."""
        held = self.num_pages[slots]
        ends = missing.cumsum()
        if len(pages) == len(slots):
            self.page_table[slots, held] = pages
        else:
            column = (held - ends + missing).repeat(missing) + np.arange(len(pages))
            self.page_table[slots.repeat(missing), column] = pages
        self.num_pages[slots] = held + missing

    def pages(self, state: SequenceState) -> np.ndarray:
        """Return the pages that a running sequence holds, i32[n]: a view."""
        return self.page_table[state.slot, : state.num_pages]

    def release(self, state: SequenceState) -> None:
        """Take the slot back. The caller frees the pages before this."""
        slot = state.slot
        self.page_table[slot, : state.num_pages] = 0
        state.num_pages = 0
        state.token_ids = state.token_ids[: state.num_tokens].copy()
        state.counts, state.times = state.counts.copy(), state.times.copy()
        state.accepted_steps = state.accepted_steps.copy()
        state.slot = NO_SLOT
        self.states[slot] = None
        self._before_answer.discard(slot)
        self._free.append(slot)

    def gather(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return counts[i] tokens of slots[i] from position starts[i] on, row after row: i32[sum(counts)]."""
        first = slots * self.token_ids.shape[1] + starts - counts.cumsum() + counts
        index = first.repeat(counts)
        index += np.arange(len(index))
        return self.token_ids.reshape(-1).take(index)

    def write_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Write token_ids[i] (i32[R, D]) behind the tokens of slots[i]. The caller raises num_tokens by those it
        keeps.
        """
        token_ids = token_ids[:, : self._most_emitted]
        ends = slots * self.token_ids.shape[1] + self.num_tokens[slots]
        self.token_ids.reshape(-1)[ends[:, None] + np.arange(token_ids.shape[1])] = token_ids

    def stamp(self, slots: np.ndarray, now: float) -> np.ndarray:
        """Record that these slots emitted tokens at `now`; return those for which they were the first."""
        self.last_token_s[slots] = now
        first_token_s = self.first_token_s[slots]
        started = slots[first_token_s != first_token_s]
        if len(started):
            self.first_token_s[started] = self.pace_start_s[started] = now
            self._give_up_late(started, now)
        return started

    def read_marks(self, slots: np.ndarray, token_ids: np.ndarray, kept: np.ndarray, now: float) -> None:
        """Follow texts that have a thinking target, up to their answers, through the tokens that `stamp` recorded.

        token_ids: i32[R, D], the first kept[i] (i64[R]) are new and counted.
        """
        if not self._before_answer:
            return
        for row, slot in enumerate(slots.tolist()):
            if slot in self._before_answer and (state := self.states[slot]) is not None:
                state.read_marks(token_ids[row, : kept[row]].tolist(), now)
                self._aim(state)
                if state.text_state == ANSWERING:
                    self._before_answer.discard(slot)

    def _aim(self, state: SequenceState) -> None:
        """Set the TPOT target of a sequence's slot to the one in force."""
        slot, target_s = state.slot, np.inf if state.tpot_slo_s is None else state.tpot_slo_s
        self.tpot_slo_s[slot] = target_s
        self.paced_tpot_s[slot] = paced_tpot_s(target_s)
        if state.first_token_s is not None:
            self._give_up_late(np.array([state.slot]), state.first_token_s)

    def misses_ttft(self, slot: int, now: float) -> bool:
        """Return whether a sequence without tokens has passed its TTFT target and therefore loses its TPOT target."""
        return bool(self._ttft_due_s[slot] < now and np.isnan(self.first_token_s[slot]))

    def _give_up_late(self, slots: np.ndarray, first_token_s: float) -> None:
        """Drop the TPOT targets and deadlines of slots whose first token came late.

        A sequence that missed its TTFT target cannot meet its SLO any more; tokens spent on its other targets would be
        taken from sequences that still can.
        """
        late = slots[self._ttft_due_s[slots] < first_token_s]
        self.tpot_slo_s[late] = self.paced_tpot_s[late] = np.inf
        self.deadline_s[late] = np.inf

    def _move_in(self, state: SequenceState) -> None:
        """Copy counts, times and tokens into the slot of `state` and make `state` view them there."""
        slot, num_tokens = state.slot, state.num_tokens
        width = self.token_ids.shape[1]
        if state.max_total + self._most_emitted > width:
            most = min(max(state.max_total, 2 * width), self._max_context)
            wider = np.empty((len(self.states), most + self._most_emitted), np.int32)
            for other in self.states:
                if other is not None and other is not state:
                    wider[other.slot, : other.num_tokens] = other.token_ids[: other.num_tokens]
                    other.token_ids = wider[other.slot]
            self.token_ids = wider
        self.token_ids[slot, :num_tokens] = state.token_ids[:num_tokens]
        self.counts[:, slot] = state.counts
        self.times[:, slot] = state.times
        self.accepted_steps[slot] = 0
        self.accepted_steps[slot, : len(state.accepted_steps)] = state.accepted_steps
        state.accepted_steps = self.accepted_steps[slot]
        state.token_ids, state.counts, state.times = self.token_ids[slot], self.counts[:, slot], self.times[:, slot]
