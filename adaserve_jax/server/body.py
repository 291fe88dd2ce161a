"""Refuse bodies that hold more than can be served, before they are validated, rendered or tokenised.

A body within `max_body_bytes` may still hold a million empty lists or a text that fills the context a hundred times.
Its JSON values are counted on the bytes; prompts, messages and characters are counted on the parsed object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute

from adaserve_jax.engine.client import CONTEXT_IS, check_prompt
from adaserve_jax.errors import RequestError
from adaserve_jax.sampling import MAX_ALLOWED_IDS
from adaserve_jax.server.errors import ApiError, invalid
from adaserve_jax.server.json_size import excess
from adaserve_jax.server.state import ServerState

MAX_VALUES = 2**18
"""Most values in the JSON of one body, or twice the tokens of a context if these are more."""
MAX_PARTS = 2**15
"""Most lists, objects and named members among them, or eight times the tokens of a context: they cost a parser about
ten times as much as numbers and texts in a list."""
MAX_MEMBERS = MAX_ALLOWED_IDS
"""Most members of a list or object other than the prompt, the messages and the tokens."""
LARGE_BYTES = 2**16
"""Bytes above which bodies are checked one at a time, so that events of streams are sent between them."""
_LONG_FIELDS = frozenset(("prompt", "messages", "input", "tokens"))


class BoundedRoute(APIRoute):
    """Route that refuses a body that is too much for the served model before FastAPI validates it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, turn = super().get_route_handler(), asyncio.Lock()

        async def bounded(request: Request) -> Response:
            state: ServerState = request.app.state.server
            if request.method == "POST" and state.phase != "starting":
                if len(await request.body()) > LARGE_BYTES:
                    async with turn:
                        await asyncio.sleep(0)  # lets events of streams go out between two of them
                        await _check(request, state)
                else:
                    await _check(request, state)
            return await handle(request)

        return bounded


async def _check(request: Request, state: ServerState) -> None:
    max_context = state.info.max_context
    check_values(await request.body(), max(MAX_VALUES, 2 * max_context), max(MAX_PARTS, 8 * max_context))
    try:
        found = await request.json()  # starlette keeps it for FastAPI
    except (ValueError, RecursionError):
        return  # FastAPI says what is wrong with it
    check_parts(found, max_context, state.settings.max_choices, state.longest_token)


def check_values(body: bytes, most: int, most_parts: int) -> None:
    """Raise ApiError for JSON of more than `most` values, or so many lists, objects and named members, counted without
    parsing it."""
    if b"\0" in body:  # as in UTF-16, whose bytes would be miscounted; JSON in UTF-8 has none
        raise ApiError(400, "the body must be JSON in UTF-8, got a NUL byte in it", code="invalid_json")
    if what := excess(body, most, most_parts):
        told = f"the body must hold at most {what}, got more; send several requests"
        raise ApiError(400, told, code="too_many_values")


def check_parts(body: object, max_context: int, max_choices: int, longest_token: int) -> None:
    """Raise ApiError or RequestError for a prompt or a conversation that no context of the model can hold.

    What has a wrong type is left to validation. longest_token: most bytes, and so characters, of one token.
    """
    if not isinstance(body, dict):
        return
    fields = cast("dict[str, Any]", body)
    prompt = fields.get("prompt")
    for name, value in fields.items():
        if name not in _LONG_FIELDS and isinstance(value, list | dict) and len(value) > MAX_MEMBERS:
            raise invalid(f"{name[:40]} must have at most {MAX_MEMBERS} members, got {len(value)}", name[:40])
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        prompt = [prompt]
    if isinstance(prompt, list) and len(prompt) > max_choices:
        raise invalid(f"prompts times n must be at most {max_choices}, got {len(prompt)} of them", "n")
    for one in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(one, str):
            check_text(len(one), max_context, longest_token, "prompt")
        elif isinstance(one, list) and one and fields.get("truncate_prompt_tokens") is None:
            check_prompt(len(one), max_context)
    for name, turns in (("messages", fields.get("messages")), ("input", _turns(fields))):
        if isinstance(turns, list):
            texts = list(_texts(turns, max_context, name))
            check_text(sum(map(len, texts)), max_context, longest_token, name)


def check_text(characters: int, max_context: int, longest_token: int, param: str) -> None:
    """Raise RequestError if a text of so many characters has more tokens than the context, whatever it says."""
    if characters > max_context * longest_token:
        raise RequestError(
            f"{CONTEXT_IS} {max_context} tokens, which {param} so long exceeds in any case; got {characters} "
            "characters, shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _turns(fields: dict[str, Any]) -> list[Any]:
    """Return instructions and input of a request of /v1/responses as a conversation."""
    given = fields.get("input")
    return [{"content": fields.get("instructions")}, *(given if isinstance(given, list) else [{"content": given}])]


def _texts(messages: list[Any], max_context: int, param: str) -> Iterable[str]:
    """Yield the texts of a conversation. Raises RequestError for more messages and parts than `max_context`."""
    count = len(messages)
    for message in messages:
        named = message if isinstance(message, dict) else {}
        contents = [named.get(name) for name in ("content", "output", "arguments")]
        listed = [part for content in contents if isinstance(content, list) for part in content]
        count += max(len(listed) - 1, 0)
        if count > max_context:
            raise RequestError(
                f"{CONTEXT_IS} {max_context} tokens, so {param} must have at most as many messages and parts; send "
                "fewer",
                param=param,
                code="context_length_exceeded",
            )
        calls = named.get("tool_calls")
        functions = [_member(call, "function") for call in calls] if isinstance(calls, list) else []
        texts = [*contents, *(_member(part, "text") for part in listed)]
        texts += [_member(function, "arguments") for function in functions]
        yield from (text for text in texts if isinstance(text, str))


def _member(value: object, name: str) -> object:
    """Return the member of an object; None if it has none, or the value is no object."""
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None
