"""ProcessEngine: the engine in a process of its own, behind the same `EngineClient` protocol as the thread mode.

The front end stays responsive while JAX compiles or a step runs, and survives the engine's death. Two ZeroMQ sockets
in a fresh 0700 directory carry `engine.wire` messages. Knows nothing of models or HTTP; never imports jax.
"""

from __future__ import annotations

import logging
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import zmq

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine import ipc as sockets
from adaserve_jax.engine import ipc as wire
from adaserve_jax.engine.by_name import LOCAL_ENGINE
from adaserve_jax.engine.client import (
    EngineInfo,
    EngineStats,
    GenerateRequest,
    OutputChunk,
    Sink,
    Sinks,
    check_room,
)
from adaserve_jax.engine.supervisor import OnDeath
from adaserve_jax.errors import EngineDeadError, RequestError
from adaserve_jax.stats import StepStats
from adaserve_jax.types import Progress

HEARTBEAT_LIMIT_S = 60.0
CLOSE_LIMIT_S = 15.0
DYING_LIMIT_S = 1.0
_log = logging.getLogger(__name__)


class ProcessEngine:
    """Runs `factory(config, progress)` in a child process. Thread-safe; sinks are called from one receiving thread.

    progress(what, done, total) is called while `start` waits. factory is "module:callable" giving an EngineClient.
    on_death: called from the receiving thread; what it says of the death is what requests are told.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        factory: str = LOCAL_ENGINE,
        on_death: OnDeath = lambda why: EngineDeadError(f"{why}; restart the server"),
    ):
        self._config = config
        self._progress = progress
        self._factory = factory
        self._on_death = on_death
        self._sinks = Sinks()
        self._lock = threading.Lock()  # guards everything below
        self._submitted = 0
        self._info: EngineInfo | None = None
        self._stats = EngineStats(StepStats())
        self._received = 0
        self._stepped_s = 0.0  # when the engine was last seen to step, or to be idle
        self._last_words: tuple[float, str] | None = None  # of the engine: when it said that it died, and why
        self._error: Exception | None = None
        self._settled = threading.Event()  # ready, failed or dead
        self._closing = False
        self._child: subprocess.Popen[bytes] | None = None
        self._receiver: threading.Thread | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine is not ready: call start() and wait for it to return")
        return self._info

    @property
    def pid(self) -> int | None:
        """Process id of the engine process, None before `start`."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        with self._lock:  # a close() meanwhile waits until there is something to close
            if self._child is not None or self._closing:
                raise EngineDeadError("an engine starts once; build a new ProcessEngine instead")
            self._child = self._spawn()
        self._settled.wait()
        if self._info is None:
            error = self._error or EngineDeadError("the engine was closed while it started")
            self.close()
            raise error

    def _spawn(self) -> subprocess.Popen[bytes]:
        """The child, told what to run, and the thread that reads what it sends."""
        self._folder = sockets.new_folder()
        self._context = zmq.Context()
        self._requests = sockets.requests_out(self._context, self._folder)
        replies = sockets.replies_in(self._context, self._folder)
        command = [sys.executable, "-m", "adaserve_jax.engine.process_main", self._folder]
        # A session of its own: Ctrl-C reaches the front end only, which drains before it stops the engine.
        child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        start = wire.encode(wire.Start(self._config, self._factory))
        assert child.stdin is not None
        try:
            child.stdin.write(struct.pack("<I", len(start)) + start)
            child.stdin.flush()
        except BrokenPipeError:
            pass  # the child died at once; the receiving thread says so
        self._receiver = threading.Thread(
            target=self._receive, args=(child, replies), name="engine-replies", daemon=True
        )
        self._receiver.start()
        return child

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self.info.check_prompt(len(request.prompt_ids))  # at once, without asking the engine
        choices = request.sampling.n
        with self._lock:
            if not self.is_alive():
                raise (self._error or EngineDeadError("the engine is not running")).with_traceback(None)
            if request.request_id in self._sinks:
                raise RequestError(f"request_id {request.request_id!r} is in flight already", param="request_id")
            waiting = self._stats.scheduler.waiting + self._submitted - self._received
            check_room(choices, waiting, self._config.max_waiting)
            if not self._sinks:
                self._stepped_s = time.monotonic()
            self._sinks.open(request.request_id, sink, choices)  # before anything can come of it
            self._send(wire.Submit(request))
            self._submitted += choices

    def _send(self, message: wire.ToEngine) -> None:
        """Never waits and loses nothing that a living child could read: the socket has no limit, and keeps what it is
        given before the child has its end of it."""
        self._requests.send(wire.encode(message), zmq.DONTWAIT)

    def abort(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._sinks and self.is_alive():
                self._send(wire.Abort(request_id))

    def stats(self) -> EngineStats:
        """The numbers of the last step, at most a heartbeat old. The age of that step is told from here: so it grows
        too when the process hangs as a whole."""
        age_s = time.monotonic() - self._stepped_s if self._sinks else 0.0
        return replace(self._stats, step_age_s=age_s)

    def is_alive(self) -> bool:
        return self._info is not None and self._error is None and not self._closing

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        child = self._child
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()  # the child ends by itself; while it still loads it has nothing worth waiting for
        if self._info is None:
            child.kill()
        try:
            child.wait(CLOSE_LIMIT_S + wire.save_limit_s(self._config))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if self._receiver is not None:
            self._receiver.join()
        self._requests.close(linger=0)
        self._context.term()

    def __enter__(self) -> ProcessEngine:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _receive(self, child: subprocess.Popen[bytes], replies: zmq.Socket) -> None:
        """The receiving thread: until the child is gone and everything that it sent is read."""
        heard = time.monotonic()
        why = ""
        while True:
            ended = child.poll() is not None  # looked at before reading, so that nothing sent earlier is missed
            if self._last_words is not None and time.monotonic() - self._last_words[0] > DYING_LIMIT_S:
                child.kill()
            if replies.poll(0 if ended else 50):
                heard = time.monotonic()
                self._take(wire.decode_from_engine(replies.recv()))
            elif ended:
                break
            elif self._info is not None and time.monotonic() - heard > HEARTBEAT_LIMIT_S:
                why = f"the engine process gave no sign of life for {HEARTBEAT_LIMIT_S:g} s and was ended"
                child.kill()
        replies.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._last_words is not None:
            why = self._last_words[1]
        self._end(why or f"the engine process ended with status {child.returncode}")

    def _take(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Step(chunks, stats, received):
                with self._lock:
                    if chunks or stats.scheduler.steps != self._stats.scheduler.steps:
                        self._stepped_s = time.monotonic()
                    self._stats, self._received = stats, received
                for request_id in self._sinks.deliver([chunk for chunk in chunks if not self._tells_of_death(chunk)]):
                    self.abort(request_id)
            case wire.Refused(request_id, fault):
                self._sinks.fail(request_id, fault.message, fault.code, fault.param)
            case wire.Loading(what, done, total):
                if self._progress is not None:
                    self._progress(what, done, total)
            case wire.Ready(info):
                self._info = info
                self._settled.set()
            case wire.Failed(fault):
                self._error = wire.to_error(fault)

    def _tells_of_death(self, chunk: OutputChunk) -> bool:
        """Whether the engine told a request that it died. The process ends then, and all are told the same."""
        if chunk.error_code != EngineDeadError.code or self._error is not None:
            return False
        if self._last_words is None:
            self._last_words = time.monotonic(), chunk.error or "the engine died"
        return True

    def _end(self, why: str) -> None:
        """The child is gone: later calls raise, and whoever waits is told."""
        if self._closing:
            error = EngineDeadError("the engine was closed")
        elif self._info is None:
            error = self._error or EngineDeadError(why)
        else:
            error = self._on_death(why)
        with self._lock:
            self._error = error
            before = self._stats
            self._stats = before.ended()
        fault = wire.to_fault(error)
        self._sinks.fail_all(fault.message, fault.code, fault.param)
        self._settled.set()
