"""The gRPC side of a draft service: one thread per stream reads frames for the worker, another writes its answers.

Whatever comes in at the port costs its own stream at most. No text, no token id and no secret gets into a log.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any, Protocol

import grpc

from adaserve_jax.certificates import check_certificates, read_file
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.messages import FromService, Refused
from adaserve_jax.star.service.limits import Allowance
from adaserve_jax.star.service.worker import Connection, Frame
from adaserve_jax.star.settings import DraftServiceSettings, host_port
from adaserve_jax.star.wire import (
    MAX_FRAME_BYTES,
    METHOD,
    Caps,
    WireError,
    in_frames,
    read_target_frame,
    service_frame,
)

# Who may speak to a draft service, how much, and what was refused. Tokens are read from a file and kept as
# digests.
#
# Knows no gRPC. Nothing here is ever logged: neither tokens nor what targets say.

AUTHORIZATION = "authorization"
"""Name of the metadata that carries "Bearer TOKEN"."""
_SCHEME = "bearer "
MIN_TOKEN = 16
"""Characters; shorter ones can be guessed."""


class Tokens:
    """The tokens that are accepted, by their digests."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    @staticmethod
    def from_file(path: str) -> Tokens:
        """One token a line; empty lines and those that begin with # are left out. Raises ConfigError, which tells no
        token."""
        try:
            text = read_file("token_file", path).decode("ascii")
        except UnicodeDecodeError:
            raise ConfigError(f"token_file must hold tokens of ASCII characters, got others in {path}") from None
        tokens = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if not tokens:
            raise ConfigError(f"token_file must hold at least one token, got none in {path}")
        if any(len(token) < MIN_TOKEN or len(token.split()) > 1 for token in tokens):
            raise ConfigError(
                f"token_file must hold one token of at least {MIN_TOKEN} characters in each line, got another line in "
                f"{path}; make one with: openssl rand -hex 32"
            )
        return Tokens(tokens)

    def identify(self, authorization: str) -> str | None:
        """A name for whose token it is, the same in every run with that file; None: nobody's. All are compared, each in
        constant time."""
        found = None
        given = _digest(authorization[len(_SCHEME) :].strip())
        for number, digest in enumerate(self._digests, 1):
            if hmac.compare_digest(digest, given):
                found = number
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        return f"token-{found}" if found is not None and is_bearer else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def check_secured(settings: DraftServiceSettings) -> None:
    """Raise ConfigError where others than this machine could use the draft, or files of certificates are wrong."""
    host, _ = host_port("listen", settings.listen)
    guarded = settings.token_file is not None or settings.tls_client_ca is not None or settings.insecure
    if not guarded and not is_loopback(host):
        raise ConfigError(
            f"listen must be on loopback without a token and without client certificates, got {settings.listen!r}: "
            "whoever reaches the port could use the draft; give token_file or tls_client_ca, or insecure where the "
            "network is closed"
        )
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it: every address that the name stands for is loopback's. Raises ConfigError:
    there is no such host."""
    try:
        return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError) as error:
        raise ConfigError(f"there is no host {host!r} to listen on; give one of this machine's addresses") from error


class Audit:
    """Counts streams, and what was refused, by why. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self.opened = 0

    def refuse(self, why: str) -> None:
        """One stream was refused or ended for what it did."""
        with self._lock:
            self._refused[why] += 1

    def refused(self) -> dict[str, int]:
        """Streams by why they were refused or ended."""
        with self._lock:
            return dict(self._refused)

    def open(self, peer: str, most: int, most_per_peer: int) -> str:
        """A stream of this peer begins: "", or why it may not."""
        with self._lock:
            if self._streams.total() >= most:
                return f"{most} targets are connected, as many as may be"
            if self._streams[peer] >= most_per_peer:
                return f"{most_per_peer} connections of this peer are open, as many as one may have"
            self._streams[peer] += 1
            self.opened += 1
            return ""

    def close(self, peer: str) -> None:
        """A stream that `open` let in has ended."""
        with self._lock:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    @property
    def streams(self) -> int:
        """Open now."""
        with self._lock:
            return self._streams.total()


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
