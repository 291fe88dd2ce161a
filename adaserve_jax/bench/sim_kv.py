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
        self._base_pages = self._in_force = limits.num_pages
        self._content = np.zeros((limits.num_pages + limits.extension_pages, limits.page_size), np.uint64)

    def forget(self) -> None:
        """Nothing is held any more."""
        self._content[:] = 0

    def add_extension(self) -> None:
        """The pages of the extension are there, with nothing in them."""
        self._in_force = len(self._content)

    def drop_extension(self) -> None:
        """They are not, and what they held is lost."""
        self._in_force = self._base_pages
        self._content[self._base_pages :] = 0

    def move(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        """Copy pages, i32[N] each."""
        self._content[to_pages] = self._content[from_pages]

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
        if held.max(initial=0) >= self._in_force:
            raise IntegrityError(f"a row names a page that is not there: {held.max()} of {self._in_force}")
        if len(np.unique(held)) != len(held):
            raise IntegrityError("two rows of one step hold the same page")
