"""One HTTP request in the engine: submit its prompts, deliver their chunks, give back what was reserved for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from adaserve_jax.engine.client import GenerateRequest, OutputChunk, Sink
from adaserve_jax.errors import AdaServeError, OverloadedError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.server.admission import Reservation
from adaserve_jax.server.errors import ApiError, from_code
from adaserve_jax.server.formatting import DeltaBuilder
from adaserve_jax.server.observers import ChoiceText, EndedChoice, Origin
from adaserve_jax.server.schema import (
    CompletionTokensDetails,
    PromptTokensDetails,
    ResponseMetrics,
    SloMetrics,
    SpeculativeDecodingMetrics,
    SpeculativeMetrics,
    Usage,
)
from adaserve_jax.server.state import ServerState

_log = logging.getLogger(__name__)
Receiver = Callable[[int, OutputChunk], bool]
"""Called with (index, chunk); returns whether it used the chunk."""
FORM_CODES = frozenset({"invalid_grammar", "invalid_schema", "no_token_allowed"})
"""Codes of errors about the form that a text was asked to have."""


@dataclass
class _Choice:
    """Progress of one choice.

    last_s: arrival of its last tokens on this process's clock. text: its chunks' texts, where the server records texts.
    """

    tokens: int = 0
    reasoning_tokens: int = 0
    last_s: float | None = None
    ended: bool = False
    metrics: RequestMetrics | None = None
    text: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Generation:
    """The choices of one HTTP request; choice c of prompt p has index p * n + c. Used on the event loop.

    requests: one per prompt. reservation: room for all choices; a choice's share is given back when the engine ends it,
    whether or not somebody still reads. form_name: the body's field that asks for a text of a form, for the error of
    one that cannot be enforced; "": the engine's name of it. cut_tokens: tokens of the prompt that were left out to
    give the output room.
    """

    state: ServerState
    requests: list[GenerateRequest]
    reservation: Reservation
    origin: Origin = field(default_factory=Origin)
    deltas: DeltaBuilder = field(default_factory=DeltaBuilder)
    form_name: str = ""
    cut_tokens: int = 0
    _choices: list[_Choice] = field(default_factory=list)
    _queue: asyncio.Queue[tuple[int, OutputChunk]] = field(default_factory=asyncio.Queue)
    _receiver: Receiver | None = None
    _cancelled: bool = False

    @cached_property
    def choices_per_prompt(self) -> int:
        return self.requests[0].sampling.n

    def start(self) -> None:
        """Submit every prompt.

        Raises what `submit` raises. Prompts submitted before are then aborted and give back their room as they end;
        that of the others is given back here.
        """
        loop = asyncio.get_running_loop()
        self._choices = [_Choice() for _ in range(len(self.requests) * self.choices_per_prompt)]
        for position, request in enumerate(self.requests):
            try:
                self.state.client.submit(request, self._sink(position, loop))
                self.state.in_flight.add(request.request_id)
            except BaseException as error:
                for earlier in self.requests[:position]:
                    self.state.client.abort(earlier.request_id)
                left = range(position * self.choices_per_prompt, len(self._choices))
                self.reservation.release(left, max_tokens_of(self.requests[position:]))
                if isinstance(error, AdaServeError):
                    self.state.rejected(self.origin, request.slo, request.slo_class, left, error)
                raise

    def abort(self) -> None:
        """Stop the choices that still run."""
        for position, request in enumerate(self.requests):
            if not self._has_ended(position):
                self.state.client.abort(request.request_id)

    def cancel(self) -> None:
        """Stop the choices that still run, because the client has gone."""
        self._cancelled = True
        self.abort()

    def deliver_to(self, receiver: Receiver) -> None:
        """Offer chunks to `receiver` before `chunks` yields them, until that ends.

        It is offered no chunk that would overtake a queued one and none that ends a choice.
        """
        self._receiver = receiver

    async def chunks(self) -> AsyncIterator[tuple[int, OutputChunk]]:
        """Yield (index, chunk) as they come, but for those that a receiver used, until every choice has ended.

        Raises ApiError when a choice ends with an error or is stopped by the server; the others are then aborted.
        """
        unfinished = len(self._choices)
        try:
            while unfinished:
                index, chunk = await self._queue.get()
                if chunk.finish_reason in ("error", "abort"):
                    self.abort()
                    raise self._failure(chunk)
                unfinished -= chunk.finish_reason is not None
                yield index, chunk
        finally:
            self._receiver = None

    def usage(self, output_tokens: int | None = None) -> Usage:
        """Return the token counts; a prompt counts once, however many choices it has.

        output_tokens: count of the output to report instead of all that have come.
        """
        prompt = sum(len(request.prompt_ids) for request in self.requests)
        output = sum(choice.tokens for choice in self._choices) if output_tokens is None else output_tokens
        if self.deltas.prompt_only:
            output = 0
        cached = sum(
            min(0 if each.metrics is None else each.metrics.cached_tokens for each in self._choices_of(position))
            for position in range(len(self.requests))
        )  # of each prompt the tokens that none of its choices had to compute
        thinks = any(request.sampling.thinking is not None for request in self.requests)
        thought = min(output, sum(choice.reasoning_tokens for choice in self._choices))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=thought) if thinks else None,
        )

    def metrics(self) -> ResponseMetrics:
        return response_metrics([choice.metrics for choice in self._choices if choice.metrics is not None])

    def _sink(self, position: int, loop: asyncio.AbstractEventLoop) -> Sink:
        """Return the sink of one prompt, which the engine's thread calls."""

        def sink(chunk: OutputChunk) -> None:
            self.state.mailbox.post(loop, self._deliver, position, chunk, time.monotonic())

        return sink

    def _deliver(self, position: int, chunk: OutputChunk, now: float) -> None:
        index = position * self.choices_per_prompt + chunk.choice
        try:
            self._settle(index, chunk)
            self._observe(index, self.requests[position], chunk, now)
        finally:  # the client gets the chunk even if counting it failed
            if not self._received(index, chunk):
                self._queue.put_nowait((index, chunk))

    def _received(self, index: int, chunk: OutputChunk) -> bool:
        if self._receiver is None or chunk.finish_reason is not None or not self._queue.empty():
            return False
        try:
            return self._receiver(index, chunk)
        except Exception:  # the reader of `chunks` tries again, and tells the client if that fails too
            _log.exception("a chunk could not be written at once")
            return False

    def _settle(self, index: int, chunk: OutputChunk) -> None:
        """Update the choice, and give back its room when it ended."""
        choice, position = self._choices[index], index // self.choices_per_prompt
        choice.tokens += len(chunk.token_ids)
        choice.reasoning_tokens += chunk.reasoning_tokens
        self.reservation.received(index, len(chunk.token_ids))
        if chunk.finish_reason is not None:
            choice.ended, choice.metrics = True, chunk.metrics
            self.reservation.release([index], self.requests[position].sampling.max_tokens - choice.tokens)
            if self._has_ended(position):
                self.state.in_flight.discard(chunk.request_id)

    def _observe(self, index: int, request: GenerateRequest, chunk: OutputChunk, now: float) -> None:
        """Report a chunk to metrics, admission and observers."""
        choice = self._choices[index]
        if chunk.token_ids:
            if choice.last_s is not None:
                self.state.metrics.observe_tokens(now - choice.last_s, len(chunk.token_ids))
                self.state.admission.observe_tokens(now - choice.last_s, len(chunk.token_ids))
            elif len(chunk.token_ids) > 1:
                self.state.metrics.observe_tokens(0.0, len(chunk.token_ids) - 1)
            choice.last_s = now
        if self.state.settings.record_text:
            choice.text.append(chunk.reasoning + chunk.text)
        if chunk.finish_reason is not None:
            self.state.ended(self._ended_choice(index, request, chunk))

    def _ended_choice(self, index: int, request: GenerateRequest, chunk: OutputChunk) -> EndedChoice:
        assert chunk.finish_reason is not None
        metrics = chunk.metrics
        tpot_s = request.slo.tpot_s(self.state.info.baseline_s) if metrics is None else metrics.tpot_slo_s
        recorded = self.state.settings.record_text
        text = ChoiceText(request.prompt_ids, "".join(self._choices[index].text)) if recorded else None
        ending = "rejected" if metrics is None else chunk.finish_reason
        if chunk.finish_reason == "abort" and self._cancelled:
            ending = "cancelled"
        return EndedChoice(
            self.origin, index, ending, chunk.error_code, request.slo_class, tpot_s, request.slo.ttft_s, metrics, text,
            thinking_tpot_slo_s=request.slo.thinking_tpot_s, e2e_slo_s=request.slo.e2e_s,
        )  # fmt: skip

    def _failure(self, chunk: OutputChunk) -> ApiError:
        if chunk.finish_reason == "abort":
            return from_code("the server stopped the request because it shuts down; retry elsewhere", "aborted")
        code = chunk.error_code or ("engine_error" if self.state.client.is_alive() else "engine_dead")
        wait_s = self.state.retry_after_s() if code == OverloadedError.code else self.state.client.stats().back_in_s
        message, param = chunk.error or "the engine failed on this request", chunk.error_param
        if self.form_name and param not in (None, "tools") and code in FORM_CODES:
            named = message if code == "no_token_allowed" else message.replace(param, self.form_name, 1)
            message, param = named, self.form_name
        return from_code(message, code, param, wait_s)

    def _choices_of(self, position: int) -> list[_Choice]:
        first = position * self.choices_per_prompt
        return self._choices[first : first + self.choices_per_prompt]

    def _has_ended(self, position: int) -> bool:
        return all(choice.ended for choice in self._choices_of(position))


def max_tokens_of(requests: Iterable[GenerateRequest]) -> int:
    """Return the most tokens that requests can take: their prompts, and all that their choices may generate."""
    return sum(len(one.prompt_ids) + one.sampling.n * one.sampling.max_tokens for one in requests)


def response_metrics(choices: list[RequestMetrics]) -> ResponseMetrics:
    """Return the `metrics` object of a response: of several choices the slowest times, summed counts, all targets."""
    steps, accepted = sum(c.verify_steps for c in choices), sum(c.accepted_tokens for c in choices)
    met = [c.slo_met for c in choices if c.slo_met is not None]
    feasible = [c.slo_feasible for c in choices if c.slo_feasible is not None]
    begin = min((c.arrival_s for c in choices), default=0.0)
    end = max((c.last_token_s for c in choices if c.last_token_s is not None), default=begin)
    return ResponseMetrics(
        time_to_first_token_ms=_slowest_ms(c.ttft_s for c in choices),
        queue_time_ms=_slowest_ms(c.queue_s for c in choices),
        tokens_per_second=round(sum(c.output_tokens for c in choices) / (end - begin), 3) if end > begin else None,
        speculative=SpeculativeMetrics(
            verify_steps=steps, accepted_tokens=accepted, mean_accepted=round(accepted / steps, 4) if steps else 0.0
        ),
        speculative_decoding=_speculative_decoding(choices[0]) if len(choices) == 1 else None,
        slo=SloMetrics(
            tpot_target_ms=_slowest_ms(c.tpot_slo_s for c in choices),
            ttft_target_ms=_slowest_ms(c.ttft_slo_s for c in choices),
            tpot_ms=_slowest_ms(c.tpot_s for c in choices),
            thinking_tpot_target_ms=_slowest_ms(c.thinking_tpot_slo_s for c in choices),
            thinking_tpot_ms=_slowest_ms(c.thinking_tpot_s for c in choices),
            answer_tpot_ms=_slowest_ms(c.answer_tpot_s for c in choices),
            e2e_target_ms=_slowest_ms(c.e2e_slo_s for c in choices),
            e2e_ms=_slowest_ms(c.e2e_s for c in choices if c.e2e_slo_s is not None),
            met=all(met) if met else None,
            feasible=all(feasible) if feasible else None,
        ),
    )


def _speculative_decoding(choice: RequestMetrics) -> SpeculativeDecodingMetrics | None:
    """Return vLLM's metrics of one choice; None if it never speculated."""
    steps = sum(choice.accepted_steps)
    if not steps:
        return None
    accepted, drafted = choice.accepted_tokens, choice.drafted_tokens
    return SpeculativeDecodingMetrics(
        mean_acceptance_length=1 + accepted / steps,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        acceptance_histogram=list(choice.accepted_steps),
        num_spec_steps=steps,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=len(choice.accepted_steps) - 1,
    )


def _slowest_ms(values: Iterable[float | None]) -> float | None:
    """Return the largest known value, converted from seconds to milliseconds with three decimals."""
    known = [value * 1e3 for value in values if value is not None]
    return round(max(known), 3) if known else None
