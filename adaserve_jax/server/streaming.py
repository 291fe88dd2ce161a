"""Delivering a generation over HTTP: server-sent events or one body, and stopping it when the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from adaserve_jax.server.dialects import Dialect, to_json
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.generation import Generation
from adaserve_jax.server.pieces import Piece
from adaserve_jax.server.responses import ResponseMetrics, Usage

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


async def events(generation: Generation, dialect: Dialect, usage: UsageReports) -> AsyncIterator[str]:
    """The events of a stream, `data: {...}` each, the last one `data: [DONE]`.

    metrics come in the last event before it, which carries the usage when that is asked for at the end. A failure is an
    event with an `error` object; before the first event it is raised as ApiError instead.
    """
    left = len(generation.requests) * generation.choices_per_prompt
    tokens, began = 0, False
    plain: dict[int, tuple[str, str]] = {}

    def counts() -> dict[str, Usage | None]:
        if usage.throughout:
            return {"usage": generation.usage(tokens)}
        return {"usage": None} if usage.at_end else {}

    try:
        async for index, chunk in generation.chunks():
            left -= chunk.finish_reason is not None
            opening = dialect.opening(index, **counts()) if generation.pieces.opens(index) else None
            tokens += len(chunk.token_ids)
            if opening is not None:
                began = True
                yield _data(to_json(opening))
            piece = generation.pieces.take(index, chunk)
            if piece is None:
                continue
            began = True
            if piece.is_plain and not usage.throughout:
                if index not in plain:
                    plain[index] = _around_text(dialect, index, counts())
                before, after = plain[index]
                yield _data(f"{before}{json.dumps(piece.text)}{after}")
                continue
            last = {} if left or usage.at_end else {"metrics": generation.metrics()}
            yield _data(to_json(dialect.event([piece], **counts(), **last)))
        if usage.at_end:
            yield _data(to_json(dialect.event([], usage=generation.usage(), metrics=generation.metrics())))
    except Exception as error:  # the boundary: one stream's bug must not take the server down
        if not isinstance(error, ApiError):
            _log.exception("a stream failed")
            error = ApiError(500, "the server failed on this request and goes on", code="internal_error")
        if not began:
            raise error from None
        yield _data(json.dumps(error.body()))
    yield _data("[DONE]")


def _around_text(dialect: Dialect, index: int, extras: Mapping[str, Usage | None]) -> tuple[str, str]:
    """The JSON before and after the text of an event that carries only text: made once, since most events are."""
    before, after = to_json(dialect.event([Piece(index, _MARK)], **extras)).split(json.dumps(_MARK))
    return before, after


def _data(text: str) -> str:
    return f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """Sends events until they end or the client goes away, whichever comes first; then calls `on_end`.

    The status is sent with the first event, so that what fails before it has the status of its error.
    """

    def __init__(self, content: AsyncIterator[str], on_end: Callable[[], None], headers: Mapping[str, str]):
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._content = content
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first(self._respond(scope, receive, send), self.listen_for_disconnect(receive))
        except OSError:
            _log.debug("the client went away while an event was sent")
        finally:
            self._on_end()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._content)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self.body_iterator = _joined(first, self._content)
        await self.stream_response(send)


async def _joined(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for item in rest:
        yield item


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
