"""Whether one target more may use a draft service: not where it, or one that is there, were slower than without.

No thread, clock or device. Knows targets by their times only; sessions are others'. Source: StarSD, section 4.2.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# How many targets one draft keeps busy, and how fast they are then: closed forms, one by one and batched.
#
# All targets are alike here, one request each: a round is one draft of S seconds and Z seconds until the target
# asks again, which it does in phase. Source: StarSD, sections 3.2 to 4.2; corrected in docs/equations.md.
# Imports no jax.

ServiceTime = Callable[[int], float]
"""S(n): seconds of the draft for n requests at once; does not fall with n."""
MOST_TARGETS = 4096
"""Where `max_targets` stops counting."""


def return_s(network_s: float, verify_s: float) -> float:
    """Z, seconds from an answer until the same target asks again. Eq. 6."""
    return network_s + verify_s


def accepted(chance: float, depth: int) -> float:
    """E[l]: accepted tokens of one round, each level accepted with `chance` after the one before. Eq. 3."""
    return sum(chance**level for level in range(1, depth + 1))


def emitted(chance: float, depth: int) -> float:
    """Tokens of one round: the accepted ones and the target's own one, which eq. 11 leaves out."""
    return accepted(chance, depth) + 1.0


def full_targets(service_s: float, back_s: float) -> int:
    """N_full: fewest targets that leave the draft no idle time, one at a time. Eq. 12."""
    return math.ceil(back_s / service_s) + 1


def max_targets(service_s: float, back_s: float, tokens: float, plain_s: float) -> int:
    """N_max: most targets, one at a time, none of which is slower than plain decoding at plain_s per token; 0: even one
    alone is. tokens: of one round, `emitted`. Section 4.2, in closed form."""
    alone = back_s + service_s <= tokens * plain_s
    return math.floor(tokens * plain_s / service_s) if alone else 0


@dataclass(frozen=True)
class Rounds:
    """Table 1 of StarSD for one number of targets. batch: requests per draft, on average. round_s: of one target, T.
    wait_s: of a request in the queue; idle_s: of the draft between two drafts (Table 1's, not eq. 9's, which is of a
    round). rounds_per_s: requests drafted, R_q; target_rounds_per_s: R_p. load: busy share of the draft."""

    targets: int
    batch: float
    round_s: float
    throughput_tps: float
    per_target_tps: float
    wait_s: float
    idle_s: float
    rounds_per_s: float
    target_rounds_per_s: float
    load: float


def rounds(targets: int, service_s: ServiceTime, back_s: float, tokens: float, *, max_rows: int = 1) -> Rounds:
    """What `targets` targets get of one draft that takes up to max_rows requests at once (1: the paper's).

    back_s: Z. tokens: of one round, `emitted`. The device takes all that wait when it is free, and requests that were
    drafted together come back together. So targets form groups, and groups that wait at once become one: in the end g
    groups of about N / g take turns, g the fewest that leave no idle time, else every target for itself. Then T = max(
    sum over the groups of S(n), Z + S(n) of the largest). Groups above max_rows: batches are full, N / max_rows in a
    round. With max_rows = 1 this is eq. 8 to 10. Batched, a loop may settle at one group more or fewer, as its phases
    fall.
    """
    sizes = _groups(targets, service_s, back_s)
    if sizes[0] <= max_rows:
        services, batches = [service_s(size) for size in sizes], float(len(sizes))
        busy_s = sum(services)
    else:
        sizes, services, batches = [max_rows], [service_s(max_rows)], targets / max_rows
        busy_s = batches * services[0]
    round_s = max(busy_s, back_s + services[0])
    served_s = sum(size * took for size, took in zip(sizes, services, strict=True)) / sum(sizes)
    rate = targets / round_s
    return Rounds(
        targets=targets,
        batch=targets / batches,
        round_s=round_s,
        throughput_tps=tokens * rate,
        per_target_tps=tokens / round_s,
        wait_s=round_s - back_s - served_s,
        idle_s=(round_s - busy_s) / batches,
        rounds_per_s=rate,
        target_rounds_per_s=1.0 / round_s,
        load=busy_s / round_s,
    )


def max_targets_batched(service_s: ServiceTime, back_s: float, tokens: float, plain_s: float, *, max_rows: int) -> int:
    """N_max where up to max_rows requests are drafted at once: the most targets, up to MOST_TARGETS, of which none is
    slower than plain decoding."""

    def pays(targets: int) -> bool:
        return rounds(targets, service_s, back_s, tokens, max_rows=max_rows).round_s <= tokens * plain_s

    return bisect_left(range(1, MOST_TARGETS + 1), True, key=lambda targets: not pays(targets))


def measured(times_s: Mapping[int, float]) -> ServiceTime:
    """S(n) from seconds measured at some n: lines between them, in proportion beyond the last, and the first before it.
    Raises ValueError without any."""
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
    """Sizes of the groups, largest first, where a batch has no limit."""
    for count in range(1, targets):
        size, larger = divmod(targets, count)
        sizes = [size + 1] * larger + [size] * (count - larger)
        services = [service_s(each) for each in sizes]
        if sum(services[1:]) >= back_s:
            return sizes
    return [1] * targets


RATE = 0.1
"""Weight of a new measurement in its moving average."""
FEWEST = 16
"""Drafts, and rounds verified, after which averages are believed."""


@dataclass
class _Times:
    """Of one target. plain_s, verify_s: as its Hello said, 0: not known. back_s: Z as measured, back_seen times."""

    plain_s: float
    verify_s: float
    back_s: float = 0.0
    back_seen: int = 0

    @property
    def return_s(self) -> float:
        """Z: measured, else as said."""
        return self.back_s if self.back_seen >= FEWEST else self.verify_s


class Admission:
    """Learns S(n), Z and E[l] + 1 from what is served, and judges who asks to come. max_rows: most requests at once.

    The paper's targets have one request each. Here they have several, on average as many as those that are there: all
    requests share the draft alike, and plain decoding too gives each request of a target a token per step.
    """

    def __init__(self, max_rows: int):
        self._max_rows = max_rows
        self._service_s: dict[int, float] = {}
        self._served = 0
        self._tokens = 0.0
        self._verified = 0
        self._targets: dict[str, _Times] = {}

    @property
    def tokens(self) -> float:
        """E[l] + 1, moving average; 0.0: not known."""
        return self._tokens if self._verified >= FEWEST else 0.0

    def served(self, rows: int, seconds: float) -> None:
        """A search of so many rows took so long, catch-up included."""
        before = self._service_s.get(rows, seconds)
        self._service_s[rows] = before + RATE * (seconds - before)
        self._served += 1

    def verified(self, target_id: str, tokens: int, seconds: float) -> None:
        """A target emitted so many tokens with a tree, and asked again after so many seconds."""
        self._verified += 1
        self._tokens += (tokens - self._tokens) * max(RATE, 1.0 / self._verified)
        times = self._targets.get(target_id)
        if times is not None:
            times.back_seen += 1
            times.back_s += (seconds - times.back_s) * max(RATE, 1.0 / times.back_seen)

    def leave(self, target_id: str) -> None:
        """A target is gone; unknown ones are ignored."""
        self._targets.pop(target_id, None)

    def admit(self, target_id: str, *, plain_s: float, verify_s: float, requests: int = 0) -> str:
        """Admit it: "", or why not, and it is not admitted. plain_s, verify_s: of its Hello; requests: that the targets
        which are there have now. Who is there already stays; what is not known yet keeps nobody out. Nor is anybody
        kept out where nobody is: it takes nothing from others, says itself when drafts are worth their time, and
        without it nothing would be measured again after an hour in which the device was slow."""
        there = self._targets.get(target_id)
        if there is not None:
            there.plain_s, there.verify_s = plain_s, verify_s
            return ""
        coming = _Times(plain_s, verify_s)
        why = self._why_not(coming, max(requests / max(len(self._targets), 1), 1.0))
        if not why:
            self._targets[target_id] = coming
        return why

    def _why_not(self, coming: _Times, each: float) -> str:
        """each: requests of one target."""
        if self._served < FEWEST or not self.tokens or not self._targets:
            return ""
        service_s, now = measured(self._service_s), len(self._targets)
        for times, is_new in ((coming, True), *((times, False) for times in self._targets.values())):
            if not times.plain_s or not times.return_s:
                continue
            worth_s = self.tokens * times.plain_s
            if self._round_s(now + 1, each, times.return_s) <= worth_s:
                continue
            if not is_new and self._round_s(now, each, times.return_s) > worth_s:
                continue  # it is no worse off than it is
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
        return rounds(requests, measured(self._service_s), back_s, self.tokens, max_rows=self._max_rows).round_s
