"""Samples of a simulation: at the end of the first step after each SAMPLE_S of the virtual clock, or more seldom, and
at the end of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from adaserve_jax.results.samples import SAMPLE_S, Sample
from adaserve_jax.stats import StepStats

ADDED = (
    "steps", "spec_steps", "generation_tokens", "draft_tokens", "accepted_tokens", "preemptions", "draft_s", "verify_s",
    "wait_s", "running", "waiting", "pages_used", "pages_total", "extension_used", "extension_total", "last_budget",
)  # fmt: skip
MOST_SAMPLES = 36_000
"""Of one point: of longer ones than an hour samples are further apart."""
MOST_READ = 1_000_000
"""Totals of replicas that the samples of one point add up, at most: of many replicas samples are further apart."""
NOTHING = StepStats()


class SimSampler:
    """Call `note` at the end of every step, and `end` after the last. totals: of each replica, asked for only when a
    sample is due. duration_s: of the simulation, at most. replicas: how many totals there are."""

    def __init__(
        self, totals: Callable[[], Sequence[StepStats]], *, run_id: str, point: str, duration_s: float = 0.0,
        replicas: int = 1,
    ):  # fmt: skip
        self.samples: list[Sample] = []
        self._totals = totals
        self._run_id, self._point = run_id, point
        self._every_s = max(SAMPLE_S, duration_s / min(MOST_SAMPLES, MOST_READ / replicas))
        self._due_s = self._every_s
        self._taken_s = -math.inf

    def note(self, now_s: float) -> None:
        """Take a sample if one is due. The host's phases are 0: the virtual clock stands still meanwhile."""
        if now_s < self._due_s:
            return
        self._due_s = self._every_s * (math.floor(now_s / self._every_s) + 1)
        self._take(now_s)

    def end(self, now_s: float) -> None:
        """Take the last sample, which has what came since the one before, unless that one was taken just now."""
        if self._taken_s < now_s:
            self._take(now_s)

    def _take(self, now_s: float) -> None:
        self._taken_s = now_s
        stats = together(self._totals())
        self.samples.append(Sample.of(stats, NOTHING, run_id=self._run_id, point=self._point, t_s=now_s, host=False))


def together(replicas: Sequence[StepStats]) -> StepStats:
    """Of all replicas: counts, requests, pages and budgets added up, depth and width the greatest."""
    if len(replicas) == 1:
        return replicas[0]
    every = StepStats(
        last_depth=max(each.last_depth for each in replicas),
        last_width=max(each.last_width for each in replicas),
        draft_resident=all(each.draft_resident for each in replicas),
        swaps={str(number): sum(each.swaps.values()) for number, each in enumerate(replicas)},
    )
    for name in ADDED:
        setattr(every, name, sum(getattr(each, name) for each in replicas))
    return every
