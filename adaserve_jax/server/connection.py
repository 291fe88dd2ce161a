"""HTTP connections: uvicorn's configuration and TLS, a time limit for requests, direct writes of a stream, draining.

It uses parts of uvicorn that are not documented, so pyproject.toml bounds its version (docs/dependencies.md).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from functools import partial
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from adaserve_jax.certificates import check_certificates
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.settings import ServerSettings

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers of TLS 1.2, the oldest version allowed: forward secret and authenticated, as all of TLS 1.3's are."""
DIRECT_BODY = "adaserve.direct_body"
"""Key of the ASGI extension that holds a connection's DirectBody."""
ABSOLUTE_TARGET = re.compile(rb"https?://[^/]*", re.IGNORECASE)
BODY_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
POLL_S = 0.05
ABORT_GRACE_S = 2.0
"""Seconds that aborted requests get to end when the server stops."""
_log = logging.getLogger(__name__)


def tls_options(settings: ServerSettings) -> dict[str, Any]:
    """Return uvicorn's options for https; none without a certificate. Raises ConfigError naming the file."""
    if settings.tls_cert is None:
        return {}
    assert settings.tls_key is not None
    check_certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)  # before the port opens
    options: dict[str, Any] = {
        "ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key, "ssl_ciphers": CIPHERS,
    }  # fmt: skip
    if settings.tls_client_ca is not None:
        options |= {"ssl_ca_certs": settings.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


class DirectBody:
    """Direct writes of parts of a chunked body (RFC 9112, 7.1) to the connection.

    They save what `send` costs: a task switch, every middleware, and an HTTP state machine that does not change between
    a response's head and its end. Head and end must go through `send`.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl):
        self._transport = transport
        self._flow = flow

    @property
    def ready(self) -> bool:
        """True while the client reads fast enough; otherwise use `send`, which waits for it."""
        return not self._flow.write_paused and not self.closed

    @property
    def closed(self) -> bool:
        """True once the client is gone or the connection is closing: what is written then is lost."""
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write one chunk; `data` must not be empty, which would end the body."""
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()


def direct_body(scope: Scope) -> DirectBody | None:
    """Return the DirectBody of a response that is sent in chunks; None for HTTP/1.0 and HEAD."""
    direct = scope.get("extensions", {}).get(DIRECT_BODY)
    return direct if scope["http_version"] == "1.1" and scope["method"] != "HEAD" else None


def cut_off(scope: Scope) -> None:
    """Close the connection of a response that fails midway, so that its client does not take it for complete."""
    direct = scope.get("extensions", {}).get(DIRECT_BODY)
    if direct is not None:
        direct.abort()


def two_lengths() -> ApiError:
    """Return the refusal of a body with two lengths (RFC 9112, 6.1), which closes the connection: a proxy in between
    may go by the other one and take a part of the body for the next client's request."""
    return ApiError(
        400, "a body must have one length, got Content-Length beside Transfer-Encoding; leave one of them out",
        code="ambiguous_length", headers={"connection": "close"},
    )  # fmt: skip


class TimeoutProtocol(H11Protocol):
    """HTTP protocol that closes a connection whose client takes too long to send a request, or to read an answer.

    The client gets `receive_timeout` seconds for the headers, from the connection or the first byte, and again for the
    body. uvicorn only limits the time between requests. A client that has read nothing for as long, while more of its
    answer waits than a connection buffers, is cut off: what it leaves unread is held in memory.

    A request with two lengths of its body is refused, and nothing that follows it is read. A target in absolute form,
    `GET http://host/path`, is served as its path.
    """

    def __init__(self, receive_timeout: float, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._receive_timeout = receive_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._unread: asyncio.TimerHandle | None = None
        self._inner_app, self.app = self.app, self._with_direct_body

    async def _with_direct_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        if {name for name, _ in scope["headers"]} >= BODY_LENGTHS:
            await two_lengths().response()(scope, receive, send)
            return
        if absolute := ABSOLUTE_TARGET.match(scope["raw_path"]):
            scope["raw_path"] = scope["raw_path"][absolute.end() :] or b"/"
            scope["path"] = unquote(scope["raw_path"].decode("ascii"))
        scope.setdefault("extensions", {})[DIRECT_BODY] = DirectBody(self.transport, self.flow)
        await self._inner_app(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await(h11.IDLE)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await(self.conn.their_state)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:  # uvicorn limits idle connections
            self._await(self.conn.their_state)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self._watch_reader(False)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_reader(False)

    def _watch_reader(self, waits: bool) -> None:
        """Begin or end to watch whether the client reads; while it is watched, nothing is written."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if waits:
            left = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(self._receive_timeout, self._check_reader, left)

    def _check_reader(self, left: int) -> None:
        """Cut off a client that has read nothing since `left` bytes were left to be read."""
        if self.transport.get_write_buffer_size() < left:
            self._watch_reader(True)
        else:
            self.transport.abort()

    def _await(self, part: object) -> None:
        """Start the timer for a part of a request: headers (IDLE), a body (SEND_BODY), or none."""
        part = part if part in (h11.IDLE, h11.SEND_BODY) else None
        if part is self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited = part
        if part is not None:
            self._deadline = self.loop.call_later(self._receive_timeout, self._time_out)

    def _time_out(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def http_config(app: ASGIApp, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for these settings. Raises ConfigError (see `tls_options`)."""
    protocol: Any = partial(TimeoutProtocol, settings.receive_timeout)
    tls = tls_options(settings)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,  # that of the process (adaserve_jax.logs)
        log_level=settings.log_level,
        access_log=settings.log_level in ("info", "debug"),
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]  # seconds, whole or not
        proxy_headers=settings.trust_gateway,
        server_header=False,
        **tls,
        **options,
    )


class Drainable(Protocol):
    """State of a server that can be drained: `ServerState`, or a router's. is_busy: a request has not ended."""

    @property
    def phase(self) -> str: ...

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def is_busy(self) -> bool: ...

    def drain(self) -> None:
        """Take no new requests."""

    def abort_all(self) -> None:
        """Stop every request that is left."""


StateT = TypeVar("StateT", bound=Drainable)


class DrainingServer(uvicorn.Server, Generic[StateT]):
    """uvicorn's server that takes nothing new after SIGTERM or SIGINT and lets requests in flight finish.

    They get `shutdown_timeout` seconds. A second signal ends them with an error at once, a third the server.
    """

    def __init__(self, config: uvicorn.Config, state: StateT):
        super().__init__(config)
        self.state = state
        self._drain: asyncio.Task[None] | None = None
        self._hurried = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; the base class would close connections at once and re-raise the signal afterwards."""
        if self._loop is None or self._hurried:
            self.should_exit = self.force_exit = True
            return
        if self.state.phase == "draining":
            self._hurried = True
            return
        self.state.drain()
        self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Take no new requests and exit when none is left. Call it on the event loop."""
        self.state.drain()
        seconds = self.state.settings.shutdown_timeout
        if self.state.is_busy or self.is_answering():
            _log.warning(
                "nothing new is taken; requests in flight have %g s to end, a second signal ends them", seconds
            )
        self._drain = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Wait until all responses are sent, the time is up or a second signal came; stop what is left; then let the
        server exit."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.state.settings.shutdown_timeout
        while (self.state.is_busy or self.is_answering()) and loop.time() < end and not self._hurried:
            await asyncio.sleep(POLL_S)
        end = loop.time() + ABORT_GRACE_S
        while self.state.is_busy and loop.time() < end:
            self.state.abort_all()  # repeatedly: a long prompt may be submitted only now
            await asyncio.sleep(POLL_S)
        self.should_exit = True

    def is_answering(self) -> bool:
        """Return whether a response is being made, or a client has not read all of one."""
        connections: set[Any] = self.server_state.connections
        return bool(self.server_state.tasks) or any(
            each.transport is not None and each.transport.get_write_buffer_size() for each in connections
        )
