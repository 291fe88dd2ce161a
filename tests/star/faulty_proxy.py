"""What stands between a target and a draft service in tests, and does to their messages and bytes what networks do.

`FrameProxy` speaks gRPC to both and knows messages: it loses, doubles, swaps, delays and spoils them by a plan
drawn from a seed. `ByteProxy` knows nothing of what it passes on: it cuts connections and adds junk.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from adaserve_jax.star import draft_pb2 as pb
from adaserve_jax.star.wire import METHOD

Address = tuple[str, int]


@dataclass(frozen=True)
class Faults:
    """What becomes of messages, each a share of them: lost; doubled; late: overtaken by the frame after it. Of frames:
    delayed for `spike_s`, with all that follow; garbled: some bits of them turned; cut: the stream ends there. Nothing
    of this becomes of Hello and Welcome, without which nothing would be left to try. rewrite: changes every message, a
    `pb.FromTarget` or `pb.FromService`, on its way."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    delayed: float = 0.0
    spike_s: float = 0.2
    garbled: float = 0.0
    cut: float = 0.0
    rewrite: Callable[[Any], None] | None = None


NO_FAULTS = Faults()
GREETINGS = frozenset({"hello", "welcome"})


class Way:
    """One direction of one stream. Frames in, frames out: the same plan for the same seed and the same frames."""

    def __init__(self, proxy: FrameProxy, frame: type[Any], up: bool, seed: int) -> None:
        self._proxy = proxy
        self._frame = frame
        self._up = up
        self._draw = random.Random(seed)
        self._held: list[Any] = []

    def passes(self, data: bytes) -> Iterator[bytes]:
        """What becomes of one frame. Raises ConnectionError where the stream is cut."""
        proxy, draw = self._proxy, self._draw
        faults = proxy.up if self._up else proxy.down
        held, self._held = self._held, []
        frame, sent = self._frame.FromString(data), self._frame()
        greets = False
        for message in frame.messages:
            kind = message.WhichOneof("kind")
            greets |= kind in GREETINGS
            proxy.saw(kind)
            self._pass(message, sent, faults)
        sent.messages.extend(held)
        if not sent.messages:
            return
        if greets:
            yield sent.SerializeToString()
            return
        if self._happens(faults.delayed, "delayed"):
            time.sleep(faults.spike_s)
        if self._happens(faults.cut, "cut"):
            raise ConnectionError("cut")
        said = bytearray(sent.SerializeToString())
        if self._happens(faults.garbled, "garbled"):
            for _ in range(8):
                said[draw.randrange(len(said))] ^= 1 << draw.randrange(8)
        yield bytes(said)

    def _pass(self, message: Any, sent: Any, faults: Faults) -> None:
        if faults.rewrite is not None:
            faults.rewrite(message)
        if message.WhichOneof("kind") in GREETINGS:
            sent.messages.append(message)
        elif self._happens(faults.lost, "lost"):
            return
        elif self._happens(faults.late, "late"):
            self._held.append(message)
        else:
            sent.messages.append(message)
            if self._happens(faults.doubled, "doubled"):
                sent.messages.append(message)

    def _happens(self, share: float, what: str) -> bool:
        happens = self._draw.random() < share
        if happens:
            self._proxy.happened(what)
        return happens


class FrameProxy:
    """Listens on loopback and passes streams on to `upstream`. up, down: what happens to what targets and the service
    say, from now on. counts: what happened, by name of the fault; seen: messages that came, by kind. on_message: called
    with the kind of each, in a thread of the stream."""

    def __init__(self, upstream: Address, seed: int = 0) -> None:
        self.upstream = upstream
        self.up = self.down = NO_FAULTS
        self.counts: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.on_message: Callable[[str], None] = lambda kind: None
        self._lock = threading.Lock()
        self._seed = seed
        self._streams = 0
        self._server = grpc.server(ThreadPoolExecutor(16, "proxy"), handlers=[_Handlers(self)])
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> Address:
        return ("127.0.0.1", self.port)

    def saw(self, kind: str) -> None:
        with self._lock:
            self.seen[kind] += 1
        self.on_message(kind)

    def happened(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def close(self) -> None:
        self._server.stop(0.0).wait()

    def serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream, until one side ends it."""
        with self._lock:
            self._streams += 1
            seed = self._seed + 2 * self._streams
        up, down = Way(self, pb.TargetFrame, True, seed), Way(self, pb.ServiceFrame, False, seed + 1)
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with grpc.insecure_channel("{}:{}".format(*self.upstream), [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.stream_stream(METHOD)(iter(outgoing.get, None))

            def end() -> None:
                outgoing.put(None)
                call.cancel()

            def forward() -> None:
                # gRPC raises bare exceptions where a stream ends; a cut is one too
                with contextlib.suppress(Exception):
                    for data in requests:
                        for said in up.passes(data):
                            outgoing.put(said)
                end()

            context.add_callback(end)
            threading.Thread(target=forward, name="proxy-up", daemon=True).start()
            try:
                for data in call:
                    yield from down.passes(data)
            except (grpc.RpcError, ConnectionError) as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, f"behind the proxy: {type(error).__name__}")
            finally:
                end()


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, proxy: FrameProxy) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(proxy.serve)

    def service(self, handler_call_details: Any) -> Any:
        return self._handler if handler_call_details.method == METHOD else None


class ByteProxy:
    """Passes TCP connections on to `upstream`."""

    def __init__(self, upstream: Address) -> None:
        self.upstream = upstream
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, name="proxy-accept", daemon=True).start()

    @property
    def address(self) -> Address:
        return self._listening.getsockname()[:2]

    def cut(self) -> None:
        """End all connections that stand, without a word: their peers get a reset."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for side in pair:
                _end(side)

    def junk(self, data: bytes) -> None:
        """Say this in the middle of every connection, to both of its sides."""
        with self._lock:
            for pair in self._pairs:
                for side in pair:
                    with contextlib.suppress(OSError):
                        side.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.upstream, timeout=60.0)
            except OSError:
                _end(near)
                continue
            far.settimeout(None)
            for side in (near, far):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((near, far))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(one, other), name="proxy-pump", daemon=True).start()


def _pump(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    _end(one)
    _end(other)


def _end(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)
    side.close()
