"""Admission control: predict how long a request would wait for its turn and refuse it when that is too long.

A queue without a bound makes every request late. The prediction is Little's law: choices leave the engine at a rate of
slots / (seconds that a choice holds its slot), both as recently observed, so the k-th choice in the queue waits k times
the inverse. The order is the scheduler's `deadline` order, in which later arrivals that are due sooner overtake; they
are expected at the rate of recent arrivals. The ratio of actual waits to predictions corrects the rest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from adaserve_jax.errors import OverloadedError, QueueFullError
from adaserve_jax.types import RequestMetrics

WEIGHT = 0.05
"""Weight of the newest choice in the averages, which so follow about the last twenty."""
SHRINK = 0.02
"""Weight of a smaller number of slots in use: a dip between two steps says little."""
MAX_RATIO = 4.0
"""Largest ratio of a wait to its prediction, or the inverse, that corrections learn from and reach."""
ARRIVALS_S = 4.0
"""Seconds of arrivals from which the rate of arrivals to come is estimated."""
BURST_S = 1.0
"""The same where more arrive than before, so that a burst counts at once."""
TTFT_SHARE = 0.35
"""Share of a TTFT target that the predicted time to the first token may take; the rest is for prediction errors."""


class Slots:
    """Count of the choices that are queued or running, at most `limit`. Used from the event loop only.

    waiting: due times (`EngineInfo.due_s`) of the choices that have not begun, in order.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self.waiting: list[float] = []

    @property
    def running(self) -> int:
        return self.used - len(self.waiting)

    def reserve(self, count: int, due_s: float = 0.0, predicted_s: float = 0.0) -> Reservation:
        """Reserve room for `count` choices, of which the last is predicted to wait so long. Raises QueueFullError."""
        if self.used + count > self.limit:
            raise QueueFullError(
                f"{count} choices were asked for, {self.used} are in flight and at most {self.limit} may be; "
                "retry in a moment"
            )
        self.used += count
        for _ in range(count):
            insort(self.waiting, due_s)
        return Reservation(self, count, due_s, predicted_s)

    def ahead(self, due_s: float) -> int:
        """Return the number of choices that have not begun and are due no later."""
        return bisect_right(self.waiting, due_s)


class Reservation:
    """Room of one HTTP request, given back choice by choice or all at once."""

    def __init__(self, slots: Slots, count: int, due_s: float, predicted_s: float):
        self.predicted_s = predicted_s
        self._slots = slots
        self._due_s = due_s
        self._held = self._waiting = count

    def begin(self) -> None:
        """Move one choice from waiting to running, when its first token came; do nothing when none waits."""
        if self._waiting:
            self._waiting -= 1
            del self._slots.waiting[bisect_left(self._slots.waiting, self._due_s)]

    def release(self, count: int | None = None) -> None:
        """Give back `count` choices, or all that are left; never more than are held."""
        count = self._held if count is None else min(count, self._held)
        self._held -= count
        self._slots.used -= count
        while self._waiting > self._held:
            self.begin()


class RecentArrivals:
    """Choices admitted in the last seconds, from which overtaking by later arrivals is estimated."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, float, int]] = deque()  # time, patience (due - time), count

    def add(self, now: float, due_s: float, count: int) -> None:
        """Note that `count` choices due at `due_s` were admitted."""
        self._arrivals.append((now, due_s - now, count))

    def overtaking(self, now: float, due_s: float) -> tuple[float, float]:
        """Estimate which later arrivals overtake a choice that is due at `due_s`.

        Returns:
            Choices per second, and for how many seconds: a later arrival with less patience is due sooner only if it
            comes before the difference in patience has passed.
        """
        while self._arrivals and self._arrivals[0][0] < now - ARRIVALS_S:
            self._arrivals.popleft()
        patience_s = due_s - now
        sooner = [(at, patience_s - other_s, count) for at, other_s, count in self._arrivals if other_s < patience_s]
        total = sum(count for _, _, count in sooner)
        newest = sum(count for at, _, count in sooner if at >= now - BURST_S)
        during_s = sum(ahead_s * count for _, ahead_s, count in sooner) / max(total, 1)
        return max(total / ARRIVALS_S, newest / BURST_S), during_s


class QueueAdmission:
    """Wait prediction, learned from choices that ended. Used from the event loop only.

    Attributes:
        max_wait_s: Longest wait that a request may have, seconds; 0: nothing is refused.
        hold_s: Seconds that a choice holds its slot; None until one has ended.
        first_token_s: Seconds from the slot to the first token.
        bias: Waits over predictions, of requests with and without a TTFT target, since the former overtake the latter.
    """

    def __init__(self, max_wait_s: float):
        self.max_wait_s = max_wait_s
        self.hold_s: float | None = None
        self.first_token_s = 0.0
        self.bias = {True: 1.0, False: 1.0}
        self.arrivals = RecentArrivals()
        self._slots: float | None = None

    def learn(self, metrics: RequestMetrics) -> None:
        """Update the averages with a choice that ended."""
        begin, first, end = metrics.first_scheduled_s, metrics.first_token_s, metrics.last_token_s
        if begin is None or first is None or end is None:
            return
        weight = WEIGHT if self.hold_s is not None else 1.0
        self.hold_s = (1 - weight) * (self.hold_s or 0.0) + weight * (end - begin)
        self.first_token_s += weight * (first - begin - self.first_token_s)

    def correct(self, predicted_s: float, waited_s: float, has_ttft_target: bool) -> None:
        """Update the bias with the actual wait of a prediction that was above 0."""
        if predicted_s > 0:
            bias = self.bias[has_ttft_target] * _bounded(waited_s / predicted_s) ** WEIGHT
            self.bias[has_ttft_target] = _bounded(bias)

    def observe_engine(self, running: int, waiting: int, max_running: int) -> None:
        """Update the number of slots from the engine's counts; its pages may allow fewer than `max_running`."""
        slots = max_running if self._slots is None else self._slots
        if running >= slots:
            slots = running
        elif waiting:
            slots += SHRINK * (running - slots)
        self._slots = min(max(slots, 1.0), max_running)

    def wait_s(
        self, ahead: int, running: int, has_ttft_target: bool, overtaking: tuple[float, float] = (0.0, 0.0)
    ) -> float:
        """Return the predicted seconds until one more choice gets a slot; 0 while one is free or nothing is known.

        With q choices to end first, at u per second, and o overtaking choices per second for d seconds, the wait is
        q / (u - o) where that is at most d, else (q + o d) / u.

        Args:
            ahead: Choices that come before it.
            running: Choices that have a slot now.
            has_ttft_target: Whether it has a TTFT target.
            overtaking: Result of `RecentArrivals.overtaking`.
        """
        if self.hold_s is None or self._slots is None:
            return 0.0
        queue, rate = max(ahead + 1 + running - self._slots, 0.0), self._slots / max(self.hold_s, 1e-9)
        if not queue:
            return 0.0
        overtaking_rate, during_s = overtaking
        if queue <= (rate - overtaking_rate) * during_s:
            rate -= overtaking_rate
        else:
            queue += overtaking_rate * during_s
        return self.bias[has_ttft_target] * queue / rate

    def check(self, wait_s: float, ttft_slo_s: float | None) -> None:
        """Raise OverloadedError when a request would wait longer than `max_wait_s` or its TTFT target allow.

        A target shorter than the time from slot to first token does not count: an empty server would miss it too.
        """
        if not self.max_wait_s or not wait_s:
            return
        limit_s, name = self.max_wait_s, "this server lets a request wait"
        if ttft_slo_s is not None and self.first_token_s <= ttft_slo_s:
            allowed_s = max(TTFT_SHARE * ttft_slo_s - self.first_token_s, 0.0)
            if allowed_s < limit_s:
                limit_s, name = allowed_s, "its TTFT target allows"
        if wait_s > limit_s:
            raise OverloadedError(
                f"the request would wait {wait_s:.3g} s for its turn, longer than the {limit_s:.3g} s that {name}; "
                "retry after the time in Retry-After, or elsewhere",
                retry_after_s=wait_s - limit_s,
            )


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / MAX_RATIO), MAX_RATIO)
