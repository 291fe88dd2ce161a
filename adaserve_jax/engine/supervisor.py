"""SupervisedEngine: an engine that is started again when its process ends, behind the same `EngineClient` protocol.

Decides whether and when, and lets totals go on where the engine before stopped. Knows no process, socket or HTTP: what
it supervises is built by a function, and says itself that it died.
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
"""Called by an engine that was ready and died, once, with the reason and before its requests are told; returns what
they are told."""
LEAST_START_LIMIT_S = 600.0
START_LIMIT = 5.0
"""A start that is not the first one may take so many times as long as that one, and at least LEAST_START_LIMIT_S."""
LONGEST_BACK_IN_S = 10.0
"""A start that compiled says little about one that finds everything compiled: it is promised to take no longer."""
_log = logging.getLogger(__name__)


class SupervisedEngine:
    """Replaces an engine that died, at most `max_restarts` times within any `window_s` seconds; then it stays dead.

    build: makes a new engine that has not started, given what it calls when it dies. While an engine is replaced,
    `is_alive` is False, `stats().back_in_s` is set, and `submit` raises EngineRestartingError; afterwards all is as
    before, and no count of `stats` ever goes down. A new engine that is not ready in time is closed, as one that died;
    least_start_limit_s: time that it has at least.
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
        self._build = build
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._start_limit_s = least_start_limit_s
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below; pairs are replaced as a whole
        self._current: tuple[EngineClient | None, EngineStats | None] = (None, None)  # engine, totals of those before
        self._fault: tuple[EngineDeadError, float | None] | None = None  # what is told; since when it is replaced
        self._restarted_at: deque[float] = deque()
        self._restarts = 0
        self._start_s = LONGEST_BACK_IN_S
        self._closing = False
        self._info: EngineInfo | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)

    @property
    def info(self) -> EngineInfo:
        """Of the engine now, or of the one before while there is none."""
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
        """A new engine in the place of the one before, whose totals are kept. With the lock."""
        before, earlier = self._current
        if before is not None:
            earlier = _after(before.stats(), earlier)
        engine = self._build(self._on_death)
        self._current = (engine, earlier)
        return engine

    def _start(self, engine: EngineClient) -> None:
        """Raises what the engine's start raises."""
        began = self._clock()
        engine.start()
        self._start_s = self._clock() - began
        self._info = engine.info

    def _on_death(self, why: str) -> EngineDeadError:
        """The engine died: whether it is replaced is decided before anybody is told."""
        with self._changed:
            now = self._clock()
            error = self._verdict(why, now)
            self._fault = error, now if isinstance(error, EngineRestartingError) else None
            self._changed.notify_all()
            return error

    def _verdict(self, why: str, now: float) -> EngineDeadError:
        """What is told of an engine that ended now; counts the restart when there will be one. With the lock."""
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
        """Start one new engine; when that fails, the next turn of the loop tries again, or it stays dead."""
        with self._changed:
            if self._closing:
                return
            engine, told = self._replace(), self._fault
        try:
            self._start_in_time(engine)
        except Exception as error:
            self._on_death(f"the engine could not be started again: {error}")
            return
        with self._changed:
            self._restarts += 1
            if self._fault is told:  # else the new one died already
                self._fault = None
        _log.warning("the engine is back after %.1f s", self._start_s)

    def _start_in_time(self, engine: EngineClient) -> None:
        """Raises what the engine's start raises; EngineDeadError when that took too long, and the engine is closed."""
        first = threading.Lock()  # taken by what comes first, the start's end or the limit

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
    """`own` with the counts of the engines before, if there are any."""
    return own if earlier is None else own.after(earlier)
