"""Whether a prompt can be served at all, by its length: what a context and a pool of KV pages hold."""

from __future__ import annotations

from adaserve_jax.errors import RequestError
from adaserve_jax.types import Limits


def check_not_empty(prompt_tokens: int) -> None:
    """Raise RequestError for a prompt of no tokens."""
    if prompt_tokens == 0:
        raise RequestError("prompt must have at least one token, got none", param="prompt", code="empty_prompt")


def check_prompt(prompt_tokens: int, max_context: int, param: str = "prompt") -> None:
    """Raise RequestError unless a prompt has a token, and leaves room for one in the context. param: the field that the
    prompt is of."""
    check_not_empty(prompt_tokens)
    if prompt_tokens >= max_context:
        raise RequestError(
            f"prompt must leave room for one token in a context of {max_context}, got {prompt_tokens} tokens; "
            "shorten it",
            param=param,
            code="context_length_exceeded",
        )


def fit(prompt_tokens: int, max_tokens: int, limits: Limits) -> int:
    """Most tokens of a request, prompt and output, whatever else runs. Raises RequestError when not even one output
    token fits."""
    check_prompt(prompt_tokens, limits.max_context)
    total = min(prompt_tokens + max_tokens, limits.max_context)
    if -(-total // limits.page_size) > limits.num_pages:
        raise RequestError(
            f"prompt and max_tokens must fit the KV cache of {limits.num_pages * limits.page_size} tokens, got "
            f"{prompt_tokens} + {total - prompt_tokens}; shorten the prompt or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return total
