"""One HTTP request's run through the engine: submits its prompts, hands out their chunks, gives the room back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from adaserve_jax.engine.client import GenerateRequest, OutputChunk, Sink
from adaserve_jax.errors import AdaServeError
from adaserve_jax.server.admission import Reservation
from adaserve_jax.server.auth import Hold
from adaserve_jax.server.errors import ApiError, of_code
from adaserve_jax.server.formatting import Pieces
from adaserve_jax.server.observers import ChoiceText, EndedChoice, Origin
from adaserve_jax.server.schema import PromptTokensDetails, ResponseMetrics, SloMetrics, SpeculativeMetrics, Usage
from adaserve_jax.server.state import ServerState
from adaserve_jax.types import RequestMetrics

_log = logging.getLogger(__name__)
Taker = Callable[[int, OutputChunk], bool]
"""taker(index, chunk): whether it took the chunk at once."""


@dataclass
class _Choice:
    """What is known of one choice. last_s: when its last tokens came, on this process's clock. text: its pieces, where
    the server keeps texts."""

    tokens: int = 0
    last_s: float | None = None
    begun: bool = False
    ended: bool = False
    metrics: RequestMetrics | None = None
    text: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Generation:
    """The choices of one HTTP request, prompt after prompt; choice c of prompt p has index p * n + c.

    `reservation`, of the server's room, and `hold`, of the key's limits, cover them all; each is given back when the
    engine has ended it, whoever still reads.
    pieces: turns chunks into what is shown.
    """

    state: ServerState
    requests: list[GenerateRequest]
    reservation: Reservation
    hold: Hold
    origin: Origin = field(default_factory=Origin)
    pieces: Pieces = field(default_factory=Pieces)
    _choices: list[_Choice] = field(default_factory=list)
    _queue: asyncio.Queue[tuple[int, OutputChunk]] = field(default_factory=asyncio.Queue)
    _taker: Taker | None = None

    @cached_property
    def choices_per_prompt(self) -> int:
        return self.requests[0].sampling.n

    def start(self) -> None:
        """Submit every prompt: what `submit` raises stops those before, which give their room back as they end, and
        gives back that of the others. Call it on the event loop."""
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
                self.hold.drop(len(left), tokens_of(self.requests[position:]))
                self.reservation.release(len(left))
                if isinstance(error, AdaServeError):
                    self.state.rejected(self.origin, request.slo, request.slo_class, left, error)
                raise

    def _sink(self, position: int, loop: asyncio.AbstractEventLoop) -> Sink:
        """The sink of one prompt, called by the engine's thread."""

        def sink(chunk: OutputChunk) -> None:
            self.state.mailbox.post(loop, self._deliver, position, chunk, time.monotonic())

        return sink

    def _deliver(self, position: int, chunk: OutputChunk, now: float) -> None:
        index = position * self.choices_per_prompt + chunk.choice
        try:
            self._settle(position, self._choices[index], chunk)
            self._observe(index, self.requests[position], chunk, now)
        finally:  # whoever waits gets it, whatever counting it made of it
            if not self._taken(index, chunk):
                self._queue.put_nowait((index, chunk))

    def _taken(self, index: int, chunk: OutputChunk) -> bool:
        """Whether the taker took it; one that overtakes none, and ends nothing, since ends are for `chunks`."""
        if self._taker is None or chunk.finish_reason is not None or not self._queue.empty():
            return False
        try:
            return self._taker(index, chunk)
        except Exception:  # it is tried again by whoever waits, who tells the client when that fails too
            _log.exception("a chunk could not be written at once")
            return False

    def _settle(self, position: int, choice: _Choice, chunk: OutputChunk) -> None:
        """Note what came, and give back the room of a choice that ended."""
        if not choice.begun:
            choice.begun = True
            self.reservation.begin()
        choice.tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            choice.ended, choice.metrics = True, chunk.metrics
            self.reservation.release(1)
            self.hold.end(self.requests[position].sampling.max_tokens - choice.tokens)
            if self._all_ended(position):
                self.state.in_flight.discard(chunk.request_id)

    def _observe(self, index: int, request: GenerateRequest, chunk: OutputChunk, now: float) -> None:
        """Tell metrics, admission and observers."""
        choice = self._choices[index]
        if chunk.token_ids:
            if choice.last_s is not None:
                self.state.metrics.observe_tokens(now - choice.last_s, len(chunk.token_ids))
            elif len(chunk.token_ids) > 1:
                self.state.metrics.observe_tokens(0.0, len(chunk.token_ids) - 1)
            choice.last_s = now
        if self.state.settings.record_text:
            choice.text.append(chunk.text)
        if chunk.finish_reason is not None:
            if all(each.ended for each in self._choices):
                self._compare(request.slo.ttft_s is not None)
            self.state.ended(self._ended(index, request, chunk))

    def _compare(self, targeted: bool) -> None:
        """Tell admission how long the last choice that began has waited, which is what it had predicted."""
        waits = [c.metrics.queue_s for c in self._choices if c.metrics is not None and c.metrics.queue_s is not None]
        if len(waits) == len(self._choices):
            self.state.admission.compare(self.reservation.predicted_s, max(waits), targeted)

    def _ended(self, index: int, request: GenerateRequest, chunk: OutputChunk) -> EndedChoice:
        assert chunk.finish_reason is not None
        metrics = chunk.metrics
        tpot_s = request.slo.tpot_s(self.state.info.baseline_s) if metrics is None else metrics.tpot_slo_s
        keep = self.state.settings.record_text
        text = ChoiceText(request.prompt_ids, "".join(self._choices[index].text)) if keep else None
        return self.origin.ended(
            index, "rejected" if metrics is None else chunk.finish_reason, chunk.error_code,
            slo_class=request.slo_class, tpot_slo_s=tpot_s, ttft_slo_s=request.slo.ttft_s, metrics=metrics, text=text,
        )  # fmt: skip

    def abort(self) -> None:
        """Stop what still runs; nothing when all has ended."""
        for position, request in enumerate(self.requests):
            if not self._all_ended(position):
                self.state.client.abort(request.request_id)

    def _all_ended(self, position: int) -> bool:
        first = position * self.choices_per_prompt
        return all(choice.ended for choice in self._choices[first : first + self.choices_per_prompt])

    def offer_to(self, taker: Taker) -> None:
        """From now on until `chunks` ends, offer what comes to `taker` first, on the event loop."""
        self._taker = taker

    async def chunks(self) -> AsyncIterator[tuple[int, OutputChunk]]:
        """(index, chunk) as they come, until every choice has ended, but for those that a taker took.

        Raises ApiError when a choice ends with an error or is stopped by the server; the others are then stopped.
        """
        left = len(self._choices)
        try:
            while left:
                index, chunk = await self._queue.get()
                if chunk.finish_reason in ("error", "abort"):
                    self.abort()
                    raise self._failure(chunk)
                left -= chunk.finish_reason is not None
                yield index, chunk
        finally:
            self._taker = None

    def _failure(self, chunk: OutputChunk) -> ApiError:
        if chunk.finish_reason == "abort":
            return of_code("the server stopped the request because it shuts down; retry elsewhere", "aborted")
        code = chunk.error_code or ("engine_error" if self.state.client.is_alive() else "engine_dead")
        wait_s = self.state.client.stats().back_in_s
        return of_code(chunk.error or "the engine failed on this request", code, chunk.error_param, wait_s)

    def usage(self, output_tokens: int | None = None) -> Usage:
        """Token counts, with so many of the output, or all that have come; a prompt counts once, however many choices
        it has."""
        prompt = sum(len(request.prompt_ids) for request in self.requests)
        output = sum(choice.tokens for choice in self._choices) if output_tokens is None else output_tokens
        cached = sum(self._cached_tokens(position) for position in range(len(self.requests)))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def _cached_tokens(self, position: int) -> int:
        """Tokens of one prompt that none of its choices had to compute."""
        first = position * self.choices_per_prompt
        choices = self._choices[first : first + self.choices_per_prompt]
        return min(choice.metrics.cached_tokens if choice.metrics is not None else 0 for choice in choices)

    def metrics(self) -> ResponseMetrics:
        return summarize([choice.metrics for choice in self._choices if choice.metrics is not None])


def tokens_of(requests: Iterable[GenerateRequest]) -> int:
    """The most tokens that requests can take: those of their prompts, and all that their choices may generate."""
    return sum(len(one.prompt_ids) + one.sampling.n * one.sampling.max_tokens for one in requests)


def summarize(choices: list[RequestMetrics]) -> ResponseMetrics:
    """The `metrics` object: of one choice its own values; of several the slowest times, summed counts, all met."""
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
        slo=SloMetrics(
            tpot_target_ms=_slowest_ms(c.tpot_slo_s for c in choices),
            ttft_target_ms=_slowest_ms(c.ttft_slo_s for c in choices),
            tpot_ms=_slowest_ms(c.tpot_s for c in choices),
            met=all(met) if met else None,
            feasible=all(feasible) if feasible else None,
        ),
    )


def _slowest_ms(values: Iterable[float | None]) -> float | None:
    """The largest of the known values, seconds, in milliseconds to the microsecond."""
    known = [value * 1e3 for value in values if value is not None]
    return round(max(known), 3) if known else None
