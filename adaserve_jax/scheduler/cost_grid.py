"""Seconds as lines in the context load, on grids of declared sizes: what samples say, as arrays that are quick to read.

Knows no step, no clock and no learning; `cost.py` corrects these times while serving, the simulator takes them as they
are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import CostSamples, Limits


@dataclass(frozen=True, eq=False)
class Lines:
    """seconds = base + slope * context load. base, slope: f64, of one shape."""

    base: np.ndarray
    slope: np.ndarray

    def at(self, row: int, column: int, load: float) -> float:
        """Seconds of one line; both arrays have two axes."""
        return self.base.item(row, column) + self.slope.item(row, column) * load


class CostGrid:
    """The samples' seconds by token edge, rows, width and context load. E: limits.token_edges."""

    def __init__(self, samples: CostSamples, limits: Limits):
        """Raises ConfigError: there is no verify time, or one that is not above 0."""
        if not samples.verify_s:
            raise ConfigError("the cost table needs at least one verify time; run the executor's warm_up first")
        self._samples = samples
        self._edges = limits.token_edges
        self.row_buckets = sorted({rows for _, rows in samples.verify_s})
        self.verify = self._verify()
        self.catchup_tokens = sorted(samples.catchup_s)
        self._catchup = [
            self._line(samples.catchup_s, samples.catchup_per_context_s, tokens, min(tokens, self.row_buckets[-1]))
            for tokens in self.catchup_tokens
        ]
        self.level_rows = sorted({rows for rows, _ in samples.draft_level_s})
        self._levels = self._level(max(limits.max_width, 1))

    def row_bucket(self, rows: int) -> int:
        """Index of the smallest number of rows that was timed and holds `rows`, or of the largest."""
        return bucket_of(self.row_buckets, rows)

    def groups(self, rows: int) -> int:
        """Groups that rows form when they read their contexts."""
        return -(-rows // self._samples.context_rows)

    def verify_s(self, tokens: int, rows: int, load: float) -> float:
        """Seconds to verify a step of so many packed tokens."""
        edge, column = min(bisect_left(self._edges, tokens), len(self._edges) - 1), self.row_bucket(rows)
        return self.verify.at(edge, column, load)

    def level_s(self, rows: int, load: float) -> np.ndarray:
        """f64[max_width], seconds of one level of the beam search of width 1, 2, ..."""
        row = bucket_of(self.level_rows, rows)
        return self._levels.base[row] + self._levels.slope[row] * load

    def level_of(self, rows: int, width: int, load: float) -> float:
        """Seconds of one level of that width."""
        return self._levels.at(bucket_of(self.level_rows, rows), width - 1, load)

    def catchup_s(self, tokens: int, load: float) -> float:
        """Seconds to feed `tokens` tokens to the draft; beyond the largest size that was timed, in proportion."""
        if tokens <= 0 or not self.catchup_tokens:
            return 0.0
        index = bucket_of(self.catchup_tokens, tokens)
        base, slope = self._catchup[index]
        return (base + slope * load) * max(1.0, tokens / self.catchup_tokens[index])

    def _line(self, seconds: Mapping, slopes: Mapping, key: object, rows: int) -> tuple[float, float]:
        """Base and slope of one sample, which was taken with `context` tokens in each of `rows` rows."""
        slope = slopes.get(key, 0.0)
        base = seconds[key] - slope * self._samples.context * self.groups(rows)
        if base < 0:
            raise ConfigError(f"the times of {key} must not be below 0 seconds without context, got {base:g}")
        return base, slope

    def _verify(self) -> Lines:
        """[E, row buckets]; edges that were not timed are interpolated between those that were."""
        samples, shape = self._samples, (len(self._edges), len(self.row_buckets))
        grid = Lines(np.empty(shape), np.empty(shape))
        for column, rows in enumerate(self.row_buckets):
            timed = sorted(key for key in samples.verify_s if key[1] == rows)
            tokens = [key[0] for key in timed]
            lines = [self._line(samples.verify_s, samples.verify_per_context_s, key, min(*key)) for key in timed]
            grid.base[:, column] = np.interp(self._edges, tokens, [base for base, _ in lines])
            grid.slope[:, column] = np.interp(self._edges, tokens, [slope for _, slope in lines])
        if not (grid.base > 0).all():
            raise ConfigError("every verify time must be above 0 seconds; run the executor's warm_up again")
        return grid

    def _level(self, max_width: int) -> Lines:
        """[rows, max_width], from the next wider width that was timed; zeros where nothing was."""
        samples, shape = self._samples, (max(len(self.level_rows), 1), max_width)
        grid = Lines(np.zeros(shape), np.zeros(shape))
        for index, rows in enumerate(self.level_rows):
            widths = sorted(width for r, width in samples.draft_level_s if r == rows)
            for width in range(1, max_width + 1):
                key = rows, widths[bucket_of(widths, width)]
                line = self._line(samples.draft_level_s, samples.level_per_context_s, key, rows)
                grid.base[index, width - 1], grid.slope[index, width - 1] = line
        return grid


def bucket_of(buckets: list[int], value: int) -> int:
    """Index of the smallest bucket that holds `value`, or of the largest."""
    return max(min(bisect_left(buckets, value), len(buckets) - 1), 0)
