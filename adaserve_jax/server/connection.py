"""How connections are kept: uvicorn's HTTP protocol with a limit on the time that a client takes to send a request, and
with a short way for the parts of a stream.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from adaserve_jax.certificates import check_certificates
from adaserve_jax.server.settings import ServerSettings

# https: the files are checked before the port opens, so that what is wrong with them is one clear error.

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2, the oldest version that is spoken: forward secret and authenticated. Those of TLS 1.3 all are."""


def tls_options(settings: ServerSettings) -> dict[str, Any]:
    """What uvicorn needs to speak https; nothing without a certificate. Raises ConfigError."""
    if settings.tls_cert is None:
        return {}
    check_tls(settings)
    options: dict[str, Any] = {
        "ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key, "ssl_ciphers": CIPHERS,
    }  # fmt: skip
    if settings.tls_client_ca is not None:
        options |= {"ssl_ca_certs": settings.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def check_tls(settings: ServerSettings) -> None:
    """Load certificate, key and CA once. Raises ConfigError naming the setting, the file and what is wrong."""
    assert settings.tls_cert is not None and settings.tls_key is not None
    check_certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


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


# The HTTP server's end: on SIGTERM or SIGINT what is in flight finishes within a time limit, nothing new is
# taken.

POLL_S = 0.05
ABORT_GRACE_S = 2.0


class Drainable(Protocol):
    """What is served: `ServerState`, or a router's."""

    @property
    def phase(self) -> str:
        """Is "draining" once `drain` was called."""
        ...

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def is_busy(self) -> bool:
        """Whether anything that was taken has not ended."""
        ...

    def drain(self) -> None:
        """Take nothing new."""
        ...

    def abort_all(self) -> None:
        """End what is left."""
        ...


Served = TypeVar("Served", bound=Drainable)


class DrainingServer(uvicorn.Server, Generic[Served]):
    """On the first signal takes nothing new and waits for what is in flight; on the second stops at once."""

    def __init__(self, config: uvicorn.Config, state: Served):
        super().__init__(config)
        self.state = state
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal; the base class would end connections at once and re-raise the signal afterwards."""
        if self._loop is None or self.state.phase == "draining":
            self.should_exit = self.force_exit = True
            return
        self.state.drain()
        self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Take nothing new from now on, and exit when nothing is left to do. Call it on the event loop."""
        self.state.drain()
        self._drain = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Wait until all is answered and sent or the time is up, end what is left, then let the server exit."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.state.settings.shutdown_timeout
        while (self.state.is_busy or self.is_answering()) and loop.time() < end:
            await asyncio.sleep(POLL_S)
        while self.state.is_busy and loop.time() < end + ABORT_GRACE_S:
            self.state.abort_all()  # again and again: a long prompt may be tokenised only now
            await asyncio.sleep(POLL_S)
        self.should_exit = True

    def is_answering(self) -> bool:
        """Whether a response is being made, or a client has not taken all of one."""
        connections: set[Any] = self.server_state.connections
        return bool(self.server_state.tasks) or any(
            each.transport is not None and each.transport.get_write_buffer_size() for each in connections
        )
