"""How anything talks to an engine: the messages, and the client protocol of the thread mode and the process mode.

Imports no jax and none of the server's packages; the messages are plain dataclasses, so that msgspec can carry them
between processes and tests can build them by hand.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from adaserve_jax.errors import QueueFullError, RequestError
from adaserve_jax.models.config import GenerationDefaults
from adaserve_jax.scheduler.queue import due_s
from adaserve_jax.stats import DrafterStats, LearningStats, StepStats, counter, gauge
from adaserve_jax.types import SLO, FinishReason, RequestMetrics, SamplingParams, TokenLogprob

MAX_SALT_CHARS = 256
MAX_TAG_CHARS = 64


@dataclass(frozen=True)
class GenerateRequest:
    """One user request, tokenised. Its `sampling.n` choices run as n independent requests with choice index 0..n-1.

    request_id must be unique among requests in flight. cache_salt: cached KV is shared with requests of the same salt
    only. learn: whether drafts may learn from the text. tenant: on whose behalf, as far as learning must not follow one
    client alone. draft_tag: the name of the draft to use; "": the engine chooses.
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


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """New text of one choice. The last chunk of a choice, and only it, has a finish_reason, and metrics unless the
    choice was refused before it began, or lost with its engine.

    text never ends inside a character and never shows part of a stop string. finish_reason "error" comes with
    `error`, a message for the user, and `error_code` and `error_param` as of AdaServeError when one was raised.
    logprobs: one per token id where the request asked for them, else none.
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


def check_salt(salt: object) -> None:
    """Raise RequestError unless `salt` is a text of bounded length."""
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARS:
        got = f"{len(salt)} characters" if isinstance(salt, str) else repr(salt)
        raise RequestError(
            f"cache_salt must be a text of at most {MAX_SALT_CHARS} characters, got {got}",
            param="cache_salt",
            code="invalid_value",
        )


def check_prompt(
    prompt_tokens: int, max_context: int, *, max_tokens: int = 1, kv_tokens: int | None = None, param: str = "prompt"
) -> None:
    """Raise RequestError unless a prompt can be served, whatever else runs.

    Args:
        prompt_tokens: Tokens of the prompt.
        max_context: Most tokens of prompt and output together; the prompt must leave room for one token.
        max_tokens: Most output tokens that the request asks for.
        kv_tokens: Tokens that the KV pool holds; None where it is not known.
        param: Request field that holds the prompt.
    """
    if prompt_tokens == 0:
        raise RequestError("prompt must have at least one token, got none", param="prompt", code="empty_prompt")
    if prompt_tokens >= max_context:
        raise RequestError(
            f"prompt must leave room for one token in a context of {max_context}, got {prompt_tokens} tokens; "
            "shorten it",
            param=param,
            code="context_length_exceeded",
        )
    total = min(prompt_tokens + max_tokens, max_context)
    if kv_tokens is not None and total > kv_tokens:
        raise RequestError(
            f"prompt and max_tokens must fit the KV cache of {kv_tokens} tokens, got {prompt_tokens} + "
            f"{total - prompt_tokens}; shorten the prompt or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )


@dataclass(frozen=True)
class EngineInfo:
    """What a ready engine is. baseline_s: measured seconds of one token, alone, without speculation. defaults: sampling
    that the target's makers ask for. draft: its name or folder, "remote" where draft services are asked, None without a
    draft. drafts: what `draft_tag` may be."""

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

    def check_prompt(self, prompt_tokens: int, param: str = "prompt") -> None:
        """Raise RequestError unless a prompt has a token and leaves room for one; param: the field that holds it."""
        check_prompt(prompt_tokens, self.max_context, param=param)

    def due_s(self, arrival_s: float, priority: int, ttft_slo_s: float | None) -> float:
        """Return the time by which the scheduler's `deadline` order sorts waiting requests; lower is served sooner."""
        return due_s(arrival_s, priority, ttft_slo_s)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for metrics and health.

    step_age_s: seconds since the last completed step, 0 when idle. restarts: how often an engine that ended was
    replaced. back_in_s: while it is being replaced, about how many seconds that still takes; else None. drafter: of the
    draft services that are asked; None where none is.
    """

    scheduler: StepStats
    compiles_after_ready: int = counter("compiles_after_ready", "Compilations since ready; anything but 0 is a bug.")
    step_age_s: float = gauge("step_age_seconds", "Seconds since the last completed step; 0 when idle.", default=0.0)
    restarts: int = counter("engine_restarts", "Engine processes that ended and were replaced.")
    back_in_s: float | None = None
    learning: LearningStats = field(default_factory=LearningStats)
    drafter: DrafterStats | None = None

    def ended(self) -> EngineStats:
        """The counts of an engine that is gone."""
        drafter = None if self.drafter is None else self.drafter.ended()
        return replace(self, scheduler=self.scheduler.ended(), learning=self.learning.ended(), drafter=drafter)

    def after(self, earlier: EngineStats) -> EngineStats:
        """The counts of this engine and of those before it; what is as of now is this engine's."""
        drafter = self.drafter or earlier.drafter
        if self.drafter is not None and earlier.drafter is not None:
            drafter = self.drafter.after(earlier.drafter)
        return replace(
            self, scheduler=self.scheduler.after(earlier.scheduler), learning=self.learning.after(earlier.learning),
            compiles_after_ready=self.compiles_after_ready + earlier.compiles_after_ready, drafter=drafter,
        )  # fmt: skip


Sink = Callable[[OutputChunk], None]


class EngineClient(Protocol):
    """Thread-safe handle of one engine. Sinks are called from an engine thread, never after their last chunk."""

    @property
    def info(self) -> EngineInfo:
        """Raises EngineDeadError before `start` returned."""
        ...

    def start(self) -> None:
        """Load, compile, get ready; returns when requests can be served. Raises what loading raised."""
        ...

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request. Raises RequestError (cannot ever be served), QueueFullError, EngineDeadError; what takes
        long to find out, as of a JSON schema, comes in last chunks without metrics instead."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; its choices end with finish_reason "abort". Unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats:
        """Never raises: zeros before `start`, the last numbers after the engine's end."""
        ...

    def is_alive(self) -> bool: ...

    def close(self) -> None:
        """Stop the engine; requests in flight end with finish_reason "error"."""
        ...


# Who gets the chunks of which request. Safe in any thread; sinks are called without a lock held.

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Open:
    """A request some of whose choices, `left`, have not ended."""

    sink: Sink
    left: set[int]
    failed: bool = False


class Sinks:
    """Those of open requests: from `open` until all choices have ended. One thread at a time delivers, or fails, so
    that each sink gets its chunks in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, request_id: str, sink: Sink, choices: int) -> None:
        with self._lock:
            self._open[request_id] = _Open(sink, set(range(choices)))

    def deliver(self, chunks: Iterable[OutputChunk]) -> list[str]:
        """Hand each chunk to its request's sink, unless its choice has ended or is nobody's. Returns the requests whose
        sink failed at one: it gets nothing more, and the request is open until its choices have ended."""
        known: list[tuple[_Open, OutputChunk]] = []
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
            if not request.failed and not _call(request.sink, chunk):
                request.failed = True
                failed.append(chunk.request_id)
        return failed

    def fail(self, request_id: str, message: str, code: str | None, param: str | None) -> None:
        """End what is left of a request with finish_reason "error": it was refused before it began, or lost with its
        engine."""
        with self._lock:
            request = self._open.get(request_id)
            left = [] if request is None else sorted(request.left)
        self.deliver([OutputChunk(request_id, choice, "", [], "error", None, message, code, param) for choice in left])

    def fail_all(self, message: str, code: str | None, param: str | None) -> None:
        with self._lock:
            request_ids = list(self._open)
        for request_id in request_ids:
            self.fail(request_id, message, code, param)


def _call(sink: Sink, chunk: OutputChunk) -> bool:
    """Whether the sink took the chunk. A client's failing sink costs its own request only."""
    try:
        sink(chunk)
    except Exception:
        _log.exception("the sink of request %s raised; the request is stopped", chunk.request_id)
        return False
    return True


# What is refused before a request is queued, by whoever sees it first. Imports no jax.


def check_room(choices: int, waiting: int, max_waiting: int) -> None:
    """Raise RequestError when so many choices can never wait, QueueFullError when they cannot now."""
    if choices > max_waiting:
        raise RequestError(
            f"n must be at most {max_waiting}, the requests that may wait, got {choices}; lower n or raise max_waiting",
            param="n",
            code="invalid_value",
        )
    if waiting + choices > max_waiting:
        raise QueueFullError(f"{waiting} requests wait and at most {max_waiting} may; retry in a moment")


def check_ids(ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Raise RequestError unless every id is one of the model's. param: the field that holds them."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param}: token ids must be from 0 to {vocab_size - 1}, got {token}",
                param=param,
                code="invalid_value",
            )
