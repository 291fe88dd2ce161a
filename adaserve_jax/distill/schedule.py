"""When a piece of training may run: what it will take, and what share of the time it has taken. Knows no draft."""

from __future__ import annotations

TIME_RATE = 0.2
"""Weight of a new piece in the expected seconds of its kind."""


class PieceTimes:
    """Expected seconds of a piece of training, by kind; those of a kind that never ran are `first_s`."""

    def __init__(self, first_s: float):
        self._first_s = first_s
        self._expected_s: dict[str, float] = {}

    def expected_s(self, kind: str) -> float:
        return self._expected_s.get(kind, self._first_s)

    def took(self, kind: str, seconds: float) -> None:
        before = self._expected_s.get(kind)
        self._expected_s[kind] = seconds if before is None else before + TIME_RATE * (seconds - before)


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
