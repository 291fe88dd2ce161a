"""Deliver a generation over HTTP, as server-sent events or as one body, and stop it when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.server.connection import DirectBody, direct_body
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.formatting import ChoiceDelta, EventFormatter, ResponseFormatter, to_json
from adaserve_jax.server.generation import Generation
from adaserve_jax.server.parse import run_sized
from adaserve_jax.server.schema import StreamOptions, Usage

CLIENT_CLOSED_REQUEST = 499
WARNING_HEADER = "x-adaserve-warning"
INFEASIBLE = "a target is below what one request alone would get; served best-effort"
_TEXT_MARK = uuid.uuid4().hex
_log = logging.getLogger(__name__)


class StreamWriter(Protocol):
    """Write the events of a stream: `write` per chunk, in order, then `end`, or `failed` where it fails midway.

    `named` returns an error in the endpoint's words.
    """

    generation: Generation

    def write(self, index: int, chunk: OutputChunk) -> str: ...

    def end(self) -> str: ...

    def failed(self, error: ApiError) -> str: ...

    def named(self, error: ApiError) -> ApiError: ...


class EventWriter:
    """Write the events of a stream as `data: {...}`: `write` per chunk, in order, then `end`.

    Metrics are in the last event, which carries the usage too when that is asked for.
    """

    def __init__(self, generation: Generation, formatter: EventFormatter, options: StreamOptions):
        self.generation = generation
        self._formatter = formatter
        self._options = options
        self._unfinished = len(generation.requests) * generation.choices_per_prompt
        self._tokens = 0
        self._text_frames: dict[int, tuple[str, str]] = {}

    def write(self, index: int, chunk: OutputChunk) -> str:
        """Return the events of one chunk: none, one, or two with the opening of its choice.

        Most chunks hold only text, so their JSON is made once per choice and only the text is filled in.
        """
        formatter, deltas = self._formatter, self.generation.deltas
        if index in self._text_frames and deltas.is_text_only(index, chunk):
            self._tokens += len(chunk.token_ids)
            before, after = self._text_frames[index]
            return f"{before}{encode_basestring_ascii(chunk.text)}{after}"
        self._unfinished -= chunk.finish_reason is not None
        opening = formatter.opening(index, **self._counts()) if deltas.is_new(index) else None
        first = "" if opening is None else _event(to_json(opening))
        self._tokens += len(chunk.token_ids)
        delta = deltas.add(index, chunk)
        if delta is None:
            return first
        if delta.is_text_only and not self._options.continuous_usage_stats:
            if index not in self._text_frames:
                self._text_frames[index] = self._text_frame(index)
            before, after = self._text_frames[index]
            return f"{first}{before}{encode_basestring_ascii(delta.text)}{after}"
        is_last = not self._unfinished and not self._options.include_usage
        last = {"metrics": self.generation.metrics()} if is_last else {}
        return first + _event(to_json(formatter.event([delta], **self._counts(), **last)))

    def end(self) -> str:
        """Return the event with the usage that comes after the last choice; empty unless it is asked for."""
        if not self._options.include_usage:
            return ""
        usage, metrics = self.generation.usage(), self.generation.metrics()
        return _event(to_json(self._formatter.event([], usage=usage, metrics=metrics)))

    def failed(self, error: ApiError) -> str:
        return _event(json.dumps(error.body()))

    def named(self, error: ApiError) -> ApiError:
        return error

    def _counts(self) -> dict[str, Usage | None]:
        if self._options.continuous_usage_stats:
            return {"usage": self.generation.usage(self._tokens)}
        return {"usage": None} if self._options.include_usage else {}

    def _text_frame(self, index: int) -> tuple[str, str]:
        """Return the parts before and after the text of an event that carries only text."""
        event = _event(to_json(self._formatter.event([ChoiceDelta(index, _TEXT_MARK)], **self._counts())))
        before, after = event.split(json.dumps(_TEXT_MARK))
        return before, after


def _event(data: str) -> str:
    return f"data: {data}\n\n"


async def events(writer: StreamWriter) -> AsyncIterator[str]:
    """Yield the events of a stream as they come, the last one `data: [DONE]`.

    A failure is an event too; before the first event it is raised as ApiError instead.
    """
    began = False
    try:
        async for index, chunk in writer.generation.chunks():
            text = writer.write(index, chunk)
            if text:
                began = True
                yield text
        if end := writer.end():
            yield end
    except Exception as error:  # one stream's bug must not take the server down
        if not isinstance(error, ApiError):
            _log.exception("a stream failed")
            error = ApiError(500, "the server failed on this request and goes on", code="internal_error")
        error = writer.named(error)
        if not began:
            raise error from None
        yield writer.failed(error)
    yield _event("[DONE]")


class EventStream(StreamingResponse):
    """Response that sends a generation's events until they end or the client disconnects, then stops the generation.

    The status is sent with the first event, so a failure before it has the status of its error. Between the first event
    and the end of a choice, events are written straight to the connection where `DirectBody` allows it.
    """

    def __init__(self, writer: StreamWriter, headers: Mapping[str, str]):
        self._events = events(writer)
        super().__init__(self._events, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._writer = writer
        self._direct: DirectBody | None = None
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not await finish_first(self._respond(scope, receive, send), self.listen_for_disconnect(receive)):
                self._writer.generation.cancel()
        except OSError:
            _log.debug("the client disconnected while an event was sent")
            self._writer.generation.cancel()
        finally:
            self._writer.generation.abort()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self.body_iterator = self._body(first, direct_body(scope))
        await self.stream_response(send)

    async def _body(self, first: str, direct: DirectBody | None) -> AsyncIterator[str]:
        """Yield `first` and the rest.

        A yielded event may still be unsent until the next one is asked for, so `_sending` keeps direct writes out.
        """
        self._sending = True
        yield first
        if direct is not None:
            self._direct = direct
            self._writer.generation.deliver_to(self._write_directly)
        self._sending = False
        async for text in self._events:
            if direct is not None and direct.closed:  # asyncio logs each further write until uvicorn hears of it
                raise ConnectionResetError("the client disconnected")
            self._sending = True
            yield text
            self._sending = False

    def _write_directly(self, index: int, chunk: OutputChunk) -> bool:
        if self._sending or self._direct is None or not self._direct.ready:
            return False
        if text := self._writer.write(index, chunk):
            self._direct.write(text.encode())
        return True


async def collect(
    generation: Generation, formatter: ResponseFormatter, http: Request, headers: Mapping[str, str]
) -> Response:
    """Return the whole answer as one body; stop the generation when the client disconnects. Raises ApiError."""
    parts: dict[int, list[ChoiceDelta]] = {}

    async def gather() -> None:
        async for index, chunk in generation.chunks():
            delta = generation.deltas.add(index, chunk)
            if delta is not None:
                parts.setdefault(index, []).append(delta)

    async def disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    try:
        finished = await finish_first(gather(), disconnected())
        if not finished:
            generation.cancel()
    finally:
        generation.abort()
    if not finished:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    usage, metrics = generation.usage(), generation.metrics()

    def written() -> str:
        choices = [ChoiceDelta.join(parts[index]) for index in sorted(parts)]
        return _by_choice(formatter.full(choices, usage, metrics))

    size = usage.completion_tokens * (1 + (generation.requests[0].sampling.logprobs or 0))
    body = await run_sized(size, written)
    headers = with_warning(headers, INFEASIBLE if metrics.slo.feasible is False else "")
    return Response(body, media_type="application/json", headers=headers)


def _by_choice(response: BaseModel) -> str:
    """Return the JSON of a response, written choice by choice: no other thread runs while pydantic writes."""
    choices: list[BaseModel] = getattr(response, "choices", [])
    if len(choices) < 2:
        return to_json(response)
    before, after = to_json(response.model_copy(update={"choices": []})).split('"choices":[]', 1)
    return f'{before}"choices":[{",".join(choice.model_dump_json() for choice in choices)}]{after}'


def with_warning(headers: Mapping[str, str], text: str) -> Mapping[str, str]:
    """Return the headers with one more warning; as they are where `text` is empty."""
    if not text:
        return headers
    return {**headers, WARNING_HEADER: "; ".join(filter(None, (headers.get(WARNING_HEADER), text)))}


async def finish_first(work: Awaitable[None], other: Awaitable[None]) -> bool:
    """Run both until one ends and cancel the rest. Return whether `work` ended; raise what it raised."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
