"""LocalEngine: the engine in a thread of this process, behind the `EngineClient` protocol.

`LLM`, notebooks and tests use it directly; the engine process runs one too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.constraints import RequestConstraints
from adaserve_jax.constraints.sandbox import contained
from adaserve_jax.distill.routing import MAX_PROMPT_CHARS
from adaserve_jax.engine.build import Assembly, Observe
from adaserve_jax.engine.client import (
    EngineInfo,
    EngineStats,
    GenerateRequest,
    OutputChunk,
    Sink,
    Sinks,
    check_request,
    check_room,
)
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.errors import AdaServeError, ConfigError, EngineDeadError
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.scheduler.cost_model import ServedTimes
from adaserve_jax.stats import LearningStats, StepStats
from adaserve_jax.types import Progress

IDLE_POLL_S = 0.01
"""Seconds between two looks at the draft that is brought back while no request is open."""
YIELD_S = 0.0005
"""Seconds between two idle pieces of training, in which waiting threads get the lock."""
_log = logging.getLogger(__name__)


class LocalEngine:
    """An `EngineClient` that loads and compiles in the thread that calls `start`, and runs steps in its own."""

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, observe: Observe | None = None,
        warm_folder: str | None = None,
    ):  # fmt: skip
        """Configure an engine that has not started; `observe` wraps the executor, so that a caller sees its steps.

        warm_folder: private folder that keeps measured times for restarts; None: every start measures its own.
        """
        self._warm_folder = warm_folder
        self._config = config
        self._progress = progress
        self._observe = observe
        self._sinks = Sinks()
        self._lock = threading.Condition()  # guards the inbox, the flags, and opening a request
        self._inbox: deque[Callable[[], None]] = deque()
        self._preparing: dict[str, tuple[GenerateRequest, float]] = {}  # waiting for a grammar, with arrival time
        self._queued = 0  # choices of these and of the inbox, which the scheduler does not count yet
        self._counting = threading.Lock()  # guards this count, and that each choice is in one of the two; taken last
        self._stopping = False
        self._calls: set[Future[None]] = set()  # of callers that wait for something to be done between two steps
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
        """Loaded parts of the engine, for benchmarks and tests while the engine is idle."""
        self.info  # noqa: B018  raises before start
        return self._assembly

    @property
    def executor(self) -> ModelExecutor:
        """Executor of `assembly`; the same rule holds."""
        return self.assembly.executor

    @property
    def served(self) -> ServedTimes:
        """Times of the steps since the policy was set; read them while the engine is idle."""
        return self._core.scheduler.costs.served

    @property
    def config(self) -> EngineConfig:
        """Configuration in force, with every "auto" resolved."""
        return self.executor.resolved.config

    def start(self) -> None:
        if self._info is not None or self._stopping:
            raise EngineDeadError("an engine starts once; build a new LocalEngine instead")
        self._assembly = assembly = Assembly(self._config, self._progress, self._observe, self._warm_folder)
        try:
            assembly.get_ready()
            self._core = self._build_core(assembly.config)
            info = assembly.describe(assembly.config)
            with self._lock:
                if self._stopping:
                    raise EngineDeadError("the engine was closed while it started")
                self._info = info
                self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
                self._thread.start()
        except BaseException:
            assembly.release()
            raise

    def _build_core(self, config: EngineConfig) -> EngineCore:
        core = self._assembly.build_core(config)
        if self._assembly.executor.leaves_host_free:
            core.deliver_beside_device(self._deliver)
        return core

    def set_policy(self, policy: str) -> None:
        """Change the scheduling policy without compiling.

        Raises:
            ConfigError: the policy is unknown, or a request is open.
            ElasticError: the draft cannot be brought back from the memory that it gave to KV pages.
        """
        config = replace(self.config, policy=policy)
        with self._lock:
            if self._sinks:  # without any, the inbox holds at most aborts of requests that have ended
                raise ConfigError(f"set_policy({policy!r}) needs an idle engine; {len(self._sinks)} requests are open")
            self._core.bring_back_draft()
            self._core = self._build_core(config)
            self._info = self._assembly.describe(config)

    def prepare(self, request: GenerateRequest) -> None:
        """Wait until the request's JSON schema is compiled, so that a caller with many schemas does not flood the
        queue of compilations. A schema that fails is reported when the request is submitted. Raises RequestError."""
        prepared = threading.Event()
        self._core.prepare(request, self._check(request), prepared.set)
        prepared.wait()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        arrival_s = time.monotonic()
        shared = self._check(request)
        choices = request.sampling.n
        with self._lock:
            self._require_alive()
            with self._counting:
                waiting = self._core.scheduler.num_new + self._queued
            check_room(choices, waiting, self._config.max_waiting)
            self._sinks.open(request, sink)
            if not self._is_busy:
                self._last_step_s = arrival_s
            self._count_queued(choices)
            self._preparing[request.request_id] = (request, arrival_s)
        try:
            self._core.prepare(request, shared, lambda: self._enqueue(request, shared))
        except BaseException:
            with self._lock:
                if self._preparing.pop(request.request_id, None) is not None:
                    self._count_queued(-choices)
                    self._sinks.discard(request.request_id)
            raise

    def _count_queued(self, change: int) -> None:
        with self._counting:
            self._queued += change

    def _check(self, request: GenerateRequest) -> RequestConstraints | None:
        """Refuse at once what can never be served; return the constraints that the request's choices share."""
        check_request(request, self.info)
        return self._core.check(request)

    def _enqueue(self, request: GenerateRequest, shared: RequestConstraints | None) -> None:
        """Put a prepared request in the inbox, unless it was aborted meanwhile."""
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
                self._count_queued(-waiting[0].sampling.n)
                self._inbox.append(lambda: self._deliver(self._core.abort_unqueued(*waiting)))
            self._lock.notify()

    def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        self.info  # noqa: B018  raises before start
        assembly = self._assembly
        matrices = assembly.read_adapter(name, folder, replace=replace)  # here, so that no step waits for the disk

        def put() -> None:
            scheduler = self._core.scheduler
            slot = assembly.put_adapter(name, matrices, scheduler.adapters_in_use(), replace=replace)
            scheduler.forget_adapter(slot)

        self._between_steps(put)

    def unload_adapter(self, name: str) -> None:
        self.info  # noqa: B018  raises before start
        self._between_steps(lambda: self._assembly.adapters.remove(name))

    def _between_steps(self, change: Callable[[], None]) -> None:
        """Let the engine thread change the adapters, wait, and raise what that raised."""
        done: Future[None] = Future()

        def act() -> None:
            try:
                change()
            except AdaServeError as error:
                done.set_exception(error)
            else:
                assert self._info is not None
                self._info = replace(self._info, adapters=self._assembly.adapters.names)
                done.set_result(None)

        with self._lock:
            self._require_alive()
            self._calls.add(done)
            self._inbox.append(act)
            self._lock.notify()
        try:
            done.result()
        finally:
            self._calls.discard(done)

    def stats(self) -> EngineStats:
        if self._info is None:
            return EngineStats(StepStats())
        assembly = self._assembly
        with self._counting:
            queued, steps = self._queued, self._core.scheduler.stats
        return EngineStats(
            scheduler=replace(
                steps, waiting=steps.waiting + queued, waiting_new=steps.waiting_new + queued, preparing=queued
            ),
            compiles_after_ready=assembly.executor.compiles_after_ready,
            step_age_s=time.monotonic() - self._last_step_s if self._is_busy else 0.0,
            learning=LearningStats() if assembly.learner is None else assembly.learner.stats(),
            drafter=None if assembly.drafting is None else assembly.drafting.drafter.stats(),
        )

    @property
    def _is_busy(self) -> bool:
        """True if a step is due."""
        return bool(self._inbox) or self._core.has_work

    def is_alive(self) -> bool:
        return self._info is not None and self._error is None and not self._stopping

    def _require_alive(self) -> None:
        if not self.is_alive():
            error = self._error or EngineDeadError("the engine is not running; build and start a new one")
            raise error.with_traceback(None)

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
            self._core.deliver_rest()
            self._core.deliver_rest()
        except BaseException as cause:  # a panic of native code is no Exception
            _log.exception("the engine stopped")
            error = EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}")
        self._end(error)

    def _take_inbox(self) -> bool:
        """Wait until there is work, and do what clients asked for since the last step; return False to stop."""
        with self._lock:
            while not (self._inbox or self._stopping or self._core.has_work):
                if self._core.is_idle:
                    self._lock.wait(self._core.idle_for_s)
                else:
                    more = self._core.work_while_idle()  # holds the lock, so that no other thread moves the draft
                    self._lock.wait(YIELD_S if more else IDLE_POLL_S)
            actions, self._inbox = self._inbox, deque()
            stopping = self._stopping
            self._last_step_s = time.monotonic()  # idle time does not count into the age of the last step
        for action in actions:
            action()
        return not stopping

    def _add(self, request: GenerateRequest, arrival_s: float, shared: RequestConstraints | None) -> None:
        try:
            with self._counting:  # so that `max_waiting` counts the request at every moment, and once
                try:
                    with contained("parameters"):
                        self._core.add(request, arrival_s, shared, self._draft_of(request))
                finally:
                    self._queued -= request.sampling.n
        except AdaServeError as error:
            self._sinks.fail(request.request_id, str(error), error.code, error.param)
        else:
            router = self._assembly.router
            if router is not None and request.draft_tag and request.learn:
                router.learn(request.draft_tag, request.prompt_ids, request.tenant)  # from accepted requests only

    def _draft_of(self, request: GenerateRequest) -> int:
        """Return the index of the draft that speculates for the request; the router learns nothing from it yet."""
        router = self._assembly.router
        if router is None:
            return 0
        if request.draft_tag:
            return router.index(request.draft_tag)
        # A step waits for this: decode no more of a long prompt than the router reads (a token has >= 1 character).
        last = request.prompt_ids[-MAX_PROMPT_CHARS:] if router.needs_text else []
        return router.route(request.prompt_ids, self._assembly.tokenizer.decode(last))

    def _deliver(self, chunks: list[OutputChunk]) -> None:
        for request_id in self._sinks.deliver(chunks):
            self._sinks.deliver(self._core.abort(request_id))

    def _end(self, error: EngineDeadError) -> None:
        """Refuse new requests and end the open ones. Leaves the core alone: its state may be broken."""
        with self._lock:
            self._error = error
            self._preparing.clear()
            calls = list(self._calls)
        for call in calls:
            if not call.done():
                call.set_exception(error)
        self._sinks.fail_all(str(error), error.code, error.param)
