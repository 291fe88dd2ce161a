"""A chat streamed by the official client."""

from __future__ import annotations

from typing import Any

import openai


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, dict[int, tuple[str, str, str]], str]:
    """Text, calls (id, name, arguments) and finish reason of a stream."""
    content, calls, reason = "", {}, ""
    for event in client.chat.completions.create(**fields, stream=True):
        (choice,) = event.choices
        content += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            known = calls.get(piece.index)
            if known is None:
                assert piece.index == len(calls) and piece.id and piece.type == "function" and piece.function.name
                known = (piece.id, piece.function.name, "")
            else:
                assert piece.id is None and piece.function.name is None and piece.function.arguments
            calls[piece.index] = (*known[:2], known[2] + piece.function.arguments)
        reason = choice.finish_reason or reason
    return content, calls, reason
