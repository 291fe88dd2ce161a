"""The live state of one request between admission and its end. Knows nothing of other requests or of policies."""

from __future__ import annotations

import numpy as np

from adaserve_jax.types import Request, RequestMetrics

NO_SLOT = -1


class RequestState:
    """Tokens, progress, timings and counts of one request.

    Invariant: pending = num_tokens - num_computed >= 1. pending 1: a decode row, whose last token is the root of the
    next tree; pending > 1: a prefill row. num_computed and draft_computed count tokens whose KV the target and the
    draft hold. slot and num_pages mean something only while the request runs.
    """

    __slots__ = (
        "accepted_tokens",
        "draft_computed",
        "drafted_tokens",
        "first_scheduled_s",
        "first_token_s",
        "last_token_s",
        "max_total",
        "num_computed",
        "num_pages",
        "num_tokens",
        "order_key",
        "preemptions",
        "prompt_len",
        "request",
        "sequence",
        "slot",
        "verify_steps",
        "_asked",
        "_buffer",
        "_feasible",
    )

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
        self.max_total = max_total
        self.order_key = order_key
        self.sequence = sequence
        self.prompt_len = len(request.prompt_ids)
        self.num_tokens = self.prompt_len
        self._buffer = np.empty(self.prompt_len + 16, np.int32)
        self._buffer[: self.prompt_len] = request.prompt_ids
        self.num_computed = 0
        self.draft_computed = 0
        self.slot = NO_SLOT
        self.num_pages = 0
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.verify_steps = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.preemptions = 0

    @property
    def rank(self) -> tuple[float, int]:
        """Total order of service: lower is sooner, and is preempted later."""
        return (self.order_key, self.sequence)

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

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """i32[stop - start], a view of prompt and output tokens."""
        return self._buffer[start:stop]

    @property
    def last_token(self) -> int:
        return int(self._buffer[self.num_tokens - 1])

    def append(self, token_ids: list[int], now: float) -> None:
        """Add output tokens, emitted together at `now` (seconds)."""
        end = self.num_tokens + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[: self.num_tokens] = self._buffer[: self.num_tokens]
            self._buffer = grown
        self._buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end
        if self.first_token_s is None:
            self.first_token_s = now
        self.last_token_s = now

    def forget_kv(self) -> None:
        """What preemption by recompute leaves: every token, no KV."""
        self.num_computed = 0
        self.draft_computed = 0
        self.preemptions += 1

    def metrics(self) -> RequestMetrics:
        asked = self._asked
        return RequestMetrics(
            arrival_s=asked.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            prompt_tokens=self.prompt_len,
            output_tokens=self.num_output,
            verify_steps=self.verify_steps,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            preemptions=self.preemptions,
            tpot_slo_s=asked.tpot_slo_s,
            ttft_slo_s=asked.ttft_slo_s,
            slo_class=asked.slo_class,
            slo_feasible=self._feasible,
        )
