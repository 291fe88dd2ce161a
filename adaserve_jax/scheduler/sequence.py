"""The live state of one request between admission and its end. Knows nothing of other requests or of policies."""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.types import Limits, RequestMetrics, RowSampling, Sequence

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
    NUM_COUNTS,
) = range(10)
"""Entries of the counts of a request, and how many there are."""
COMPUTED = slice(NUM_COMPUTED, DRAFT_COMPUTED + 1)
"""The entries that count what target and draft have computed."""
FIRST_SCHEDULED_S, FIRST_TOKEN_S, LAST_TOKEN_S, NUM_TIMES = range(4)
"""Entries of its times, NaN until they come, and how many there are."""


class _Count:
    """One of a request's counts as a Python int."""

    def __init__(self, entry: int):
        self._entry = entry

    def __get__(self, state: SequenceState, owner: type) -> int:
        return int(state.counts[self._entry])

    def __set__(self, state: SequenceState, value: int) -> None:
        state.counts[self._entry] = value


class _Time:
    """One of a request's times, seconds, None until it comes."""

    def __init__(self, entry: int):
        self._entry = entry

    def __get__(self, state: SequenceState, owner: type) -> float | None:
        value = float(state.times[self._entry])
        return None if math.isnan(value) else value


class SequenceState:
    """Tokens, progress, timings and counts of one request.

    counts: i64[NUM_COUNTS], times: f64[NUM_TIMES], token_ids: i32[at least num_tokens]; while the request runs they are
    views of its slot in the SlotTable, which advances all rows of a step at once, and else its own.

    Invariant: pending = num_tokens - num_computed >= 1. pending 1: a decode row, whose last token is the root of the
    next tree; pending > 1: a prefill row. num_computed and draft_computed count tokens whose KV the target and the
    draft hold. slot and num_pages mean something only while the request runs. page_keys: of its full pages, as far as
    the prefix cache asked for them. cached_tokens: of the prompt, found there when the request was first scheduled.
    """

    __slots__ = (
        "cached_tokens", "counts", "page_keys", "preemptions", "rank", "request", "slot", "times", "token_ids",
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
        self,
        request: Sequence,
        *,
        max_total: int,
        order_key: float,
        sequence: int,
        asked: Sequence | None = None,
        feasible: bool | None = None,
    ):
        """request: as it is scheduled. max_total: most tokens, prompt and output together. order_key: seconds, lower is
        served sooner. asked: as it came, where that carries targets that nobody pursues. feasible: of its targets."""
        self.request = request
        self._asked = request if asked is None else asked
        self._feasible = feasible
        self.rank = (order_key, sequence)
        """Total order of service: lower is sooner, and is preempted later."""
        self.slot = NO_SLOT
        self.preemptions = 0
        self.page_keys: list[bytes] = []
        self.cached_tokens = 0
        self.token_ids = np.asarray(request.prompt_ids, np.int32)
        prompt_len = len(self.token_ids)
        self.counts = np.array([prompt_len, 0, 0, 0, prompt_len, max_total, 0, 0, 0], np.int64)
        self.times = np.full(NUM_TIMES, np.nan)

    @property
    def sequence(self) -> int:
        return self.rank[1]

    @property
    def pending(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def is_untargeted(self) -> bool:
        """Whether it came without a TPOT target; one that is out of reach was a target too."""
        return self._asked.tpot_slo_s is None

    @property
    def is_running(self) -> bool:
        return self.slot != NO_SLOT

    def forget_kv(self) -> None:
        """What preemption by recompute leaves: every token, no KV."""
        self.num_computed = 0
        self.draft_computed = 0
        self.preemptions += 1

    def metrics(self) -> RequestMetrics:
        asked, counts = self._asked, self.counts.tolist()
        first_scheduled_s, first_token_s, last_token_s = (None if math.isnan(t) else t for t in self.times.tolist())
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
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
            tpot_slo_s=asked.tpot_slo_s,
            ttft_slo_s=asked.ttft_slo_s,
            slo_class=asked.slo_class,
            slo_feasible=self._feasible,
        )


# The slot table: the state of all running requests as arrays by slot, so that a plan and a commit are a few
# array operations, however many run.
#
# Knows requests and page ids; not which request runs next.


class SlotTable:
    """Columns by slot, S = limits.max_requests. page_table: i32[S, max_pages_per_request], unused entries 0.

    counts: i64[NUM_COUNTS, S], times: f64[NUM_TIMES, S] (entries in state.py), each also by name: views, i64[S] and
    f64[S]. token_ids: i32[S, W], W at least the most tokens that any running request may have, and one step's more;
    what lies beyond a request's num_tokens means nothing. states: whose slot it is. Running requests hold views of all.
    """

    def __init__(self, limits: Limits, *, gives_up: bool = False):
        """gives_up: whether the TPOT target of a request that missed its TTFT target is pursued no more."""
        size = limits.max_requests
        self._gives_up = gives_up
        self.page_table = np.zeros((size, limits.max_pages_per_request), np.int32)
        self.counts = np.zeros((NUM_COUNTS, size), np.int64)
        (
            self.num_tokens, self.num_computed, self.draft_computed, self.num_pages, self.prompt_len, self.max_total,
            self.verify_steps, self.drafted_tokens, self.accepted_tokens,
        ) = self.counts  # fmt: skip
        self.times = np.full((NUM_TIMES, size), np.nan)
        self.first_scheduled_s, self.first_token_s, self.last_token_s = self.times
        self.token_ids = np.empty((size, 0), np.int32)
        self._most_emitted = limits.max_depth + 1
        self.states: list[SequenceState | None] = [None] * size
        self.seed = np.zeros(size, np.uint64)
        self.choice = np.zeros(size, np.int32)
        self.temperature = np.zeros(size, np.float32)
        self.top_k = np.zeros(size, np.int32)
        self.top_p = np.ones(size, np.float32)
        self.min_p = np.zeros(size, np.float32)
        self.tpot_slo_s = np.full(size, np.inf)
        """As it is pursued: inf where there is none, or where it was given up."""
        self._ttft_due_s = np.full(size, np.inf)
        self.has_stop_ids = np.zeros(size, bool)
        self.draft = np.zeros(size, np.int32)
        """Which of several drafts speculates."""
        self.sequence = np.zeros(size, np.int64)
        self._max_context = limits.max_context
        self._free = list(range(size - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def bind(self, state: SequenceState, pages: np.ndarray) -> None:
        """Give `state` a slot and its first pages. At least one slot is free."""
        slot = state.slot = self._free.pop()
        request = state.request
        sampling = request.sampling
        self.seed[slot] = request.seed
        self.choice[slot] = request.choice
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.tpot_slo_s[slot] = np.inf if request.tpot_slo_s is None else request.tpot_slo_s
        ttft_slo_s = request.ttft_slo_s if self._gives_up else None
        self._ttft_due_s[slot] = np.inf if ttft_slo_s is None else request.arrival_s + ttft_slo_s
        if state.first_token_s is not None:
            self._give_up_late(np.array([slot]), state.first_token_s)
        self.has_stop_ids[slot] = bool(request.stop_token_ids)
        self.draft[slot] = request.draft
        self.sequence[slot] = state.sequence
        self.states[slot] = state
        self._move_in(state)
        self.num_pages[slot] = len(pages)
        self.page_table[slot, : len(pages)] = pages

    def grow(self, slots: np.ndarray, missing: np.ndarray, pages: np.ndarray) -> None:
        """Add `pages` (i32[sum(missing)]) to the ends of the slots' page lists, missing[i] of them to slots[i]."""
        held = self.num_pages[slots]
        ends = missing.cumsum()
        if len(pages) == len(slots):
            self.page_table[slots, held] = pages
        else:
            column = (held - ends + missing).repeat(missing) + np.arange(len(pages))
            self.page_table[slots.repeat(missing), column] = pages
        self.num_pages[slots] = held + missing

    def pages(self, state: SequenceState) -> np.ndarray:
        return self.page_table[state.slot, : state.num_pages]

    def release(self, state: SequenceState) -> None:
        """Take the slot back; its pages are the caller's to free, before this."""
        slot = state.slot
        self.page_table[slot, : state.num_pages] = 0
        state.num_pages = 0
        state.token_ids = state.token_ids[: state.num_tokens].copy()
        state.counts, state.times = state.counts.copy(), state.times.copy()
        state.slot = NO_SLOT
        self.states[slot] = None
        self._free.append(slot)

    def gather(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """i32[sum(counts)]: counts[i] tokens of slots[i] from position starts[i] on, row after row."""
        first = slots * self.token_ids.shape[1] + starts - counts.cumsum() + counts
        index = first.repeat(counts)
        index += np.arange(len(index))
        return self.token_ids.reshape(-1).take(index)

    def write_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Put token_ids[i] (i32[R, D]) behind the tokens of slots[i]; how many of them count, num_tokens will say."""
        token_ids = token_ids[:, : self._most_emitted]
        ends = slots * self.token_ids.shape[1] + self.num_tokens[slots]
        self.token_ids.reshape(-1)[ends[:, None] + np.arange(token_ids.shape[1])] = token_ids

    def stamp(self, slots: np.ndarray, now: float) -> np.ndarray:
        """These rows emitted tokens at `now`. Returns the slots of those that had none before."""
        self.last_token_s[slots] = now
        first_token_s = self.first_token_s[slots]
        started = slots[first_token_s != first_token_s]
        if len(started):
            self.first_token_s[started] = now
            self._give_up_late(started, now)
        return started

    def misses_ttft(self, slot: int, now: float) -> bool:
        """Whether a request has no token yet and its TTFT target has passed, where that gives up the other one."""
        return bool(self._ttft_due_s[slot] < now and np.isnan(self.first_token_s[slot]))

    def _give_up_late(self, slots: np.ndarray, first_token_s: float) -> None:
        """A request that missed one target meets its SLO no more: the other is not worth what it would cost those that
        still can."""
        late = slots[self._ttft_due_s[slots] < first_token_s]
        self.tpot_slo_s[late] = np.inf

    def row_sampling(self, slots: np.ndarray) -> RowSampling:
        return RowSampling(
            seed=self.seed[slots],
            choice=self.choice[slots],
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
        )

    def _move_in(self, state: SequenceState) -> None:
        """Copy counts, times and tokens to the slot of `state`, which from now on looks at them there."""
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
        state.token_ids, state.counts, state.times = self.token_ids[slot], self.counts[:, slot], self.times[:, slot]
