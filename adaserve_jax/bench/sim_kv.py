"""KV of the simulated machine: what each slot of each page holds, so that wrong reads and writes are found at once."""

from __future__ import annotations

import numpy as np

from adaserve_jax.bench.sim_text import kv_name
from adaserve_jax.errors import IntegrityError
from adaserve_jax.types import Limits, StepPlan


class KVRecord:
    """Which (request, position) each KV slot holds, so that a misplaced or missing entry is found at once."""

    def __init__(self, limits: Limits):
        self._page_size = limits.page_size
        self._content = np.zeros((limits.num_pages, limits.page_size), np.uint64)

    def extend(self, plan: StepPlan, ctx: np.ndarray, counts: np.ndarray) -> None:
        """Check the first `ctx` tokens (i32[R]) of every row, then write the `counts` next ones."""
        for row in range(plan.num_rows):
            end = int(ctx[row]) + int(counts[row])
            position = np.arange(end)
            page, slot = plan.page_table[row][position // self._page_size], position % self._page_size
            name = kv_name(plan.sampling.seed[row], plan.sampling.choice[row], position)
            if not (self._content[page, slot] == name)[: ctx[row]].all():
                raise IntegrityError(f"row {row} reads KV that it did not write")
            self._content[page[ctx[row] :], slot[ctx[row] :]] = name[ctx[row] :]
        ends = -(-(ctx + counts) // self._page_size)
        held = np.concatenate([plan.page_table[row, : ends[row]] for row in range(plan.num_rows)])
        if len(np.unique(held)) != len(held):
            raise IntegrityError("two rows of one step hold the same page")
