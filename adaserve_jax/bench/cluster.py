"""Several replicas and a router on one virtual timeline: what happens in which order.

At one instant, steps end first, then requests arrive and are routed, then steps begin. So a request is in its replica's
queue before any step that begins at its arrival or later, and a router sees just what had ended by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from adaserve_jax.bench.fleet import Assigned, Fleet
from adaserve_jax.bench.replica import Replica
from adaserve_jax.bench.routers import Router

STEP_ENDS, STEP_BEGINS = 0, 2
"""Kinds of events, in their order at one instant; between them come arrivals."""


def run_cluster(
    replicas: Sequence[Replica],
    router: Router,
    fleet: Fleet,
    arrivals: Sequence[Assigned],
    deliver: Callable[[int, Assigned, Replica], None],
    *,
    drain_s: float,
) -> float:
    """Serve `arrivals` (in order of arrival_s) to the end; returns the time of the last step's end.

    fleet: of these replicas; with one nobody asks it. deliver(number, arrival, replica): adds that arrival to the
    chosen replica. drain_s: after the last arrival; a step that ends later than that is its replica's last one, and
    requests left are cut off.
    """
    events: list[tuple[float, int, int]] = []
    last_due_s, arrived, waiting = arrivals[-1].arrival_s, 0, iter(arrivals)
    asked = next(waiting, None)
    waiting_to_begin = set[int]()

    def begin_later(replica: Replica, at_s: float) -> None:
        if not replica.is_stepping and replica.index not in waiting_to_begin:
            waiting_to_begin.add(replica.index)
            heappush(events, (max(at_s, replica.clock.now()), STEP_BEGINS, replica.index))

    while events or asked is not None:
        arrives = asked is not None and (
            not events or asked.arrival_s < events[0][0]
            or (asked.arrival_s == events[0][0] and events[0][1] == STEP_BEGINS)
        )  # fmt: skip
        if asked is not None and arrives:
            due_s = asked.arrival_s
            replica = replicas[router.choose(asked, fleet, due_s) if len(replicas) > 1 else 0]
            deliver(arrived, asked, replica)
            arrived, asked = arrived + 1, next(waiting, None)
            begin_later(replica, due_s)
            continue
        at_s, kind, index = heappop(events)
        replica = replicas[index]
        if kind == STEP_BEGINS:
            waiting_to_begin.discard(index)
            replica.begin_step(at_s)
            heappush(events, (replica.clock.now(), STEP_ENDS, index))
            continue
        replica.end_step()
        if replica.has_work and at_s <= last_due_s + drain_s:
            begin_later(replica, at_s)
    for replica in replicas:
        replica.cut_off()
    return max(replica.clock.now() for replica in replicas)
