"""The gRPC side of a draft service: one thread per stream reads frames for the worker, another writes its answers.

Whatever comes in at the port costs its own stream at most. No text, no token id and no secret gets into a log.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from adaserve_jax.certificates import read_file
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.limits import Allowance
from adaserve_jax.star.messages import FromService, Refused
from adaserve_jax.star.security import AUTHORIZATION, Audit, Tokens, check_secured
from adaserve_jax.star.settings import DraftServiceSettings, host_port
from adaserve_jax.star.streams import Connection, Frame
from adaserve_jax.star.wire import (
    MAX_FRAME_BYTES,
    METHOD,
    Caps,
    WireError,
    in_frames,
    read_target_frame,
    service_frame,
)

MOST_UNTAKEN = 64
"""Frames of one stream that may wait for the worker; then nothing more of it is read."""
MOST_UNSENT = 1024
"""Frames for one stream that may wait to be sent; a target that reads none of them is as good as gone."""
PING_S, PING_TIMEOUT_S = 20.0, 10.0
"""How often a silent connection is asked for a sign of life, and how long it has to give one."""
HELLO_S = 30.0
"""In which a new stream has to say who it is."""
LAST_WORDS_S = 5.0
"""In which a target has to read what is sent before its stream ends."""
SPARE_THREADS = 8
"""Beside one for each stream: what comes beyond is refused by a thread too."""
_log = logging.getLogger(__name__)


class Hears(Protocol):
    """What a server hands over to (`star.worker.Worker`)."""

    def heard(self, stream: Connection, frame: Frame) -> None: ...
    def lost(self, stream: Connection) -> None: ...


class DraftServer:
    """Listens for targets. Raises ConfigError: the address is not to be had, or not to be had so openly."""

    def __init__(self, settings: DraftServiceSettings, worker: Hears, caps: Caps, audit: Audit | None = None) -> None:
        check_secured(settings)
        self.audit = audit or Audit()
        self._settings = settings
        self._worker = worker
        self._caps = caps
        self._is_shut = False
        self._tokens = None if settings.token_file is None else Tokens.from_file(settings.token_file)
        most = settings.max_targets + SPARE_THREADS
        self._server = grpc.server(
            ThreadPoolExecutor(most, "draft-stream"),
            handlers=[_Handlers(self)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=most,
        )
        self.port = self._bind()

    def _bind(self) -> int:
        settings = self._settings
        host, port = host_port("listen", settings.listen)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if settings.tls_cert is None or settings.tls_key is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, _credentials(settings))
        except RuntimeError:
            bound = 0
        if not bound:
            raise _taken(settings.listen)
        return bound

    def start(self) -> None:
        self._server.start()

    def shut(self) -> None:
        """Let no stream in any more; those that stand go on."""
        self._is_shut = True

    def stop(self, grace_s: float) -> threading.Event:
        """Take no more streams; those that stand have so long to end. Returns at once what is set when all have."""
        return self._server.stop(grace_s)

    # ---- one stream ----

    def serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The method: frames in, frames out."""
        if self._is_shut:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the draft service is shutting down")
        peer = _peer_of(context)
        identity = self._identify(context)
        if identity is None:
            self.audit.refuse("unauthenticated")
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this draft service asks for a token that it knows")
        why = self.audit.open(peer, self._settings.max_targets, self._settings.max_streams_per_peer)
        if why:
            self.audit.refuse("streams")
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        stream = _Stream(identity, context, self.audit)
        try:
            threading.Thread(target=self._read, args=(stream, requests), name="draft-reader", daemon=True).start()
            yield from stream.outgoing()
        finally:
            self.audit.close(peer)
            stream.over()
            self._worker.lost(stream)

    def _read(self, stream: _Stream, requests: Iterator[bytes]) -> None:
        """Hand frames over until the stream ends. One that says too much waits: nothing more of it is read until its
        messages are paid for."""
        now, rate = time.monotonic, self._settings.max_messages_per_s
        allowance = Allowance(rate, max(1, int(rate)), now())
        try:
            for data in requests:
                frame = read_target_frame(data, self._caps)
                stream.untaken.acquire()
                wait_s = allowance.owe(max(len(frame), 1), now())  # now, before the worker wants the interpreter
                self._worker.heard(stream, frame)
                if wait_s:
                    stream.pause(wait_s)
        except WireError as error:
            self.audit.refuse("garbage")
            stream.send([Refused(error.code, str(error))])
        except Exception as error:  # gRPC raises bare exceptions where a stream breaks
            _log.debug("a stream ended: %s", type(error).__name__)
        finally:
            stream.end()

    def _identify(self, context: grpc.ServicerContext) -> str | None:
        """Who the peer is: its token, its certificate's name, or anybody. None: it should have said."""
        if self._tokens is not None:
            given = dict(context.invocation_metadata() or ()).get(AUTHORIZATION, "")
            return self._tokens.identify(given if isinstance(given, str) else "")
        names: Any = context.peer_identities() if self._settings.tls_client_ca is not None else None
        return "certificate-" + b",".join(sorted(names)).decode("utf-8", "replace") if names else "anybody"


class _Stream:
    """Implements `streams.Connection`."""

    def __init__(self, identity: str, context: grpc.ServicerContext, audit: Audit) -> None:
        self.identity = identity
        self._context = context
        self._audit = audit
        self.untaken = threading.Semaphore(MOST_UNTAKEN)
        self._unsent: queue.SimpleQueue[Sequence[FromService] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._is_over = threading.Event()
        self._grace = threading.Timer(LAST_WORDS_S, context.cancel)  # for a target that does not read them
        self._grace.daemon = True
        context.add_callback(self.over)

    def send(self, frame: Sequence[FromService]) -> None:
        if self._ended:
            return
        self._unsent.put(frame)
        if self._unsent.qsize() > MOST_UNSENT:
            self._audit.refuse("unread")
            self.end()
            self._context.cancel()  # gRPC's thread waits for the target to read, and would for ever

    def taken(self) -> None:
        self.untaken.release()

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the stream is over."""
        self._is_over.wait(seconds)

    def end(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, True
            if not ended:
                self._grace.start()
        self._unsent.put(None)

    def over(self) -> None:
        """Nothing more is sent."""
        self.end()
        self._grace.cancel()
        self._is_over.set()

    def outgoing(self) -> Iterator[bytes]:
        """Frames as bytes, until the stream ends; at once where no answer to a Hello comes, since none was said."""
        try:
            frame = self._unsent.get(timeout=HELLO_S)
        except queue.Empty:
            return
        while frame is not None:
            yield from in_frames(service_frame, frame)
            frame = self._unsent.get()


class _Handlers(grpc.GenericRpcHandler):
    """The one method, whose frames come and go as bytes."""

    def __init__(self, server: DraftServer) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(server.serve)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handler if handler_call_details.method == METHOD else None


_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", int(PING_S * 1e3)),
    ("grpc.keepalive_timeout_ms", int(PING_TIMEOUT_S * 1e3)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.server_handshake_timeout_ms", 10_000),
)


def check_free(settings: DraftServiceSettings) -> None:
    """Raise ConfigError where the address is not to be had, before minutes of loading."""
    host, port = host_port("listen", settings.listen)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            raise _taken(settings.listen) from None


def _taken(address: str) -> ConfigError:
    return ConfigError(f"cannot listen on {address}; choose another address with --listen")


def _credentials(settings: DraftServiceSettings) -> grpc.ServerCredentials:
    assert settings.tls_cert is not None and settings.tls_key is not None
    pair = read_file("tls_key", settings.tls_key), read_file("tls_cert", settings.tls_cert)
    if settings.tls_client_ca is None:
        return grpc.ssl_server_credentials([pair])
    authorities = read_file("tls_client_ca", settings.tls_client_ca)
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=True)


def _peer_of(context: grpc.ServicerContext) -> str:
    """The peer's address without its port."""
    return context.peer().rpartition(":")[0]
