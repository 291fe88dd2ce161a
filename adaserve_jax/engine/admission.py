"""What is refused before a request is queued, by whoever sees it first. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence

from adaserve_jax.errors import QueueFullError, RequestError


def check_room(choices: int, waiting: int, max_waiting: int) -> None:
    """Raise RequestError when so many choices can never wait, QueueFullError when they cannot now."""
    if choices > max_waiting:
        raise RequestError(
            f"n must be at most {max_waiting}, the requests that may wait, got {choices}; lower n or raise max_waiting",
            param="n",
            code="invalid_value",
        )
    if waiting + choices > max_waiting:
        raise QueueFullError(f"{waiting} requests wait and at most {max_waiting} may; retry in a moment")


def check_ids(ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Raise RequestError unless every id is one of the model's. param: the field that holds them."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param}: token ids must be from 0 to {vocab_size - 1}, got {token}",
                param=param,
                code="invalid_value",
            )
