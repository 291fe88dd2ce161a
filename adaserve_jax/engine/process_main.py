"""The engine process: runs one engine and speaks `engine.wire` with the front end that started it.

Started by `engine.process` as `python -m adaserve_jax.engine.process_main SOCKET_DIR` with a `Start` message on its
standard input, which then stays open: its end means that the front end is gone or wants the engine to stop.
This is the only process that imports jax. Knows nothing of HTTP.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import zmq

from adaserve_jax.engine import ipc as sockets
from adaserve_jax.engine import ipc as wire
from adaserve_jax.engine.by_name import load
from adaserve_jax.engine.client import EngineClient, OutputChunk
from adaserve_jax.errors import AdaServeError, EngineDeadError

HEARTBEAT_S = 0.25
CLOSE_LIMIT_S = 10.0
T = TypeVar("T")


def read_start(pipe: int) -> wire.Start:
    """Read the one length-prefixed message that says what to run."""
    (size,) = struct.unpack("<I", _read(pipe, 4))
    return wire.decode_start(_read(pipe, size))


def _read(pipe: int, size: int) -> bytes:
    """Exactly `size` bytes. Raises EngineDeadError when the front end ended before it sent them."""
    data = b""
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            raise EngineDeadError(f"expected {size} bytes from the front end, got {len(data)}")
        data += part
    return data


class Outbox:
    """Collects what the engine's threads produce; one thread sends it, everything of one moment as one `Step`.

    The socket belongs to `_run` alone, which takes from the left what others put in on the right.
    """

    def __init__(self, socket: zmq.Socket):
        self._socket = socket
        self._woken = threading.Event()
        self._messages: deque[wire.Loading | wire.Ready | wire.Failed | wire.Refused] = deque()
        self._chunks: deque[OutputChunk] = deque()
        self._engine: EngineClient | None = None
        self._received = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def post(self, message: wire.Loading | wire.Ready | wire.Failed | wire.Refused) -> None:
        self._messages.append(message)
        self._woken.set()

    def sink(self, chunk: OutputChunk) -> None:
        """The sink of every request."""
        self._chunks.append(chunk)
        if not self._woken.is_set():  # once for a whole step
            self._woken.set()

    def count_received(self, choices: int) -> None:
        self._received += choices

    def start_steps(self, engine: EngineClient) -> None:
        """From now on send the engine's numbers with each step, and alone when nothing happens."""
        self._engine = engine

    def close(self) -> None:
        """Send what is left, then close the socket."""
        self._closing = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._woken.wait(HEARTBEAT_S)
            self._woken.clear()  # first: what is put in from here on wakes this thread again, or is seen below
            engine, closing = self._engine, self._closing
            for message in _taken(self._messages):
                self._socket.send(wire.encode(message))
            if engine is not None:
                chunks = _taken(self._chunks)
                received = self._received  # read before the engine's numbers, which then include these requests
                self._socket.send(wire.encode(wire.Step(chunks, engine.stats(), received)))
            if closing:
                self._socket.close()
                return


def _taken(items: deque[T]) -> list[T]:
    """What is there now, taken out."""
    return [items.popleft() for _ in range(len(items))]


class Inbox:
    """Takes requests from the front end until its pipe ends."""

    def __init__(self, socket: zmq.Socket):
        self._socket = socket

    def serve(self, engine: EngineClient, outbox: Outbox, stop: threading.Event) -> None:
        """Hand every message to the engine; returns once `stop` is set or the engine died."""
        while engine.is_alive() and not stop.is_set():
            if self._socket.poll(100):
                self._handle(wire.decode_to_engine(self._socket.recv()), engine, outbox)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _handle(self, message: wire.ToEngine, engine: EngineClient, outbox: Outbox) -> None:
        if isinstance(message, wire.Abort):
            engine.abort(message.request_id)
            return
        try:
            engine.submit(message.request, outbox.sink)
        except Exception as error:  # one bad request must not end the engine
            if not isinstance(error, AdaServeError):
                traceback.print_exc()
            outbox.post(wire.Refused(message.request.request_id, wire.to_fault(error)))
        outbox.count_received(message.request.sampling.n)


def stop_at_end_of(pipe: int, stop: threading.Event, folder: str, limit_s: float) -> None:
    """Set `stop` when the front end closes the pipe or dies; end this process if it does not end by itself within
    `limit_s` seconds then."""
    while os.read(pipe, 1):
        pass
    stop.set()
    time.sleep(limit_s)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(folder: str) -> int:
    """Run until standard input ends. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front end, which drains first
    pipe = sys.stdin.fileno()
    start = read_start(pipe)
    stop = threading.Event()
    limit_s = CLOSE_LIMIT_S + wire.save_limit_s(start.config)
    threading.Thread(target=stop_at_end_of, args=(pipe, stop, folder, limit_s), daemon=True).start()
    with zmq.Context() as context:
        outbox, inbox = Outbox(sockets.replies_out(context, folder)), Inbox(sockets.requests_in(context, folder))
        try:
            build: Callable[..., EngineClient] = load(start.factory)
            engine = build(start.config, lambda *part: outbox.post(wire.Loading(*part)))
            engine.start()
        except Exception as error:
            if not isinstance(error, AdaServeError):
                traceback.print_exc()
            outbox.post(wire.Failed(wire.to_fault(error)))
            outbox.close()
            inbox.close()
            return 1
        outbox.post(wire.Ready(engine.info))
        outbox.start_steps(engine)
        inbox.serve(engine, outbox, stop)
        engine.close()
        outbox.close()
        inbox.close()
    if not stop.is_set():
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: the interpreter's own end takes seconds to free every compiled program
