"""Turn what a chat request says about thinking into what the engine is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaserve_jax.constraints.reasoning_formats import ReasoningMarks
from adaserve_jax.server.conversation import content_of
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.schema import INT32, ChatBody
from adaserve_jax.server.state import ServerState
from adaserve_jax.types import SamplingParams


def marks_in(state: ServerState) -> ReasoningMarks | None:
    """Return the marks between which the served model thinks; None: it has none in its vocabulary."""
    marks = state.marks
    if marks is None or max(marks.tokens.opening, marks.tokens.closing) >= state.info.vocab_size:
        return None
    return marks


def with_thinking(
    sampling: SamplingParams, body: ChatBody, prompt_ids: Sequence[int], state: ServerState
) -> SamplingParams:
    """Return sampling parameters with the marks between which the answer to a prompt thinks, if the model has any, and
    the limit of it. Raises RequestError, and ApiError: the request asks for what needs marks, and there are none."""
    name, most = _limit(body)
    marks = marks_in(state)
    if marks is None:
        if most is not None:
            raise invalid(
                f"{name} must be left out, got {most}: this model has no marks of thinking that the server knows; "
                "see --reasoning-parser",
                name, "unsupported_parameter",
            )  # fmt: skip
        return sampling
    last = len(body.messages) - 1
    continued = content_of(body.messages[last], last) if body.continue_final_message else None
    return replace(sampling, thinking=marks.thinking(prompt_ids, continued), max_thinking_tokens=most)


def _limit(body: ChatBody) -> tuple[str, int | None]:
    """Return the name and value of the limit of thinking; None: none. Raises ApiError."""
    both = ("max_thinking_tokens", "thinking_token_budget")
    name, value = next(((name, most) for name in both if (most := getattr(body, name)) is not None), (both[0], None))
    if value is not None and not -1 <= value < INT32:
        raise invalid(f"{name} must be -1 or an integer from 0 to {INT32 - 1}, got {value}", name)
    return name, None if value == -1 else value
