"""Streams to a draft service over gRPC: one channel, one call and one thread for each stream.

Knows frames and nothing of what they mean. Nothing of a token, a key or a text gets into an error or a log.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

import grpc

from adaserve_jax.certificates import read_file
from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.client.link import Lost, Received
from adaserve_jax.star.messages import FromTarget, Refused
from adaserve_jax.star.wire import MAX_FRAME_BYTES, METHOD, WireError, in_frames, read_service_frame, target_frame

_log = logging.getLogger(__name__)

KEEPALIVE_S = 20.0
"""Between two pings of a stream that is open: a service whose host is gone is noticed so, when nothing is said."""
PING_ANSWER_S = 5.0
CLOSE_S = 1.0
"""What was sent before a stream is closed has so long to get there."""
MOST_UNSENT = 256
"""Frames that may wait to be sent; a service that reads none of them is as good as gone."""
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1e3)),
    ("grpc.keepalive_timeout_ms", int(PING_ANSWER_S * 1e3)),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each channel connects when it is opened, whatever became of others
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


class GrpcTransport:
    """Implements `transport.Transport`. Encrypted where the configuration names an authority; with a certificate of its
    own, and a token, where it names those. Raises ConfigError: a file cannot be read."""

    def __init__(self, address: str, config: DrafterConfig) -> None:
        self.address = address
        self._config = config
        self.metadata()
        self.channel().close()

    def open(self, received: Received, lost: Lost) -> GrpcStream:
        return GrpcStream(self, received, lost)

    def channel(self) -> grpc.Channel:
        """A new channel, which connects with its first call; the files are read anew, so that they can be replaced."""
        config = self._config
        if config.drafter_ca is None:
            return grpc.insecure_channel(self.address, _OPTIONS)
        names = ("drafter_ca", "drafter_key", "drafter_cert")
        paths = [(name, getattr(config, name)) for name in names]
        authority, key, certificate = (None if path is None else read_file(name, path) for name, path in paths)
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(self.address, credentials, _OPTIONS)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call says of who calls."""
        path = self._config.drafter_token_file
        if path is None:
            return ()
        token = read_file("drafter_token_file", path).decode("ascii", "replace").strip()
        if not token or not token.isascii() or not token.isprintable():
            raise ConfigError(f"drafter_token_file must hold one line of printable ASCII, and {path} does not")
        return (("authorization", f"Bearer {token}"),)


class GrpcStream:
    """Implements `transport.Stream`: gRPC's own thread sends what is in the queue, and a thread of the stream's own
    connects and receives."""

    def __init__(self, transport: GrpcTransport, received: Received, lost: Lost) -> None:
        self._transport = transport
        self._received = received
        self._lost = lost
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
        if self._unsent.qsize() > MOST_UNSENT:
            self._fail(f"{MOST_UNSENT} frames wait, and the service reads none")
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
        """End the stream for a reason of this side, which `lost` tells."""
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
        except Exception as error:  # a thread that ends without saying so would leave its link waiting for ever
            _log.exception("draft service %s: the stream failed", self._transport.address)
            why = type(error).__name__
        with self._lock:
            ended, self._ended = self._ended, True
            why = self._failure or why
            if self._grace is not None:
                self._grace.cancel()
        self._unsent.put(None)
        if not ended:
            self._lost(why)

    def _stream(self) -> str | None:
        """Connect, and receive until the stream ends; why it did, if that is known."""
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
                    self._received(read_service_frame(data))
            except WireError as error:
                call.cancel()
                return str(error)
            except grpc.RpcError as error:
                why = _why(error)
                if call.code() is grpc.StatusCode.UNAUTHENTICATED and not self._ended:
                    self._received([Refused("unauthenticated", why)])
                return why
        return None


def _why(error: grpc.RpcError) -> str:
    """In a line: the code, and what the other side or the network says."""
    code, details = (getattr(error, name, lambda: None)() for name in ("code", "details"))
    return f"{getattr(code, 'name', 'UNKNOWN')}: {details}"[:200]
