"""LocalEngine: the engine in a thread of this process, behind the `EngineClient` protocol.

For tests, notebooks, offline work, and as what the engine process runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax

from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.constraints.shared import Shared
from adaserve_jax.distill.languages import MOST_CHARS
from adaserve_jax.distill.learner import Learner
from adaserve_jax.engine import drafting
from adaserve_jax.engine.admission import check_ids, check_room
from adaserve_jax.engine.baseline import measure_baseline
from adaserve_jax.engine.calibration_file import CalibrationFile
from adaserve_jax.engine.client import EngineInfo, EngineStats, GenerateRequest, OutputChunk, Sink, failed_chunks
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.engine.learning import build_learner, build_router, learning_bytes
from adaserve_jax.errors import AdaServeError, CheckpointError, ConfigError, EngineDeadError, RequestError
from adaserve_jax.models.generation_defaults import GenerationDefaults
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.identity import device_name
from adaserve_jax.scheduler.calibration import Calibrator
from adaserve_jax.scheduler.policy_names import policy_of
from adaserve_jax.scheduler.scheduler import build_scheduler
from adaserve_jax.stats import LearningStats, StepStats
from adaserve_jax.types import Executor, Progress

_log = logging.getLogger(__name__)
REST_S = 0.01
"""Seconds between two looks at a draft that comes back while nobody asks for anything."""
YIELD_S = 0.0005
"""Seconds between two pieces of training then, in which whoever waits for the lock gets it."""
REMOTE = "remote"
"""What `EngineInfo.draft` says where draft services are asked."""
Observe = Callable[[Executor], Executor]


class LocalEngine:
    """Implements `EngineClient`. `start` loads and compiles in the calling thread, then runs steps in its own."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None, observe: Observe | None = None):
        """observe: what the steps run on instead of the executor, made from it; it sees what they do."""
        self._config = config
        self._progress = progress
        self._observe = observe
        self._lock = threading.Condition()  # guards the inbox, the sinks and the flags
        self._inbox: deque[Callable[[], None]] = deque()
        self._sinks: dict[str, tuple[Sink, set[int]]] = {}
        self._preparing: dict[str, tuple[GenerateRequest, float]] = {}  # and when they came; on their way to the inbox
        self._queued = 0  # choices of these and of the inbox, not yet seen by the scheduler
        self._stopping = False
        self._error: EngineDeadError | None = None
        self._thread: threading.Thread | None = None
        self._info: EngineInfo | None = None
        self._drafting: drafting.Drafting | None = None
        self._last_step_s = time.monotonic()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine is not ready: call start() and wait for it to return")
        return self._info

    @property
    def executor(self) -> ModelExecutor:
        """The executor, for benchmarks and tests; only while the engine is idle."""
        self.info  # noqa: B018  raises before start
        return self._executor

    @property
    def calibrator(self) -> Calibrator | None:
        """What verifications taught, whatever the policy was; None without a draft. Only while the engine is idle."""
        self.info  # noqa: B018  raises before start
        return self._calibrator

    @property
    def learner(self) -> Learner | None:
        """What learns from the texts, for benchmarks and tests; None where nothing does."""
        self.info  # noqa: B018  raises before start
        return self._learner

    @property
    def config(self) -> EngineConfig:
        """The configuration in force, without "auto"."""
        return self.executor.resolved.config

    def start(self) -> None:
        if self._info is not None or self._stopping:
            raise EngineDeadError("an engine starts once; build a new LocalEngine instead")
        config = self._config
        policy = policy_of(config)  # before minutes of compiling
        if config.drafter is not None:
            drafting.check_packages()
            drafting.check_files(config.drafter)
        room = {"training_bytes": learning_bytes(config)} if config.learning is not None else {}
        self._executor = load_executor(config, self._progress, swaps=policy.elastic, **room)
        try:
            self._get_ready()
        except BaseException:
            self._close_executor()
            raise
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def _get_ready(self) -> None:
        self._tokenizer = Tokenizer.from_folder(self._executor.target_folder)
        self._samples = self._executor.warm_up(self._progress)
        config = self._executor.resolved.config
        chances = self._executor.chances
        self._calibrator = None if chances is None else Calibrator(chances, learn=config.calibrate)
        self._calibration_file = CalibrationFile.of(config, self._calibrator)
        if config.drafter is not None and chances is not None:
            self._drafting = found = drafting.connect_drafter(
                config.drafter, chances, self._tokenizer, self._samples, self._executor.limits,
                self._executor.target.config.vocab_size,
            )  # fmt: skip
            self._executor.drafter, self._samples = found.drafter, found.samples
        self._baseline_s = measure_baseline(self._executor, config, self._samples, self._tokenizer)
        self._eos_ids = (*self._executor.target.config.eos_token_ids, *self._tokenizer.eos_token_ids)
        self._grammars, self._no_grammars = self._load_grammars()
        self._router = build_router(config, self._executor, self._tokenizer)
        self._learner = build_learner(self._executor, config, self._calibrator, self._router, self._progress)
        self._core = self._build_core(config)
        self._info = self._describe(config)

    def _load_grammars(self) -> tuple[Grammars | None, str]:
        """What holds texts to schemas, or else why nothing does."""
        try:
            return Grammars(self._tokenizer, self._executor.target.config.vocab_size, self._eos_ids), ""
        except (CheckpointError, ConfigError) as error:
            return None, str(error)

    def _build_core(self, config: EngineConfig) -> EngineCore:
        found = self._drafting
        scheduler = build_scheduler(config, self._executor.limits, self._samples, self._calibrator)
        executor = self._executor if self._observe is None else self._observe(self._executor)
        return EngineCore(
            executor, scheduler, self._tokenizer,
            eos_ids=self._eos_ids, baseline_s=self._baseline_s, seed=config.seed, constraints=self._constraints(config),
            learner=self._learner, remote=None if found is None else found.drafter,
        )  # fmt: skip

    def _constraints(self, config: EngineConfig) -> Constraints:
        """What requests may ask of the logits."""
        refusal = ""
        if config.num_processes > 1:
            refusal = "an engine of several processes (num_processes) does not edit logits"
        vocab_size = self._executor.target.config.vocab_size
        return Constraints(vocab_size, self._tokenizer, self._grammars, self._no_grammars, refusal=refusal)

    def _describe(self, config: EngineConfig) -> EngineInfo:
        return EngineInfo(
            target=config.target,
            draft=config.draft if config.drafter is None else REMOTE,
            policy=config.policy,
            device=device_name(config.tp),
            jax_version=jax.__version__,
            max_context=config.max_context,
            max_requests=config.max_requests,
            vocab_size=self._executor.target.config.vocab_size,
            baseline_s=self._baseline_s,
            deterministic=config.deterministic,
            defaults=GenerationDefaults.from_folder(self._executor.target_folder),
            drafts=config.draft_names,
        )

    def set_policy(self, policy: str) -> None:
        """Serve with another policy from now on, without compiling. Raises ConfigError unless the engine is idle,
        SwapError when the draft's memory is KV pages and it cannot be brought back."""
        config = replace(self.config, policy=policy)
        with self._lock:
            if self._sinks:  # without any, the inbox holds at most aborts of requests that have ended
                raise ConfigError(f"set_policy({policy!r}) needs an idle engine; {len(self._sinks)} requests are open")
            self._core.settle()
            self._core = self._build_core(config)
            self._info = self._describe(config)

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
            self._sinks[request.request_id] = (sink, set(range(choices)))
            self._queued += choices
            self._preparing[request.request_id] = (request, arrival_s)
        self._core.prepare(request, shared, lambda: self._enqueue(request, shared))

    def _check(self, request: GenerateRequest) -> Shared | None:
        """What the request's choices have in common. Raises at once what no waiting can change."""
        check_ids(request.prompt_ids, self.info.vocab_size)
        if request.draft_tag and self._router is None:
            has = "has no draft" if self._drafting is None else "asks a draft service, which has one draft"
            raise RequestError(
                f"draft_tag must be absent: this engine {has}; got {request.draft_tag!r}", param="draft_tag"
            )
        if request.draft_tag and self._router is not None:
            self._router.index(request.draft_tag)
        return self._core.check(request)

    def _enqueue(self, request: GenerateRequest, shared: Shared | None) -> None:
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
        busy, live = self._is_busy, self._core.scheduler.stats
        return EngineStats(
            scheduler=live,
            compiles_after_ready=self._executor.compiles_after_ready,
            step_age_s=time.monotonic() - self._last_step_s if busy else 0.0,
            learning=LearningStats() if self._learner is None else self._learner.stats(),
            drafter=None if self._drafting is None else self._drafting.drafter.stats(),
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
        if self._calibration_file is not None:
            self._calibration_file.save()
        if self._learner is not None:
            self._learner.close()
        self._close_executor()

    def _close_executor(self) -> None:
        if self._drafting is not None:
            self._drafting.drafter.close()
        self._executor.close()

    # ---- the engine thread ----

    def _run(self) -> None:
        error = EngineDeadError("the engine was closed")
        try:
            while self._take_inbox():
                if self._core.has_work:
                    self._take_draft_times()
                    self._deliver(self._core.step())
                    if not self._inbox:
                        self._core.learn()
                    if self._calibration_file is not None:
                        self._calibration_file.save_if_due()
        except BaseException as cause:  # a panic of native code is no Exception
            _log.exception("the engine stopped")
            error = EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}")
        self._end(error)

    def _take_draft_times(self) -> None:
        """Where drafting is planned by a guess: by a service's own times, once one has answered."""
        if self._drafting is None or not self._drafting.guessed:
            return
        found = drafting.answered(self._drafting, self._executor.limits)
        if found is not None:
            self._drafting, self._samples = found, found.samples
            self._core.scheduler.retime_draft(found.samples)

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

    def _add(self, request: GenerateRequest, arrival_s: float, shared: Shared | None) -> None:
        with self._lock:
            self._queued -= request.sampling.n
        try:
            self._core.add(request, arrival_s, shared, self._draft_of(request))
        except AdaServeError as error:
            self._deliver(_failed(request.request_id, range(request.sampling.n), error))
        else:
            if self._router is not None and request.draft_tag:
                self._router.route(request)  # which learns of a tag what its topic is: not from who was refused

    def _draft_of(self, request: GenerateRequest) -> int:
        """The index of the draft that is to speculate for it. Nothing is learned from the request yet."""
        if self._router is None:
            return 0
        if request.draft_tag:
            return self._router.index(request.draft_tag)
        # a step waits for this, so no more of a long prompt than is looked at, where a token is a character at least
        last = request.prompt_ids[-MOST_CHARS:] if self._router.needs_text else []
        return self._router.route(request, self._tokenizer.decode(last))

    def _deliver(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            with self._lock:
                sink, left = self._sinks.get(chunk.request_id, (None, set()))
                if chunk.finish_reason is not None:
                    left.discard(chunk.choice)
                    if not left:
                        self._sinks.pop(chunk.request_id, None)
            if sink is not None and not _call(sink, chunk):
                with self._lock:
                    self._sinks.pop(chunk.request_id, None)
                self._core.abort(chunk.request_id)

    def _end(self, error: EngineDeadError) -> None:
        """Refuse all that comes, and tell every open sink; the core, whose state may be broken, is left alone."""
        with self._lock:
            self._error = error
            sinks, self._sinks = self._sinks, {}
            self._preparing.clear()
        for request_id, (sink, choices) in sinks.items():
            for chunk in _failed(request_id, choices, error):
                _call(sink, chunk)


def _call(sink: Sink, chunk: OutputChunk) -> bool:
    """Whether the sink took the chunk. A client's failing sink costs its own request only."""
    try:
        sink(chunk)
    except Exception:
        _log.exception("a sink failed on a chunk of request %s", chunk.request_id)
        return False
    return True


def _failed(request_id: str, choices: Iterable[int], error: AdaServeError) -> list[OutputChunk]:
    return failed_chunks(request_id, choices, str(error), error.code, error.param)
