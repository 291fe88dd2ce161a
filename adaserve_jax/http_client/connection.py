"""One HTTP/1.1 connection whose bytes get their time stamp when they are read, before they are parsed.

The bench's client and the cluster's router use it; docs/dependencies.md says why not aiohttp. Runs on
one event loop. The parser is httptools, which uvicorn uses too; it is imported on first use, so that a bench without a
URL does not need it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from adaserve_jax.errors import ConfigError

Headers = Sequence[tuple[str, str]]
"""Lower-case names and values, in order; a name may come several times."""
MAX_HEAD_BYTES = 2**16
STALE_S = 1.0
"""A connection that the server had closed while it was idle is lost within so long of the next send, or sooner. Lost
later, the server may have worked on the request."""


class ResponseHandler(Protocol):
    """Receiver of the response to one request. After `on_end` or `on_lost` nothing else is called."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Take status and headers."""

    def on_body(self, at_s: float, part: bytes) -> None:
        """Take a part of the body. at_s: time.monotonic when its bytes were read."""

    def on_end(self, at_s: float) -> None:
        """Note that the response is complete."""

    def on_lost(self, at_s: float, code: str, heard: bool) -> None:
        """Note that the response is cut. code: disconnected or malformed_http; heard: whether any byte came."""


def parser_library() -> Any:
    """Import httptools. Raises ConfigError if it is not installed."""
    try:
        import httptools
    except ImportError:
        raise ConfigError(
            "asking a server by its URL needs httptools, which is not installed; install it: "
            "pip install 'adaserve-jax[client]'"
        ) from None
    return httptools


class HttpConnection(asyncio.Protocol):
    """One connection that carries requests one after another; also the callback object of its parser.

    on_idle: called with the connection when it can carry the next request. on_closed: called once, at its end.
    """

    def __init__(self, on_idle: Callable[[HttpConnection], None], on_closed: Callable[[HttpConnection], None]):
        self._library = parser_library()
        self._on_idle, self._on_closed = on_idle, on_closed
        self._transport: asyncio.Transport | None = None
        self._handler: ResponseHandler | None = None
        self.was_idle = False
        """Set once it was idle: a server may close an idle connection just when a request is sent on it."""
        self.opened_s = 0.0
        self.is_open = False

    @property
    def socket(self) -> Any:
        """The socket, once the connection is open."""
        assert self._transport is not None
        return self._transport.get_extra_info("socket")

    def send(self, message: bytes, handler: ResponseHandler) -> None:
        """Write a whole request on an idle connection."""
        assert self._transport is not None and self._handler is None
        self._handler = handler
        self._parser = self._library.HttpResponseParser(self)
        self._headers: list[tuple[str, str]] = []
        self._head_bytes = 0
        self._heard = self._in_body = self._complete = self._reusable = False
        self._transport.write(message)

    def pause(self) -> None:
        """Stop reading until `resume`, for a consumer that is slower than the server."""
        if self._transport is not None and self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection at once; its handler is not called any more."""
        self._handler = None
        if self._transport is not None and self.is_open:
            self.is_open = False
            self._transport.abort()

    def close_for(self, handler: ResponseHandler) -> None:
        """Close the connection if it still carries this handler's request."""
        if self._handler is handler:
            self.close()

    # ---- called by the event loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.opened_s = time.monotonic()
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self._handler is None:  # bytes without a request
            self.close()
            return
        self._heard = True
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (self._library.HttpParserError, self._library.HttpParserUpgrade):
            if not self._complete:
                self._lose("malformed_http")
                return
            self._reusable = False  # what follows the response is no HTTP
        if self._complete:
            self._end()
        elif not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._lose("malformed_http")

    def connection_lost(self, exc: Exception | None) -> None:
        self._now = time.monotonic()
        self.is_open = False
        handler, self._handler = self._handler, None
        if handler is not None:
            until_closed = self._in_body and not {"content-length", "transfer-encoding"} & dict(self._headers).keys()
            if until_closed and exc is None:
                handler.on_end(self._now)
            else:
                handler.on_lost(self._now, "disconnected", self._heard)
        self._on_closed(self)

    # ---- called by the parser ----

    def on_message_begin(self) -> None:
        if self._complete:  # a second response
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1").strip()))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status >= 200 and self._handler is not None:
            self._in_body = True
            self._handler.on_head(status, self._headers)
        else:
            self._headers = []

    def on_body(self, body: bytes) -> None:
        if self._handler is not None and not self._complete:
            self._handler.on_body(self._now, body)

    def on_message_complete(self) -> None:
        if self._in_body and not self._complete:
            self._complete, self._reusable = True, self._parser.should_keep_alive()

    def _end(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.on_end(self._now)
        if self._reusable and self.is_open:
            self._on_idle(self)
        else:
            self.close()

    def _lose(self, code: str) -> None:
        handler = self._handler
        self.close()
        if handler is not None:
            handler.on_lost(self._now, code, self._heard)
