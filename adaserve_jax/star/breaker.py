"""When to leave a service alone: a breaker per service, and waits that grow. No clock, no thread: times are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

BAD_ROUNDS = 3
"""In a row, until a breaker opens: one may be a pause of the network, three cost three deadlines."""
FIRST_TRIAL_S = 0.5
LAST_TRIAL_S = 30.0
"""After how long a service that does not answer is tried again, at first and in the end."""


class Backoff:
    """Waits that double from `first_s` to `most_s`, each shortened by up to a half at random, so that many targets do
    not come back at once. draw: uniform in [0, 1)."""

    def __init__(self, first_s: float, most_s: float, draw: Callable[[], float]) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._failures = 0

    def next_s(self) -> float:
        """Seconds to wait after one more failure."""
        wait_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 60))
        self._failures += 1
        return wait_s * (1.0 - 0.5 * self._draw())

    def reset(self) -> None:
        self._failures = 0


class Breaker:
    """Closed: the service is asked. Open, after BAD_ROUNDS bad rounds in a row: it is not. Half open, once a wait is
    over: it is asked, and the next round decides. opens: how often it has opened."""

    def __init__(self, draw: Callable[[], float], bad_rounds: int = BAD_ROUNDS) -> None:
        self.state: Literal["closed", "half_open", "open"] = "closed"
        self.opens = 0
        self._most = bad_rounds
        self._bad = 0
        self._trial_s = 0.0
        self._backoff = Backoff(FIRST_TRIAL_S, LAST_TRIAL_S, draw)

    def allows(self, now: float) -> bool:
        """Whether the service may be asked; half opens when its time has come."""
        if self.state == "open" and now >= self._trial_s:
            self.state = "half_open"
        return self.state != "open"

    def good(self) -> None:
        """A round brought something."""
        if self.state != "closed" or self._bad:
            self.state = "closed"
            self._bad = 0
            self._backoff.reset()

    def bad(self, now: float) -> None:
        """A round brought nothing in time."""
        self._bad += 1
        if self.state == "half_open" or self._bad >= self._most:
            self.state = "open"
            self.opens += 1
            self._trial_s = now + self._backoff.next_s()
