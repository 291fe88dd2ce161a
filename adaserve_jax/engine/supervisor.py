"""SupervisedEngine: replaces an engine that died, behind the same `EngineClient` protocol.

It wraps any client that reports its own death, decides whether to start another, and keeps totals across restarts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from adaserve_jax.engine.client import EngineClient, EngineInfo, EngineStats, GenerateRequest, Sink
from adaserve_jax.errors import EngineDeadError, EngineRestartingError
from adaserve_jax.stats import StepStats

OnDeath = Callable[[str], EngineDeadError]
"""Called once by an engine that was ready and died, with the reason, before its requests are ended. Returns the error
that they get."""
LEAST_START_LIMIT_S = 600.0
START_LIMIT = 5.0
"""Limit of a restart, as a multiple of the first start's time; at least LEAST_START_LIMIT_S."""
LONGEST_BACK_IN_S = 10.0
"""Largest estimate of a restart's time: the first start, which compiled, says little about one with a warm cache."""
_log = logging.getLogger(__name__)


class SupervisedEngine:
    """Replaces an engine that died, at most `max_restarts` times within any `window_s` seconds; then it stays dead.

    While an engine is being replaced, `is_alive` is False, `stats().back_in_s` is set and `submit` raises
    EngineRestartingError. No count of `stats` ever goes down. A new engine that is not ready in time is closed and
    counts as one that died.
    """

    def __init__(
        self,
        build: Callable[[OnDeath], EngineClient],
        *,
        max_restarts: int = 1,
        window_s: float = 600.0,
        least_start_limit_s: float = LEAST_START_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Configure an engine that has not started.

        Args:
            build: makes a new engine that has not started; it gets the function to call when it dies.
            max_restarts: restarts within any `window_s` seconds.
            window_s: length of that window, seconds.
            least_start_limit_s: seconds that a restart may take at least.
            clock: monotonic seconds.
        """
        self._build = build
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._start_limit_s = least_start_limit_s
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below; pairs are replaced as a whole
        self._current: tuple[EngineClient | None, EngineStats | None] = (
            None,
            None,
        )  # engine, totals before it
        self._fault: tuple[EngineDeadError, float | None] | None = None  # error for requests; time of death if replaced
        self._restarted_at: deque[float] = deque()
        self._restarts = 0
        self._start_s = LONGEST_BACK_IN_S
        self._closing = False
        self._info: EngineInfo | None = None
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
        engine, fault = self._current[0], self._fault
        if engine is None or fault is not None:
            raise (fault[0] if fault else EngineDeadError("the engine is not ready")).with_traceback(None)
        engine.submit(request, sink)

    def abort(self, request_id: str) -> None:
        engine = self._current[0]
        if engine is not None:
            engine.abort(request_id)

    def stats(self) -> EngineStats:
        engine, earlier = self._current
        own = EngineStats(StepStats()) if engine is None else engine.stats()
        fault = self._fault
        since = None if fault is None else fault[1]
        if since is None and earlier is None:
            return own
        left_s = None if since is None else max(min(self._start_s, LONGEST_BACK_IN_S) - (self._clock() - since), 0.0)
        return replace(_after(own, earlier), restarts=self._restarts, back_in_s=left_s)

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
        self._start_s = self._clock() - began
        self._info = engine.info

    def _on_death(self, why: str) -> EngineDeadError:
        """Decide whether the dead engine is replaced, and return the error that its requests get."""
        with self._changed:
            now = self._clock()
            error = self._verdict(why, now)
            self._fault = error, now if isinstance(error, EngineRestartingError) else None
            self._changed.notify_all()
            return error

    def _verdict(self, why: str, now: float) -> EngineDeadError:
        """Return the error for an engine that died at `now`; count the restart if there will be one. Needs the
        lock."""
        while self._restarted_at and self._restarted_at[0] <= now - self._window_s:
            self._restarted_at.popleft()
        if self._closing:
            return EngineDeadError("the engine was closed")
        if len(self._restarted_at) < self._max_restarts:
            self._restarted_at.append(now)
            _log.warning("%s; it is started again", why)
            return EngineRestartingError(f"{why}; it is started again: retry in a few seconds")
        _log.error("%s; it is not started again", why)
        return EngineDeadError(
            f"{why}, after {len(self._restarted_at)} restarts within {self._window_s:g} s; restart the server"
        )

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
            self._restarts += 1
            if self._fault is fault:  # else the new one died already
                self._fault = None
        _log.warning("the engine is back after %.1f s", self._start_s)

    def _start_in_time(self, engine: EngineClient) -> None:
        """Start an engine, or close it and raise EngineDeadError when that takes too long; raise what its start
        raises."""
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
