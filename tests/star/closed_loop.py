"""N targets and one draft, event by event: the oracle of the closed forms, with which it shares no code."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass
class Seen:
    """Seconds of one round, of waiting per request, of idleness per service; the share that the draft was busy."""

    round_s: float
    wait_s: float
    idle_s: float
    load: float


def run(starts_s, service_s, back_s: float, *, max_rows: int = 1, rounds: int = 400) -> Seen:
    """starts_s: when each target asks first. The draft takes all that wait, at most max_rows, the longest waiting
    first; each asks again back_s after its answer. The first half is not counted."""
    arrivals = [(at, number) for number, at in enumerate(starts_s)]
    heapq.heapify(arrivals)
    now, queue, answered, services = 0.0, [], [], []
    while len(answered) < rounds * len(starts_s):
        if not queue:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now + 1e-12:
            queue.append(heapq.heappop(arrivals))
        taken, queue = queue[:max_rows], queue[max_rows:]
        end = now + service_s(len(taken))
        services.append((now, end))
        for at, number in taken:
            answered.append((end, now - at))
            heapq.heappush(arrivals, (end + back_s, number))
        now = end
    half = [(at, wait) for at, wait in answered[len(answered) // 2 :]]
    begin = half[0][0]
    kept = [(start, end) for start, end in services if start >= begin]
    span = kept[-1][1] - kept[0][0]
    busy = sum(end - start for start, end in kept)
    in_span = [wait for at, wait in half if at > kept[0][0]]
    return Seen(
        round_s=span * len(starts_s) / len(in_span),
        wait_s=sum(in_span) / len(in_span),
        idle_s=(span - busy) / max(len(kept) - 1, 1),
        load=busy / span,
    )
