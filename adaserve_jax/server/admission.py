"""Whether a request is worth queueing: predicts how long it would wait for its turn, and refuses it when that is
too long. A queue that nobody bounds makes every request late and none of them sooner.

The prediction is Little's law: choices leave `slots` at a rate of slots / (seconds that one holds its slot), both as
lately seen, so the k-th in the queue waits k times the inverse. Who is before whom is what the scheduler's `deadline`
order says, of those who come later and are due sooner too: they are expected as lately. What that leaves out is learned
as the ratio of waits to predictions. Knows no engine, no HTTP, and no clock but the times that it is given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from adaserve_jax.errors import OverloadedError, QueueFullError
from adaserve_jax.types import RequestMetrics

WEIGHT = 0.05
"""Of the newest choice in the averages: they follow the last twenty or so."""
SHRINK = 0.02
"""How fast the number of slots in use is believed to have become smaller: a dip between two steps is no evidence."""
MAX_RATIO = 4.0
"""Of a wait to its prediction, and its inverse: neither one choice nor all of them teach more."""
LATELY_S = 4.0
"""How far back arrivals tell of those to come."""
JUST_NOW_S = 1.0
"""The same where more come than before: a crowd is believed at once."""
TTFT_SHARE = 0.35
"""Share of a TTFT target that the predicted time to the first token may take; the rest is for what is not foreseen."""


class Slots:
    """Counts the choices that are queued or running; at most `limit`. Used from the event loop only.

    waiting: when those that have not begun are due, in order (`scheduler.queue.due_s`).
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self.waiting: list[float] = []

    def reserve(self, count: int, due_s: float = 0.0, predicted_s: float = 0.0) -> Reservation:
        """Take room for `count` choices, the last of which is predicted to wait so long. Raises QueueFullError."""
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
        """Choices that have not begun and are due no later."""
        return bisect_right(self.waiting, due_s)


class Reservation:
    """Room that one HTTP request holds; given back choice by choice, or all at once."""

    def __init__(self, slots: Slots, count: int, due_s: float, predicted_s: float):
        self.predicted_s = predicted_s
        self._slots = slots
        self._due_s = due_s
        self._held = self._waiting = count

    def begin(self) -> None:
        """One choice waits no longer: its first token came. Nothing when none waits."""
        if self._waiting:
            self._waiting -= 1
            del self._slots.waiting[bisect_left(self._slots.waiting, self._due_s)]

    def release(self, count: int | None = None) -> None:
        """Give back `count`, or all that is left; never more than is held."""
        count = self._held if count is None else min(count, self._held)
        self._held -= count
        self._slots.used -= count
        while self._waiting > self._held:
            self.begin()


class Overtakers:
    """The choices that were let in lately, and how many of those to come will go before one that waits."""

    def __init__(self) -> None:
        self._lately: deque[tuple[float, float, int]] = deque()

    def add(self, now: float, due_s: float, count: int) -> None:
        """`count` choices were let in that are due then."""
        self._lately.append((now, due_s - now, count))

    def expected(self, now: float, due_s: float) -> tuple[float, float]:
        """Choices per second that will overtake one that is due then, and for how many seconds: a later one with less
        patience is due sooner only if it comes before the difference has passed."""
        while self._lately and self._lately[0][0] < now - LATELY_S:
            self._lately.popleft()
        patience_s = due_s - now
        sooner = [(at, patience_s - other_s, count) for at, other_s, count in self._lately if other_s < patience_s]
        total = sum(count for _, _, count in sooner)
        newest = sum(count for at, _, count in sooner if at >= now - JUST_NOW_S)
        during_s = sum(ahead_s * count for _, ahead_s, count in sooner) / max(total, 1)
        return max(total / LATELY_S, newest / JUST_NOW_S), during_s


class Admission:
    """What ended choices taught about waiting. Used from the event loop only.

    max_wait_s: longest wait that a request may have before it, seconds; 0: nothing is ever refused.
    """

    def __init__(self, max_wait_s: float):
        self.max_wait_s = max_wait_s
        self.hold_s: float | None = None
        """Seconds that a choice holds its slot; None: none has ended yet."""
        self.overtakers = Overtakers()
        self.first_s = 0.0
        """Seconds from the slot to the first token."""
        self.bias = {True: 1.0, False: 1.0}
        """Waits over their predictions, of requests with and without a TTFT target: the former overtake the latter."""
        self._slots: float | None = None

    def learn(self, metrics: RequestMetrics) -> None:
        """One choice has ended, however it did."""
        begin, first, end = metrics.first_scheduled_s, metrics.first_token_s, metrics.last_token_s
        if begin is None or first is None or end is None:
            return
        weight = WEIGHT if self.hold_s is not None else 1.0
        self.hold_s = (1 - weight) * (self.hold_s or 0.0) + weight * (end - begin)
        self.first_s += weight * (first - begin - self.first_s)

    def compare(self, predicted_s: float, waited_s: float, targeted: bool) -> None:
        """What became of one prediction. One that took no wait teaches nothing."""
        if predicted_s > 0:
            bias = self.bias[targeted] * _bounded(waited_s / predicted_s) ** WEIGHT
            self.bias[targeted] = _bounded(bias)

    def see(self, running: int, waiting: int, max_running: int) -> None:
        """What the engine said last of its choices. max_running: its slots; pages may allow fewer."""
        slots = max_running if self._slots is None else self._slots
        if running >= slots:
            slots = running
        elif waiting:
            slots += SHRINK * (running - slots)
        self._slots = min(max(slots, 1.0), max_running)

    def wait_s(self, ahead: int, begun: int, targeted: bool, overtakers: tuple[float, float] = (0.0, 0.0)) -> float:
        """Predicted seconds until one more choice gets a slot; 0 while one is free or nothing is known.

        ahead: choices that come before it; begun: those that have a slot now; targeted: it has a TTFT target;
        overtakers: as of `Overtakers.expected`. With q choices to end first, of u per second, and o overtakers per
        second for d seconds, the wait is q / (u - o) where that is at most d, else (q + o d) / u.
        """
        if self.hold_s is None or self._slots is None:
            return 0.0
        queue, rate = max(ahead + 1 + begun - self._slots, 0.0), self._slots / max(self.hold_s, 1e-9)
        if not queue:
            return 0.0
        overtaking, during_s = overtakers
        if queue <= (rate - overtaking) * during_s:
            rate -= overtaking
        else:
            queue += overtaking * during_s
        return self.bias[targeted] * queue / rate

    def check(self, wait_s: float, ttft_slo_s: float | None) -> None:
        """Raise OverloadedError when a request would wait longer than it may, by `max_wait_s` or its own target.

        A target shorter than the time from slot to first token is out of reach, and no reason to refuse.
        """
        if not self.max_wait_s or not wait_s:
            return
        limit_s, name = self.max_wait_s, "this server lets a request wait"
        if ttft_slo_s is not None and self.first_s <= ttft_slo_s:  # else an empty server would not meet it either
            allowed_s = max(TTFT_SHARE * ttft_slo_s - self.first_s, 0.0)
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
