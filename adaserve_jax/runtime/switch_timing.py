"""Times how long the draft takes to catch up when speculation is turned on again: C_switch by lag and rows.

`adaserve profile` does it; an engine that starts without one reckons with single catch-up programs. Source: Nightjar,
table 3.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from adaserve_jax.runtime.timing import catch_up_once
from adaserve_jax.types import Progress

if TYPE_CHECKING:
    from adaserve_jax.runtime.executor import ModelExecutor

MOST_TOKENS = 16_384
"""Tokens of all rows together that are fed for one time; longer lags take as long in proportion."""


def measure_switching(
    executor: ModelExecutor, passes: int, progress: Progress | None = None
) -> dict[tuple[int, int], float]:
    """Seconds by (lag, rows), the least of `passes` times, in chunks of the largest catch-up program, as a switch feeds
    them; empty without a draft. Page 0 loses what it held."""
    limits, drafter = executor.limits, executor.local_drafter
    if drafter is None:
        return {}
    sizes = list(itertools.product(_spread(limits.max_context), _spread(limits.max_requests)))
    found: dict[tuple[int, int], float] = {}
    for done, (lag, rows) in enumerate(sizes, 1):
        fed = max(1, min(lag, MOST_TOKENS // rows))
        chunk = max(1, limits.max_tokens // rows)
        times = []
        for _ in range(passes):
            started = time.perf_counter()
            for context in range(0, fed, chunk):
                counts = np.full(rows, min(chunk, fed - context), np.int32)
                catch_up_once(limits, drafter, counts, context)
            times.append(time.perf_counter() - started)
        found[lag, rows] = min(times) * lag / fed
        if progress is not None:
            progress("timing switches", done, len(sizes))
    return found


def _spread(most: int) -> list[int]:
    """1, 4, 16, ... below `most`, and `most`."""
    return [*(4**power for power in range(most.bit_length()) if 4**power < most), most]
