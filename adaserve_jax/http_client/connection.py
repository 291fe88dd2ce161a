"""One HTTP/1.1 connection whose bytes are stamped when they are read, before anything looks at them.

Runs on one event loop. The parser is httptools, which uvicorn also stands on; it is imported when it is first needed,
so that a bench without a URL does not ask for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from adaserve_jax.errors import ConfigError

MAX_HEAD_BYTES = 2**16


class Answer(Protocol):
    """Hears what comes back to one request. After `on_end` or `on_lost` nothing comes any more."""

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """headers: by lower-case name."""
        ...

    def on_body(self, at_s: float, part: bytes) -> None:
        """at_s: time.monotonic when the bytes were read."""
        ...

    def on_end(self, at_s: float) -> None:
        """All of it was read."""
        ...

    def on_lost(self, at_s: float, code: str, heard: bool) -> None:
        """There will be no more. code: disconnected or malformed_http. heard: whether any byte came back."""
        ...


def parser_library() -> Any:
    """httptools. Raises ConfigError without it."""
    try:
        import httptools
    except ImportError:
        raise ConfigError(
            "asking a server by its URL needs httptools, which is not installed; install it: "
            "pip install 'adaserve-jax[client]'"
        ) from None
    return httptools


class HttpConnection(asyncio.Protocol):
    """Carries one request after another. on_idle(connection): it may carry the next one; on_closed(connection): never
    again. All that the parser calls is here too."""

    def __init__(self, on_idle: Callable[[HttpConnection], None], on_closed: Callable[[HttpConnection], None]):
        self._library = parser_library()
        self._on_idle, self._on_closed = on_idle, on_closed
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self.was_idle = False
        """Servers close idle connections, also just when a request is sent onto one."""
        self.opened_s = 0.0
        self.is_open = False

    @property
    def socket(self) -> Any:
        """The one below, as the event loop shows it. Only once it is open."""
        assert self._transport is not None
        return self._transport.get_extra_info("socket")

    def send(self, message: bytes, answer: Answer) -> None:
        """Write a whole request. Only on an idle connection."""
        assert self._transport is not None and self._answer is None
        self._answer = answer
        self._parser = self._library.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._heard = self._in_body = self._complete = self._reusable = False
        self._transport.write(message)

    def pause(self) -> None:
        """Read nothing more until `resume`: who takes the answer is slower than the server."""
        if self._transport is not None and self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def close(self) -> None:
        """At once, whatever is under way; its answer hears nothing more."""
        self._answer = None
        if self._transport is not None and self.is_open:
            self.is_open = False
            self._transport.abort()

    def close_for(self, answer: Answer) -> None:
        """Close it if it still carries the request that this answers."""
        if self._answer is answer:
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.opened_s = time.monotonic()
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self._answer is None:  # nothing was asked
            self.close()
            return
        self._heard = True
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (self._library.HttpParserError, self._library.HttpParserUpgrade):
            self._lose("malformed_http")
            return
        if self._complete:
            self._end()
        elif not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._lose("malformed_http")

    def connection_lost(self, exc: Exception | None) -> None:
        self._now = time.monotonic()
        self.is_open = False
        answer, self._answer = self._answer, None
        if answer is not None:
            until_closed = self._in_body and not {"content-length", "transfer-encoding"} & self._headers.keys()
            if until_closed and exc is None:
                answer.on_end(self._now)
            else:
                answer.on_lost(self._now, "disconnected", self._heard)
        self._on_closed(self)

    def on_message_begin(self) -> None:
        if self._complete:  # more than was asked for
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status >= 200 and self._answer is not None:
            self._in_body = True
            self._answer.on_head(status, self._headers)
        else:
            self._headers = {}

    def on_body(self, body: bytes) -> None:
        if self._answer is not None and not self._complete:
            self._answer.on_body(self._now, body)

    def on_message_complete(self) -> None:
        if self._in_body and not self._complete:
            self._complete, self._reusable = True, self._parser.should_keep_alive()

    def _end(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.on_end(self._now)
        if self._reusable and self.is_open:
            self._on_idle(self)
        else:
            self.close()

    def _lose(self, code: str) -> None:
        answer = self._answer
        self.close()
        if answer is not None:
            answer.on_lost(self._now, code, self._heard)
