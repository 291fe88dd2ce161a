"""LocalEngine: the engine in a thread of this process, behind the `EngineClient` protocol.

For tests, notebooks, offline work, and as what the engine process runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.constraints import RequestConstraints
from adaserve_jax.distill.routing import MOST_CHARS
from adaserve_jax.engine.build import Assembly, Observe
from adaserve_jax.engine.client import (
    EngineInfo,
    EngineStats,
    GenerateRequest,
    OutputChunk,
    Sink,
    Sinks,
    check_ids,
    check_room,
)
from adaserve_jax.errors import AdaServeError, ConfigError, EngineDeadError, RequestError
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.stats import LearningStats, StepStats
from adaserve_jax.types import Progress

_log = logging.getLogger(__name__)
REST_S = 0.01
"""Seconds between two looks at a draft that comes back while nobody asks for anything."""
YIELD_S = 0.0005
"""Seconds between two pieces of training then, in which whoever waits for the lock gets it."""


class LocalEngine:
    """Implements `EngineClient`. `start` loads and compiles in the calling thread, then runs steps in its own."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None, observe: Observe | None = None):
        """observe: what the steps run on instead of the executor, made from it; it sees what they do."""
        self._config = config
        self._progress = progress
        self._observe = observe
        self._sinks = Sinks()
        self._lock = threading.Condition()  # guards inbox and flags; requests are looked up and opened under it
        self._inbox: deque[Callable[[], None]] = deque()
        self._preparing: dict[str, tuple[GenerateRequest, float]] = {}  # and when they came; on their way to the inbox
        self._queued = 0  # choices of these and of the inbox, not yet seen by the scheduler
        self._stopping = False
        self._error: EngineDeadError | None = None
        self._thread: threading.Thread | None = None
        self._info: EngineInfo | None = None
        self._last_step_s = time.monotonic()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine is not ready: call start() and wait for it to return")
        return self._info

    @property
    def assembly(self) -> Assembly:
        """What the engine runs on, whatever its policy is; for benchmarks and tests, while the engine is idle."""
        self.info  # noqa: B018  raises before start
        return self._assembly

    @property
    def executor(self) -> ModelExecutor:
        """The executor; as `assembly`, of which it is."""
        return self.assembly.executor

    @property
    def config(self) -> EngineConfig:
        """The configuration in force, without "auto"."""
        return self.executor.resolved.config

    def start(self) -> None:
        if self._info is not None or self._stopping:
            raise EngineDeadError("an engine starts once; build a new LocalEngine instead")
        self._assembly = assembly = Assembly(self._config, self._progress, self._observe)
        try:
            assembly.get_ready()
            self._core = assembly.build_core(assembly.config)
            self._info = assembly.describe(assembly.config)
        except BaseException:
            assembly.release()
            raise
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def set_policy(self, policy: str) -> None:
        """Serve with another policy from now on, without compiling. Raises ConfigError unless the engine is idle,
        ElasticError when the draft's memory is KV pages and it cannot be brought back."""
        config = replace(self.config, policy=policy)
        with self._lock:
            if self._sinks:  # without any, the inbox holds at most aborts of requests that have ended
                raise ConfigError(f"set_policy({policy!r}) needs an idle engine; {len(self._sinks)} requests are open")
            self._core.settle()
            self._core = self._assembly.build_core(config)
            self._info = self._assembly.describe(config)

    def prepare(self, request: GenerateRequest) -> None:
        """Wait for what takes long before a request can begin, as its JSON schema does: for who has so many that the
        engine would not take all at once. A refusal is told where the request is submitted. Raises RequestError."""
        prepared = threading.Event()
        self._core.prepare(request, self._check(request), prepared.set)
        prepared.wait()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        arrival_s = time.monotonic()
        shared = self._check(request)
        choices = request.sampling.n
        with self._lock:
            if not self.is_alive():
                raise self._error or EngineDeadError("the engine is not running; build and start a new one")
            if request.request_id in self._sinks:
                raise RequestError(f"request_id {request.request_id!r} is in flight already", param="request_id")
            check_room(choices, self._core.scheduler.num_waiting + self._queued, self._config.max_waiting)
            if not self._is_busy:
                self._last_step_s = arrival_s
            self._sinks.open(request.request_id, sink, choices)
            self._queued += choices
            self._preparing[request.request_id] = (request, arrival_s)
        self._core.prepare(request, shared, lambda: self._enqueue(request, shared))

    def _check(self, request: GenerateRequest) -> RequestConstraints | None:
        """What the request's choices have in common. Raises at once what no waiting can change."""
        check_ids(request.prompt_ids, self.info.vocab_size)
        router = self._assembly.router
        if request.draft_tag and router is None:
            has = "has no draft" if self._assembly.drafting is None else "asks a draft service, which has one draft"
            raise RequestError(
                f"draft_tag must be absent: this engine {has}; got {request.draft_tag!r}", param="draft_tag"
            )
        if request.draft_tag and router is not None:
            router.index(request.draft_tag)
        return self._core.check(request)

    def _enqueue(self, request: GenerateRequest, shared: RequestConstraints | None) -> None:
        """What takes long is done, or refused, which `_add` finds; unless nobody waits for it any more."""
        with self._lock:
            waiting, arrival_s = self._preparing.get(request.request_id, (None, 0.0))
            if waiting is request:
                del self._preparing[request.request_id]
                self._inbox.append(lambda: self._add(request, arrival_s, shared))
                self._lock.notify()

    def abort(self, request_id: str) -> None:
        with self._lock:
            waiting = self._preparing.pop(request_id, None)
            if waiting is None:
                self._inbox.append(lambda: self._deliver(self._core.abort(request_id)))
            else:
                self._queued -= waiting[0].sampling.n
                self._inbox.append(lambda: self._deliver(self._core.aborted(*waiting)))
            self._lock.notify()

    def stats(self) -> EngineStats:
        if self._info is None:
            return EngineStats(StepStats())
        assembly, busy, live = self._assembly, self._is_busy, self._core.scheduler.stats
        return EngineStats(
            scheduler=live,
            compiles_after_ready=assembly.executor.compiles_after_ready,
            step_age_s=time.monotonic() - self._last_step_s if busy else 0.0,
            learning=LearningStats() if assembly.learner is None else assembly.learner.stats(),
            drafter=None if assembly.drafting is None else assembly.drafting.drafter.stats(),
        )

    @property
    def _is_busy(self) -> bool:
        """Whether a step is due."""
        return bool(self._inbox) or self._core.has_work

    def is_alive(self) -> bool:
        return self._info is not None and self._error is None and not self._stopping

    def close(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify()
            if self._thread is None or self._thread is threading.current_thread():
                return
            thread, self._thread = self._thread, None
        thread.join()
        self._assembly.save()
        self._assembly.release()

    # ---- the engine thread ----

    def _run(self) -> None:
        error = EngineDeadError("the engine was closed")
        try:
            while self._take_inbox():
                if self._core.has_work:
                    if (samples := self._assembly.new_draft_times()) is not None:
                        self._core.scheduler.retime_draft(samples)
                    self._deliver(self._core.step())
                    if not self._inbox:
                        self._core.learn()
                    if self._assembly.calibration_file is not None:
                        self._assembly.calibration_file.save_if_due()
        except BaseException as cause:  # a panic of native code is no Exception
            _log.exception("the engine stopped")
            error = EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}")
        self._end(error)

    def _take_inbox(self) -> bool:
        """Do what clients asked for since the last step; wait while there is nothing to do. False: stop."""
        with self._lock:
            while not (self._inbox or self._stopping or self._core.has_work):
                if self._core.rests:
                    self._lock.wait(self._core.wakes_in_s)
                else:
                    more = self._core.rest()  # with the lock: nobody else moves the draft meanwhile
                    self._lock.wait(YIELD_S if more else REST_S)
            actions, self._inbox = self._inbox, deque()
            stopping = self._stopping
            self._last_step_s = time.monotonic()  # a step that starts after a long idle time is not a late one
        for action in actions:
            action()
        return not stopping

    def _add(self, request: GenerateRequest, arrival_s: float, shared: RequestConstraints | None) -> None:
        with self._lock:
            self._queued -= request.sampling.n
        try:
            self._core.add(request, arrival_s, shared, self._draft_of(request))
        except AdaServeError as error:
            self._sinks.fail(request.request_id, str(error), error.code, error.param)
        else:
            router = self._assembly.router
            if router is not None and request.draft_tag:
                router.route(request)  # which learns of a tag what its topic is: not from who was refused

    def _draft_of(self, request: GenerateRequest) -> int:
        """The index of the draft that is to speculate for it. Nothing is learned from the request yet."""
        router = self._assembly.router
        if router is None:
            return 0
        if request.draft_tag:
            return router.index(request.draft_tag)
        # a step waits for this, so no more of a long prompt than is looked at, where a token is a character at least
        last = request.prompt_ids[-MOST_CHARS:] if router.needs_text else []
        return router.route(request, self._assembly.tokenizer.decode(last))

    def _deliver(self, chunks: list[OutputChunk]) -> None:
        for request_id in self._sinks.deliver(chunks):
            self._sinks.deliver(self._core.abort(request_id))

    def _end(self, error: EngineDeadError) -> None:
        """Refuse all that comes, and tell every open sink; the core, whose state may be broken, is left alone."""
        with self._lock:
            self._error = error
            self._preparing.clear()
        self._sinks.fail_all(str(error), error.code, error.param)
