"""ProcessEngine: the engine in a child process, behind the same `EngineClient` protocol as the thread mode.

The front end stays responsive while JAX compiles or a step runs, and survives the engine's death. Two ZeroMQ sockets
in a fresh directory of mode 0700 carry the messages of `engine.ipc`; `engine.process_main` is the other side.
"""

from __future__ import annotations

import logging
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import zmq

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine import ipc
from adaserve_jax.engine.client import (
    EngineInfo,
    EngineStats,
    GenerateRequest,
    Sink,
    Sinks,
    check_request,
    check_room,
)
from adaserve_jax.engine.supervisor import OnDeath
from adaserve_jax.errors import EngineDeadError
from adaserve_jax.stats import StepStats
from adaserve_jax.types import Progress

HEARTBEAT_LIMIT_S = 60.0
"""Silence after which the engine process is killed."""
LAST_LOOK_MS = 250
"""Wait for messages that the child sent just before it ended."""
LOOK_LIMIT_S = 1.0
"""Most silence that one poll counts: this process may have been suspended, and its child with it."""
DYING_LIMIT_S = 1.0
"""Time that the process has to end after it reported that its engine died."""
_log = logging.getLogger(__name__)


class ProcessEngine:
    """An `EngineClient` whose engine runs in a child process. Thread-safe; one receiving thread calls the sinks."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        factory: str | None = None,
        warm_folder: str | None = None,
        on_death: OnDeath = lambda why, requests: EngineDeadError(f"{why}; restart the server"),
    ):
        """Configure an engine that has not started. The receiving thread calls `progress` and `on_death`.

        factory: "module:callable" that the child calls with config and progress to make its engine; None:
        `LocalEngine`, which also gets `warm_folder`. on_death: takes the reason of death and the requests in flight;
        returns the error that they get.
        """
        self._config = config
        self._progress = progress
        self._factory = factory
        self._warm_folder = warm_folder
        self._on_death = on_death
        self._sinks = Sinks()
        self._lock = threading.Lock()  # guards everything below
        self._submitted = 0
        self._calls: dict[int, Future[None]] = {}  # of callers that wait for an AdapterReply
        self._last_call = 0
        self._info: EngineInfo | None = None
        self._stats = EngineStats(StepStats())
        self._received = 0
        self._stepped_s = 0.0  # when the engine was last seen to step or to be idle
        self._reported_death: tuple[float, str] | None = None  # when the child said that its engine died, and why
        self._error: Exception | None = None
        self._started = threading.Event()  # set when the engine is ready, failed or dead
        self._closing = False
        self.socket_folder = ""
        """Folder of the sockets, from `start` until the child has ended."""
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
        self._started.wait()
        if self._info is None:
            error = self._error or EngineDeadError("the engine was closed while it started")
            self.close()
            raise error

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the child, send it what to run, and start the receiving thread."""
        self.socket_folder = ipc.new_folder()
        self._context = zmq.Context()
        self._requests = ipc.sender(self._context, self.socket_folder, ipc.TO_ENGINE, linger_ms=0)
        replies = ipc.receiver(self._context, self.socket_folder, ipc.FROM_ENGINE)
        command = [sys.executable, "-m", "adaserve_jax.engine.process_main", self.socket_folder]
        # A session of its own: Ctrl-C reaches the front end only, which drains before it stops the engine.
        try:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except BaseException:
            replies.close(linger=0)
            self._requests.close(linger=0)
            self._context.term()
            shutil.rmtree(self.socket_folder, ignore_errors=True)
            raise
        start = ipc.encode(ipc.Start(self._config, self._factory, self._warm_folder))
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # the child died at once; the receiving thread reports it
            child.stdin.write(struct.pack("<I", len(start)) + start)
            child.stdin.flush()
        self._receiver = threading.Thread(
            target=self._receive, args=(child, replies), name="engine-replies", daemon=True
        )
        self._receiver.start()
        return child

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        check_request(request, self.info)
        choices = request.sampling.n
        message = ipc.encode(ipc.Submit(request))  # before anything is open that a failure would leave so
        with self._lock:
            self._require_alive()
            waiting = self._stats.scheduler.waiting_new + self._submitted - self._received
            check_room(choices, waiting, self._config.max_waiting)
            if not self._sinks:
                self._stepped_s = time.monotonic()
            self._sinks.open(request, sink)  # before any chunk of it can arrive
            self._send(message)
            self._submitted += choices

    def _require_alive(self) -> None:
        if not self.is_alive():
            raise (self._error or EngineDeadError("the engine is not running")).with_traceback(None)

    def _send(self, message: bytes) -> None:
        """Send an encoded message without waiting. Nothing is lost: the socket has no limit, and it holds messages
        until the child has bound its end."""
        self._requests.send(message, zmq.DONTWAIT)

    def abort(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._sinks and self.is_alive():
                self._send(ipc.encode(ipc.Abort(request_id)))

    def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        self._call(lambda call: ipc.LoadAdapter(call, name, folder, replace))

    def unload_adapter(self, name: str) -> None:
        self._call(lambda call: ipc.UnloadAdapter(call, name))

    def _call(self, message: Callable[[int], ipc.ToEngine]) -> None:
        """Send a call, wait for its end, and raise what it raised."""
        done: Future[None] = Future()
        with self._lock:
            self._require_alive()
            self._last_call += 1
            self._calls[self._last_call] = done
            self._send(ipc.encode(message(self._last_call)))
        done.result()

    def stats(self) -> EngineStats:
        """Return the statistics of the last step, at most a heartbeat old. The age of that step is measured here, so
        that it grows even if the whole child hangs."""
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
            with suppress(BrokenPipeError):  # it is dead, and what could not be written is still buffered
                child.stdin.close()  # the child ends by itself
        if self._info is None:
            child.kill()  # while it loads it has nothing to save
        try:
            child.wait(ipc.CLOSE_LIMIT_S + ipc.save_limit_s(self._config))
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
        """Read messages until the child has ended, and end all requests then, whatever fails here."""
        try:
            why = self._read_until_ended(child, replies)
        except BaseException as error:
            _log.exception("the replies of the engine process cannot be read; it is ended")
            child.kill()
            child.wait()
            why = f"the replies of the engine process could not be read ({error!r}), and it was ended"
        finally:
            replies.close(linger=0)
            shutil.rmtree(self.socket_folder, ignore_errors=True)
        self._end(why)

    def _read_until_ended(self, child: subprocess.Popen[bytes], replies: zmq.Socket) -> str:
        """Read messages until the child has ended and all that it sent is read; return why it ended."""
        looked, silent_s = time.monotonic(), 0.0
        why = ""
        while True:
            now = time.monotonic()  # leaps while this process is suspended, and then its child is too
            silent_s, looked = silent_s + min(now - looked, LOOK_LIMIT_S), now
            ended = child.poll() is not None  # before reading, so that nothing that it sent is missed
            died = None if self._closing else self._reported_death  # while it closes it may have much to save
            if died is not None and time.monotonic() - died[0] > DYING_LIMIT_S:
                child.kill()
            if replies.poll(LAST_LOOK_MS if ended else 50):
                silent_s = 0.0
                self._take(ipc.decode_from_engine(replies.recv()))
            elif ended:
                break
            elif self._info is not None and silent_s > HEARTBEAT_LIMIT_S:
                why = f"the engine process gave no sign of life for {HEARTBEAT_LIMIT_S:g} s and was ended"
                child.kill()
        if self._reported_death is not None:
            why = self._reported_death[1]
        return why or f"the engine process ended with status {child.returncode}"

    def _take(self, message: ipc.FromEngine) -> None:
        match message:
            case ipc.Step(chunks, stats, received):
                with self._lock:
                    if chunks or stats.scheduler.steps != self._stats.scheduler.steps:
                        self._stepped_s = time.monotonic()
                    self._stats, self._received = stats, received
                alive = [each for each in chunks if not self._is_death_report(each.error_code, each.error)]
                for request_id in self._sinks.deliver(alive):
                    self.abort(request_id)
            case ipc.Refused(request_id, fault):
                if not self._is_death_report(fault.code, fault.message):
                    self._sinks.fail(request_id, fault.message, fault.code, fault.param)
            case ipc.AdapterReply(call, adapters, fault):
                with self._lock:
                    assert self._info is not None
                    self._info = replace(self._info, adapters=adapters)
                    waiting = self._calls.pop(call)
                if fault is None:
                    waiting.set_result(None)
                else:
                    waiting.set_exception(ipc.to_error(fault))
            case ipc.Loading(what, done, total):
                if self._progress is not None:
                    self._progress(what, done, total)
            case ipc.Ready(info):
                self._info = info
                self._started.set()
            case ipc.Failed(fault):
                self._error = ipc.to_error(fault)

    def _is_death_report(self, code: str | None, error: str | None) -> bool:
        """Note a death that the engine reports in a chunk or a refusal; return True for such a one. The process ends
        then, and `_end` gives the same error to every request."""
        if code != EngineDeadError.code or self._error is not None:
            return False
        if self._reported_death is None:
            self._reported_death = time.monotonic(), error or ipc.DIED
        elif self._reported_death[1] == ipc.DIED and error:  # what requests were told says more
            self._reported_death = self._reported_death[0], error
        return True

    def _end(self, why: str) -> None:
        """End all requests with the reason of the child's end; later calls raise it."""
        if self._closing:
            error = EngineDeadError("the engine was closed")
        elif self._info is None:
            error = self._error or EngineDeadError(why)
        else:
            error = self._on_death(why, self._sinks.requests())
        with self._lock:
            self._error = error
            self._stats = self._stats.ended()
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.set_exception(error)
        fault = ipc.to_fault(error)
        self._sinks.fail_all(fault.message, fault.code, fault.param)
        self._started.set()
