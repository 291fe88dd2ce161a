"""Main program of the engine process: it runs one engine and exchanges `engine.ipc` messages with the front end.

`ProcessEngine` starts it as `python -m adaserve_jax.engine.process_main SOCKET_FOLDER` with a `Start` message on its
standard input, which then stays open: it ends when the front end is gone or wants the engine to stop. Of the two
processes only this one imports jax.
"""

from __future__ import annotations

import importlib
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
from contextlib import closing
from typing import TypeVar

import zmq

from adaserve_jax.engine import ipc
from adaserve_jax.engine.client import EngineClient, OutputChunk
from adaserve_jax.errors import AdaServeError, ConfigError, EngineDeadError
from adaserve_jax.logs import log_to_stderr

HEARTBEAT_S = 0.25
LAST_MESSAGES_MS = 1000
"""Time that the last messages have to leave the closed socket."""
CLOSE_LIMIT_S = 10.0
"""Time to end by itself once the front end is gone."""
T = TypeVar("T")
Notice = ipc.Loading | ipc.Ready | ipc.Failed | ipc.Refused | ipc.AdapterReply


def read_start(pipe: int) -> ipc.Start:
    """Read the length-prefixed `Start` message."""
    (size,) = struct.unpack("<I", _read(pipe, 4))
    return ipc.decode_start(_read(pipe, size))


def _read(pipe: int, size: int) -> bytes:
    """Read exactly `size` bytes. Raises EngineDeadError if the pipe ends before."""
    data = b""
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            raise EngineDeadError(f"expected {size} bytes from the front end, got {len(data)}")
        data += part
    return data


class Outbox:
    """Sends what the engine's threads produce; all chunks of one moment go out as one `Step`.

    Only the thread of `_run` touches the socket. Other threads append to deques, whose ends are safe without a lock.
    """

    def __init__(self, socket: zmq.Socket):
        self._socket = socket
        self._woken = threading.Event()
        self._messages: deque[Notice] = deque()
        self._chunks: deque[OutputChunk] = deque()
        self.engine: EngineClient | None = None
        """Once set, its statistics are sent with each step and as a heartbeat."""
        self.received = 0
        """Choices that the engine has received."""
        self._closing = False
        self._replying = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def post(self, message: Notice) -> None:
        self._messages.append(message)
        self._woken.set()

    def post_adapters(self, call: int, engine: EngineClient, fault: ipc.Fault | None) -> None:
        """Post the reply to a call that changed adapters. The last reply has the adapters as they are."""
        with self._replying:
            self.post(ipc.AdapterReply(call, engine.info.adapters, fault))

    def sink(self, chunk: OutputChunk) -> None:
        """Take a chunk; the engine calls this as the sink of every request."""
        self._chunks.append(chunk)
        if not self._woken.is_set():  # once for a whole step
            self._woken.set()

    def close(self) -> None:
        """Send what is left, then close the socket."""
        self._closing = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._woken.wait(HEARTBEAT_S)
            self._woken.clear()  # before taking, so that anything appended later wakes this thread again
            engine, closing = self.engine, self._closing
            for message in _taken(self._messages):
                self._socket.send(ipc.encode(message))
            if engine is not None:
                chunks = _taken(self._chunks)
                received = self.received  # read before the statistics, so that they include these requests
                self._socket.send(ipc.encode(ipc.Step(chunks, engine.stats(), received)))
            if closing:
                self._socket.close()
                return


def _taken(items: deque[T]) -> list[T]:
    """Remove and return the items that are there now."""
    return [items.popleft() for _ in range(len(items))]


def serve(requests: zmq.Socket, engine: EngineClient, outbox: Outbox, stop: threading.Event) -> None:
    """Hand every message to the engine until `stop` is set or the engine died."""
    while engine.is_alive() and not stop.is_set():
        if not requests.poll(100):
            continue
        match ipc.decode_to_engine(requests.recv()):
            case ipc.Abort(request_id):
                engine.abort(request_id)
            case ipc.LoadAdapter() | ipc.UnloadAdapter() as call:  # reads from the disk, so that requests must not wait
                threading.Thread(target=change_adapters, args=(call, engine, outbox), daemon=True).start()
            case ipc.Submit(request):
                try:
                    engine.submit(request, outbox.sink)
                except Exception as error:  # one bad request must not end the engine
                    outbox.post(ipc.Refused(request.request_id, describe(error)))
                outbox.received += request.sampling.n


def change_adapters(call: ipc.LoadAdapter | ipc.UnloadAdapter, engine: EngineClient, outbox: Outbox) -> None:
    """Make the call and post its reply."""
    fault = None
    try:
        if isinstance(call, ipc.LoadAdapter):
            engine.load_adapter(call.name, call.folder, replace=call.replace)
        else:
            engine.unload_adapter(call.name)
    except Exception as error:
        fault = describe(error)
    outbox.post_adapters(call.call, engine, fault)


def describe(error: Exception) -> ipc.Fault:
    """Describe an exception to the front end; print where it was raised unless it is for users."""
    if not isinstance(error, AdaServeError):
        traceback.print_exception(error)
    return ipc.to_fault(error)


def stop_at_end_of(pipe: int, stop: threading.Event, folder: str, limit_s: float) -> None:
    """Wait until the front end closes the pipe or dies, then set `stop`; after `limit_s` more seconds, kill this
    process."""
    while os.read(pipe, 1):
        pass
    stop.set()
    time.sleep(limit_s)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def find_factory(path: str | None) -> Callable[..., EngineClient]:
    """Import the callable that makes the engine; without a "module:callable" path, `LocalEngine`, which imports jax."""
    if path is None:
        from adaserve_jax.engine.thread_engine import LocalEngine

        return LocalEngine
    module, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"an engine's factory must be 'module:callable', got {path!r}")
    return getattr(importlib.import_module(module), name)


def main(folder: str) -> int:
    """Run the engine until standard input ends; return the exit status."""
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front end, which drains first
    pipe = sys.stdin.fileno()
    start = read_start(pipe)
    stop = threading.Event()
    limit_s = CLOSE_LIMIT_S + ipc.save_limit_s(start.config)
    threading.Thread(target=stop_at_end_of, args=(pipe, stop, folder, limit_s), daemon=True).start()
    with (
        zmq.Context() as context,
        ipc.receiver(context, folder, ipc.TO_ENGINE) as requests,
        closing(Outbox(ipc.sender(context, folder, ipc.FROM_ENGINE, LAST_MESSAGES_MS))) as outbox,
    ):
        try:
            make = find_factory(start.factory)
            warm = {} if start.factory else {"warm_folder": start.warm_folder}
            engine = make(start.config, lambda *part: outbox.post(ipc.Loading(*part)), **warm)
            engine.start()
        except Exception as error:
            outbox.post(ipc.Failed(describe(error)))
            return 1
        outbox.post(ipc.Ready(engine.info))
        outbox.engine = engine
        serve(requests, engine, outbox, stop)
        if not stop.is_set():  # without an open request nothing else would say so, while closing may take long
            outbox.post(ipc.Refused("", ipc.to_fault(EngineDeadError(ipc.DIED))))
        engine.close()
    if not stop.is_set():
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the interpreter's own exit takes seconds to free every compiled program
