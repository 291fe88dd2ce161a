"""Turn the messages of a conversation, and the tools that it may call, into the tokens of a prompt.

A chat template that knows tools gets tools, calls and results as transformers documents them. For one that does not,
they are written into the texts of ordinary messages (`_plain`).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from adaserve_jax.constraints.tool_formats import ToolFormat
from adaserve_jax.models.chat_prompt import ChatPrompt
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.json_size import excess
from adaserve_jax.server.parse import run_sized
from adaserve_jax.server.schema import ChatBody, Message, TokenizeBody, Tool
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import TextCodec

NEWER_ROLES = {"developer": "system"}
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_ARGUMENTS = 16_384
"""Most values in the arguments of an earlier call."""
_KNOWS_TOOLS = re.compile(r"\{[{%](?:(?!\{[{%])[^}])*?\btools\b")
"""A tag that names tools; the search ends at the next tag, or it would go to the end of the text from each of them."""
_RESERVED = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip
"""Names that the template's own library takes; as a variable of a client, each could change how it runs."""
Turn = dict[str, Any]


def chat_prompt(body: ChatBody | TokenizeBody, settings: ServerSettings) -> ChatPrompt:
    """Return the options of the chat template. Raises ApiError and RequestError."""
    if body.chat_template is not None and not settings.trust_request_chat_template:
        raise invalid(
            "chat_template must be left out: this server runs without --trust-request-chat-template",
            "chat_template",
            "unsupported_parameter",
        )
    open_end = body.continue_final_message is True
    if open_end and body.add_generation_prompt:
        raise invalid(
            "add_generation_prompt must be false or left out where continue_final_message is true",
            "add_generation_prompt",
        )
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED or not name.isidentifier():
            raise invalid(
                f"chat_template_kwargs must hold variables of the template, got {name[:40]!r}", "chat_template_kwargs"
            )
    given = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
    variables |= {name: value for name, value in given.items() if value is not None}
    if body.reasoning_effort == "none":
        variables.setdefault("enable_thinking", False)  # what templates that can answer without thinking call it
    ends = not open_end if body.add_generation_prompt is None else body.add_generation_prompt
    special = body.add_special_tokens is True
    return ChatPrompt(ends, open_end, special, variables, body.chat_template, asked_s=time.monotonic())


async def encode_chat(
    tokenizer: TextCodec, messages: list[Message], form: ToolFormat, tools: Sequence[Tool], prompt: ChatPrompt,
    template_threads: Executor,
) -> list[int]:  # fmt: skip
    """Return the token ids of a conversation.

    form: how calls are written where the chat template knows no tools. template_threads: threads that wait for a
    client's template, so that other long inputs need not.

    Raises RequestError and ApiError.
    """
    shown = [_shown(tool) for tool in tools]

    def encoded() -> list[int]:
        turns, told = [_turn(message, index) for index, message in enumerate(messages)], shown
        if not _KNOWS_TOOLS.search(tokenizer.chat_template if prompt.template is None else prompt.template):
            turns, told = _plain(turns, shown, form), []
        return tokenizer.apply_chat_template(turns, replace(prompt, tools=told))

    if prompt.template is None:
        return await run_sized(sum(map(_length, messages)) + _size([shown, prompt.variables]), encoded)
    return await asyncio.get_running_loop().run_in_executor(template_threads, encoded)


def _size(value: Any) -> int:
    """Return the characters of all texts in a JSON value, and one for each other value, however deep it is nested."""
    size, left = 0, [value]
    while left:
        one = left.pop()
        size += len(one) if isinstance(one, str) else 1
        if isinstance(one, dict | list):
            left += [*one, *one.values()] if isinstance(one, dict) else one
    return size


def _length(message: Message) -> int:
    """Return the characters of a message, and one for each of its parts."""
    parts = [message.content] if isinstance(message.content, str) else [part.text for part in message.content or ()]
    texts = [*parts, message.name, message.reasoning_content, message.reasoning]
    texts += [call.function.arguments for call in message.tool_calls or ()]
    return sum(1 + len(text or "") for text in texts)


def _turn(message: Message, index: int) -> Turn:
    """Return a message as chat templates take it. Raises ApiError."""
    turn: Turn = {"role": NEWER_ROLES.get(message.role, message.role), "content": content_of(message, index)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        if message.role != "assistant":
            where = f"messages[{index}].tool_calls"
            raise invalid(f"{where} must be left out unless the role is assistant, got {message.role}", "messages")
        turn["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"messages[{index}].tool_calls[{place}]"),
                },
            }
            for place, call in enumerate(message.tool_calls)
        ]
    if thought := message.reasoning_content or message.reasoning:
        if message.role != "assistant":
            where = f"messages[{index}].reasoning_content"
            raise invalid(f"{where} must be left out unless the role is assistant, got {message.role}", "messages")
        turn["reasoning_content"] = thought
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id or ""
    return turn


def content_of(message: Message, index: int) -> str:
    """Return the text of a message. Raises ApiError."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise invalid(
            f"messages[{index}].content must be given unless the role is assistant, got null", "messages",
            "missing_field",
        )  # fmt: skip
    for part in message.content:
        if part.type not in TEXT_PARTS or part.text is None:
            got = f"of type {part.type!r}" if part.type not in TEXT_PARTS else "without a text"
            raise invalid(
                f"messages[{index}].content must hold parts of type text, got a part {got}",
                "messages",
                "unsupported_content",
            )
    return "\n".join(part.text or "" for part in message.content)  # like vLLM


def _arguments(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of an earlier call; templates write them again.

    Returns none for a text that is no object in JSON, such as a call that was cut at its limit: a conversation must be
    able to go on behind it. Raises ApiError: too many values.
    """
    if what := excess(text.encode(), MAX_ARGUMENTS, MAX_ARGUMENTS):
        raise invalid(f"{where}.function.arguments must hold at most {what}", "messages", "too_many_values")
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _shown(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates take it: name, description, parameters, the order that models were trained on."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def _spelled(value: dict[str, Any]) -> str:
    """Return the JSON of a value with its letters as they are: models are not trained on their escapes."""
    return json.dumps(value, ensure_ascii=False)


def _plain(turns: list[Turn], tools: list[dict[str, Any]], form: ToolFormat) -> list[Turn]:
    """Return a conversation without tools that says the same in its texts.

    Tools are listed at the end of the first system message; calls stand in the assistant's text as it would write them;
    results are messages of the user.
    """
    plain: list[Turn] = []
    for turn in turns:
        text, role = turn["content"], turn["role"]
        kept = {key: turn[key] for key in ("name", "reasoning_content") if key in turn and role != "tool"}
        if calls := turn.get("tool_calls"):
            bodies = [(call["function"]["name"], _spelled(call["function"]["arguments"])) for call in calls]
            text = f"{text}\n{form.write(bodies)}" if text else form.write(bodies)
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        plain.append({"role": role, "content": text, **kept})
    if tools:
        listed = "\n".join(_spelled(tool["function"]) for tool in tools)
        told = (
            f"You can call these functions:\n{listed}\nTo call one, answer with its name and its arguments as JSON:\n"
            + form.write([("NAME", "{...}")])
        )
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}
        else:
            plain.insert(0, {"role": "system", "content": told})
    return plain
