"""The slot table: what is constant while a request runs, as arrays by slot, so that a plan is one fancy index.

Knows requests and page ids; not which request runs next.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.state import NO_SLOT, RequestState
from adaserve_jax.types import Limits, RowSampling


class SlotTable:
    """Columns by slot, S = limits.max_requests. page_table: i32[S, max_pages_per_request], unused entries 0."""

    def __init__(self, limits: Limits):
        size = limits.max_requests
        self.page_table = np.zeros((size, limits.max_pages_per_request), np.int32)
        self.seed = np.zeros(size, np.uint64)
        self.choice = np.zeros(size, np.int32)
        self.temperature = np.zeros(size, np.float32)
        self.top_k = np.zeros(size, np.int32)
        self.top_p = np.ones(size, np.float32)
        self.min_p = np.zeros(size, np.float32)
        self.tpot_slo_s = np.full(size, np.inf)
        self._free = list(range(size - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def bind(self, state: RequestState, pages: np.ndarray) -> None:
        """Give `state` a slot and its first pages. At least one slot is free."""
        slot = state.slot = self._free.pop()
        request = state.request
        sampling = request.sampling
        self.seed[slot] = request.seed
        self.choice[slot] = request.choice
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.tpot_slo_s[slot] = np.inf if request.tpot_slo_s is None else request.tpot_slo_s
        state.num_pages = 0
        self.grow(state, pages)

    def grow(self, state: RequestState, pages: np.ndarray) -> None:
        end = state.num_pages + len(pages)
        self.page_table[state.slot, state.num_pages : end] = pages
        state.num_pages = end

    def pages(self, state: RequestState) -> np.ndarray:
        return self.page_table[state.slot, : state.num_pages]

    def release(self, state: RequestState) -> None:
        """Take the slot back; its pages are the caller's to free, before this."""
        self.page_table[state.slot, : state.num_pages] = 0
        self._free.append(state.slot)
        state.slot = NO_SLOT
        state.num_pages = 0

    def row_sampling(self, slots: np.ndarray) -> RowSampling:
        return RowSampling(
            seed=self.seed[slots],
            choice=self.choice[slots],
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
        )
