"""Turn a request body into the engine's terms: prompt tokens, sampling parameters, targets and priority.

Errors are RequestError and ApiError that name the field.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from starlette.datastructures import Headers

from adaserve_jax.engine.client import CONTEXT_IS, EngineInfo, check_ids, check_prompt
from adaserve_jax.errors import RequestError
from adaserve_jax.sampling import is_finite, require
from adaserve_jax.server.constraint_fields import ANY_OBJECT, constraints_of, json_text
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.prompt_logprobs import PromptReport, is_prompt_only
from adaserve_jax.server.schema import MIN_SEED, ChatBody, CompletionBody, GenerationBody, ResponseFormat
from adaserve_jax.server.settings import DEFAULT_CLASS, KeySettings, ServerSettings, SloClass
from adaserve_jax.server.state import TextCodec
from adaserve_jax.types import SLO, SamplingParams

LONG_TEXT = 8192
"""Characters or tokens of one HTTP request above which they are rendered, tokenised, decoded or written in a thread
instead of on the event loop. Each log probability of the output counts as one."""
MAX_SHOWN = 40
OUTPUT_SHARE = 0.25
"""Most of the context that a prompt which is cut to fit leaves for the output; less where less is asked."""
MAX_TOKENS_UNSET = 2**31 - 1
"""Value of max_tokens until the prompt's length is known."""
TARGET_HEADERS = {
    "slo_tpot_ms": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "slo_ttft_ms": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "slo_e2e_ms": ("x-llm-d-slo-e2e-ms", "x-slo-e2e-ms"),
}
"""Headers in which gateways send targets, by field of the body: the current name and the older one."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_TRANSLATED = {"max_tokens", "prompt_logprobs", "logit_bias", "allowed_token_ids", "json_schema", "regex"}
_SAMPLING_FIELDS = ({each.name for each in fields(SamplingParams)} & set(GenerationBody.model_fields)) - _TRANSLATED
"""Fields that a body and SamplingParams share in one form."""
T = TypeVar("T")
AnyBody = TypeVar("AnyBody", bound=GenerationBody)


def check_supported(body: GenerationBody) -> None:
    """Raise ApiError for fields that ask for something this server does not implement."""
    name = body.refused_field()
    if name is not None:
        what = type(body).model_fields[name].description or ""
        raise invalid(f"{name} is {what[:1].lower()}{what[1:]}", name, "unsupported_parameter")
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        raise invalid("stream_options must be left out unless stream is true", "stream_options")


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts one by one. Raises ApiError for an empty one."""
    prompt = body.prompt
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
    prompts = cast("list[str | list[int]]", [prompt] if single else prompt)
    for index, one in enumerate(prompts):
        if not one:
            where = "prompt" if single else f"prompt[{index}]"
            raise invalid(f"{where} must not be empty", "prompt", "empty_prompt")
    if not prompts:
        raise invalid("prompt must not be empty, got an empty list", "prompt", "empty_prompt")
    return prompts


async def run_sized(size: int, work: Callable[[], T]) -> T:
    """Run `work`, in a thread when its input is longer than LONG_TEXT; return or raise what it does."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


async def encode(
    tokenizer: TextCodec, prompts: Sequence[str | list[int]], vocab_size: int, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each prompt. Raises RequestError."""

    def encoded(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special_tokens)
        check_ids(prompt, vocab_size)
        return prompt

    return await run_sized(sum(map(len, prompts)), lambda: [encoded(prompt) for prompt in prompts])


def check_rows(prompts: Sequence[list[int]], tokenizer: TextCodec, vocab_size: int, param: str) -> None:
    """Raise RequestError, naming the token, if a prompt has one of the tokenizer's that the model has no row for."""
    for token in map(max, filter(None, prompts)):
        if token >= vocab_size:
            spelled = tokenizer.spelled(token)
            text = spelled if isinstance(spelled, str) else spelled.decode(errors="replace")
            raise RequestError(
                f"{param} must hold tokens of the model, whose ids are from 0 to {vocab_size - 1}, got "
                f"{text[:MAX_SHOWN]!r} ({token}), which only its tokenizer has; leave it out",
                param=param,
                code="invalid_value",
            )


def truncated(body: GenerationBody, ids: list[int], info: EngineInfo, *, to_fit: bool = False) -> list[int]:
    """Return the tokens of a prompt that truncate_prompt_tokens keeps. Raises ApiError.

    to_fit: without it, keep all that leaves the output its share of the context.
    """
    most = body.truncate_prompt_tokens
    if most is None and not to_fit:
        return ids
    if most is None:
        context = info.max_sequence_tokens
        share = max(1, min(asked_tokens(body)[0] or context, int(context * OUTPUT_SHARE)), body.min_tokens or 0)
        most = max(1, context - share)
    elif most != -1 and most < 1:
        raise invalid(f"truncate_prompt_tokens must be -1 or above 0, got {most}", "truncate_prompt_tokens")
    elif most == -1:
        asked = asked_tokens(body)[0] or (1 if isinstance(body, ChatBody) else SamplingParams.max_tokens)
        most = max(1, info.max_sequence_tokens - max(asked, body.min_tokens or 0))
    return ids[:most] if body.truncation_side == "right" else ids[-most:]


def sampling_of(body: GenerationBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters; `fit_context` must still fit max_tokens to the prompt.

    defaults: the model's, for fields that the body leaves out. Raises RequestError and ApiError.
    """
    given: dict[str, Any] = dict(defaults) | {
        name: getattr(body, name) for name in _SAMPLING_FIELDS if getattr(body, name) is not None
    }
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if given.get("top_p") == 0:  # the smallest nucleus is the likeliest token
        given |= {"top_p": 1.0, "top_k": 1}
    if MIN_SEED <= given.get("seed", 0) < 0:
        given["seed"] = None if given["seed"] == -1 else given["seed"] % 2**64
    given["logit_bias"] = _biases(body.logit_bias or {})
    given["logprobs"], logprobs_name = _logprobs(body)
    given["prompt_logprobs"] = PromptReport.of(body).top
    form, names_of_form = constraints_of(body, _json_schema(body.response_format))
    given |= form
    limit, limit_name = asked_tokens(body)
    if limit is not None:
        given["max_tokens"] = 1 if is_prompt_only(body) else limit  # the token is drawn and not shown
    elif isinstance(body, ChatBody):
        given["max_tokens"] = MAX_TOKENS_UNSET
    names = {"max_tokens": limit_name, "logprobs": logprobs_name} | names_of_form
    try:
        return SamplingParams(**given)
    except RequestError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        raise invalid(str(error).replace(str(error.param), name, 1), name, error.code) from None


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return the biases by token id. Raises ApiError for a key that is no id."""
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(
                f"logit_bias must have token ids as its keys, like '464', got {key[:MAX_SHOWN]!r}", "logit_bias"
            )
    return {int(key): bias for key, bias in given.items()}


def _logprobs(body: GenerationBody) -> tuple[int | None, str]:
    """Return how many likeliest tokens to report (None: no log probabilities) and the field that asks for it."""
    if isinstance(body, CompletionBody):
        return body.logprobs, "logprobs"
    assert isinstance(body, ChatBody)
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs must be left out unless logprobs is true", "top_logprobs")
        return None, "top_logprobs"
    return body.top_logprobs or 0, "top_logprobs"


def _json_schema(wanted: ResponseFormat | None) -> str | None:
    """Return the schema that the output must fit, as JSON; None: any text. Raises ApiError."""
    if wanted is not None and (wanted.json_schema is None) == (wanted.type == "json_schema"):
        raise invalid(
            'response_format.json_schema must be given when its type is "json_schema", and only then',
            "response_format",
        )
    if wanted is not None and wanted.schema_ is not None and wanted.type != "json_object":
        raise invalid(
            'response_format.schema must be left out unless its type is "json_object"; give json_schema.schema',
            "response_format",
        )
    if wanted is None or wanted.type == "text":
        return None
    if wanted.schema_ is not None:
        return json_text("response_format.schema", wanted.schema_)
    if wanted.json_schema is None:
        return ANY_OBJECT
    return json_text("response_format.json_schema.schema", wanted.json_schema.schema_)


def asked_tokens(body: GenerationBody) -> tuple[int | None, str]:
    """Return the limit that the body asks for and the field that holds it."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def fit_context(
    body: GenerationBody, sampling: SamplingParams, prompt_tokens: int, info: EngineInfo, *, to_fit: bool = False
) -> SamplingParams:
    """Return sampling parameters whose max_tokens fits behind the prompt.

    The default (16 for completions, all room for chat) and a limit that the body asks for are cut to fit, as far as
    min_tokens allows. A limit that fits behind no prompt is refused, unless `to_fit`.

    Raises RequestError(code="context_length_exceeded").
    """
    most = info.max_sequence_tokens
    check_prompt(prompt_tokens, most, "messages" if isinstance(body, ChatBody) else "prompt")
    room = most - prompt_tokens
    asked, name = asked_tokens(body)
    wrong = asked is not None and asked > most and not to_fit
    if sampling.min_tokens > room:
        asked, name, wrong = sampling.min_tokens, "min_tokens", True
    if wrong:
        holder = "" if most == info.max_context else " in this server's KV cache"
        raise RequestError(
            f"{CONTEXT_IS} {most} tokens{holder}, got a prompt of {prompt_tokens} and {name} {asked}; lower {name}",
            param=name,
            code="context_length_exceeded",
        )
    return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)


@dataclass(frozen=True)
class RequestTargets:
    """Targets, class name and priority (lower is sooner) of a request, within all limits.

    max_queue_s: longest wait to begin; 0: the server's.
    """

    slo: SLO
    slo_class: str
    priority: int
    max_queue_s: float


def targets_of(
    body: GenerationBody,
    settings: ServerSettings,
    classes: Mapping[str, SloClass],
    baseline_s: float,
    limits: KeySettings | None = None,
    *,
    thinks: bool = False,
) -> RequestTargets:
    """Return the request's own targets, else its class's, within the limits of server and key.

    baseline_s: seconds that `slo_relative` multiplies. limits: those of the request's API key. thinks: the output may
    think, so that its class's target of thinking applies. Raises RequestError(code="invalid_slo").
    """
    default = _class_of(body, settings, classes, limits)
    thinking_ms = body.slo_thinking_tpot_ms if isinstance(body, ChatBody) else None
    own = SLO(body.slo_tpot_ms, body.slo_ttft_ms, body.slo_relative, thinking_ms, body.slo_e2e_ms)
    if thinks and thinking_ms is None:
        thinking_ms = default.thinking_tpot_ms
    tpot_ms, relative, ttft_ms = own.tpot_ms, own.relative, own.ttft_ms
    if tpot_ms is None and relative is None:
        tpot_ms = default.tpot_ms
    if ttft_ms is None:
        ttft_ms = default.ttft_ms
    low, high = settings.min_slo_tpot_ms, settings.max_slo_tpot_ms
    ttft_low = settings.min_slo_ttft_ms
    if limits is not None:
        low, ttft_low = max(low, limits.min_slo_tpot_ms), max(ttft_low, limits.min_slo_ttft_ms)
    if relative is not None and not low <= relative * baseline_s * 1e3 <= high:
        tpot_ms, relative = relative * baseline_s * 1e3, None
    ttft_ms = _clamp(ttft_ms, ttft_low, settings.max_slo_ttft_ms)
    e2e_ms = _clamp(default.e2e_ms if own.e2e_ms is None else own.e2e_ms, ttft_low, math.inf)
    slo = SLO(_clamp(tpot_ms, low, high), ttft_ms, relative, _clamp(thinking_ms, low, high), e2e_ms)
    priority = default.priority if body.priority is None else body.priority
    if limits is not None and limits.min_priority is not None:
        priority = max(priority, limits.min_priority)
    max_queue_ms = default.max_queue_ms if body.max_queue_ms is None else body.max_queue_ms
    if max_queue_ms is not None:
        require(is_finite(max_queue_ms) and max_queue_ms > 0, "max_queue_ms", "a finite number above 0", max_queue_ms)
    return RequestTargets(slo, default.name, priority, (max_queue_ms or 0.0) / 1e3)


def _class_of(
    body: GenerationBody, settings: ServerSettings, classes: Mapping[str, SloClass], limits: KeySettings | None
) -> SloClass:
    name = body.slo_class
    if name is None and body.service_tier is not None:
        name = settings.tiers().get(body.service_tier, body.service_tier)
    allowed = sorted(classes)
    if limits is not None and limits.slo_classes:
        allowed = list(limits.slo_classes)
        if body.slo_class is None and name in (None, DEFAULT_CLASS):
            name = allowed[0]
    name = DEFAULT_CLASS if name is None else name
    if name not in allowed:
        param, got, named = "slo_class", body.slo_class, allowed
        if got is None:
            tiers = [tier for tier, meant in settings.tiers().items() if meant in allowed]
            param, got, named = "service_tier", body.service_tier, [*allowed, *sorted(set(tiers) - set(allowed))]
        raise RequestError(f"{param} must be one of {', '.join(named)}, got {got!r}", param=param, code="invalid_slo")
    return classes[name]


def _clamp(value: float | None, low: float, high: float) -> float | None:
    """Return `value` within the limits; `low` wins where a key's minimum is above the server's maximum."""
    return None if value is None else max(min(value, high), low)


def with_header_targets(body: AnyBody, headers: Headers, *, trusted: bool) -> tuple[AnyBody, str]:
    """Return the body with targets of a trusted gateway's headers where it has none of that kind, and a warning or "".

    Raises ApiError(code="invalid_slo") for a header that is no target, even where the body has its own.
    """
    named = [name for names in TARGET_HEADERS.values() for name in names if name in headers]
    if not trusted:
        return body, f"ignored headers of an untrusted gateway: {', '.join(named)}" if named else ""
    own_tpot = body.slo_tpot_ms is not None or body.slo_relative is not None
    own = {
        "slo_tpot_ms": own_tpot, "slo_ttft_ms": body.slo_ttft_ms is not None, "slo_e2e_ms": body.slo_e2e_ms is not None,
    }  # fmt: skip
    found = {
        field: next((value for value in [_target(headers, name) for name in names] if value is not None), None)
        for field, names in TARGET_HEADERS.items()
    }
    update = {field: value for field, value in found.items() if value is not None and not own[field]}
    return body.model_copy(update=update), ""


def _target(headers: Headers, name: str) -> float | None:
    """Return the milliseconds that a header asks for; None without the header. Raises ApiError."""
    values = headers.getlist(name)
    if not values:
        return None
    if len(values) > 1:
        raise invalid(f"the header {name} must be given once, got {len(values)} of them", name, "invalid_slo")
    try:
        return SLO(tpot_ms=float(values[0])).tpot_ms
    except (ValueError, RequestError):
        got = repr(values[0][:MAX_SHOWN])
        raise invalid(f"the header {name} must be a finite number above 0, got {got}", name, "invalid_slo") from None
