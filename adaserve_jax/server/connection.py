"""How connections are kept: uvicorn's HTTP protocol with a limit on the time that a client takes to send a request, and
with a short way for the parts of a stream."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.tls import tls_options

DIRECT = "adaserve.direct_body"


class DirectBody:
    """Writes parts of a chunked body (RFC 9112, 7.1) to the connection at once: `send` takes a task switch, every layer
    of the application, and an HTTP state machine that has nothing to say about them.

    Only between a response's head and its end, both of which go through `send`.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl):
        self._transport = transport
        self._flow = flow

    @property
    def ready(self) -> bool:
        """Whether the client reads as fast as it is written to; if not, `send` waits for it."""
        return not self._flow.write_paused and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """data: not empty, which would end the body."""
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()


def direct_body(scope: Scope) -> DirectBody | None:
    """Of this response, when its body is sent in chunks because nothing says its length."""
    direct = scope.get("extensions", {}).get(DIRECT)
    return direct if scope["http_version"] == "1.1" and scope["method"] != "HEAD" else None


def cut_off(scope: Scope) -> None:
    """End the connection of a response that has begun and will have no end, so that its client does not take what came
    for the whole."""
    direct = scope.get("extensions", {}).get(DIRECT)
    if direct is not None:
        direct.abort()


class PatientProtocol(H11Protocol):
    """Closes a connection whose client takes longer than `receive_timeout`, seconds, for a request's headers, counted
    from the first byte or from the connection, or after them for its body. uvicorn only limits idle time."""

    def __init__(self, receive_timeout: float, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._receive_timeout = receive_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._served, self.app = self.app, self._with_direct_body

    async def _with_direct_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("extensions", {})[DIRECT] = DirectBody(self.transport, self.flow)
        await self._served(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await(h11.IDLE)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await(self.conn.their_state)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:  # idle connections have uvicorn's limit, until something comes
            self._await(self.conn.their_state)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def _await(self, part: object) -> None:
        """A part of a request is awaited: headers (IDLE), a body (SEND_BODY), or nothing."""
        part = part if part in (h11.IDLE, h11.SEND_BODY) else None
        if part is self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited = part
        if part is not None:
            self._deadline = self.loop.call_later(self._receive_timeout, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def http_config(app: ASGIApp, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration for these settings. Raises ConfigError (see tls)."""
    protocol: Any = partial(PatientProtocol, settings.receive_timeout)
    tls = tls_options(settings)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level=settings.log_level,
        access_log=settings.log_level in ("info", "debug"),
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]  # seconds, whole or not
        proxy_headers=settings.trust_gateway,
        server_header=False,
        **tls,
        **options,
    )
