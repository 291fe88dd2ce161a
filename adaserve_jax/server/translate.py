"""From a request body to what the engine takes: prompts to tokens.

Raises RequestError and ApiError that name the field. Knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from adaserve_jax.engine.admission import check_ids
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.protocol import CompletionBody, GenerationBody, Message
from adaserve_jax.server.state import TextCodec

LONG_TEXT = 8192
"""Characters or tokens, of one HTTP request together, above which work on them leaves the event loop to others."""
T = TypeVar("T")


def check_supported(body: GenerationBody) -> None:
    """Refuse fields that ask for something this server does not do."""
    name = body.unsupported_field()
    if name is not None:
        what = type(body).model_fields[name].description or ""
        raise invalid(f"{name} is {what[:1].lower()}{what[1:]}", name, "unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options must be left out unless stream is true", "stream_options")


def check_draft_tag(body: GenerationBody, drafts: Sequence[str]) -> str:
    """The draft that a request asks for, "" where it leaves the choice to the engine. Raises ApiError unless it is one
    of `drafts`."""
    tag = body.draft_tag or ""
    if tag and tag not in drafts:
        what = f"one of the drafts {', '.join(drafts)}" if drafts else "left out: the model is served without a draft"
        raise invalid(f"draft_tag must be {what}; got {tag!r}", "draft_tag")
    return tag


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


async def apart(size: int, work: Callable[[], T]) -> T:
    """What `work` returns or raises, done off the event loop when it is about more than LONG_TEXT."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


async def encode(tokenizer: TextCodec, prompts: Sequence[str | list[int]], vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt; where these are long together, off the event loop. Raises RequestError."""
    size = sum(map(len, prompts))
    return await apart(size, lambda: [_encoded(tokenizer, prompt, vocab_size) for prompt in prompts])


def _encoded(tokenizer: TextCodec, prompt: str | list[int], vocab_size: int) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    check_ids(prompt, vocab_size)
    return prompt


async def encode_chat(tokenizer: TextCodec, messages: list[Message]) -> list[int]:
    """Token ids of a conversation. Raises RequestError."""
    plain = chat_messages(messages)
    return await apart(sum(len(m["content"]) for m in plain), lambda: tokenizer.apply_chat_template(plain))
