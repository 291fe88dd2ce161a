"""What turning speculation on again costs: seconds by the draft's longest lag and the number of rows, from a table.

Knows no policy and no step. Source: Nightjar (C_switch, table 3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import Limits


class SwitchTable:
    """C_switch(L_max, n) on a grid of lags and rows, made monotone, looked up rounding both up."""

    def __init__(self, lags: Sequence[int], rows: Sequence[int], seconds: np.ndarray):
        """lags: tokens; rows: both rising. seconds: f64[len(lags), len(rows)]. More lag or more rows never cost less:
        each entry becomes the largest of those that it holds.

        Raises ConfigError: the grid is not rising or not of that shape, or has a time below 0.
        """
        seconds = np.asarray(seconds, np.float64)
        if seconds.shape != (len(lags), len(rows)) or not seconds.size:
            raise ConfigError(
                f"the table of switching costs must have {len(lags)} lags x {len(rows)} rows of seconds, at least one, "
                f"got shape {seconds.shape}"
            )
        if any(a >= b for grid in (lags, rows) for a, b in pairwise(grid)):
            raise ConfigError(f"lags and rows of the switching costs must rise, got {list(lags)} and {list(rows)}")
        if not (seconds >= 0).all():
            raise ConfigError(f"switching costs must be at least 0 seconds, got {seconds.min():g}")
        self._lags = list(lags)
        self._rows = list(rows)
        self._seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)

    @classmethod
    def of(cls, cost: CostTable, limits: Limits) -> SwitchTable:
        """As it was profiled; else by the time that the draft takes to be fed what it lacks, every row as much as the
        row that lacks most."""
        profiled = cost.samples.switch_s
        if profiled:
            lags, rows = (sorted(set(sizes)) for sizes in zip(*profiled, strict=True))
            return cls(lags, rows, np.array([[profiled[lag, n] for n in rows] for lag in lags]))
        lags, rows = doubling(limits.max_context), doubling(limits.max_requests)
        return cls(lags, rows, np.array([[cost.catchup_s(lag * n) for n in rows] for lag in lags]))

    def switch_s(self, lag: int, rows: int) -> float:
        """Seconds; beyond the grid, those of its edge."""
        row = min(bisect_left(self._lags, lag), len(self._lags) - 1)
        column = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        return self._seconds.item(row, column)


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... below `most`, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
