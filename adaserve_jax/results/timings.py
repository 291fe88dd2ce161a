"""Times of programs as they were measured, and the lines in the context load that are fitted to them.

What warm-up and `adaserve profile` measure alike. Imports no jax.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from adaserve_jax.types import CostSamples

LEAST_S = 1e-6
"""No level of a search is quicker than this; the difference of two times may be noise."""
LEAST_BASE = 0.25
"""A fitted time without context is at least this share of the least measured one: lines are not trusted beyond."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Timings:
    """Seconds by what was run, every row having `context` committed tokens.

    verify: by (bucket tokens, rows, context); catchup: the same, of the draft; search: by (rows, width, depth,
    context). switching: by (lag, rows), from the start of the context until the draft of each row has that lag behind
    it; empty: not measured. typical_context: where lines are anchored; context_rows: rows that read their context
    together.
    """

    typical_context: int
    context_rows: int
    verify: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])
    catchup: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])
    search: dict[tuple[int, int, int, int], float] = field(default_factory=dict[tuple[int, int, int, int], float])
    switching: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def samples(self) -> CostSamples:
        """What the cost table starts from. Catch-up: with the most rows that were timed."""
        verify = self._lines(((t, r), min(t, r), c, s) for (t, r, c), s in self.verify.items())
        catchup = self._lines(((t, r), min(t, r), c, s) for (t, r, c), s in self.catchup.items())
        most = dict(sorted(catchup))  # of equal tokens the last one stays, which has the most rows
        levels = self._lines(((r, w), r, c, s) for (r, w, c), s in self._levels().items())
        return CostSamples(
            verify_s={key: at for key, (at, _) in verify.items()},
            catchup_s={tokens: catchup[tokens, rows][0] for tokens, rows in most.items()},
            draft_level_s={key: max(at, LEAST_S) for key, (at, _) in levels.items()},
            context=self.typical_context,
            context_rows=self.context_rows,
            verify_per_context_s={key: slope for key, (_, slope) in verify.items()},
            catchup_per_context_s={tokens: catchup[tokens, rows][1] for tokens, rows in most.items()},
            level_per_context_s={key: slope for key, (_, slope) in levels.items()},
            switch_s=dict(self.switching),
        )

    def load(self, context: int, rows: int) -> float:
        """The context load of so many rows with the same context."""
        return float(context * -(-rows // self.context_rows))

    def _levels(self) -> dict[tuple[int, int, int], float]:
        """Seconds of one level by (rows, width, context): what one more costs, the first being the catch-up's. With one
        depth only, the whole call is the best that is known of a level."""
        depths: dict[tuple[int, int, int], list[tuple[int, float]]] = defaultdict(list)
        for (rows, width, depth, context), seconds in self.search.items():
            depths[rows, width, context].append((depth, seconds))
        levels: dict[tuple[int, int, int], float] = {}
        for key, points in depths.items():
            depths_of, seconds_of = zip(*points, strict=True)
            slope = np.polyfit(depths_of, seconds_of, 1)[0] if len(points) > 1 else seconds_of[0]
            levels[key] = max(LEAST_S, float(slope))
        return levels

    def _lines(self, timed: Iterable[tuple[Key, int, int, float]]) -> dict[Key, tuple[float, float]]:
        """Per key: seconds at the typical context, and per token of context load. timed: (key, rows, context,
        seconds)."""
        points: dict[Key, list[tuple[float, float]]] = defaultdict(list)
        typical: dict[Key, float] = {}
        for key, rows, context, seconds in timed:
            points[key].append((self.load(context, rows), seconds))
            typical[key] = self.load(self.typical_context, rows)
        lines: dict[Key, tuple[float, float]] = {}
        for key, each in points.items():
            base, slope = fit_line(*np.array(each).T)
            lines[key] = base + slope * typical[key], slope
        return lines


def fit_line(load: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Base and slope of least relative squared error, the slope not below 0 and the base not far below what was
    measured. load, seconds: f64[N]."""
    weight = 1.0 / seconds**2
    mean_load, mean_s = np.average(load, weights=weight), np.average(seconds, weights=weight)
    spread = (weight * (load - mean_load) ** 2).sum()
    slope = 0.0 if spread <= 0 else max(0.0, (weight * (load - mean_load) * (seconds - mean_s)).sum() / spread)
    base = mean_s - slope * mean_load
    least = LEAST_BASE * seconds.min()
    if base >= least:
        return float(base), float(slope)
    return float(least), float((weight * load * (seconds - least)).sum() / (weight * load**2).sum())
