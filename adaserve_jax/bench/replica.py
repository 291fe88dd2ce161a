"""One simulated engine on a virtual clock of its own: the scheduler that serves, and an executor that only takes time.

A step is begun and ended apart, so that what it brings is known to nobody before its end. Knows no other replica.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adaserve_jax.bench.fleet import Assigned, Fleet
from adaserve_jax.bench.sim_executor import VirtualClock
from adaserve_jax.bench.token_times import TokenTimes
from adaserve_jax.results.records import Status
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.scheduler.swapping import swap_if_due
from adaserve_jax.scheduler.updates import StepUpdates
from adaserve_jax.stats import StepStats
from adaserve_jax.types import (
    CandidateTrees,
    DraftTrees,
    Executor,
    Request,
    RequestMetrics,
    RequestUpdate,
    StepOutcome,
    StepPlan,
)

OnEnd = Callable[["Replica", str, Assigned, RequestMetrics, Status, tuple[float, ...]], None]
"""on_end(replica, request id, what its router knows of it, its metrics, how it ended, seconds of each token since the
first one where they are kept)."""


class Replica:
    """Requests from `add` to `on_end`. Call begin_step and end_step in turn; add at any time."""

    def __init__(
        self, index: int, scheduler: Scheduler, executor: Executor, clock: VirtualClock, on_end: OnEnd,
        *, fleet: Fleet | None = None, keep_token_times: bool = True, on_step: Callable[[float], None] | None = None,
    ):  # fmt: skip
        """fleet: where routers read of its requests; None: no router asks. on_step: told the time of the end of every
        step, after what the step brought was taken in."""
        self.index = index
        self.clock = clock
        self._open: dict[str, tuple[Assigned, int]] = {}
        """What a router knows of each request that has not ended, and its number in the order of `add`."""
        self._added = 0
        self._fleet = fleet
        self._place = np.zeros(64, np.int64)  # in the fleet, by number
        self._token_times = TokenTimes() if keep_token_times else None
        self._scheduler = scheduler
        self._executor = executor
        self._on_end = on_end
        self._on_step = on_step
        self._in_flight: tuple[StepPlan, DraftTrees, CandidateTrees, StepOutcome] | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> StepStats:
        return self._scheduler.stats

    @property
    def totals(self) -> StepStats:
        """As `stats`, for who asks often; the next step changes them."""
        return self._scheduler.totals

    @property
    def is_stepping(self) -> bool:
        return self._in_flight is not None

    def add(self, request: Request, known: Assigned) -> None:
        self._open[request.request_id] = (known, self._added)
        if self._fleet is not None:
            if self._added == len(self._place):
                self._place = np.concatenate([self._place, np.zeros_like(self._place)])
            self._place[self._added] = self._fleet.add(self.index, known)
        self._added += 1
        self._scheduler.add(request)

    def begin_step(self, at_s: float) -> None:
        """Run the next step, no sooner than `at_s`, up to its end by this replica's clock."""
        scheduler, clock = self._scheduler, self.clock
        while clock.now() < at_s:  # one addition may fall short of `at_s` by its rounding
            clock.advance(at_s - clock.now())
        plan = scheduler.plan(clock.now())
        assert plan is not None, "a step is begun only with work"
        candidates = CandidateTrees.empty(plan.num_decode)
        if plan.draft is not None:
            candidates = self._executor.speculate(plan)
        trees = scheduler.select(plan, candidates, clock.now())
        self._in_flight = (plan, trees, candidates, self._executor.verify(plan, trees))

    def end_step(self) -> None:
        """Take in what the step brought, at its end; the draft and pages change places after it, where that is due."""
        assert self._in_flight is not None, "a step is ended after it was begun"
        plan, trees, candidates, outcome = self._in_flight
        self._in_flight = None
        now = self.clock.now()
        self._take_in(self._scheduler.commit(plan, trees, candidates, outcome, now), now)
        swap_if_due(self._scheduler, self._executor, self.clock.now)
        if self._on_step is not None:
            self._on_step(now)

    def cut_off(self) -> None:
        """End all requests as they are."""
        for request_id in list(self._open):
            update = self._scheduler.abort(request_id)
            if update is not None:
                self._end(update, "unfinished")

    def _take_in(self, updates: StepUpdates, now: float) -> None:
        """The one place that reads what `commit` returns."""
        if self._token_times is not None:
            self._token_times.take(updates, now)
        if self._fleet is not None:
            self._fleet.take(self.index, self._place[updates.sequence], updates.counts, now)
        for update in updates.ended.values():
            self._end(update, "finished")

    def _end(self, update: RequestUpdate, status: Status) -> None:
        metrics = update.metrics
        assert metrics is not None
        known, sequence = self._open.pop(update.request_id)
        known.first_token_s, known.received = metrics.first_token_s, metrics.output_tokens
        if self._fleet is not None:
            self._fleet.end(self.index, int(self._place[sequence]))
        offsets_s = () if self._token_times is None else self._token_times.pop(sequence)
        self._on_end(self, update.request_id, known, metrics, status, offsets_s)
