"""What both engine clients refuse before a request is queued. Imports no jax."""

from __future__ import annotations

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
