"""Interface of every engine: requests, output chunks, statistics, the `EngineClient` protocol, and the checks that a
request passes where it enters. Plain dataclasses, which msgspec carries between processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from adaserve_jax.engine.adapters import NOT_FOUND, not_loaded
from adaserve_jax.errors import QueueFullError, RequestError
from adaserve_jax.models.config import GenerationDefaults
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.scheduler.queue import deadline_key_s
from adaserve_jax.stats import DrafterStats, LearningStats, StepStats, counter, gauge
from adaserve_jax.types import SLO, FinishReason, SamplingParams, TokenLogprob

MAX_SALT_CHARS = 256
MAX_TAG_CHARS = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerateRequest:
    """One tokenised user request. Its `sampling.n` choices run as n independent sequences.

    Attributes:
        request_id: unique among the requests in flight.
        cache_salt: cached KV is shared only with requests of the same salt.
        learn: whether drafts may learn from the text, and it may be kept to draft from.
        tenant: account that the request belongs to; learning is balanced between tenants, and service if
            `EngineConfig.fair_tenants` says so.
        draft_tag: name of the draft to use; "": the engine chooses.
        adapter: name of the adapter of the target; "": the model alone.
        max_wait_s: its choices end with the error "overloaded" if none of them has begun after so long; 0: they wait.
        max_queue_s: the same, with the error "queue_timeout".
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    slo: SLO = field(default_factory=SLO)
    priority: int = 0
    slo_class: str = "default"
    cache_salt: str = ""
    learn: bool = True
    tenant: str = ""
    draft_tag: str = ""
    max_wait_s: float = 0.0
    max_queue_s: float = 0.0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """New text of one choice. Only the last chunk of a choice has a finish_reason; it also has metrics, unless the
    choice was refused before it began or was lost with its engine.

    Attributes:
        text: never ends inside a character and never shows part of a stop string.
        stop_reason: the stop string or the id of `stop_token_ids` that ended the text; None: an EOS token or none did.
        reasoning: like text, of what was thought; reasoning_tokens: new tokens of it, without its marks. Only with
            `SamplingParams.thinking`.
        error: message for the user; set with finish_reason "error".
        error_code, error_param: `code` and `param` of the AdaServeError, if one was raised.
        logprobs: one per token id if the request asked for them, else empty.
        prompt_logprobs: the next ones of the prompt's tokens, from the second on, if the request asked for them. They
            come before the first token, in as many chunks as the prompt is computed in.
    """

    request_id: str
    choice: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    reasoning: str = ""
    reasoning_tokens: int = 0
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class EngineInfo:
    """Facts about a ready engine.

    Attributes:
        draft: name or folder of the draft, "remote" with draft services, None without a draft.
        baseline_s: measured seconds per token of one request alone, without speculation.
        defaults: sampling parameters of the target's generation_config.json.
        drafts: valid values of `draft_tag`.
        kv_tokens: tokens that all KV pages hold together; None: the context is the only limit.
        draft_vocabulary: how the target's tokens are mapped to the draft's, and what share of them; "" if vocabularies
            are the same.
        adapters: names of the adapters that are loaded; valid values of `GenerateRequest.adapter`.
        lora_slots: adapters that may be loaded at once; 0: none.
        synthetic_acceptance: chances by depth by which drafted tokens are accepted, as text; None: by comparison. The
            text is then not the target's.
    """

    target: str
    draft: str | None
    policy: str
    device: str
    jax_version: str
    max_context: int
    max_requests: int
    vocab_size: int
    baseline_s: float
    deterministic: bool = False
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    drafts: tuple[str, ...] = ()
    kv_tokens: int | None = None
    draft_vocabulary: str = ""
    adapters: tuple[str, ...] = ()
    lora_slots: int = 0
    synthetic_acceptance: str | None = None

    @property
    def max_sequence_tokens(self) -> int:
        """Return the most tokens of prompt and output together: of the context, or of all KV pages if fewer."""
        return self.max_context if self.kv_tokens is None else min(self.max_context, self.kv_tokens)

    def deadline_key_s(self, arrival_s: float, priority: int, patience_s: float | None) -> float:
        """Return the time by which the scheduler's `deadline` order sorts waiting requests; lower is served sooner.

        Under a policy of another order, predicted waits are wrong by the difference between the two orders.
        patience_s: seconds to the TTFT target or the deadline; before a deadline the scheduler also leaves the time
        that the output takes, so that it serves such a request sooner than this says.
        """
        return deadline_key_s(arrival_s, priority, patience_s)


@dataclass(frozen=True)
class Crash:
    """End of an engine that was not asked for."""

    why: str
    unix_s: float


@dataclass(frozen=True)
class EngineStats:
    """Snapshot of an engine for metrics and health checks.

    Attributes:
        step_age_s: seconds since the last completed step, 0 when idle.
        restarts: how often an engine that ended was started again, counted when it ended.
        last_crash: the last unwanted end of an engine; None: there was none.
        back_in_s: estimated seconds until a replacement is ready; None unless one is being started.
        drafter: statistics of the draft services; None without any.
    """

    scheduler: StepStats
    compiles_after_ready: int = counter("compiles_after_ready", "Compilations since ready; anything but 0 is a bug.")
    step_age_s: float = gauge("step_age_seconds", "Seconds since the last completed step; 0 when idle.", default=0.0)
    restarts: int = counter("engine_restarts", "Restarts of the engine, counted when they begin.")
    back_in_s: float | None = None
    last_crash: Crash | None = None
    learning: LearningStats = field(default_factory=LearningStats)
    drafter: DrafterStats | None = None

    def ended(self) -> EngineStats:
        """Return the statistics to show after the engine has gone: counts stay, gauges are zero."""
        drafter = None if self.drafter is None else self.drafter.ended()
        return replace(self, scheduler=self.scheduler.ended(), learning=self.learning.ended(), drafter=drafter)

    def after(self, earlier: EngineStats) -> EngineStats:
        """Add the counts of the engines before this one; gauges stay this engine's."""
        drafter = self.drafter or earlier.drafter
        if self.drafter is not None and earlier.drafter is not None:
            drafter = self.drafter.after(earlier.drafter)
        return replace(
            self, scheduler=self.scheduler.after(earlier.scheduler), learning=self.learning.after(earlier.learning),
            compiles_after_ready=self.compiles_after_ready + earlier.compiles_after_ready, drafter=drafter,
        )  # fmt: skip


Sink = Callable[[OutputChunk], None]


class EngineClient(Protocol):
    """Thread-safe handle of one engine. Sinks are called from an engine thread, and never after a request's last
    chunk."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine. Raises EngineDeadError before `start` has returned."""
        ...

    def start(self) -> None:
        """Load and compile; return when requests can be served. Raises what loading raised."""
        ...

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request.

        A refusal that takes long to find out (an invalid JSON schema) does not raise: each choice gets a last chunk
        with an error and without metrics.

        Raises:
            RequestError: the engine can never serve the request.
            QueueFullError: `max_waiting` choices that never ran wait already.
            EngineDeadError: the engine does not run.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; its choices end with finish_reason "abort". Unknown ids are ignored."""
        ...

    def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter of the target from a folder in PEFT's format; return when requests may name it.

        Running requests go on meanwhile. replace: an adapter may have the name already; requests that began with it end
        with it.

        Raises:
            CheckpointError: the folder holds no adapter of this model.
            RequestError: the name is no name or is taken, or there is no room.
            EngineDeadError: the engine does not run.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. New requests cannot name it from now on; those that began with it end with it, and its
        room is free once they have. Raises RequestError: it is not loaded; EngineDeadError: the engine does not run."""
        ...

    def stats(self) -> EngineStats:
        """Return zeros before `start` and the last numbers after the engine's end; never raises."""
        ...

    def is_alive(self) -> bool: ...

    def close(self) -> None:
        """Stop the engine; requests in flight end with finish_reason "error"."""
        ...


@dataclass(eq=False)
class _OpenRequest:
    """A request with its sink, and the choices that have not ended."""

    request: GenerateRequest
    sink: Sink
    left: set[int]
    failed: bool = False


class Sinks:
    """Sinks of the open requests: from `open` until all choices have ended.

    Methods are safe in any thread and call sinks without holding a lock. Only one thread at a time may deliver or fail,
    so that each sink gets its chunks in order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, request: GenerateRequest, sink: Sink) -> None:
        """Open a request. Raises RequestError if its id is in use."""
        request_id = request.request_id
        with self._lock:
            if request_id in self._open:
                raise RequestError(f"request_id {request_id!r} is in flight already", param="request_id")
            self._open[request_id] = _OpenRequest(request, sink, set(range(request.sampling.n)))

    def discard(self, request_id: str) -> None:
        """Forget an open request, whose sink gets nothing."""
        with self._lock:
            self._open.pop(request_id, None)

    def requests(self) -> list[GenerateRequest]:
        """Return the open requests."""
        with self._lock:
            return [each.request for each in self._open.values()]

    def deliver(self, chunks: Iterable[OutputChunk]) -> list[str]:
        """Hand each chunk to its request's sink; drop chunks of unknown requests and ended choices.

        Return the ids of requests whose sink raised. Such a sink gets nothing more, and its request stays open until
        its choices have ended.
        """
        known: list[tuple[_OpenRequest, OutputChunk]] = []
        with self._lock:  # once for a whole step
            for chunk in chunks:
                request = self._open.get(chunk.request_id)
                if request is None or chunk.choice not in request.left:
                    continue
                if chunk.finish_reason is not None:
                    request.left.discard(chunk.choice)
                    if not request.left:
                        del self._open[chunk.request_id]
                known.append((request, chunk))
        failed: list[str] = []
        for request, chunk in known:
            if request.failed:
                continue
            try:
                request.sink(chunk)
            except Exception:  # a failing sink costs its own request only
                _log.exception("the sink of request %s raised; the request is stopped", chunk.request_id)
                request.failed = True
                failed.append(chunk.request_id)
        return failed

    def fail(self, request_id: str, message: str, code: str | None, param: str | None) -> None:
        """End the open choices of a request, refused or lost with its engine, with finish_reason "error"."""
        with self._lock:
            request = self._open.get(request_id)
            left = [] if request is None else sorted(request.left)
        self.deliver([OutputChunk(request_id, choice, "", [], "error", None, message, code, param) for choice in left])

    def fail_all(self, message: str, code: str | None, param: str | None) -> None:
        with self._lock:
            request_ids = list(self._open)
        for request_id in request_ids:
            self.fail(request_id, message, code, param)


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise RequestError if an engine can never serve a request. Every `EngineClient.submit` calls this first."""
    check_ids(request.prompt_ids, info.vocab_size)
    _check_salt(request.cache_salt)
    _check_draft_tag(request.draft_tag, info)
    if request.adapter and request.adapter not in info.adapters:
        raise RequestError(not_loaded(request.adapter, info.adapters), param="model", code=NOT_FOUND)
    thinking_ms = request.slo.thinking_tpot_ms
    if thinking_ms is not None and request.sampling.thinking is None:
        raise RequestError(
            f"slo_thinking_tpot_ms must be absent from a request whose thinking has no marks, got {thinking_ms:g}; "
            "a server finds a model's marks by --reasoning-parser",
            param="slo_thinking_tpot_ms",
            code="unsupported_parameter",
        )
    if info.synthetic_acceptance is not None and (grammar := request.sampling.grammar_source) is not None:
        raise RequestError(
            f"{grammar[1]} must be absent: this engine accepts drafted tokens by synthetic acceptance, so that no text "
            "fits a grammar",
            param=grammar[1],
            code="unsupported_parameter",
        )
    prompt_tokens, most = len(request.prompt_ids), info.max_sequence_tokens
    check_prompt(prompt_tokens, most)
    output_tokens = min(request.sampling.max_tokens, info.max_context - prompt_tokens)
    if prompt_tokens + output_tokens > most:
        raise RequestError(
            f"prompt and max_tokens must fit the KV cache of {most} tokens, got {prompt_tokens} + "
            f"{output_tokens}; shorten the prompt or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )


CONTEXT_IS = "this model's maximum context length is"
"""Begins what is said of a prompt that is too long, by which clients such as litellm know that it is."""


def check_prompt(prompt_tokens: int, most: int, param: str = "prompt") -> None:
    """Raise RequestError, naming the field `param`, unless a prompt has a token and leaves room for one in `most`."""
    if prompt_tokens == 0:
        raise RequestError(f"{param} must have at least one token, got none", param=param, code="empty_prompt")
    if prompt_tokens >= most:
        raise RequestError(
            f"{CONTEXT_IS} {most} tokens, prompt and output together, got a prompt of {prompt_tokens}; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _check_draft_tag(tag: str, info: EngineInfo) -> None:
    if not tag or tag in info.drafts:
        return
    if info.drafts:
        raise RequestError(
            f"draft_tag must name one of the drafts: {', '.join(info.drafts)}; got {tag!r}",
            param="draft_tag",
            code="invalid_value",
        )
    has = "has no draft" if info.draft is None else "asks a draft service, which has one draft"
    raise RequestError(
        f"draft_tag must be absent: this engine {has}; got {tag!r}", param="draft_tag", code="invalid_value"
    )


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARS:
        got = f"{len(salt)} characters" if isinstance(salt, str) else repr(salt)
        raise RequestError(
            f"cache_salt must be a text of at most {MAX_SALT_CHARS} characters, got {got}",
            param="cache_salt",
            code="invalid_value",
        )


def check_room(choices: int, waiting: int, max_waiting: int) -> None:
    """Raise RequestError if a request's choices can never wait in the queue, QueueFullError if they cannot now."""
    if choices > max_waiting:
        raise RequestError(
            f"n must be at most {max_waiting}, the requests that may wait, got {choices}; lower n or raise max_waiting",
            param="n",
            code="invalid_value",
        )
    if waiting + choices > max_waiting:
        raise QueueFullError(f"{waiting} requests wait and at most {max_waiting} may; retry in a moment")


def check_ids(ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Raise RequestError, naming the field `param`, unless every id is in the model's vocabulary."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param}: token ids must be from 0 to {vocab_size - 1}, got {token}",
                param=param,
                code="invalid_value",
            )
