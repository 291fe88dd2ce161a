"""What a step will take: a live table of seconds, seeded by the warm-up's samples and corrected by every outcome.

Knows nothing of requests or policies.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import CostSamples, Limits, StepOutcome, StepPlan

ENTRY_RATE = 0.2
"""Weight of a new time in its entry's moving average."""
DRIFT_RATE = 0.05
"""Weight of a new ratio (measured over warm-up) in the ratio that stands in for entries not seen lately."""
FRESH_STEPS = 200
"""Steps after which an entry's own average counts for half, and the drift ratio for the other half."""
OUTLIER = 4.0
"""A measurement further than this factor from the prediction is taken at this factor."""


class CostTable:
    """Predicted seconds of verification, catch-up and draft levels. E: limits.token_edges."""

    def __init__(self, samples: CostSamples, limits: Limits):
        if not samples.verify_s:
            raise ConfigError("the cost table needs at least one verify time; run the executor's warm_up first")
        self.samples = samples
        """As measured at warm-up."""
        self._edges = limits.token_edges
        self._row_buckets = sorted({rows for _, rows in samples.verify_s})
        self._sample = _verify_grid(samples, self._edges, self._row_buckets)
        self._average = self._sample.copy()
        self._seen = np.full(self._sample.shape, -np.inf)
        self._steps = 0
        self._verify_drift = 1.0
        self._draft_drift = 1.0
        self._overhead_s = {False: 0.0, True: 0.0}  # by whether the step drafts
        self.baseline_s = float(self._sample[0, 0])
        """Seconds of one token of one request, without speculation, as measured at warm-up."""
        self._catchup_tokens = sorted(samples.catchup_s)
        self._catchup_s = [samples.catchup_s[tokens] for tokens in self._catchup_tokens]
        self.draft_widths = tuple(sorted({width for _, width in samples.draft_level_s}))
        """Widths that were timed; a width between them costs what the next wider one costs."""
        self._level_rows = sorted({rows for rows, _ in samples.draft_level_s})
        self._level_s = _level_grid(samples, self._level_rows, max(limits.max_width, 1))
        self._refresh()

    @property
    def max_catchup_tokens(self) -> int:
        """Most catch-up tokens of one step: the largest size that was timed, else the largest token edge."""
        return self._catchup_tokens[-1] if self._catchup_tokens else self._edges[-1]

    def overhead_s(self, drafting: bool) -> float:
        """Seconds of a step outside draft and verification, averaged over the steps that draft, or that do not.

        A kind that was never seen counts as free, so that it is tried.
        """
        return self._overhead_s[drafting]

    def verify_s(self, rows: int) -> np.ndarray:
        """f64[E], seconds to verify each token edge with `rows` rows, non-decreasing."""
        return self._predicted[:, _bucket(self._row_buckets, rows)]

    def step_at_warm_up_s(self, tokens: int, rows: int, depth: int, width: int) -> float:
        """Seconds of a step of so many packed tokens, by the warm-up's samples alone: a t_spec that never learns."""
        edge = min(bisect_left(self._edges, tokens), len(self._edges) - 1)
        verify_s = float(self._sample[edge, _bucket(self._row_buckets, rows)])
        if not depth or not self._level_rows:
            return verify_s
        return verify_s + depth * float(self._level_s[_bucket(self._level_rows, rows)][width - 1])

    def level_s(self, rows: int) -> np.ndarray:
        """f64[max_width], seconds of one level of the beam search of width 1, 2, ..."""
        if not self._level_rows:
            return np.zeros(self._level_s.shape[1])
        return self._level_s[_bucket(self._level_rows, rows)] * self._draft_drift

    def catchup_s(self, tokens: int) -> float:
        """Seconds to feed `tokens` tokens to the draft."""
        if tokens <= 0 or not self._catchup_tokens:
            return 0.0
        index = bisect_left(self._catchup_tokens, tokens)
        if index == len(self._catchup_tokens):
            return self._catchup_s[-1] * tokens / self._catchup_tokens[-1] * self._draft_drift
        return self._catchup_s[index] * self._draft_drift

    def observe(self, plan: StepPlan, outcome: StepOutcome, step_s: float) -> None:
        """Learn from one step; step_s: seconds from its plan to its commit.

        A call of the draft that only catches up is not waited for, so that its time says nothing.
        """
        self._steps += 1
        edge = bisect_left(self._edges, outcome.bucket)
        if outcome.verify_s > 0 and edge < len(self._edges):
            self._observe_verify(edge, _bucket(self._row_buckets, plan.num_rows), outcome.verify_s)
        drafting = plan.draft is not None and plan.draft.depth > 0
        if plan.draft is not None and drafting and outcome.draft_s > 0:
            predicted = self.catchup_s(int(plan.draft.catchup_counts.sum()))
            predicted += plan.draft.depth * float(self.level_s(plan.num_rows)[plan.draft.width - 1])
            if predicted > 0:
                ratio = min(max(outcome.draft_s / predicted, 1 / OUTLIER), OUTLIER)
                self._draft_drift *= 1 + ENTRY_RATE * (ratio - 1)
        overhead_s = min(max(step_s - outcome.draft_s - outcome.verify_s, 0.0), OUTLIER * self.baseline_s)
        self._overhead_s[drafting] += DRIFT_RATE * (overhead_s - self._overhead_s[drafting])

    def _observe_verify(self, edge: int, rows: int, seconds: float) -> None:
        predicted = self._blend()[edge, rows]
        seconds = min(max(seconds, predicted / OUTLIER), predicted * OUTLIER)
        self._average[edge, rows] = predicted + ENTRY_RATE * (seconds - predicted)
        self._seen[edge, rows] = self._steps
        self._verify_drift += DRIFT_RATE * (seconds / self._sample[edge, rows] - self._verify_drift)
        self._refresh()

    def _blend(self) -> np.ndarray:
        fresh = np.exp2((self._seen - self._steps) / FRESH_STEPS)
        return fresh * self._average + (1 - fresh) * self._sample * self._verify_drift

    def _refresh(self) -> None:
        self._predicted = np.maximum.accumulate(self._blend(), axis=0)


def _bucket(buckets: list[int], value: int) -> int:
    """Index of the smallest bucket that holds `value`, or of the largest."""
    return min(bisect_left(buckets, value), len(buckets) - 1)


def _verify_grid(samples: CostSamples, edges: tuple[int, ...], row_buckets: list[int]) -> np.ndarray:
    """f64[E, row buckets]; edges that were not timed are interpolated between those that were."""
    grid = np.empty((len(edges), len(row_buckets)))
    for column, rows in enumerate(row_buckets):
        timed = sorted((tokens, seconds) for (tokens, r), seconds in samples.verify_s.items() if r == rows)
        grid[:, column] = np.interp(edges, [tokens for tokens, _ in timed], [seconds for _, seconds in timed])
    if not (grid > 0).all():
        raise ConfigError("every verify time must be above 0 seconds; run the executor's warm_up again")
    return grid


def _level_grid(samples: CostSamples, row_buckets: list[int], max_width: int) -> np.ndarray:
    """f64[row buckets, max_width], from the next wider width that was timed."""
    grid = np.zeros((len(row_buckets), max_width))
    for index, rows in enumerate(row_buckets):
        timed = {width: seconds for (r, width), seconds in samples.draft_level_s.items() if r == rows}
        widths = sorted(timed)
        for width in range(1, max_width + 1):
            grid[index, width - 1] = timed[widths[_bucket(widths, width)]]
    return grid
