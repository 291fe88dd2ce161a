"""The live state of one request between admission and its end. Knows nothing of other requests or of policies."""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.types import Request, RequestMetrics

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

    def __get__(self, state: RequestState, owner: type) -> int:
        return int(state.counts[self._entry])

    def __set__(self, state: RequestState, value: int) -> None:
        state.counts[self._entry] = value


class _Time:
    """One of a request's times, seconds, None until it comes."""

    def __init__(self, entry: int):
        self._entry = entry

    def __get__(self, state: RequestState, owner: type) -> float | None:
        value = float(state.times[self._entry])
        return None if math.isnan(value) else value


class RequestState:
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
        request: Request,
        *,
        max_total: int,
        order_key: float,
        sequence: int,
        asked: Request | None = None,
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
