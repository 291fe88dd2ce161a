"""Admission of targets to a draft service, and the closed forms behind it.

A target is refused if, with it, any target would be slower than by plain decoding. In the closed forms all targets are
alike and have one request each: a round is one draft of S seconds and Z seconds until the target asks again. Source:
StarSD, sections 3.2 to 4.2; docs/equations.md has the corrections. Imports no jax.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

ServiceTime = Callable[[int], float]
"""S(n): seconds of the draft for n requests at once; does not fall with n."""
MAX_COUNTED_TARGETS = 4096
"""Largest result of `max_targets_batched`."""
AVERAGE_WEIGHT = 0.1
"""Weight of a new measurement in its moving average."""
MIN_SAMPLES = 16
"""Drafts, and rounds verified, before their averages are used."""


class Turns(NamedTuple):
    """How targets share the draft in the steady state. sizes: requests of the batches that take turns; batches: of a
    round; busy_s, round_s: seconds of them, and T, of a round of one target."""

    sizes: list[int]
    batches: float
    busy_s: float
    round_s: float


def take_turns(targets: int, service_s: ServiceTime, back_s: float, *, max_rows: int = 1) -> Turns:
    """Return the steady state of `targets` targets at a draft of up to max_rows requests at once (1: the paper's).

    The free device takes all waiting requests, and requests drafted together come back together. So targets form
    groups, and groups that wait at the same time become one. In the end g groups of about N / g take turns, where g is
    the fewest that leave no idle time; otherwise every target stays alone. Then T = max(sum over the groups of S(n),
    Z + S(n) of the largest). Where groups exceed max_rows, batches are full, N / max_rows of them in a round. With
    max_rows = 1 this is eq. 8 to 10. Batched, a loop may settle at one group more or fewer, depending on its phases.

    back_s: Z.
    """
    sizes = _groups(targets, service_s, back_s)
    batches, busy_s = float(len(sizes)), sum(service_s(size) for size in sizes)
    if sizes[0] > max_rows:
        sizes, batches = [max_rows], targets / max_rows
        busy_s = batches * service_s(max_rows)
    return Turns(sizes, batches, busy_s, max(busy_s, back_s + service_s(sizes[0])))


def max_targets_batched(service_s: ServiceTime, back_s: float, tokens: float, plain_s: float, *, max_rows: int) -> int:
    """Return N_max for up to max_rows requests at once: the most targets, up to MAX_COUNTED_TARGETS, of which none is
    slower than plain decoding."""

    def pays(targets: int) -> bool:
        return take_turns(targets, service_s, back_s, max_rows=max_rows).round_s <= tokens * plain_s

    return bisect_left(range(1, MAX_COUNTED_TARGETS + 1), True, key=lambda targets: not pays(targets))


def interpolated(times_s: Mapping[int, float]) -> ServiceTime:
    """Return S(n) by linear interpolation of measured times: constant before the first, proportional beyond the last.

    Raises ValueError without any time.
    """
    if not times_s:
        raise ValueError("S(n) needs at least one measured time, got none")
    known = sorted(times_s)

    def service_s(rows: int) -> float:
        at = bisect_left(known, rows)
        if at == len(known):
            return times_s[known[-1]] * rows / known[-1]
        if known[at] == rows or at == 0:
            return times_s[known[at]]
        low, high = known[at - 1], known[at]
        return times_s[low] + (times_s[high] - times_s[low]) * (rows - low) / (high - low)

    return service_s


def _groups(targets: int, service_s: ServiceTime, back_s: float) -> list[int]:
    """Return the sizes of the groups, largest first, if batches were unlimited."""
    for count in range(1, targets):
        size, larger = divmod(targets, count)
        # All but the first, by their two sizes: a sum over thousands of groups would hold up the service.
        many, few = (larger - 1, count - larger) if larger else (0, count - 1)
        if many * service_s(size + 1) + few * service_s(size) >= back_s:
            return [size + 1] * larger + [size] * (count - larger)
    return [1] * targets


@dataclass
class _TargetTimes:
    """Times of one target. plain_s, verify_s: from its Hello, 0: unknown. back_s: Z, measured back_samples times."""

    plain_s: float
    verify_s: float
    back_s: float = 0.0
    back_samples: int = 0

    @property
    def return_s(self) -> float:
        """Z as measured, or as announced before there are enough samples."""
        return self.back_s if self.back_samples >= MIN_SAMPLES else self.verify_s


class TargetAdmission:
    """Measures S(n), Z and E[l] + 1 while serving, and decides which targets may connect. max_rows: of a batch.

    The paper's targets have one request each. Here a new target is taken to have as many as the connected ones have on
    average: all requests share the draft alike, and plain decoding too gives each request one token per step.
    """

    def __init__(self, max_rows: int):
        self._max_rows = max_rows
        self._service_s: dict[int, float] = {}
        self._searches = 0
        self._tokens = 0.0
        self._rounds = 0
        self._targets: dict[str, _TargetTimes] = {}

    @property
    def tokens(self) -> float:
        """Moving average of E[l] + 1; 0.0: unknown."""
        return self._tokens if self._rounds >= MIN_SAMPLES else 0.0

    def record_search(self, rows: int, seconds: float) -> None:
        """Record the time of a search of so many rows, including catch-up."""
        before = self._service_s.get(rows, seconds)
        self._service_s[rows] = before + AVERAGE_WEIGHT * (seconds - before)
        self._searches += 1

    def record_round(self, target_id: str, tokens: int, seconds: float) -> None:
        """Record the tokens that a target emitted with a tree, and the seconds until it asked again."""
        self._rounds += 1
        self._tokens += (tokens - self._tokens) * max(AVERAGE_WEIGHT, 1.0 / self._rounds)
        times = self._targets.get(target_id)
        if times is not None:
            times.back_samples += 1
            times.back_s += (seconds - times.back_s) * max(AVERAGE_WEIGHT, 1.0 / times.back_samples)

    def leave(self, target_id: str) -> None:
        """Remove a target; unknown ones are ignored."""
        self._targets.pop(target_id, None)

    def admit(self, target_id: str, *, plain_s: float, verify_s: float, requests: int = 0) -> str:
        """Admit a target and return "", or return the reason for refusing it.

        A connected target stays, and an unknown time keeps nobody out. A target that would be alone is always admitted:
        it takes nothing from others and decides itself when drafts are worth their time, and without it nothing would
        be measured again after an hour in which the device was slow.

        plain_s, verify_s: from its Hello. requests: open sessions of the connected targets.
        """
        there = self._targets.get(target_id)
        if there is not None:
            there.plain_s, there.verify_s = plain_s, verify_s
            return ""
        coming = _TargetTimes(plain_s, verify_s)
        why = self._refusal(coming, max(requests / max(len(self._targets), 1), 1.0))
        if not why:
            self._targets[target_id] = coming
        return why

    def _refusal(self, coming: _TargetTimes, each: float) -> str:
        """Return why one more target would not pay, "" if it does. each: requests per target."""
        if self._searches < MIN_SAMPLES or not self.tokens or not self._targets:
            return ""
        service_s, now = interpolated(self._service_s), len(self._targets)
        for times, is_new in ((coming, True), *((times, False) for times in self._targets.values())):
            if not times.plain_s or not times.return_s:
                continue
            worth_s = self.tokens * times.plain_s
            if self._round_s(now + 1, each, times.return_s) <= worth_s:
                continue
            if not is_new and self._round_s(now, each, times.return_s) > worth_s:
                continue  # it is slower than plain decoding already
            would_s = self._round_s(now + 1, each, times.return_s)
            most = max_targets_batched(service_s, times.return_s, self.tokens, times.plain_s, max_rows=self._max_rows)
            whose = "this target" if is_new else "a target that is here"
            return (
                f"{now} targets are served, {each:.3g} requests each, and the most that pay are {int(most / each)}: "
                f"with one more, a request of {whose} would get {self.tokens / would_s:.1f} tokens/s with drafts of "
                f"{1e3 * service_s(1):.2f} ms, and has {1.0 / times.plain_s:.1f} tokens/s by plain decoding; decode "
                "without this service, or start another"
            )
        return ""

    def _round_s(self, targets: int, each: float, back_s: float) -> float:
        requests = max(round(targets * each), 1)
        return take_turns(requests, interpolated(self._service_s), back_s, max_rows=self._max_rows).round_s
