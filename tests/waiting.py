"""Waiting for what must happen, for as long as a slow and busy machine may take."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 100.0
"""Nothing takes as long; below the time that a test has in all."""


def wait_until(condition: Callable[[], object], every_s: float = 0.002) -> None:
    """However slow the machine is; a test that would wait for ever is ended by the suite's limit."""
    while not condition():
        time.sleep(every_s)
