"""Compiles loops of the host by numba, and keeps what it compiled where the machine lets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """Return a function that numba compiles when it is first called, or loads from its cache.

    The cache lies beside the source, else in the home directory, or where NUMBA_CACHE_DIR says. Where none can be
    written, each process compiles anew, which takes seconds.
    """
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # "no locator available"
        return numba.njit(error_model="numpy")(function)
