"""From a request body to what the engine takes: prompts to tokens, targets clamped and classed.

Raises RequestError and ApiError that name the field. Knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from hashlib import blake2b
from typing import cast

from adaserve_jax.errors import RequestError
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.protocol import CompletionBody, GenerationBody, Message
from adaserve_jax.server.settings import DEFAULT_CLASS, ServerSettings
from adaserve_jax.server.state import TextCodec
from adaserve_jax.types import SLO

LONG_TEXT = 8192
_CLASS_OF_TIER = {"auto": DEFAULT_CLASS, "default": DEFAULT_CLASS, "priority": "interactive", "flex": "batch"}


def check_supported(body: GenerationBody) -> None:
    """Refuse fields that ask for something this server does not do."""
    name = body.unsupported_field()
    if name is not None:
        what = type(body).model_fields[name].description or ""
        raise invalid(f"{name} is {what[:1].lower()}{what[1:]}", name, "unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options must be left out unless stream is true", "stream_options")


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts one by one; none is empty."""
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


def chat_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages with plain text contents; "developer" is today's name of "system"."""
    return [{"role": _role(m.role), "content": _content(m, i)} for i, m in enumerate(messages)]


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _content(message: Message, index: int) -> str:
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            got = f"of type {part.type!r}" if part.type != "text" else "without a text"
            raise invalid(
                f"messages[{index}].content must hold parts of type text, got a part {got}",
                "messages",
                "unsupported_content",
            )
    return "".join(part.text or "" for part in message.content)


async def encode(tokenizer: TextCodec, prompt: str | list[int], vocab_size: int) -> list[int]:
    """Token ids of one prompt; a long text is tokenised off the event loop. Raises RequestError."""
    if isinstance(prompt, str):
        if len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(tokenizer.encode, prompt)
        return tokenizer.encode(prompt)
    check_ids(prompt, vocab_size, "prompt")
    return prompt


async def encode_chat(tokenizer: TextCodec, messages: list[Message]) -> list[int]:
    """Token ids of a conversation. Raises RequestError."""
    plain = chat_messages(messages)
    if sum(len(m["content"]) for m in plain) > LONG_TEXT:
        return await asyncio.to_thread(tokenizer.apply_chat_template, plain)
    return tokenizer.apply_chat_template(plain)


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raises RequestError unless every id is one of the model's."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param} must hold token ids from 0 to {vocab_size - 1}, got {token}",
                param=param,
                code="invalid_value",
            )


def salt_of(body: GenerationBody, settings: ServerSettings) -> str:
    """What separates this request's cached KV from others': the salt that it brings, under the key that it came with.
    Those that share both share pages, and can tell from `cached_tokens` what others sent."""
    salt = body.cache_salt or ""
    if settings.api_key is None:
        return salt
    key = blake2b(settings.api_key.encode()).digest()
    return blake2b(salt.encode(), key=key, digest_size=16).hexdigest()


def slo_of(
    body: GenerationBody, settings: ServerSettings, classes: Mapping[str, SLO], baseline_s: float
) -> tuple[SLO, str]:
    """The targets in force and the class: the body's own, else those of its class, each within the limits.

    baseline_s: seconds, what `slo_relative` multiplies. Raises RequestError(code="invalid_slo").
    """
    name = body.slo_class
    if name is None and body.service_tier is not None:
        name = _CLASS_OF_TIER.get(body.service_tier, body.service_tier)
    name = DEFAULT_CLASS if name is None else name
    if name not in classes:
        param = "slo_class" if body.slo_class is not None else "service_tier"
        known = ", ".join(sorted(classes))
        raise RequestError(f"{param} must be one of {known}, got {name!r}", param=param, code="invalid_slo")
    own, default = SLO(body.slo_tpot_ms, body.slo_ttft_ms, body.slo_relative), classes[name]
    tpot_ms, relative, ttft_ms = own.tpot_ms, own.relative, own.ttft_ms
    if tpot_ms is None and relative is None:
        tpot_ms = default.tpot_ms
    if ttft_ms is None:
        ttft_ms = default.ttft_ms
    low, high = settings.min_slo_tpot_ms, settings.max_slo_tpot_ms
    if relative is not None and not low <= relative * baseline_s * 1e3 <= high:
        tpot_ms, relative = relative * baseline_s * 1e3, None
    return SLO(
        _clamp(tpot_ms, low, high), _clamp(ttft_ms, settings.min_slo_ttft_ms, settings.max_slo_ttft_ms), relative
    ), name


def _clamp(value: float | None, low: float, high: float) -> float | None:
    return None if value is None else min(max(value, low), high)
