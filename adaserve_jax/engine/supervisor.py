"""SupervisedEngine: replaces an engine that died, behind the same `EngineClient` protocol.

It wraps any client that reports its own death, decides whether and when to start another, keeps totals across restarts,
and refuses a request that was there whenever an engine died (`Suspects`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from adaserve_jax.engine.client import (
    Crash,
    EngineClient,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    OutputChunk,
    Sink,
)
from adaserve_jax.errors import AdaServeError, EngineDeadError, EngineRestartingError, RequestError
from adaserve_jax.stats import StepStats

OnDeath = Callable[[str, Sequence[GenerateRequest]], EngineDeadError]
"""Function that an engine which was ready calls once when it dies, with the reason and the requests in flight, before
these are ended. Returns the error that they get."""
LEAST_START_LIMIT_S = 600.0
START_LIMIT = 5.0
"""Limit of a restart, as a multiple of the first start's time; at least LEAST_START_LIMIT_S."""
LONGEST_BACK_IN_S = 10.0
"""Largest estimate of a restart's time: the first start, which compiled, says little about one with a warm cache."""
LONGEST_BACKOFF_S = 60.0
MAX_REASON_CHARS = 300
_log = logging.getLogger(__name__)


class SupervisedEngine:
    """Replaces an engine that died, unless that happened more than `max_restarts` times in a row without progress.

    Progress is a finished request, or `window_s` seconds of service. The first engine that dies within `window_s` is
    replaced at once, the second after `backoff_s`, each other after twice the wait before, at most LONGEST_BACKOFF_S.

    While an engine is being replaced, `is_alive` is False, `stats().back_in_s` is set and `submit` raises
    EngineRestartingError. No count of `stats` ever goes down. A new engine that is not ready in time is closed and
    counts as one that died.
    """

    def __init__(
        self,
        build: Callable[[OnDeath], EngineClient],
        *,
        max_restarts: int = 3,
        window_s: float = 600.0,
        backoff_s: float = 1.0,
        least_start_limit_s: float = LEAST_START_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Configure an engine that has not started; `build` makes a new one from the function to call when it dies."""
        self._build = build
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._suspects = Suspects(window_s, clock)
        self._start_limit_s = least_start_limit_s
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below; pairs are replaced as a whole
        self._current: tuple[EngineClient | None, EngineStats | None] = (None, None)  # engine, totals before it
        self._fault: tuple[EngineDeadError, float | None] | None = None  # error for requests; time of death if replaced
        self._died_at: deque[float] = deque()  # within the last window_s
        self._died_in_a_row = 0  # without progress between
        self._ready_at = 0.0
        self._crash: Crash | None = None
        self._wait_s = 0.0  # before the restart that is due
        self._restarts = 0
        self._start_s = LONGEST_BACK_IN_S
        self._closing = False
        self._info: EngineInfo | None = None
        self._adapters: dict[str, str | None] = {}  # folders of what was loaded since the start; None: unloaded
        self._supervisor = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)

    @property
    def info(self) -> EngineInfo:
        """Facts about the current engine, or about the last one while it is being replaced."""
        if self._info is None:
            raise EngineDeadError("the engine is not ready: call start() and wait for it to return")
        return self._info

    def start(self) -> None:
        with self._changed:
            if self._closing or self._current[0] is not None:
                raise EngineDeadError("an engine starts once; build a new SupervisedEngine instead")
            engine = self._replace()
        self._start(engine)
        self._start_limit_s = max(self._start_limit_s, START_LIMIT * self._start_s)
        self._supervisor.start()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        engine = self._serving()
        if not self._suspects:
            engine.submit(request, sink)
            return
        watched = self._suspects.watch(request, sink)
        try:
            engine.submit(request, watched)
        except BaseException:
            self._suspects.end_trial(request)
            raise

    def abort(self, request_id: str) -> None:
        engine = self._current[0]
        if engine is not None:
            engine.abort(request_id)

    def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        engine = self._serving()
        engine.load_adapter(name, folder, replace=replace)
        self._adapters_changed(engine, name, folder)

    def unload_adapter(self, name: str) -> None:
        engine = self._serving()
        engine.unload_adapter(name)
        self._adapters_changed(engine, name, None)

    def _adapters_changed(self, engine: EngineClient, name: str, folder: str | None) -> None:
        with self._changed:
            self._adapters[name] = folder
            if engine is self._current[0]:
                self._info = engine.info

    def _serving(self) -> EngineClient:
        """Return the engine. Raises EngineDeadError: it is being replaced, or has ended."""
        engine, fault = self._current[0], self._fault
        if engine is None or fault is not None:
            raise (fault[0] if fault else EngineDeadError("the engine is not ready")).with_traceback(None)
        return engine

    def stats(self) -> EngineStats:
        engine, earlier = self._current
        own = EngineStats(StepStats()) if engine is None else engine.stats()
        if self._crash is None:
            return own
        fault, left_s = self._fault, None
        if fault is not None and fault[1] is not None:
            back_s = self._wait_s + min(self._start_s, LONGEST_BACK_IN_S)
            left_s = max(back_s - (self._clock() - fault[1]), 0.0)
        return replace(_after(own, earlier), restarts=self._restarts, back_in_s=left_s, last_crash=self._crash)

    def is_alive(self) -> bool:
        engine = self._current[0]
        return engine is not None and self._fault is None and engine.is_alive()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            engine = self._current[0]
            self._changed.notify_all()
        if engine is not None:
            engine.close()
        if self._supervisor.ident is not None:
            self._supervisor.join()

    def _replace(self) -> EngineClient:
        """Build an engine in place of the current one, whose totals are kept. Needs the lock."""
        before, earlier = self._current
        if before is not None:
            earlier = _after(before.stats(), earlier)
        engine = self._build(self._on_death)
        self._current = (engine, earlier)
        return engine

    def _start(self, engine: EngineClient) -> None:
        """Start an engine and measure the time; raise what its start raises."""
        began = self._clock()
        engine.start()
        self._ready_at = self._clock()
        self._start_s = self._ready_at - began
        # unloaded ones first, so that the others find room
        for name, folder in sorted(self._adapters.items(), key=lambda each: each[1] is not None):
            self._restore_adapter(engine, name, folder)
        self._info = engine.info

    def _restore_adapter(self, engine: EngineClient, name: str, folder: str | None) -> None:
        """Load or unload an adapter in a new engine as it was in the one before.

        A failure is logged. One that cannot be loaded is unloaded: the configuration may give its name other weights.
        """
        try:
            if folder is not None:
                engine.load_adapter(name, folder, replace=True)
            elif name in engine.info.adapters:
                engine.unload_adapter(name)
        except AdaServeError as error:
            _log.error("adapter %r is not as it was before the engine was started again: %s", name, error)
            if folder is not None:
                self._restore_adapter(engine, name, None)

    def _on_death(self, why: str, requests: Sequence[GenerateRequest] = ()) -> EngineDeadError:
        """Decide whether the dead engine is replaced, and return the error that its requests get."""
        with self._changed:
            now = self._clock()
            if not self._closing and self._fault is None:  # one that died in its start had no requests
                self._suspects.engine_died(requests)
            error = self._verdict(why, now)
            self._fault = error, now if isinstance(error, EngineRestartingError) else None
            self._changed.notify_all()
            return error

    def _verdict(self, why: str, now: float) -> EngineDeadError:
        """Return the error for an engine that died at `now`; count its restart. Needs the lock."""
        if self._closing:
            return EngineDeadError("the engine was closed")
        self._died_in_a_row = 1 if self._made_progress(now) else self._died_in_a_row + 1
        while self._died_at and self._died_at[0] <= now - self._window_s:
            self._died_at.popleft()
        self._died_at.append(now)
        self._crash = Crash(" ".join(why.split())[:MAX_REASON_CHARS], time.time())
        if self._died_in_a_row > self._max_restarts:
            _log.error("%s; it is not started again", why)
            return EngineDeadError(
                f"{why}; it ended {self._died_in_a_row} times in a row without finishing a request; restart the server"
            )
        earlier = len(self._died_at) - 1
        self._wait_s = min(self._backoff_s * 2.0 ** (earlier - 1), LONGEST_BACKOFF_S) if earlier else 0.0
        self._restarts += 1
        _log.warning("%s; it is started again in %g s (restart %d)", why, self._wait_s, self._restarts)
        return EngineRestartingError(f"{why}; it is started again: retry in a few seconds")

    def _made_progress(self, now: float) -> bool:
        """Return whether the engine that died finished a request or served for long. Needs the lock."""
        engine = self._current[0]
        if engine is None or self._fault is not None:  # it died in its start
            return False
        finished = engine.stats().scheduler.finished
        return bool(finished.get("stop") or finished.get("length")) or now - self._ready_at >= self._window_s

    # ---- the supervising thread ----

    def _supervise(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._fault is not None)
                if self._closing or self._fault is None or self._fault[1] is None:
                    return
                dead = self._current[0]
            assert dead is not None
            dead.close()
            with self._changed:
                self._changed.wait_for(lambda: self._closing, self._wait_s)
            self._restart()

    def _restart(self) -> None:
        """Start one new engine; if that fails, the loop of `_supervise` tries again or gives up."""
        with self._changed:
            if self._closing:
                return
            engine, fault = self._replace(), self._fault
        try:
            self._start_in_time(engine)
        except Exception as error:
            self._on_death(f"the engine could not be started again: {error}")
            return
        with self._changed:
            if self._fault is fault:  # else the new one died already
                self._fault = None
                _log.warning("the engine is back after %.1f s", self._start_s)

    def _start_in_time(self, engine: EngineClient) -> None:
        """Start an engine, or close it and raise EngineDeadError when that takes too long."""
        first = threading.Lock()  # taken by the first of two: the end of the start, the time limit

        def give_up() -> None:
            if first.acquire(blocking=False):
                engine.close()

        limit = threading.Timer(self._start_limit_s, give_up)
        limit.daemon = True
        limit.start()
        error = None
        try:
            self._start(engine)
        except Exception as raised:
            error = raised
        limit.cancel()
        if not first.acquire(blocking=False):
            error = EngineDeadError(f"it was not ready within {self._start_limit_s:g} s")
        if error is not None:
            raise error


def _after(own: EngineStats, earlier: EngineStats | None) -> EngineStats:
    """Add the counts of earlier engines, if there are any."""
    return own if earlier is None else own.after(earlier)


class Suspects:
    """Requests that were in flight in every one of the last crashes, by their content: a retry has another id.

    After one crash they are served as before: most crashes have another cause. After two, they are tried one at a time,
    so that the next crash tells them apart: only the one that was there stays a suspect. One that is left alone after
    two crashes or more is set aside: it is refused, whatever else crashes the engine meanwhile. A suspect that finishes
    is cleared. Each is forgotten `window_s` seconds after its last crash. Nothing is computed as long as no engine has
    died. Any thread may call: requests come in one, and end in another.
    """

    def __init__(self, window_s: float, clock: Callable[[], float]):
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()  # guards everything below
        self._contents: frozenset[bytes] = frozenset()
        self._aside: dict[bytes, tuple[int, float]] = {}
        """Crashes of each request that is set aside, and the time of the last one."""
        self._crashes = 0
        self._crashed_at = 0.0
        self._on_trial: GenerateRequest | None = None

    def __bool__(self) -> bool:
        return bool(self._contents or self._aside)

    def engine_died(self, requests: Sequence[GenerateRequest]) -> None:
        """Keep the suspects that were in flight, or begin anew with all that were."""
        now, there = self._clock(), frozenset(map(_content, requests))
        with self._lock:
            stay = self._contents & there if now - self._crashed_at < self._window_s else frozenset[bytes]()
            self._crashes = self._crashes + 1 if stay else 1
            self._contents, self._crashed_at, self._on_trial = stay or there, now, None
            self._set_last_aside()

    def watch(self, request: GenerateRequest, sink: Sink) -> Sink:
        """Return the sink to submit a request with; it notes that a suspect ended.

        Raises:
            RequestError: the request is set aside.
            EngineRestartingError: another suspect is tried first.
        """
        content = _content(request)
        with self._lock:
            self._forget_old()
            if content in self._aside:
                raise RequestError(
                    f"the engine crashed {self._aside[content][0]} times in a row while this request was running, "
                    f"which is set aside for {self._window_s:g} s; change its prompt or parameters, and tell the "
                    "operator",
                    code="crashes_engine",
                )
            if content not in self._contents:
                return sink
            if self._crashes > 1:
                if self._on_trial is not None:
                    raise EngineRestartingError(
                        "the engine crashed several times with this request and others; they are tried one at a time: "
                        "retry in a few seconds"
                    )
                self._on_trial = request
        left = set(range(request.sampling.n))

        def watched(chunk: OutputChunk) -> None:
            if chunk.finish_reason is not None:
                left.discard(chunk.choice)
                if chunk.finish_reason in ("stop", "length"):
                    self._clear(content)
                if not left:
                    self.end_trial(request)
            try:
                sink(chunk)
            except BaseException:
                self.end_trial(request)  # it gets no more chunks
                raise

        return watched

    def end_trial(self, request: GenerateRequest) -> None:
        """Let the next suspect be tried if this request, which ended or was not taken, is the one on trial."""
        with self._lock:
            if self._on_trial is request:
                self._on_trial = None

    def _clear(self, content: bytes) -> None:
        with self._lock:
            self._contents -= {content}
            self._set_last_aside()

    def _forget_old(self) -> None:
        """Forget what crashed longer ago than the window. Needs the lock, as does the method below."""
        now = self._clock()
        self._aside = {each: (crashes, at) for each, (crashes, at) in self._aside.items() if now - at < self._window_s}
        if now - self._crashed_at >= self._window_s:
            self._contents = frozenset()

    def _set_last_aside(self) -> None:
        if self._crashes > 1 and len(self._contents) == 1:
            self._aside |= dict.fromkeys(self._contents, (self._crashes, self._crashed_at))
            self._contents = frozenset()


def _content(request: GenerateRequest) -> bytes:
    """Return a digest of what a retry has in common with its request."""
    data = msgspec.msgpack.encode((request.prompt_ids, request.sampling, request.draft_tag, request.adapter))
    return hashlib.blake2b(data, digest_size=16).digest()
