"""The gRPC server of a draft service: authentication, streams, and the standard health protocol.

Each stream has a thread that reads frames for the worker, and one of gRPC's that writes its answers. Bad input costs
its own stream at most. Texts, token ids and secrets are never logged.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import quote

import grpc
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from adaserve_jax.certificates import check_certificates, read_file
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.messages import FromService, Refused
from adaserve_jax.star.service.limits import RateLimiter
from adaserve_jax.star.service.worker import Connection, Frame
from adaserve_jax.star.settings import DraftServiceSettings, host_port
from adaserve_jax.star.wire import (
    MAX_FRAME_BYTES,
    METHOD,
    SERVICE,
    Caps,
    WireError,
    in_frames,
    read_target_frame,
    service_frame,
)

AUTHORIZATION = "authorization"
"""Metadata key of "Bearer TOKEN"."""
_SCHEME = "bearer "
MIN_TOKEN = 16
"""Fewest characters of a token; shorter ones can be guessed."""
MAX_QUEUED_FRAMES = 64
"""Frames of one stream that may wait for the worker; above it the stream is not read."""
MAX_UNSENT_FRAMES = 1024
"""Frames that may wait to be sent to one target; a target that reads none of them is cut off."""
PING_S, PING_TIMEOUT_S = 20.0, 10.0
"""Interval of pings on a silent connection, and the longest wait for the answer."""
HELLO_TIMEOUT_S = 30.0
"""Longest time from the start of a stream to the answer to its Hello."""
DRAIN_S = 5.0
"""Time that a target has to read the last messages of its stream."""
HEALTH_CALLS, HEALTH_CALLS_OF_ONE, HEALTH_TIMEOUT_S = 4, 2, 5.0
"""Health checks at once, those of one address, and the longest time of one: they need no token, so they must not use up
the threads, and no address may keep the others from theirs."""
EXTRA_THREADS = 8
"""Threads beyond one per stream: for health checks, and to refuse further streams."""
BYTES_PER_MESSAGE = 1024
"""A frame counts as one message at least for so many of its bytes, since long texts are work too."""
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
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
_log = logging.getLogger(__name__)


class BearerTokens:
    """Accepted tokens, kept as digests.

    They are read from a file, one per line; empty lines and lines beginning with # are skipped. Raises ConfigError for
    a line that is not a token, without its text.
    """

    def __init__(self, path: str) -> None:
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
        self._digests = [_digest(token) for token in tokens]

    def identify(self, authorization: str) -> str | None:
        """Return a name for the token, the same in every run with that file; None if it is not accepted.

        The token is compared with all others, each in constant time.
        """
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
    """Raise ConfigError if other machines could use the draft unchecked, or a file of tokens or certificates is bad."""
    host, _ = host_port("listen", settings.listen)
    guarded = settings.token_file is not None or settings.tls_client_ca is not None or settings.insecure
    if not guarded and not is_loopback(host):
        raise ConfigError(
            f"listen must be on loopback without a token and without client certificates, got {settings.listen!r}: "
            "whoever reaches the port could use the draft; give token_file or tls_client_ca, or insecure where the "
            "network is closed"
        )
    if settings.token_file is not None:
        BearerTokens(settings.token_file)
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def is_loopback(host: str) -> bool:
    """Return whether every address of the host is a loopback address. Raises ConfigError when there is no such host."""
    try:
        return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError) as error:
        raise ConfigError(f"there is no host {host!r} to listen on; give one of this machine's addresses") from error


class Audit:
    """Thread-safe count of open streams and of refused ones, by reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self.opened = 0

    def refuse(self, why: str) -> None:
        """Count a stream that was refused, or ended for its behaviour."""
        with self._lock:
            self._refused[why] += 1

    def refused(self) -> dict[str, int]:
        """Return the number of refused or ended streams by reason."""
        with self._lock:
            return dict(self._refused)

    def open(self, peer: str, most: int, most_per_peer: int) -> str:
        """Count a new stream of this peer and return "", or return why it is refused."""
        with self._lock:
            if self._streams.total() >= most:
                return f"{most} targets are connected, as many as may be"
            if self._streams[peer] >= most_per_peer:
                return f"{most_per_peer} connections of this peer are open, as many as one may have"
            self._streams[peer] += 1
            self.opened += 1
            return ""

    def close(self, peer: str) -> None:
        """Count the end of a stream that `open` accepted."""
        with self._lock:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    @property
    def streams(self) -> int:
        """Number of open streams."""
        with self._lock:
            return self._streams.total()


class FrameReceiver(Protocol):
    """Receives the frames of streams; `service.worker.Worker` implements it."""

    def receive(self, stream: Connection, frame: Frame) -> None: ...
    def disconnect(self, stream: Connection) -> None: ...


class DraftServer:
    """Listens for targets. Health checks answer SERVING from `start` until `shut`.

    Raises ConfigError when the address is in use, or would need authentication.
    """

    def __init__(
        self, settings: DraftServiceSettings, worker: FrameReceiver, caps: Caps, audit: Audit | None = None
    ) -> None:
        check_secured(settings)
        self.audit = audit or Audit()
        self._settings = settings
        self._worker = worker
        self._caps = caps
        self._is_shut = False
        self._health = HealthServicer()
        for name in ("", SERVICE):
            self._health.set(name, HealthCheckResponse.SERVING)
        self._checking: Counter[str] = Counter()
        """Health checks that are running, by address."""
        self._checking_lock = threading.Lock()
        self._tokens = None if settings.token_file is None else BearerTokens(settings.token_file)
        most = settings.max_targets + EXTRA_THREADS
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
            raise _unavailable(settings.listen)
        return bound

    def start(self) -> None:
        self._server.start()

    def shut(self) -> None:
        """Accept no more streams, and report NOT_SERVING; open streams go on."""
        self._is_shut = True
        self._health.enter_graceful_shutdown()

    def stop(self, grace_s: float) -> threading.Event:
        """Accept no more streams, and end open ones after `grace_s`; return at once an event of their end."""
        return self._server.stop(grace_s)

    def check_health(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """Answer one health check. The handler of the health protocol's Check."""
        address = _address_of(context)
        with self._checking_lock:
            if self._checking[address] >= HEALTH_CALLS_OF_ONE or self._checking.total() >= HEALTH_CALLS:
                why = f"{HEALTH_CALLS} health checks are running, or {HEALTH_CALLS_OF_ONE} of this address"
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            self._checking[address] += 1
        timer = threading.Timer(HEALTH_TIMEOUT_S, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            request: Any = next(requests, None) or HealthCheckRequest()
            return self._health.Check(request, context)
        finally:
            timer.cancel()
            with self._checking_lock:
                self._checking[address] -= 1
                self._checking += Counter()  # drops addresses without any

    # ---- streams ----

    def serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve one stream: frames in, frames out. The handler of METHOD."""
        if self._is_shut:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the draft service is shutting down")
        peer = _address_of(context)
        identity = self._identify(context)
        if identity is None:
            self.audit.refuse("unauthenticated")
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "this draft service asks for a token of its --token-file; see the target's --drafter-token-file",
            )
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
            stream.mark_over()

    def _read(self, stream: _Stream, requests: Iterator[bytes]) -> None:
        """Pass frames to the worker until the stream ends. A stream above its rate is not read until it is below."""
        now, rate = time.monotonic, self._settings.max_messages_per_s
        limiter = RateLimiter(rate, max(1, int(rate)), now())
        try:
            for data in requests:
                frame = read_target_frame(data, self._caps)
                stream.queue_slots.acquire()
                owed = max(len(frame), len(data) // BYTES_PER_MESSAGE, 1)
                wait_s = limiter.owe(owed, now())  # before the worker needs the interpreter
                self._worker.receive(stream, frame)
                if wait_s:
                    stream.pause(wait_s)
        except WireError as error:
            self.audit.refuse("garbage")
            stream.send([Refused(error.code, str(error))])
        except Exception as error:  # gRPC raises bare exceptions where a stream breaks
            _log.debug("a stream ended: %s", type(error).__name__)
        finally:
            stream.end()
            self._worker.disconnect(stream)  # here, since a frame that was read before the end may come until now

    def _identify(self, context: grpc.ServicerContext) -> str | None:
        """Return the peer's identity by token or certificate, "anybody" if none is needed, None if it is unknown.

        Names of a certificate are quoted: they may have slashes, which end an identity, and commas.
        """
        if self._tokens is not None:
            given = dict(context.invocation_metadata() or ()).get(AUTHORIZATION, "")
            return self._tokens.identify(given if isinstance(given, str) else "")
        names: Any = context.peer_identities() if self._settings.tls_client_ca is not None else None
        return "certificate-" + ",".join(quote(name, safe="") for name in sorted(names)) if names else "anybody"


def _address_of(context: grpc.ServicerContext) -> str:
    """Return the peer's address without the port."""
    return context.peer().rpartition(":")[0]


class _Stream:
    """Implements `worker.Connection`."""

    def __init__(self, identity: str, context: grpc.ServicerContext, audit: Audit) -> None:
        self.identity = identity
        self._context = context
        self._audit = audit
        self.queue_slots = threading.Semaphore(MAX_QUEUED_FRAMES)
        self._unsent: queue.SimpleQueue[Sequence[FromService] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._is_over = threading.Event()
        self._grace = threading.Timer(DRAIN_S, context.cancel)  # for a target that does not read the end
        self._grace.daemon = True
        context.add_callback(self.mark_over)

    @property
    def has_ended(self) -> bool:
        return self._ended

    def send(self, frame: Sequence[FromService]) -> None:
        if self._ended:
            return
        self._unsent.put(frame)
        if self._unsent.qsize() > MAX_UNSENT_FRAMES:
            self._audit.refuse("unread")
            self.end()
            self._context.cancel()  # otherwise gRPC's thread would wait for ever for the target to read

    def frame_taken(self) -> None:
        self.queue_slots.release()

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end of the stream."""
        self._is_over.wait(seconds)

    def end(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, True
            if not ended:
                self._grace.start()
        self._unsent.put(None)

    def mark_over(self) -> None:
        """Note that the call has ended; nothing more is sent."""
        self.end()
        self._grace.cancel()
        self._is_over.set()

    def outgoing(self) -> Iterator[bytes]:
        """Yield frames as bytes until the stream ends, or end without any if the first does not come in time."""
        try:
            frame = self._unsent.get(timeout=HELLO_TIMEOUT_S)
        except queue.Empty:
            return
        while frame is not None:
            yield from in_frames(service_frame, frame)
            frame = self._unsent.get()


class _Handlers(grpc.GenericRpcHandler):
    """The draft service's method, whose frames are bytes, and the health protocol's Check.

    Health's Watch is not served: anybody could hold a thread with it for ever. Check is registered as a streaming
    method so that its time limit covers the wait for the request.
    """

    def __init__(self, server: DraftServer) -> None:
        self._methods = {
            METHOD: grpc.stream_stream_rpc_method_handler(server.serve),
            _HEALTH_METHOD: grpc.stream_unary_rpc_method_handler(
                server.check_health, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
            ),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._methods.get(handler_call_details.method)


def check_free(settings: DraftServiceSettings) -> None:
    """Raise ConfigError if the address is in use, before minutes of loading."""
    host, port = host_port("listen", settings.listen)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            raise _unavailable(settings.listen) from None


def _unavailable(address: str) -> ConfigError:
    return ConfigError(f"cannot listen on {address}; choose another address with --listen")


def _credentials(settings: DraftServiceSettings) -> grpc.ServerCredentials:
    assert settings.tls_cert is not None and settings.tls_key is not None
    pair = read_file("tls_key", settings.tls_key), read_file("tls_cert", settings.tls_cert)
    if settings.tls_client_ca is None:
        return grpc.ssl_server_credentials([pair])
    authorities = read_file("tls_client_ca", settings.tls_client_ca)
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=True)
