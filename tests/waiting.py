"""Waiting for what must happen, for as long as a slow and busy machine may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 100.0
"""Nothing takes as long; below the time that a test has in all."""


def wait_until(condition: Callable[[], object], every_s: float = 0.002) -> None:
    """However slow the machine is; a test that would wait for ever is ended by the suite's limit."""
    while not condition():
        time.sleep(every_s)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
