"""Admission control: predict how long a request would wait for its turn and refuse it when that is too long.

A queue without a bound makes every request late. The prediction plays the queue forward: choices that run end when they
have generated what they are expected to, at the speed of the last seconds, and those that wait take the slots in the
scheduler's `deadline` order. It may be wrong, so only a wait well beyond the limit is refused here; the engine ends
whatever still waits at the limit (`GenerateRequest.max_wait_s`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adaserve_jax.errors import OverloadedError, QueueFullError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.server.auth import Account

SHRINK = 0.02
"""Weight of a smaller number of slots in use: a dip between two steps says little."""
WEIGHT = 0.05
"""Weight of the newest choice in averages over choices, which so follow about the last twenty."""
SPEED_S = 2.0
"""Seconds of tokens from which the speed is known."""
REFUSE_AT = 2.0
"""Multiple of the limit up to which a predicted wait is admitted. Predictions may be twice too long right after the
load changed, and a request that does wait too long is answered at the limit."""
TTFT_SHARE = 0.35
"""Share of a TTFT target that the predicted time to the first token may take; the rest is for prediction errors."""


@dataclass(order=True, unsafe_hash=True)
class Place:
    """One choice in the queue or in a slot.

    deadline_key_s: orders the queue (`EngineInfo.deadline_key_s`). tokens: those that it has.
    """

    deadline_key_s: float
    number: int
    max_tokens: int = field(compare=False)
    tokens: int = field(default=0, compare=False)


class Slots:
    """The choices that are queued or running, at most `limit`. Used from the event loop only.

    waiting: those that have not begun, in order. running: those that have.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.waiting: list[Place] = []
        self.running: set[Place] = set()
        self._numbers = itertools.count()

    @property
    def used(self) -> int:
        return len(self.waiting) + len(self.running)

    def reserve(self, account: Account, count: int, deadline_key_s: float, max_tokens: int) -> Reservation:
        """Reserve room for `count` choices of at most so many tokens each. Raises QueueFullError.

        They count as in flight on `account` too, whose own limit `Account.require_room` checks.
        """
        if self.used + count > self.limit:
            raise QueueFullError(
                f"{count} choices were asked for, {self.used} are in flight and at most {self.limit} may be; "
                "retry in a moment"
            )
        account.in_flight += count
        places = [Place(deadline_key_s, next(self._numbers), max_tokens) for _ in range(count)]
        for place in places:
            insort(self.waiting, place)
        return Reservation(self, account, places)


class Reservation:
    """Room of one HTTP request on the server and its account, given back choice by choice or all at once."""

    def __init__(self, slots: Slots, account: Account, places: list[Place]):
        self._slots = slots
        self._account = account
        self._places: list[Place | None] = list(places)

    def received(self, choice: int, tokens: int) -> None:
        """Count tokens of a choice; the first chunk moves it from the queue to the running ones."""
        place = self._places[choice]
        if place is None:
            return
        place.tokens += tokens
        if place not in self._slots.running:
            self._slots.waiting.remove(place)
            self._slots.running.add(place)

    def release(self, choices: Sequence[int] | None = None, unused_tokens: int = 0) -> None:
        """Give back the room of these choices, or of all, and tokens that were charged for them and not generated.

        What was given back before is left alone.
        """
        for choice in range(len(self._places)) if choices is None else choices:
            place, self._places[choice] = self._places[choice], None
            if place is not None:
                self._account.in_flight -= 1
                if place in self._slots.running:
                    self._slots.running.remove(place)
                else:
                    self._slots.waiting.remove(place)
        self._account.give_back(unused_tokens)


class QueueAdmission:
    """Prediction of waits from what runs, what waits and how fast tokens come. Used from the event loop only.

    Attributes:
        max_wait_s: Longest wait that a request may have, seconds; 0: nothing is refused.
        first_token_s: Seconds from the slot to the first token.
    """

    def __init__(self, max_wait_s: float, clock: Callable[[], float] = time.monotonic):
        self.max_wait_s = max_wait_s
        self.first_token_s = 0.0
        self._clock = clock
        self._slots: float | None = None
        self._ended = 0
        self._stop_share = 0.0  # of recent choices, those that ended before their limit
        self._output = 0.0  # tokens of recent choices
        self._gap_s = self._tokens = self._measured_s = 0.0

    def learn(self, metrics: RequestMetrics, *, stopped: bool) -> None:
        """Update the averages with a choice that ended; stopped: before its limit of tokens."""
        if metrics.first_scheduled_s is None or metrics.first_token_s is None:
            return
        weight = WEIGHT if self._ended else 1.0
        self._ended += 1
        self.first_token_s += weight * (metrics.first_token_s - metrics.first_scheduled_s - self.first_token_s)
        self._stop_share += weight * (stopped - self._stop_share)
        self._output += weight * (metrics.output_tokens - self._output)

    def observe_tokens(self, gap_s: float, tokens: int) -> None:
        """Update the speed: a running choice took `gap_s` for so many tokens."""
        now = self._clock()
        kept = math.exp((self._measured_s - now) / SPEED_S)
        self._gap_s, self._tokens, self._measured_s = self._gap_s * kept + gap_s, self._tokens * kept + tokens, now

    def observe_engine(self, running: int, waiting: int, max_running: int) -> None:
        """Update the number of slots from the engine's counts; its pages may allow fewer than `max_running`."""
        slots = max_running if self._slots is None else self._slots
        if running >= slots:
            slots = running
        elif waiting:
            slots += SHRINK * (running - slots)
        self._slots = min(max(slots, 1.0), max_running)

    def expected_tokens(self, most: float) -> float:
        """Return the tokens that a choice still generates, of at most so many.

        Each token ends the text with one chance, estimated from recent choices; those that reached their limit say only
        that they had not ended before (the estimate for censored exponential times).
        """
        chance = self._stop_share / max(self._output, 1.0)
        return most if chance * most < 1e-6 else -math.expm1(-chance * most) / chance

    def wait_s(self, slots: Slots, deadline_key_s: float, max_tokens: int, count: int = 1) -> float:
        """Return the predicted seconds until the last of `count` choices gets a slot, less those that it would wait for
        the other choices on an empty server.

        0 while slots are free, and as long as nothing is known of the engine's speed.
        """
        if self._slots is None or not self._tokens:
            return 0.0
        token_s = self._gap_s / self._tokens
        ahead = slots.waiting[: bisect_right(slots.waiting, deadline_key_s, key=lambda place: place.deadline_key_s)]
        free = max(round(self._slots) - len(slots.running), 0)
        if len(ahead) + count <= free:
            return 0.0
        ends = [token_s * self.expected_tokens(max(p.max_tokens - p.tokens, 1)) for p in slots.running] + [0.0] * free
        own = [max_tokens] * (count - 1)
        begin_s = self._begin_s(ends, [*(place.max_tokens for place in ahead), *own], token_s)
        return max(begin_s - self._begin_s([0.0] * round(self._slots), own, token_s), 0.0)

    def _begin_s(self, ends: list[float], queue: list[int], token_s: float) -> float:
        """Return the seconds until what comes behind `queue` gets a slot. ends: seconds until each slot is free.
        queue: most tokens of each choice in it.
        """
        heapq.heapify(ends)
        for most in queue:
            heapq.heapreplace(ends, ends[0] + self.first_token_s + token_s * self.expected_tokens(most - 1))
        return ends[0]

    def check(
        self, wait_s: float, ttft_slo_s: float | None, e2e_slo_s: float | None = None, max_queue_s: float = 0.0
    ) -> None:  # fmt: skip
        """Raise OverloadedError when a request would wait much longer than `max_wait_s`, its TTFT target or its own
        longest wait (`max_queue_s`; 0: none) allow, or so long that not even its first token would keep its deadline.

        A target shorter than the time from slot to first token does not count: an empty server would miss it too.
        """
        if not self.max_wait_s or not wait_s:
            return
        limit_s = REFUSE_AT * self.max_wait_s
        name = f"this server lets a request wait (max_queue_wait is {self.max_wait_s:g} s)"
        if ttft_slo_s is not None and self.first_token_s <= ttft_slo_s:
            allowed_s = max(TTFT_SHARE * ttft_slo_s - self.first_token_s, 0.0)
            if allowed_s < limit_s:
                limit_s, name = allowed_s, "its TTFT target allows"
        if e2e_slo_s is not None and self.first_token_s <= e2e_slo_s < limit_s + self.first_token_s:
            limit_s, name = e2e_slo_s - self.first_token_s, "its deadline allows"
        if max_queue_s and REFUSE_AT * max_queue_s < limit_s:
            limit_s, name = REFUSE_AT * max_queue_s, "its max_queue_ms allows"
        if wait_s > limit_s:
            raise OverloadedError(
                f"the request would wait {wait_s:.3g} s for its turn, longer than the {limit_s:.3g} s that {name}; "
                "retry after the time in Retry-After, or elsewhere",
                retry_after_s=wait_s - limit_s,
            )
