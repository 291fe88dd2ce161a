"""Delivering a generation over HTTP: server-sent events or one body, and stopping it when the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as as_json

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.server.connection import DirectBody, direct_body
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.formatting import Dialect, Piece, to_json
from adaserve_jax.server.generation import Generation
from adaserve_jax.server.schema import ResponseMetrics, Usage

CLIENT_CLOSED_REQUEST = 499
WARNING_HEADER = "x-adaserve-warning"
INFEASIBLE = "a target is below what one request alone would get; served best-effort"
_MARK = uuid.uuid4().hex
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UsageReports:
    """Where a stream has the token counts. at_end: in one last event without choices. throughout: in every event, those
    so far."""

    at_end: bool = False
    throughout: bool = False


class EventWriter:
    """The events of a stream, `data: {...}` each: one call per chunk, in order, then `end`.

    metrics come in the last event, which carries the usage when that is asked for at the end.
    """

    def __init__(self, generation: Generation, dialect: Dialect, usage: UsageReports):
        self.generation = generation
        self._dialect = dialect
        self._usage = usage
        self._left = len(generation.requests) * generation.choices_per_prompt
        self._tokens = 0
        self._plain: dict[int, tuple[str, str]] = {}

    def write(self, index: int, chunk: OutputChunk) -> str:
        """What one chunk makes of events: none, one, or two."""
        dialect, pieces, counts = self._dialect, self.generation.pieces, self._counts
        if index in self._plain and pieces.shows_as_is(index, chunk):
            self._tokens += len(chunk.token_ids)
            before, after = self._plain[index]
            return f"{before}{as_json(chunk.text)}{after}"
        self._left -= chunk.finish_reason is not None
        opening = dialect.opening(index, **counts()) if pieces.opens(index) else None
        first = "" if opening is None else _data(to_json(opening))
        self._tokens += len(chunk.token_ids)
        piece = pieces.take(index, chunk)
        if piece is None:
            return first
        if piece.is_plain and not self._usage.throughout:
            if index not in self._plain:
                self._plain[index] = _around_text(dialect, index, counts())
            before, after = self._plain[index]
            return f"{first}{before}{as_json(piece.text)}{after}"
        last = {} if self._left or self._usage.at_end else {"metrics": self.generation.metrics()}
        return first + _data(to_json(dialect.event([piece], **counts(), **last)))

    def end(self) -> str:
        if not self._usage.at_end:
            return ""
        generation = self.generation
        return _data(to_json(self._dialect.event([], usage=generation.usage(), metrics=generation.metrics())))

    def _counts(self) -> dict[str, Usage | None]:
        if self._usage.throughout:
            return {"usage": self.generation.usage(self._tokens)}
        return {"usage": None} if self._usage.at_end else {}


async def events(writer: EventWriter) -> AsyncIterator[str]:
    """The events of a stream as they come, the last one `data: [DONE]`. A failure is an event with an `error` object;
    before the first event it is raised as ApiError instead."""
    began = False
    try:
        async for index, chunk in writer.generation.chunks():
            text = writer.write(index, chunk)
            if text:
                began = True
                yield text
        if end := writer.end():
            yield end
    except Exception as error:  # the boundary: one stream's bug must not take the server down
        if not isinstance(error, ApiError):
            _log.exception("a stream failed")
            error = ApiError(500, "the server failed on this request and goes on", code="internal_error")
        if not began:
            raise error from None
        yield _data(json.dumps(error.body()))
    yield _data("[DONE]")


def _around_text(dialect: Dialect, index: int, extras: Mapping[str, Usage | None]) -> tuple[str, str]:
    """What is before and after the text in an event that carries only text: made once, since most events are."""
    before, after = _data(to_json(dialect.event([Piece(index, _MARK)], **extras))).split(json.dumps(_MARK))
    return before, after


def _data(text: str) -> str:
    return f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """Sends a generation's events until they end or the client goes away, whichever comes first; then stops it.

    The status is sent with the first event, so that what fails before it has the status of its error. What comes after
    it and is not the last of a choice goes straight to the connection, where that is possible.
    """

    def __init__(self, writer: EventWriter, headers: Mapping[str, str]):
        content = events(writer)
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._content = content
        self._writer = writer
        self._direct: DirectBody | None = None
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first(self._respond(scope, receive, send), self.listen_for_disconnect(receive))
        except OSError:
            _log.debug("the client went away while an event was sent")
        finally:
            self._writer.generation.abort()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._content)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self.body_iterator = self._from(first, direct_body(scope))
        await self.stream_response(send)

    async def _from(self, first: str, direct: DirectBody | None) -> AsyncIterator[str]:
        """`first` and the rest. What is yielded may be waiting to be sent until the next is asked for."""
        self._sending = True
        yield first
        if direct is not None:
            self._direct = direct
            self._writer.generation.offer_to(self._take)
        self._sending = False
        async for text in self._content:
            self._sending = True
            yield text
            self._sending = False

    def _take(self, index: int, chunk: OutputChunk) -> bool:
        if self._sending or self._direct is None or not self._direct.ready:
            return False
        if text := self._writer.write(index, chunk):
            self._direct.write(text.encode())
        return True


async def collect(generation: Generation, dialect: Dialect, http: Request, headers: Mapping[str, str]) -> Response:
    """The whole answer in one body; when the client goes away first, the generation is stopped. Raises ApiError."""
    parts: dict[int, list[Piece]] = {}

    async def gather() -> None:
        async for index, chunk in generation.chunks():
            piece = generation.pieces.take(index, chunk)
            if piece is not None:
                parts.setdefault(index, []).append(piece)

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    try:
        finished = await _first(gather(), gone())
    finally:
        generation.abort()
    if not finished:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    ordered = [Piece.joined(parts[index]) for index in sorted(parts)]
    metrics = generation.metrics()
    body = to_json(dialect.full(ordered, generation.usage(), metrics))
    return Response(body, media_type="application/json", headers=_warned(headers, metrics))


def _warned(headers: Mapping[str, str], metrics: ResponseMetrics) -> dict[str, str]:
    """`headers`, with a warning more where a target was out of reach."""
    if metrics.slo.feasible is not False:
        return dict(headers)
    warnings = [text for text in (headers.get(WARNING_HEADER), INFEASIBLE) if text]
    return {**headers, WARNING_HEADER: "; ".join(warnings)}


async def _first(work: Awaitable[None], otherwise: Awaitable[None]) -> bool:
    """Run both until one ends, cancel the other; True when `work` ended. Raises what `work` raised."""
    main, other = asyncio.ensure_future(work), asyncio.ensure_future(otherwise)
    try:
        await asyncio.wait({main, other}, return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            main.result()
        return main.done()
    finally:
        main.cancel()
        other.cancel()
        await asyncio.gather(main, other, return_exceptions=True)
