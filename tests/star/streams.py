"""What speaks to a draft service over a real socket in tests, and a service whose device is a toy."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from adaserve_jax.star.messages import FromTarget, Load
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.limits import DraftLimits, Quotas
from adaserve_jax.star.service.server import DraftServer
from adaserve_jax.star.service.worker import Worker
from adaserve_jax.star.settings import DraftServiceSettings
from adaserve_jax.star.wire import METHOD, Caps, read_service_frame, target_frame
from tests.star.toys import VOCABULARY, ToyDevice, ToyPages, hello, limits

HANG_S = 60.0
"""Nothing takes so long, unless it hangs."""
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0)]
"""A target that does not read holds up what it is sent after some 64 KiB, instead of after megabytes."""


def until(holds: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    patience_s = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < patience_s, "it hangs"
        time.sleep(0.001)


class Target:
    """One stream. Frames are messages, or bytes as they are."""

    def __init__(self, port: int, token: str | None = None, credentials: grpc.ChannelCredentials | None = None) -> None:
        address = f"127.0.0.1:{port}"
        self._channel = (
            grpc.insecure_channel(address, SMALL_WINDOW)
            if credentials is None
            else grpc.secure_channel(address, credentials, SMALL_WINDOW)
        )
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = None if token is None else [("authorization", f"Bearer {token}")]
        call = self._channel.stream_stream(METHOD)
        self.call: Any = call(iter(self._outgoing.get, None), timeout=HANG_S, metadata=metadata)
        self._read: list[Any] = []

    def send(self, *frame: FromTarget | bytes) -> None:
        if len(frame) == 1 and isinstance(frame[0], bytes):
            self._outgoing.put(frame[0])
        else:
            self._outgoing.put(target_frame(frame))  # type: ignore[arg-type]

    def receive(self) -> Any:
        """The next message that is no Load. Raises StopIteration or grpc.RpcError at the end of the stream."""
        while True:
            while not self._read:
                self._read = list(read_service_frame(next(self.call)))
            message = self._read.pop(0)
            if not isinstance(message, Load):
                return message

    def rest(self) -> list[Any]:
        """What comes until the stream ends, Loads included."""
        read, self._read = self._read, []
        try:
            for data in self.call:
                read += read_service_frame(data)
        except grpc.RpcError:
            pass
        return read

    def close(self) -> None:
        self._outgoing.put(None)
        self.call.cancel()
        self._channel.close()


@dataclass
class Service:
    """A running one. dead: whether its worker said that it is."""

    server: DraftServer
    worker: Worker
    core: DraftCore
    device: Any
    pages: ToyPages
    dead: list[bool]

    @property
    def port(self) -> int:
        return self.server.port

    @contextmanager
    def target(self, name: str | None = "a", **how: Any) -> Iterator[Target]:
        """A stream; with a name, one that has been welcomed."""
        target = Target(self.port, **how)
        try:
            if name is not None:
                target.send(hello(name))
                welcome = target.receive()
                assert type(welcome).__name__ == "Welcome", welcome
            yield target
        finally:
            target.close()


@contextmanager
def toy_service(
    quotas: Quotas | None = None, device: Callable[[ToyPages, DraftLimits], Any] = ToyDevice, **changes: Any
) -> Iterator[Service]:
    """changes: of the settings."""
    bounds, pages, dead = limits(), ToyPages(), []
    runs = device(pages, bounds)
    core = DraftCore(bounds, pages, quotas=quotas)
    worker = Worker(core, runs, on_death=lambda: dead.append(True))
    settings = DraftServiceSettings(**({"listen": "127.0.0.1:0", "http": ""} | changes))
    server = DraftServer(settings, worker, Caps(1024, VOCABULARY))
    worker.start()
    server.start()
    try:
        yield Service(server, worker, core, runs, pages, dead)
    finally:
        ended = server.stop(0.0)
        assert worker.stop(HANG_S)
        assert ended.wait(HANG_S)


def health(port: int, method: str = "Check", service: str = "") -> Any:
    """Return what the standard health protocol says: the status, or the error's code."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        kind = channel.unary_stream if method == "Watch" else channel.unary_unary
        call = kind(
            f"/grpc.health.v1.Health/{method}", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        try:
            answer = call(HealthCheckRequest(service=service), timeout=HANG_S)
            return next(answer).status if method == "Watch" else answer.status
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]
