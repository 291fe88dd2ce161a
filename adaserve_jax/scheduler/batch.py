"""Who runs: slots, pages, admission and preemption of requests. Knows no costs, trees or clocks but the one passed in.

No request starves: the running request of the lowest rank is never preempted while another runs, ranks never change,
every request fits the pool alone, and the queue bounds how many can pass a waiting one (queue.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adaserve_jax.errors import IntegrityError
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.memory.prefix_cache import PrefixCache, first_key, next_key
from adaserve_jax.scheduler.queue import Ordering, WaitingQueue
from adaserve_jax.scheduler.sequence import COMPUTED, SequenceState, SlotTable
from adaserve_jax.types import Limits

# Requests and the prefix cache: what a request finds there when it starts, and the pages it leaves there as it
# runs.
#
# Knows no queue and no policy. A step whose rows fill no page costs one comparison.


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

    def find(self, state: SequenceState) -> np.ndarray:
        """The pages known for the tokens of a waiting request, from the first on: i32[n]. At least one token is left to
        compute, since its logits are needed."""
        pages: list[int] = []
        for index in range((state.num_tokens - 1) // self._page_size):
            page = self._cache.find(self._key(state, index))
            if page is None:
                break
            pages.append(page)
        return np.array(pages, np.int32)

    def start(self, state: SequenceState, shared: np.ndarray) -> None:
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

    def check_integrity(self, running: list[SequenceState]) -> None:
        """Raise IntegrityError unless the cache and the pool agree, and every whole page of a request was entered."""
        self._cache.check_integrity()
        for state in running:
            waits = self._due[:, state.slot] - self._computed[:, state.slot]
            if (waits <= 0).any() or (waits > self._page_size).any():
                raise IntegrityError(f"whole pages of request {state.request.sequence_id!r} were not entered")

    def _enter(self, slot: int, computed: int, drafted: int) -> None:
        state, end = self._table.states[slot], computed // self._page_size
        assert state is not None, "rows that are learned from run"
        for index in range(int(self._due[0, slot]) // self._page_size - 1, end):
            page = int(self._table.page_table[slot, index])
            self._cache.enter(self._key(state, index), page, draft_whole=drafted >= (index + 1) * self._page_size)
        self._due[0, slot] = (end + 1) * self._page_size

    def _key(self, state: SequenceState, index: int) -> bytes:
        """The key of a full page of a request; keys of earlier pages are there, or come with it."""
        keys, size = state.page_keys, self._page_size
        while len(keys) <= index:
            parent = keys[-1] if keys else first_key(state.request.cache_salt, state.request.draft)
            begin = len(keys) * size
            keys.append(next_key(parent, state.token_ids[begin : begin + size]))
        return keys[index]


class Batch:
    """The running requests, in order of admission, and those that wait for a slot."""

    def __init__(
        self, limits: Limits, ordering: Ordering, *, gives_up: bool = False, prefix_cache: bool = False,
        holds_draft: bool = True,
    ):  # fmt: skip
        """prefix_cache: whether pages of requests that ended are kept for those that begin alike. holds_draft: whether
        pages hold the draft's KV too."""
        self.limits = limits
        self.pool = PagePool(limits.num_pages, limits.page_size, limits.extension_pages)
        self.table = SlotTable(limits, gives_up=gives_up)
        self.prefixes = Prefixes(self.pool, self.table, holds_draft=holds_draft) if prefix_cache else None
        self.queue = WaitingQueue(ordering)
        self._preempts_for_priority = ordering == "priority"
        self.running: list[SequenceState] = []
        self._slots = np.zeros(limits.max_requests, np.int64)  # of `running`, as far as that is long
        self.preemptions = 0
        self.released: set[int] = set()
        """Slots that were given back, since somebody last took note and emptied it."""
        self.turned_away = False
        """Whether pages alone kept the next request from running in the last plan, or took them from one that ran."""
        self.capacity = min(limits.max_requests, limits.max_tree_tokens, limits.max_tokens)
        """Most requests that run at once: each may need one sampled position and one token of the step."""

    @property
    def slots(self) -> np.ndarray:
        """i64[running], in order of admission: a view, valid until a request starts or ends."""
        return self._slots[: len(self.running)]

    def make_room(self) -> bool:
        """Give every decode row the page of its pending token, preempting those of highest rank when pages run out.

        Returns whether anything was preempted.
        """
        self.turned_away = False
        slots, table = self.slots, self.table
        num_tokens = table.num_tokens[slots]
        # a prefill row has held the pages of all its tokens since it was admitted
        short = num_tokens > table.num_pages[slots] * self.limits.page_size
        if not np.count_nonzero(short) or self._reserve_all(slots[short], num_tokens[short]):
            return False
        preempted = False
        for state in sorted((self.running[row] for row in short.nonzero()[0]), key=lambda state: state.rank):
            while state.is_running and not self._reserve_all(np.array([state.slot]), np.array([state.num_tokens])):
                victim = max(self.running, key=lambda state: state.rank)
                self._preempt(victim)
                preempted = self.turned_away = True
        return preempted

    def reserve(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Hold pages for num_tokens[i] tokens of each slot (i64[n]), which are more than it has pages for; bool[n],
        whether. Where too few are free, nothing is taken for a slot, and the next ones are tried."""
        if self._reserve_all(slots, num_tokens):
            return np.ones(len(slots), bool)
        rows = range(len(slots))
        return np.array([self._reserve_all(slots[row : row + 1], num_tokens[row : row + 1]) for row in rows], bool)

    def _reserve_all(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool:
        """Hold pages for all of these slots, which lack some each, or take none and return False."""
        missing = -(-num_tokens // self.limits.page_size) - self.table.num_pages[slots]
        assert missing.min() > 0, "who lacks no page asks for none"
        wanted = int(missing.sum())
        if wanted > self.pool.num_free:
            return False
        self.table.grow(slots, missing, self.pool.alloc(wanted))
        return True

    def admit(self, now: float, may_start: Callable[[SequenceState], bool] | None) -> None:
        """Move waiting requests into free slots, in order, while their whole prompt fits beside one more page of growth
        for every running request, and `may_start` agrees. It is not asked while nothing runs, nor about preempted
        requests, nor about those whose turn it is for having waited longest; where it does not agree, the first that
        waits without a TPOT target goes instead."""
        while (state := self.queue.peek(now)) is not None:
            if not self._room_for(state):
                return
            asked = self.running and not state.preemptions and not self.queue.promotes
            if asked and may_start is not None and not may_start(state):
                state = self.queue.peek_untargeted()
                if state is None or not self._room_for(state):
                    return
            self.queue.take(state)
            self._start(state)

    def _start(self, state: SequenceState) -> None:
        """Give a request a slot and the pages of all its tokens, those that the prefix cache knows first."""
        pages = self.pool.pages_for(state.num_tokens)
        if self.prefixes is None:
            self.table.bind(state, self.pool.alloc(pages))
        else:
            shared = self.prefixes.find(state)
            self.pool.retain(shared)
            self.table.bind(state, np.concatenate([shared, self.pool.alloc(pages - len(shared))]))
            self.prefixes.start(state, shared)
        self._slots[len(self.running)] = state.slot
        self.running.append(state)

    def _room_for(self, state: SequenceState) -> bool:
        while not self._fits(state):
            if not self._make_way(state):
                self.turned_away = len(self.running) < self.capacity
                return False
        return True

    def _fits(self, state: SequenceState) -> bool:
        if len(self.running) >= self.capacity:
            return False
        pages, free = self.pool.pages_for(state.num_tokens), self.pool.num_free
        if self.prefixes is not None and pages + len(self.running) > free:
            # pages that others hold already cost nothing; cached ones are not free once they are taken
            pages -= int(np.count_nonzero(self.pool.references(self.prefixes.find(state))))
        return pages + len(self.running) <= free or (not self.running and pages <= free)

    def _make_way(self, state: SequenceState) -> bool:
        """Under strict priorities, preempt the running request of highest rank if it is of lower priority."""
        if not self._preempts_for_priority or not self.running:
            return False
        worst = max(self.running, key=lambda running: running.rank)
        if worst.request.priority <= state.request.priority:
            return False
        self._preempt(worst)
        return True

    def release(self, state: SequenceState) -> None:
        """Return the slot and the pages of a running request."""
        self.pool.free(self.table.pages(state))
        self.released.add(state.slot)
        self.table.release(state)
        row = self.running.index(state)
        del self.running[row]
        self._slots[row : len(self.running)] = self._slots[row + 1 : len(self.running) + 1]

    def remap(self, remap: np.ndarray) -> None:
        """Pages have moved: page i is page remap[i] now (i32[pages in force]). Between steps only."""
        slots = self.slots
        self.table.page_table[slots] = remap[self.table.page_table[slots]]  # unused entries name page 0, which stays

    def forget_draft(self) -> None:
        """The draft's KV is lost: no request has any of it. Between steps only."""
        self.table.draft_computed[:] = 0
        if self.prefixes is not None:
            self.prefixes.forget_draft()

    def _preempt(self, state: SequenceState) -> None:
        self.release(state)
        state.forget_kv()
        self.queue.put_back(state)
        self.preemptions += 1

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots, pages and progress of all running requests agree."""
        self.pool.check_integrity()
        if self.prefixes is not None:
            self.prefixes.check_integrity(self.running)
        holders = np.zeros(self.pool.pages_in_force, np.int32)
        for state in self.running:
            holders[self.table.pages(state)] += 1
        if not np.array_equal(holders, self.pool.references(np.arange(self.pool.pages_in_force))):
            raise IntegrityError("the pool counts other holders of pages than the requests that run")
        slots = [state.slot for state in self.running]
        if len(set(slots)) != len(slots) or len(slots) + self.table.num_free != self.limits.max_requests:
            raise IntegrityError("a slot is held twice or lost")
        if self.slots.tolist() != slots or any(self.table.states[state.slot] is not state for state in self.running):
            raise IntegrityError("the slots and the running requests name each other differently")
        for state in self.running:
            self._check_request(state)

    def _check_request(self, state: SequenceState) -> None:
        name = state.request.sequence_id
        if self.table.page_table[state.slot, state.num_pages :].any():
            raise IntegrityError(f"request {name!r} has page ids beyond its pages")
        if state.counts.base is not self.table.counts or state.token_ids.base is not self.table.token_ids:
            raise IntegrityError(f"request {name!r} looks at counts or tokens of its own while it runs")
        if state.pending < 1 or not 0 <= state.draft_computed <= state.num_tokens:
            raise IntegrityError(f"request {name!r} counts more computed tokens than it has")
        if state.num_computed > state.num_pages * self.limits.page_size:
            raise IntegrityError(f"request {name!r} has KV beyond its pages")
