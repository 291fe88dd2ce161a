"""One simulated engine on a virtual clock of its own: the scheduler that serves, and an executor that only takes time.

A step is begun and ended apart, so that what it brings is known to nobody before its end. Knows no other replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from adaserve_jax.bench.routers import Assigned
from adaserve_jax.bench.sim_executor import VirtualClock
from adaserve_jax.results.records import Status
from adaserve_jax.scheduler.scheduler import Scheduler
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


@dataclass
class OpenRequest:
    """What has come of a request so far. known: what its router sees of it. times, counts: of the updates that brought
    tokens, where they are kept."""

    known: Assigned
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def offsets_s(self) -> tuple[float, ...]:
        if not self.times:
            return ()
        return tuple((np.repeat(self.times, self.counts) - self.times[0]).tolist())


OnEnd = Callable[["Replica", str, OpenRequest, RequestMetrics, Status], None]
"""on_end(replica, request id, what came of it, its metrics, how it ended)."""


class Replica:
    """Requests from `add` to `on_end`. Call begin_step and end_step in turn; add at any time."""

    def __init__(
        self, index: int, scheduler: Scheduler, executor: Executor, clock: VirtualClock, on_end: OnEnd,
        *, keep_token_times: bool = True,
    ):  # fmt: skip
        self.index = index
        self.clock = clock
        self.open: dict[str, OpenRequest] = {}
        self._scheduler = scheduler
        self._executor = executor
        self._on_end = on_end
        self._keep_token_times = keep_token_times
        self._in_flight: tuple[StepPlan, DraftTrees, CandidateTrees, StepOutcome] | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def is_stepping(self) -> bool:
        return self._in_flight is not None

    def known(self) -> list[Assigned]:
        """What a router knows of the requests that have not ended."""
        return [request.known for request in self.open.values()]

    def add(self, request: Request, known: Assigned) -> None:
        self.open[request.request_id] = OpenRequest(known)
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
        """Take in what the step brought, at its end."""
        assert self._in_flight is not None, "a step is ended after it was begun"
        plan, trees, candidates, outcome = self._in_flight
        self._in_flight = None
        now = self.clock.now()
        self._take_in(self._scheduler.commit(plan, trees, candidates, outcome, now), now)

    def cut_off(self) -> None:
        """End all requests as they are."""
        for request_id in list(self.open):
            update = self._scheduler.abort(request_id)
            if update is not None:
                assert update.metrics is not None
                self._end(request_id, update.metrics, "unfinished")

    def _take_in(self, updates: list[RequestUpdate], now: float) -> None:
        """The one place that reads what `commit` returns."""
        for update in updates:
            request = self.open[update.request_id]
            known, count = request.known, len(update.token_ids)
            if not known.received:
                known.first_token_s = now
            known.received += count
            if self._keep_token_times:
                request.times.append(now)
                request.counts.append(count)
            if update.finish_reason is not None:
                assert update.metrics is not None
                self._end(update.request_id, update.metrics, "finished")

    def _end(self, request_id: str, metrics: RequestMetrics, status: Status) -> None:
        self._on_end(self, request_id, self.open.pop(request_id), metrics, status)
