"""When a piece of training may run: what it will take, and what share of the time it has taken. Knows no draft."""

from __future__ import annotations

from collections.abc import Mapping

TIME_RATE = 0.2
"""Weight of a new piece in the expected seconds of its kind."""
MOST_RISE = 2.0
"""What a piece took counts up to so many times what was expected: one that met something else says little of its kind.
"""
FORGET_RATE = 0.02
"""Share of the expected seconds that is forgotten whenever a piece is refused because of them."""
LEAST_S = 1e-5
"""What any piece is expected to take, at least."""


class PieceTimes:
    """Expected seconds of a piece of training, by kind. first_s: measured before requests came.

    A kind that does not run shows nothing of how long it takes, so what is expected of it returns to what was measured,
    never below, while it is refused.
    """

    def __init__(self, first_s: Mapping[str, float]):
        self._first_s = {kind: max(seconds, LEAST_S) for kind, seconds in first_s.items()}
        self._expected_s = dict(self._first_s)

    def expected_s(self, kind: str) -> float:
        return self._expected_s[kind]

    def took(self, kind: str, seconds: float) -> None:
        before = self._expected_s[kind]
        self._expected_s[kind] += TIME_RATE * (min(seconds, MOST_RISE * before) - before)

    def refused(self, kind: str) -> None:
        """It would have run but for what is expected of it."""
        before, first = self._expected_s[kind], self._first_s[kind]
        self._expected_s[kind] = min(before, max(first, (1 - FORGET_RATE) * before))


class Allowance:
    """Keeps training to `share` of the time in which requests run: a piece is a debt, which that time pays back. So in
    any stretch of it, training takes no more than that share and one piece."""

    def __init__(self, share: float):
        self._share = share
        self._debt_s = 0.0
        self._busy_since: float | None = None

    def pass_time(self, now: float, *, busy: bool) -> None:
        """Until now requests ran, if they did when this was last called. busy: whether they run from now on."""
        if self._busy_since is not None:
            self._debt_s = max(0.0, self._debt_s - self._share * (now - self._busy_since))
        self._busy_since = now if busy else None

    @property
    def is_open(self) -> bool:
        """Whether a piece may begin while requests run."""
        return self._share > 0 and not self._debt_s

    def spend(self, seconds: float) -> None:
        """A piece has delayed requests."""
        self._debt_s += seconds
