"""Streams to a draft service over gRPC, each with its own channel, call and thread.

Errors and logs never contain a token, a key or a text.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

import grpc

from adaserve_jax.certificates import check_client_certificates, read_file
from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.client.link import OnFrame, OnLost
from adaserve_jax.star.messages import FromTarget, Refused
from adaserve_jax.star.wire import MAX_FRAME_BYTES, METHOD, WireError, in_frames, read_service_frame, target_frame

_log = logging.getLogger(__name__)

KEEPALIVE_S = 20.0
"""Time between two pings of an open stream, which detect a lost host while nothing is sent."""
PING_ANSWER_S = 5.0
CLOSE_S = 1.0
"""Time that frames sent before `close` have to arrive."""
MAX_UNSENT_FRAMES = 256
"""Frames that may wait to be sent; a service that reads none of them counts as lost."""
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1e3)),
    ("grpc.keepalive_timeout_ms", int(PING_ANSWER_S * 1e3)),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each channel connects on its own, whatever became of others
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


class GrpcTransport:
    """Implements `link.Transport` with TLS, a client certificate and a token as far as the configuration names them.

    Raises ConfigError when a file cannot be read, or is no certificate or key.
    """

    def __init__(self, address: str, config: DrafterConfig) -> None:
        self.address = address
        self._config = config
        self.metadata()
        if config.drafter_ca is not None:
            check_client_certificates(config.drafter_ca, config.drafter_cert, config.drafter_key)

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> GrpcStream:
        return GrpcStream(self, on_frame, on_lost)

    def channel(self) -> grpc.Channel:
        """Return a new channel, which connects with its first call. Files are read anew, so they can be replaced."""
        config = self._config
        if config.drafter_ca is None:
            return grpc.insecure_channel(self.address, _OPTIONS)
        names = ("drafter_ca", "drafter_key", "drafter_cert")
        paths = [(name, getattr(config, name)) for name in names]
        authority, key, certificate = (None if path is None else read_file(name, path) for name, path in paths)
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(self.address, credentials, _OPTIONS)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the call metadata: the bearer token, if there is one."""
        path = self._config.drafter_token_file
        if path is None:
            return ()
        token = read_file("drafter_token_file", path).decode("ascii", "replace").strip()
        if not token or not token.isascii() or not token.isprintable():
            raise ConfigError(f"drafter_token_file must hold one line of printable ASCII, and {path} does not")
        return (("authorization", f"Bearer {token}"),)


class GrpcStream:
    """Implements `link.Stream`: gRPC's own thread sends the queued frames, a thread of this class connects and
    receives."""

    def __init__(self, transport: GrpcTransport, on_frame: OnFrame, on_lost: OnLost) -> None:
        self._transport = transport
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._call: Any = None
        self._ended = False
        self._failure = ""
        self._grace: threading.Timer | None = None
        threading.Thread(target=self._run, name=f"drafter {transport.address}", daemon=True).start()

    def send(self, frame: Sequence[FromTarget]) -> None:
        try:
            parts = in_frames(target_frame, frame)
        except Exception as error:
            self._fail(f"a frame could not be written: {type(error).__name__}")
            return
        if self._unsent.qsize() > MAX_UNSENT_FRAMES:
            self._fail(f"{MAX_UNSENT_FRAMES} frames wait, and the service reads none")
            return
        for part in parts:
            self._unsent.put(part)

    def close(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._unsent.put(None)
            if self._call is not None:
                self._grace = threading.Timer(CLOSE_S, self._call.cancel)
                self._grace.daemon = True
                self._grace.start()

    def _fail(self, why: str) -> None:
        """End the stream for a reason on this side; `on_lost` reports it."""
        with self._lock:
            self._failure = self._failure or why
            call = self._call
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        why = "the service ended the stream"
        try:
            why = self._stream() or why
        except ConfigError as error:
            why = str(error)
        except Exception as error:  # otherwise the link would wait for ever
            _log.exception("draft service %s: the stream failed", self._transport.address)
            why = type(error).__name__
        with self._lock:
            ended, self._ended = self._ended, True
            why = self._failure or why
            if self._grace is not None:
                self._grace.cancel()
        self._unsent.put(None)
        if not ended:
            self._on_lost(why)

    def _stream(self) -> str | None:
        """Connect and receive until the stream ends; return the reason, if it is known."""
        with self._transport.channel() as channel:
            serve = channel.stream_stream(METHOD)
            call = serve(iter(self._unsent.get, None), metadata=self._transport.metadata())
            with self._lock:
                if self._failure or self._ended:
                    call.cancel()
                self._call = call
            try:
                for data in call:
                    if self._ended:
                        continue
                    self._on_frame(read_service_frame(data))
            except WireError as error:
                call.cancel()
                return str(error)
            except grpc.RpcError as error:
                why = _why(error)
                if call.code() is grpc.StatusCode.UNAUTHENTICATED and not self._ended:
                    self._on_frame([Refused("unauthenticated", why)])
                return why
        return None


def _why(error: grpc.RpcError) -> str:
    """Return the status code and the details in one line."""
    code, details = (getattr(error, name, lambda: None)() for name in ("code", "details"))
    return f"{getattr(code, 'name', 'UNKNOWN')}: {details}"[:200]
