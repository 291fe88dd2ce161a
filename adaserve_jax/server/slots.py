"""Room for choices: counted before anything is tokenised, given back as they end. Used from the event loop only."""

from __future__ import annotations

from adaserve_jax.errors import QueueFullError


class Slots:
    """Counts the choices that are queued or running; at most `limit`. within: slots that those of this count too."""

    def __init__(self, limit: int, within: Slots | None = None):
        self.limit = limit
        self.used = 0
        self._within = within

    def reserve(self, count: int) -> Reservation:
        """Take room for `count` choices. Raises QueueFullError."""
        if self.used + count > self.limit:
            raise QueueFullError(
                f"{count} choices were asked for, {self.used} are in flight and at most {self.limit} may be; "
                "retry in a moment"
            )
        outer = () if self._within is None else (self._within.reserve(count),)
        self.used += count
        return Reservation(self, count, *outer)


class Reservation:
    """Room that one HTTP request holds; given back choice by choice, or all at once. outer: held along with it."""

    def __init__(self, slots: Slots, count: int, *outer: Reservation):
        self._slots = slots
        self._held = count
        self._outer = outer

    def release(self, count: int | None = None) -> None:
        """Give back `count`, or all that is left; never more than is held."""
        count = self._held if count is None else min(count, self._held)
        self._held -= count
        self._slots.used -= count
        for outer in self._outer:
            outer.release(count)
