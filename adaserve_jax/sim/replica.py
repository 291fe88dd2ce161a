"""Simulated replicas: one engine on its own virtual clock, and several behind a router on one timeline.

A step is begun and ended separately, so that nobody knows its outcome before its end.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

import numpy as np

from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.records import Status
from adaserve_jax.routing.fleet import Assigned, Fleet
from adaserve_jax.routing.routers import RoutingPolicy
from adaserve_jax.scheduler.commit import StepUpdates
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.scheduler.step import VerifiedStep, begin_step, end_step
from adaserve_jax.sim.executor import VirtualClock
from adaserve_jax.stats import StepStats
from adaserve_jax.types import Executor, Sequence, SequenceUpdate

_NONE = -1


class TokenTimes:
    """Records when the tokens of simulated sequences came, one step at a time.

    Sequences are named by `StepUpdates.numbers`, their number in the order of `Scheduler.add`. A sequence with tokens
    owns a row of times and counts, one column per step that brought some, until `pop`.
    """

    def __init__(self) -> None:
        self._row = np.full(1024, _NONE, np.int64)  # by sequence
        self._free: list[int] = []
        self._times_s = np.zeros((0, 64))
        self._counts = np.zeros((0, 64), np.int32)
        self._steps = np.zeros(0, np.int64)  # columns in use, by row

    def take(self, updates: StepUpdates, now: float) -> None:
        """Record that the sequences of `updates` got their new tokens at `now`."""
        sequence = updates.numbers
        try:
            rows = self._row[sequence]
        except IndexError:
            more = np.full(max(len(self._row), int(sequence.max()) + 1), _NONE, np.int64)
            self._row = np.concatenate([self._row, more])
            rows = self._row[sequence]
        new = rows == _NONE
        if np.count_nonzero(new):
            for each in sequence[new].tolist():
                self._row[each] = self._free_row()
            rows = self._row[sequence]
        steps = self._steps[rows]
        if np.count_nonzero(steps == self._times_s.shape[1]):
            self._times_s = np.concatenate([self._times_s, np.zeros_like(self._times_s)], axis=1)
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._times_s[rows, steps] = now
        self._counts[rows, steps] = updates.counts
        self._steps[rows] = steps + 1

    def pop(self, sequence: int) -> tuple[float, ...]:
        """Return and forget the seconds of each token since the first; tokens of one step share their time."""
        row = int(self._row[sequence]) if sequence < len(self._row) else _NONE
        if row == _NONE:
            return ()
        steps = int(self._steps[row])
        times_s = self._times_s[row, :steps] - self._times_s[row, 0]
        self._row[sequence] = _NONE
        self._steps[row] = 0
        self._free.append(row)
        return tuple(np.repeat(times_s, self._counts[row, :steps]).tolist())

    def _free_row(self) -> int:
        if not self._free:
            rows = len(self._steps)
            more = max(rows, 64)
            self._free = list(range(rows + more - 1, rows - 1, -1))
            self._times_s = np.concatenate([self._times_s, np.zeros((more, self._times_s.shape[1]))])
            self._counts = np.concatenate([self._counts, np.zeros((more, self._counts.shape[1]), np.int32)])
            self._steps = np.concatenate([self._steps, np.zeros(more, np.int64)])
        return self._free.pop()


OnEnd = Callable[["Replica", str, Assigned, RequestMetrics, Status, tuple[float, ...]], None]
"""on_end(replica, sequence id, the router's view of the request, metrics, status, seconds of each token since the
first, if they are recorded)."""


class Replica:
    """One simulated engine: the scheduler that serves, and an executor that only takes time.

    Call begin_step and end_step in turn; add at any time.
    """

    def __init__(
        self, index: int, scheduler: Scheduler, executor: Executor, clock: VirtualClock, on_end: OnEnd,
        *, fleet: Fleet | None = None, keep_token_times: bool = True, on_step: Callable[[float], None] | None = None,
    ):  # fmt: skip
        """Build an idle replica. fleet: the view of its requests that routers read; None: there is no router. on_step:
        called with the time of each step's end, after its outcome was committed."""
        self.index = index
        self.clock = clock
        self._open: dict[str, tuple[Assigned, int]] = {}
        """The router's view of each open request, and its number in the order of `add`."""
        self._added = 0
        self._fleet = fleet
        self._place = np.zeros(64, np.int64)  # in the fleet, by number
        self._token_times = TokenTimes() if keep_token_times else None
        self._scheduler = scheduler
        self._executor = executor
        self._on_end = on_end
        self._on_step = on_step
        self._in_flight: VerifiedStep | None = None
        self._left: dict[str, int] = {}
        """Tokens to the end of the open requests that stop by themselves."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> StepStats:
        return self._scheduler.stats

    @property
    def totals(self) -> StepStats:
        """The live statistics, without the copy that `stats` makes; the next step changes them."""
        return self._scheduler.totals

    @property
    def is_stepping(self) -> bool:
        return self._in_flight is not None

    def add(self, request: Sequence, known: Assigned, ends_after: int | None = None) -> None:
        """Add a request. ends_after: tokens after which it stops by itself, which the scheduler is not told."""
        if ends_after is not None:
            self._left[request.sequence_id] = ends_after
        self._open[request.sequence_id] = (known, self._added)
        if self._fleet is not None:
            if self._added == len(self._place):
                self._place = np.concatenate([self._place, np.zeros_like(self._place)])
            self._place[self._added] = self._fleet.add(self.index, known)
        self._added += 1
        self._scheduler.add(request)

    def begin_step(self, at_s: float) -> None:
        """Run the next step, from `at_s` at the earliest to its end by this replica's clock."""
        clock = self.clock
        while clock.now() < at_s:  # one addition may fall short of `at_s` by its rounding
            clock.advance(at_s - clock.now())
        self._in_flight = begin_step(self._scheduler, self._executor, clock.now)
        assert self._in_flight is not None, "a step is begun only with work"

    def end_step(self) -> None:
        """Commit the step at its end, then expand or contract if that is due."""
        assert self._in_flight is not None, "a step is ended after it was begun"
        step, self._in_flight = self._in_flight, None
        result = end_step(
            self._scheduler, self._executor, self.clock.now, step, self._stop_check if self._left else None,
            observe=lambda result: self._take_in(result.updates, result.ended_s),
        )  # fmt: skip
        if self._on_step is not None:
            self._on_step(result.ended_s)

    def cut_off(self) -> None:
        """End all open requests as unfinished."""
        for sequence_id in list(self._open):
            update = self._scheduler.abort(sequence_id)
            if update is not None:
                self._end(update, "unfinished")

    def _stop_check(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        left = self._left.get(sequence_id)
        if left is None:
            return None
        self._left[sequence_id] = left - len(token_ids)
        return left if left <= len(token_ids) else None

    def _take_in(self, updates: StepUpdates, now: float) -> None:
        """Pass the updates of a commit on to token times, fleet and `on_end`."""
        if self._token_times is not None:
            self._token_times.take(updates, now)
        if self._fleet is not None:
            self._fleet.take(self.index, self._place[updates.numbers], updates.counts, now)
        for update in updates.ended.values():
            self._end(update, "finished")

    def _end(self, update: SequenceUpdate, status: Status) -> None:
        metrics = update.metrics
        assert metrics is not None
        known, sequence = self._open.pop(update.sequence_id)
        self._left.pop(update.sequence_id, None)
        known.first_token_s, known.received = metrics.first_token_s, metrics.output_tokens
        if self._fleet is not None:
            self._fleet.end(self.index, int(self._place[sequence]))
        offsets_s = () if self._token_times is None else self._token_times.pop(sequence)
        self._on_end(self, update.sequence_id, known, metrics, status, offsets_s)


STEP_ENDS, STEP_BEGINS = 0, 2
"""Kinds of events, in their order at one instant; arrivals come between them."""


def run_cluster(
    replicas: abc.Sequence[Replica],
    router: RoutingPolicy,
    fleet: Fleet,
    arrivals: Iterable[Assigned],
    deliver: Callable[[int, Assigned, Replica], None],
    *,
    drain_s: float,
) -> float:
    """Serve `arrivals` (in order of arrival_s) to the end; return the time at which the last step ends.

    At one instant steps end first, then requests arrive and are routed, then steps begin. So a request is in its
    replica's queue before any step that begins at its arrival or later, and a router sees exactly what had ended by
    then. fleet: the routers' view of these replicas. deliver(number, arrival, replica) adds that arrival to the chosen
    replica. drain_s: seconds after the last arrival; a step that ends later is its replica's last, and requests left
    are cut off.
    """
    events: list[tuple[float, int, int]] = []
    due_s, arrived, waiting = 0.0, 0, iter(arrivals)
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
        if replica.has_work and (asked is not None or at_s <= due_s + drain_s):
            begin_later(replica, at_s)
    for replica in replicas:
        replica.cut_off()
    return max(replica.clock.now() for replica in replicas)
