"""Who is admitted next, and why nobody waits for ever. Knows no pages, slots or costs.

Order: preempted requests first, then the waiting by `order_key`. The key of a request never changes: its due time
plus AGEING_S seconds per step of priority, so a later arrival can overtake it only if it arrives within a bounded time
after it. Under `deadline` ordering a request that can hardly meet its TTFT target any more goes behind the others;
every PROMOTION_PERIOD-th admission takes the longest-waiting request whatever its key, which bounds that wait too.
Under `priority` ordering, a baseline, priorities are strict and preempted requests have no precedence: a request may
wait for as long as better ones come.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal

from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.types import Sequence

Ordering = Literal["deadline", "arrival", "priority"]

AGEING_S = 30.0
"""Seconds of waiting that outweigh one step of priority."""
STRICT_S = 1e9
"""The same where priority comes before everything."""
PATIENCE_S = 10.0
"""TTFT target assumed of a request without one, and the longest that the order sees, seconds."""
MAX_PRIORITY = 100
PROMOTION_PERIOD = 128
LATE_SHARE = 0.75
"""Share of its TTFT target after which a waiting request counts as late: its prompt has to be computed yet."""


def order_key(request: Sequence, ordering: Ordering) -> float:
    """Seconds on the engine's clock; lower is served sooner."""
    if ordering == "deadline":
        return due_s(request.arrival_s, request.priority, request.ttft_slo_s)
    return request.arrival_s + (STRICT_S if ordering == "priority" else AGEING_S) * _bounded(request.priority)


def due_s(arrival_s: float, priority: int, ttft_slo_s: float | None) -> float:
    """`order_key` under `deadline` ordering."""
    patience_s = PATIENCE_S if ttft_slo_s is None else min(ttft_slo_s, PATIENCE_S)
    return arrival_s + AGEING_S * _bounded(priority) + patience_s


def _bounded(priority: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


def _rank(state: SequenceState) -> tuple[float, int]:
    return state.rank


class WaitingQueue:
    """Requests that hold no slot: newly arrived and preempted."""

    def __init__(self, ordering: Ordering):
        self._ordering: Ordering = ordering
        self._preempted: list[SequenceState] = []
        self._hopeful: list[SequenceState] = []
        self._late: list[SequenceState] = []
        self._admissions = 0
        self._untargeted = 0

    def __len__(self) -> int:
        return len(self._preempted) + self.num_new

    @property
    def num_new(self) -> int:
        """Those of them that never ran."""
        return len(self._hopeful) + len(self._late)

    def add(self, state: SequenceState) -> None:
        insort(self._hopeful, state, key=_rank)
        self._untargeted += state.is_untargeted

    def put_back(self, state: SequenceState) -> None:
        """Return a preempted request to the front."""
        insort(self._preempted, state, key=_rank)
        self._untargeted += state.is_untargeted

    def peek(self, now: float) -> SequenceState | None:
        """The request to admit next, left in the queue; None when nobody waits."""
        if self._ordering == "priority":
            firsts = [waiting[0] for waiting in (self._preempted, self._hopeful) if waiting]
            return min(firsts, key=_rank, default=None)
        if self._preempted:
            return self._preempted[0]
        if self._ordering == "deadline":
            self._demote_late(now)
            if self.promotes and (self._hopeful or self._late):
                return min(self._hopeful + self._late, key=lambda state: (state.request.arrival_s, state.sequence))
        for waiting in (self._hopeful, self._late):
            if waiting:
                return waiting[0]
        return None

    def peek_untargeted(self) -> SequenceState | None:
        """The first that waits without a TPOT target: who is next when the one that `peek` returned may not start."""
        if not self._untargeted:
            return None
        waiting = (*self._hopeful, *self._late)
        return next((state for state in waiting if state.is_untargeted), None)

    def is_late(self, state: SequenceState) -> bool:
        """Whether a waiting request was found, by the last `peek`, to miss its TTFT target."""
        index = bisect_left(self._late, state.rank, key=_rank)
        return index < len(self._late) and self._late[index] is state

    @property
    def promotes(self) -> bool:
        """Whether the next admission is one of those that go to the longest-waiting request."""
        return self._ordering == "deadline" and self._admissions % PROMOTION_PERIOD == PROMOTION_PERIOD - 1

    def take(self, state: SequenceState) -> None:
        """Remove the request that `peek` returned, and count an admission."""
        self._admissions += state not in self._preempted
        self.remove(state)

    def remove(self, state: SequenceState) -> None:
        for waiting in (self._preempted, self._hopeful, self._late):
            index = bisect_left(waiting, state.rank, key=_rank)
            if index < len(waiting) and waiting[index] is state:
                del waiting[index]
                self._untargeted -= state.is_untargeted
                return
        raise ValueError(f"request {state.request.sequence_id!r} does not wait")

    def most_urgent_wait(self, now: float) -> float:
        """Waiting time over TTFT target of the first hopeful request; 0 when none waits."""
        return wait_ratio(self._hopeful[0], now) if self._hopeful else 0.0

    def _demote_late(self, now: float) -> None:
        while self._hopeful:
            ttft_slo_s = self._hopeful[0].request.ttft_slo_s
            if ttft_slo_s is None or now <= self._hopeful[0].request.arrival_s + LATE_SHARE * ttft_slo_s:
                return
            insort(self._late, self._hopeful.pop(0), key=_rank)


def wait_ratio(state: SequenceState, now: float) -> float:
    """Waiting time for the first token over the TTFT target (PATIENCE_S without one)."""
    target = state.request.ttft_slo_s
    return max(0.0, now - state.request.arrival_s) / (PATIENCE_S if target is None else target)
