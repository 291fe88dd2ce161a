"""A clock for code that takes one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s
