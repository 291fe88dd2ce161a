"""LLM: the Python API over an engine in this process."""

# pyright: reportUnnecessaryIsInstance=false
# Arguments of users are checked at run time, whatever their type says.
from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar, cast

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineInfo, EngineStats, GenerateRequest, OutputChunk
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import EngineDeadError, RequestError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.sampling import require
from adaserve_jax.types import SLO, Progress, SamplingParams, TokenLogprob

Prompt = str | Sequence[int]
OPEN_PER_SLOT = 4
"""Choices of one `generate` call that are open at once, per slot of the engine: enough to keep every slot busy."""
_T = TypeVar("_T")


@dataclass
class Completion:
    """One choice.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop string or the id of `stop_token_ids` that ended the text; None: an EOS token or none did.
        logprobs: one per token if the sampling parameters ask for them, else empty.
        prompt_logprobs: one per token of the prompt but the first, if they ask for them, else empty.
        error: message; set with finish_reason "error".
        error_code: short form of it, such as "no_token_allowed".
        reasoning: what was thought before the text, with `SamplingParams.thinking`.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    metrics: RequestMetrics | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    error: str | None = None
    error_code: str | None = None
    reasoning: str = ""
    stop_reason: int | str | None = None


@dataclass
class GenerateOutput:
    """Result for one prompt. The properties read the first choice; `n` in the sampling parameters asks for more."""

    prompt_token_ids: list[int]
    choices: list[Completion]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def metrics(self) -> RequestMetrics:
        """Metrics of the first choice, such as ttft_s, tpot_s, accepted_tokens and slo_met."""
        metrics = self.choices[0].metrics
        assert metrics is not None
        return metrics


class LLM:
    """A target and a draft model, ready to generate. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        target: str = "demo",
        draft: str | None = "auto",
        policy: str = "adaserve",
        *,
        deterministic: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """Load and compile the models: seconds to minutes the first time, less with a warm cache.

        Args:
            target: "demo" or a checkpoint folder.
            draft: "demo", a checkpoint folder, or None to draft from text already seen alone. "auto": "demo" for a
                target with its tokenizer, else None.
            policy: scheduling policy.
            deterministic: make texts independent of what else runs.
            progress: progress(what, done, total), called while models load and compile.
            **options: other fields of `EngineConfig`.

        Raises:
            CheckpointError: a checkpoint cannot be used.
            ConfigError: an option is unknown or out of range.
        """
        config = EngineConfig(target=target, draft=draft, policy=policy, deterministic=deterministic, **options)
        engine = LocalEngine(config, progress)
        engine.start()
        self._use(engine)

    @classmethod
    def over(cls, engine: LocalEngine) -> LLM:
        """Wrap an engine that has started; `close` closes it."""
        llm = cls.__new__(cls)
        llm._use(engine)
        return llm

    def _use(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.tokenizer = engine.assembly.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def set_policy(self, policy: str) -> None:
        """Change the scheduling policy while no request is open, without compiling."""
        self._engine.set_policy(policy)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | Sequence[SLO] | None = None,
        cache_salt: str | Sequence[str] = "",
        learn: bool | Sequence[bool] = True,
        draft_tag: str | Sequence[str] = "",
        adapter: str | Sequence[str] = "",
    ) -> list[GenerateOutput]:
        """Complete all prompts together and return the outputs in order.

        Every argument but `prompts` is one value for all prompts, or a list with one per prompt. A choice that no token
        may continue ends with finish_reason "error"; the others go on.

        Args:
            prompts: texts or lists of token ids.
            sampling_params: default: those of the target's generation_config.json.
            slo: latency targets.
            cache_salt: prompts share cached KV only if their salts are equal.
            learn: whether drafts may learn from the text, and it may be kept to draft from.
            draft_tag: name of the draft to use; "": the engine chooses.
            adapter: name of a loaded LoRA adapter; "": the model alone.

        Raises:
            RequestError: a prompt cannot be served; the other prompts are aborted.
            EngineDeadError: the engine stopped.
        """
        requests = self._requests(prompts, sampling_params, slo, cache_salt, learn, draft_tag, adapter)
        outputs = [GenerateOutput(r.prompt_ids, [Completion() for _ in range(r.sampling.n)]) for r in requests]
        collector = _Collector(dict(zip((r.request_id for r in requests), outputs, strict=True)))
        config = self._engine.config
        most_open = min(OPEN_PER_SLOT * config.max_requests, config.max_waiting)
        submitted: list[str] = []
        try:
            for request in requests:
                self._raise_error(collector.wait(request.sampling.n, most_open))
                if request.sampling.grammar_source is not None:
                    self._engine.prepare(request)
                self._engine.submit(request, collector)
                submitted.append(request.request_id)
            self._raise_error(collector.wait())
        except BaseException:
            for request_id in submitted:
                self._engine.abort(request_id)
            raise
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        cache_salt: str = "",
        learn: bool = True,
        draft_tag: str = "",
        adapter: str = "",
    ) -> Iterator[OutputChunk]:
        """Complete one prompt and yield chunks as steps emit them; leaving the loop early aborts the request.

        The arguments are those of `generate`. A choice that no token may continue ends with finish_reason "error"; its
        error is raised once the others have ended too.

        Raises:
            RequestError: the prompt cannot be served, or a choice ended with an error.
            EngineDeadError: the engine stopped.
        """
        (request,) = self._requests([prompt], sampling_params, slo, cache_salt, learn, draft_tag, adapter)
        chunks: queue.SimpleQueue[OutputChunk] = queue.SimpleQueue()
        self._engine.submit(request, chunks.put)
        left, failed = request.sampling.n, None
        try:
            while left:
                chunk = chunks.get()
                if _is_refusal(chunk):
                    self._raise_error(chunk)
                left -= chunk.finish_reason is not None
                failed = failed or (None if chunk.error is None else chunk)
                yield chunk
            self._raise_error(failed)
        finally:
            if left:
                self._engine.abort(request.request_id)

    def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter of the target from a folder in PEFT's format, while requests run.

        Args:
            name: what `adapter` may be afterwards.
            folder: holds adapter_config.json and adapter_model.safetensors.
            replace: an adapter may have the name already; requests that began with it end with it.

        Raises:
            CheckpointError: the folder holds no adapter of this model.
            RequestError: the name is no name or is taken, or all `max_loras` have their room.
        """
        self._engine.load_adapter(name, folder, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that began with it end with it. Raises RequestError: it is not loaded."""
        self._engine.unload_adapter(name)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        slo: SLO | Sequence[SLO] | None,
        cache_salt: str | Sequence[str],
        learn: bool | Sequence[bool],
        draft_tag: str | Sequence[str],
        adapter: str | Sequence[str],
    ) -> list[GenerateRequest]:
        many = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.info.defaults.sampling_params()
        sampling = _one_each(sampling_params, len(many), "sampling_params")
        slos = _one_each(SLO() if slo is None else slo, len(many), "slo")
        for each in sampling:
            require(isinstance(each, SamplingParams), "sampling_params", "SamplingParams", each)
        for each in slos:
            require(isinstance(each, SLO), "slo", "an SLO, such as SLO(tpot_ms=40)", each, "invalid_slo")
        salts = _one_each(cache_salt, len(many), "cache_salt")
        learns, tags = _one_each(learn, len(many), "learn"), _one_each(draft_tag, len(many), "draft_tag")
        adapters = _one_each(adapter, len(many), "adapter")
        return [
            GenerateRequest(
                uuid.uuid4().hex, self._prompt_ids(prompt), one_sampling, one_slo, cache_salt=salt, learn=may_learn,
                draft_tag=tag, adapter=name,
            )
            for prompt, one_sampling, one_slo, salt, may_learn, tag, name in zip(
                many, sampling, slos, salts, learns, tags, adapters, strict=True
            )
        ]  # fmt: skip

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not _are_token_ids(prompt):
            raise RequestError(f"prompt must be a text or a list of token ids, got {prompt!r:.200}", param="prompt")
        return [int(token) for token in prompt]

    def _raise_error(self, chunk: OutputChunk | None) -> None:
        """Raise the error of a failed request's chunk: EngineDeadError if the engine died, else RequestError."""
        if chunk is None or chunk.error is None:
            return
        if not self._engine.is_alive():
            raise EngineDeadError(chunk.error)
        raise RequestError(chunk.error, param=chunk.error_param, code=chunk.error_code or "invalid_request")


class _Collector:
    """Sink that assembles the outputs of many requests; the engine's thread calls it."""

    def __init__(self, outputs: dict[str, GenerateOutput]):
        self._outputs = outputs
        self._open = 0  # choices that are submitted, or about to be, and have not ended
        self._failed: OutputChunk | None = None
        self._changed = threading.Condition()

    def __call__(self, chunk: OutputChunk) -> None:
        completion = self._outputs[chunk.request_id].choices[chunk.choice]
        completion.text += chunk.text
        completion.reasoning += chunk.reasoning
        completion.token_ids += chunk.token_ids
        completion.logprobs += chunk.logprobs
        completion.prompt_logprobs += chunk.prompt_logprobs
        if chunk.finish_reason is None:
            return
        completion.finish_reason, completion.metrics = chunk.finish_reason, chunk.metrics
        completion.error, completion.error_code = chunk.error, chunk.error_code
        completion.stop_reason = chunk.stop_reason
        with self._changed:
            self._open -= 1
            if _is_refusal(chunk) and self._failed is None:
                self._failed = chunk
            self._changed.notify_all()

    def wait(self, choices: int = 0, most_open: int = 0) -> OutputChunk | None:
        """Wait until `choices` more fit within `most_open` open choices, or none is open; then count them as open.

        So an offline batch of any size never fills the engine's queue. Without arguments, wait until all requests have
        ended. Return at once the last chunk of a refused request, if there is one.
        """

        def has_room() -> bool:
            return self._failed is not None or not self._open or self._open + choices <= most_open

        with self._changed:
            self._changed.wait_for(has_room)
            self._open += choices
            return self._failed


def _is_refusal(chunk: OutputChunk) -> bool:
    """Return whether a request was refused or lost with its engine, rather than one of its choices failed."""
    return chunk.error is not None and chunk.metrics is None


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be texts or lists of token ids, got {prompts!r}", param="prompt")
    listed: list[Any] = list(prompts)
    return [listed] if listed and _are_token_ids(listed) else listed


def _are_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, Iterable) and all(isinstance(token, Integral) for token in cast("Iterable[Any]", prompt))


def _one_each(value: _T | Sequence[_T], count: int, name: str) -> list[_T]:
    if not isinstance(value, (list, tuple)):
        return [cast("_T", value)] * count
    listed = cast("Sequence[_T]", value)
    if len(listed) != count:
        raise RequestError(f"{name} must be one for all or one per prompt ({count}), got {len(listed)}", param=name)
    return list(listed)
