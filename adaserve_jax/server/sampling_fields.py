"""From a request body to how its tokens are drawn: every sampling field, in the API's names and units.

Raises RequestError and ApiError that name the field. Knows no engine, no tokenizer and no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adaserve_jax.errors import RequestError
from adaserve_jax.scheduler.fit import check_prompt
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.protocol import ChatBody, CompletionBody, GenerationBody, ResponseFormat
from adaserve_jax.types import SamplingParams

MAX_SHOWN = 40
ALL_THERE_IS = 2**31 - 1
"""max_tokens until it is known how much fits behind the prompt."""
ANY_OBJECT = '{"type": "object"}'
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words",
)  # fmt: skip


def sampling_of(body: GenerationBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters, before max_tokens is known to fit. defaults: of the model, for what the body leaves out.
    Raises RequestError naming the field."""
    given: dict[str, Any] = dict(defaults) | {
        name: getattr(body, name) for name in _FIELDS if getattr(body, name) is not None
    }
    if given.get("top_k") == -1:
        given["top_k"] = 0
    given["logit_bias"] = _biases(body.logit_bias or {})
    given["logprobs"], logprobs_name = _logprobs(body)
    given["json_schema"] = _json_schema(body.response_format)
    limit, limit_name = _max_tokens(body)
    if limit is not None:
        given["max_tokens"] = limit
    elif isinstance(body, ChatBody):
        given["max_tokens"] = ALL_THERE_IS
    names = {"max_tokens": limit_name, "logprobs": logprobs_name}
    try:
        return SamplingParams(**given)
    except RequestError as error:
        name = names.get(error.param or "")
        if name is None or name == error.param:
            raise
        raise RequestError(str(error).replace(str(error.param), name, 1), param=name, code=error.code) from None


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Biases by token id. Raises ApiError: a key is no id."""
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(
                f"logit_bias must have token ids as its keys, like '464', got {key[:MAX_SHOWN]!r}", "logit_bias"
            )
    return {int(key): bias for key, bias in given.items()}


def _logprobs(body: GenerationBody) -> tuple[int | None, str]:
    """How many of the likeliest tokens to report, None: report nothing, and the field that says so."""
    if isinstance(body, CompletionBody):
        if body.echo and body.logprobs is not None:
            raise invalid(
                "logprobs together with echo is not implemented: the prompt's tokens have none; leave one of them out",
                "logprobs",
                "unsupported_parameter",
            )
        return body.logprobs, "logprobs"
    assert isinstance(body, ChatBody)
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs must be left out unless logprobs is true", "top_logprobs")
        return None, "top_logprobs"
    return body.top_logprobs or 0, "top_logprobs"


def _json_schema(wanted: ResponseFormat | None) -> str | None:
    """The schema that the output must fit, as JSON; None: any text. Raises ApiError."""
    if wanted is not None and (wanted.json_schema is None) == (wanted.type == "json_schema"):
        raise invalid(
            'response_format.json_schema must be given when its type is "json_schema", and only then',
            "response_format",
        )
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return ANY_OBJECT
    try:
        text = json.dumps(wanted.json_schema.schema_, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
        return text
    except UnicodeEncodeError:
        raise invalid(
            "response_format.json_schema.schema must be valid Unicode, got half of a surrogate pair",
            "response_format",
            "invalid_text",
        ) from None
    except (ValueError, RecursionError):
        raise invalid(
            "response_format.json_schema.schema must be JSON, not nested too deeply and without NaN or infinity",
            "response_format",
        ) from None


def _max_tokens(body: GenerationBody) -> tuple[int | None, str]:
    """The limit that the body asks for and the field that holds it."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def within_context(
    body: GenerationBody, sampling: SamplingParams, prompt_tokens: int, max_context: int
) -> SamplingParams:
    """Sampling parameters whose max_tokens fits behind the prompt.

    A limit that the body asks for must fit; the default (16 for completions, all there is for chat) is cut to fit,
    as far as min_tokens allows. Raises RequestError(code="context_length_exceeded").
    """
    is_chat = isinstance(body, ChatBody)
    check_prompt(prompt_tokens, max_context, "messages" if is_chat else "prompt")
    room = max_context - prompt_tokens
    asked, name = _max_tokens(body)
    if asked is None and sampling.min_tokens > room:
        asked, name = sampling.min_tokens, "min_tokens"
    if asked is not None and asked > room:
        raise RequestError(
            f"the model's context holds {max_context} tokens, got a prompt of {prompt_tokens} and {name} {asked}; "
            f"lower {name}",
            param=name,
            code="context_length_exceeded",
        )
    if asked is not None:
        return sampling
    return replace(sampling, max_tokens=room if is_chat else min(sampling.max_tokens, room))
