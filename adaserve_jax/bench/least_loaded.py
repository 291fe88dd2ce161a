"""The router that weighs what each replica has left to do. R: replicas; K: places of a replica; C: classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaserve_jax.bench.fleet import FREE, Assigned, Fleet
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import Limits

PRIOR_OUTPUT_TOKENS = 256.0
"""Output length assumed of a class before any has ended; it counts as one that ended."""


class LeastLoaded:
    """The replica with the fewest seconds of work outstanding; of equals the first.

    A prompt token costs what one more packed token adds to a verification (the slope of the cost table), an output
    token the same and its share of a step's fixed time with all rows in use. Of a request, the prompt is outstanding
    until its first token, and of the output what its class's mean length leaves, at least one token.

    Of a replica it keeps token counts, which are whole numbers: an arrival takes time for the replicas that changed
    since the last one, and a few operations on [R, C].
    """

    def __init__(self, costs: CostTable, limits: Limits):
        seconds = costs.verify_s(limits.max_requests)
        edges = limits.token_edges
        self.prompt_token_s = float(seconds[-1] - seconds[0]) / max(edges[-1] - edges[0], 1)
        self.output_token_s = self.prompt_token_s + float(seconds[0]) / limits.max_requests
        self._lengths: dict[str, tuple[float, int]] = {}
        self._fleet: Fleet | None = None
        self._short = np.zeros(0)
        """f64[C]: with so many tokens received, a request's output is not expected to have more than one left."""
        self._prompts = self._others = np.zeros(0, np.int64)
        self._counts = np.zeros((0, 0), np.int64)

    def choose(self, request: Assigned, replicas: Sequence[list[Assigned]], now: float) -> int:
        return int(np.argmin(self.loads_s(Fleet.of(replicas))))

    def ended(self, request: Assigned) -> None:
        total, count = self._lengths.get(request.slo_class, (PRIOR_OUTPUT_TOKENS, 1))
        self._lengths[request.slo_class] = (total + request.received, count + 1)

    def expected_output(self, slo_class: str) -> float:
        """Tokens, mean of the class's outputs that ended."""
        total, count = self._lengths.get(slo_class, (PRIOR_OUTPUT_TOKENS, 1))
        return total / count

    def loads_s(self, fleet: Fleet) -> np.ndarray:
        """f64[R], seconds of a full replica that its requests still take, as expected."""
        means = np.array([self.expected_output(name) for name in fleet.kinds])
        short = np.ceil(means - 1)
        if fleet is not self._fleet or not np.array_equal(short, self._short):
            self._fleet, self._short = fleet, short
            self._prompts, self._others = (np.zeros(len(fleet), np.int64) for _ in range(2))
            self._counts = np.zeros((len(fleet), len(means)), np.int64)
            self._count(fleet, np.arange(len(fleet)))
        elif fleet.changed:
            self._count(fleet, np.fromiter(fleet.changed, np.int64, len(fleet.changed)))
        fleet.changed.clear()
        return self._prompts * self.prompt_token_s + (self._counts @ means + self._others) * self.output_token_s

    def _count(self, fleet: Fleet, rows: np.ndarray) -> None:
        """What is left on some replicas: prompt tokens; requests by class with more than one token to come, each of
        which has its class's mean left but for what it received; and the sum of what does not change with a mean."""
        if not len(self._short):
            return
        kind, received = fleet.kind[rows], fleet.received[rows]
        taken = kind != FREE
        more = taken & (received < self._short[kind])
        self._prompts[rows] = (fleet.prompt[rows] * (taken & (received == 0))).sum(axis=1)
        self._others[rows] = taken.sum(axis=1) - more.sum(axis=1) - (received * more).sum(axis=1)
        self._counts[rows] = (more[:, :, None] & (kind[:, :, None] == np.arange(len(self._short)))).sum(axis=1)
