"""Requests and the prefix cache: what a request finds there when it starts, and the pages it leaves there as it runs.

Knows no queue and no policy. A step whose rows fill no page costs one comparison.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.errors import IntegrityError
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.memory.prefix_cache import PrefixCache, first_key, next_key
from adaserve_jax.scheduler.slots import SlotTable
from adaserve_jax.scheduler.state import COMPUTED, RequestState


class Prefixes:
    """The prefix cache of a batch. queried_tokens: of the prompts that started; hit_tokens: those found.

    A request only ever shares full pages, which nobody's target writes again.
    """

    def __init__(self, pool: PagePool, table: SlotTable, *, holds_draft: bool = True):
        """holds_draft: whether pages hold the draft's KV too; a draft service keeps its own, by request."""
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._cache = PrefixCache(pool)
        self._holds_draft = holds_draft
        self._table = table
        self._page_size = pool.page_size
        self._computed = table.counts[COMPUTED]
        self._due = np.zeros_like(self._computed)
        """i64[2, S], tokens of target and draft at which a slot's next page is whole."""

    def find(self, state: RequestState) -> np.ndarray:
        """The pages known for the tokens of a waiting request, from the first on: i32[n]. At least one token is left to
        compute, since its logits are needed."""
        pages: list[int] = []
        for index in range((state.num_tokens - 1) // self._page_size):
            page = self._cache.find(self._key(state, index))
            if page is None:
                break
            pages.append(page)
        return np.array(pages, np.int32)

    def start(self, state: RequestState, shared: np.ndarray) -> None:
        """A request has its slot, and its first pages are those that `find` returned: what they hold is computed."""
        num_tokens = len(shared) * self._page_size
        drafted = self._cache.draft_prefix(shared) * self._page_size if self._holds_draft else 0
        if not state.preemptions:
            state.cached_tokens = num_tokens
            self.queried_tokens += state.num_tokens
            self.hit_tokens += num_tokens
        self._computed[:, state.slot] = num_tokens, drafted
        self._due[:, state.slot] = num_tokens + self._page_size, drafted + self._page_size

    def learn(self, slots: np.ndarray) -> None:
        """Enter what the rows of a step (slots of running requests, i64[n]) have computed since they were last seen."""
        computed = self._computed.take(slots, axis=1)
        whole = computed >= self._due.take(slots, axis=1)
        if not np.count_nonzero(whole):
            return
        for row in whole[0].nonzero()[0].tolist():
            self._enter(int(slots[row]), *computed[:, row].tolist())
        for row in whole[1].nonzero()[0].tolist():
            slot, end = int(slots[row]), int(computed[1, row]) // self._page_size
            self._cache.mark_draft(self._table.page_table[slot, self._due[1, slot] // self._page_size - 1 : end])
            self._due[1, slot] = (end + 1) * self._page_size

    def forget_draft(self) -> None:
        """The draft has no KV any more."""
        self._cache.forget_draft()
        self._due[1] = self._page_size

    def check_integrity(self, running: list[RequestState]) -> None:
        """Raise IntegrityError unless the cache and the pool agree, and every whole page of a request was entered."""
        self._cache.check_integrity()
        for state in running:
            waits = self._due[:, state.slot] - self._computed[:, state.slot]
            if (waits <= 0).any() or (waits > self._page_size).any():
                raise IntegrityError(f"whole pages of request {state.request.request_id!r} were not entered")

    def _enter(self, slot: int, computed: int, drafted: int) -> None:
        state, end = self._table.states[slot], computed // self._page_size
        assert state is not None, "rows that are learned from run"
        for index in range(int(self._due[0, slot]) // self._page_size - 1, end):
            page = int(self._table.page_table[slot, index])
            self._cache.enter(self._key(state, index), page, draft_whole=drafted >= (index + 1) * self._page_size)
        self._due[0, slot] = (end + 1) * self._page_size

    def _key(self, state: RequestState, index: int) -> bytes:
        """The key of a full page of a request; keys of earlier pages are there, or come with it."""
        keys, size = state.page_keys, self._page_size
        while len(keys) <= index:
            parent = keys[-1] if keys else first_key(state.request.cache_salt, state.request.draft)
            begin = len(keys) * size
            keys.append(next_key(parent, state.token_ids[begin : begin + size]))
        return keys[index]
