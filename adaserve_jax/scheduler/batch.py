"""The running batch: slots, pages, admission and preemption of sequences.

No sequence starves. The running sequence of the lowest rank is never preempted while another one runs, ranks never
change, every sequence fits the pool alone, and the queue bounds how many sequences can pass a waiting one (queue.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adaserve_jax.errors import IntegrityError
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.memory.prefix_cache import PrefixCache, first_key, next_key
from adaserve_jax.scheduler.fairness import TenantShares
from adaserve_jax.scheduler.queue import Ordering, WaitingQueue, bounded_priority
from adaserve_jax.scheduler.sequence import COMPUTED, SequenceState, SlotTable
from adaserve_jax.types import Limits, Sequence

_NO_PAGES = np.zeros(0, np.int32)


class Prefixes:
    """Use of the prefix cache by a batch: pages that a sequence finds at its start and leaves behind as it runs.

    Sequences share full pages only, and no target writes to a full page again. queried_tokens counts the tokens of
    sequences that started, hit_tokens those found in the cache. A step in which no row fills a page costs one
    comparison.
    """

    def __init__(self, pool: PagePool, table: SlotTable, *, holds_draft: bool = True):
        """Set up an empty cache. holds_draft: pages hold the draft's KV too; a draft service keeps KV by sequence."""
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._cache = PrefixCache(pool)
        self._holds_draft = holds_draft
        self._table = table
        self._page_size = pool.page_size
        self._computed = table.counts[COMPUTED]
        self._due = np.zeros_like(self._computed)
        """Tokens of target and draft at which the next page of a slot is full, i64[2, S]."""

    def find(self, state: SequenceState) -> np.ndarray:
        """Return the cached pages that hold the first tokens of a waiting sequence, i32[n].

        At least one token is left to compute, because its logits are needed, and every token after which the prompt is
        still to be scored.
        """
        return np.array(self._find(state.page_keys, state.sequence, state.token_ids, state.num_reusable), np.int32)

    def cached_tokens(self, sequence: Sequence, keys: list[bytes]) -> int:
        """Return how many tokens of the prompt of a new sequence cached pages hold; fills its page_keys."""
        tokens = np.asarray(sequence.prompt_ids, np.int32)
        most = len(tokens) - 1 if sequence.sampling.prompt_logprobs is None else 0
        return len(self._find(keys, sequence, tokens, most)) * self._page_size

    def _find(self, keys: list[bytes], sequence: Sequence, token_ids: np.ndarray, most_tokens: int) -> list[int]:
        """Return the cached pages of the first tokens, `most_tokens` at most; keys: as of `_key`."""
        pages: list[int] = []
        for index in range(most_tokens // self._page_size):
            page = self._cache.find(self._key(keys, sequence, token_ids, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def start(self, state: SequenceState, shared: np.ndarray) -> None:
        """Count the tokens of `shared`, the pages from `find`, as computed for a sequence that was given its slot."""
        num_tokens = len(shared) * self._page_size
        drafted = self._cache.draft_prefix(shared) * self._page_size if self._holds_draft else 0
        if not state.preemptions:
            state.cached_tokens = num_tokens
            self.queried_tokens += state.num_tokens
            self.hit_tokens += num_tokens
        self._computed[:, state.slot] = num_tokens, drafted
        self._due[:, state.slot] = num_tokens + self._page_size, drafted + self._page_size

    def enter_full_pages(self, slots: np.ndarray) -> None:
        """Enter the pages that these running slots (i64[n]) have filled since the last call."""
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
        """Record that the draft lost its KV."""
        self._cache.forget_draft()
        self._due[1] = self._page_size

    def check_integrity(self, running: list[SequenceState]) -> None:
        """Raise IntegrityError unless the cache and the pool agree and every full page of a sequence was entered."""
        self._cache.check_integrity()
        for state in running:
            waits = self._due[:, state.slot] - self._computed[:, state.slot]
            if (waits <= 0).any() or (waits > self._page_size).any():
                raise IntegrityError(f"full pages of sequence {state.sequence.sequence_id!r} were not entered")

    def _enter(self, slot: int, computed: int, drafted: int) -> None:
        state, end = self._table.states[slot], computed // self._page_size
        assert state is not None, "only running slots fill pages"
        for index in range(int(self._due[0, slot]) // self._page_size - 1, end):
            page = int(self._table.page_table[slot, index])
            key = self._key(state.page_keys, state.sequence, state.token_ids, index)
            self._cache.enter(key, page, draft_whole=drafted >= (index + 1) * self._page_size)
        self._due[0, slot] = (end + 1) * self._page_size

    def _key(self, keys: list[bytes], sequence: Sequence, token_ids: np.ndarray, index: int) -> bytes:
        """Return the key of a full page of a sequence; keys: those known, to which missing ones are added."""
        size = self._page_size
        while len(keys) <= index:
            parent = keys[-1] if keys else first_key(sequence.cache_salt, sequence.draft)
            begin = len(keys) * size
            keys.append(next_key(parent, token_ids[begin : begin + size]))
        return keys[index]


class Batch:
    """Running sequences in order of admission, and the queue of those that wait for a slot."""

    def __init__(
        self, limits: Limits, ordering: Ordering, *, gives_up: bool = False, prefix_cache: bool = False,
        holds_draft: bool = True, fair_tenants: bool = False,
    ):  # fmt: skip
        """Set up an empty batch.

        gives_up: drop TPOT target and deadline of a sequence that missed its TTFT target. prefix_cache: keep pages of
        sequences that ended for prompts that begin alike. holds_draft: pages hold the draft's KV too. fair_tenants:
        keep the shares of the tenants of a class fair, but under strict priorities, which know no tenants.
        """
        self.limits = limits
        self.pool = PagePool(limits.num_pages, limits.page_size, limits.extension_pages)
        self.table = SlotTable(limits, gives_up=gives_up)
        self.prefixes = Prefixes(self.pool, self.table, holds_draft=holds_draft) if prefix_cache else None
        self.shares = TenantShares() if fair_tenants and ordering != "priority" else None
        self.queue = WaitingQueue(ordering, self.shares)
        self._preempts_for_priority = ordering == "priority"
        self.running: list[SequenceState] = []
        self._slots = np.zeros(limits.max_requests, np.int64)  # of `running`; the rest is unused
        self.preemptions = 0
        self.released: set[int] = set()
        """Slots given back since the scheduler last reported them to the drafter."""
        self.blocked_on_pages = False
        """True if the last plan kept a sequence from starting, or preempted one, only because pages were short."""
        self.capacity = min(limits.max_requests, limits.max_tree_tokens, limits.max_tokens)
        """Most sequences that run at once: each may need one sampled position and one token of the step."""

    @property
    def slots(self) -> np.ndarray:
        """Slots of the running sequences, i64[running]: a view that is valid until one starts or ends."""
        return self._slots[: len(self.running)]

    def grow_decode_rows(self) -> bool:
        """Give every decode row the page of its pending token; preempt sequences of highest rank if pages run out.

        Returns True if anything was preempted.
        """
        self.blocked_on_pages = False
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
                self.preempt(victim)
                preempted = self.blocked_on_pages = True
        return preempted

    def reserve_for_trees(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Hold pages for num_tokens[i] tokens of the decode rows in slots[i], as far as each lacks some.

        Returns bool[n], True for rows that hold all of them now; the others got none.
        """
        holds = num_tokens <= self.table.num_pages[slots] * self.limits.page_size
        if np.count_nonzero(holds) < len(slots):
            rows = (~holds).nonzero()[0]
            if self._reserve_all(slots[rows], num_tokens[rows]):
                holds[rows] = True
            else:
                for row in rows.tolist():
                    holds[row] = self._reserve_all(slots[row : row + 1], num_tokens[row : row + 1])
        return holds

    def _reserve_all(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool:
        """Hold pages for all of these slots, which each lack some, or take none and return False."""
        missing = -(-num_tokens // self.limits.page_size) - self.table.num_pages[slots]
        assert missing.min() > 0, "only slots that lack pages ask for some"
        wanted = int(missing.sum())
        if wanted > self.pool.num_free:
            return False
        self.table.grow(slots, missing, self.pool.alloc(wanted))
        return True

    def admit(self, now: float, may_start: Callable[[SequenceState], bool] | None) -> None:
        """Start waiting sequences, in order, while slots and pages last and `may_start` agrees.

        `may_start` is not asked while nothing runs, nor for preempted sequences, nor for the one that has waited
        longest when its turn has come. If it refuses, one of those goes instead that `WaitingQueue.instead_of` names.
        """
        while (state := self.queue.peek(now)) is not None:
            shared = self._pages_to_start(state)
            if shared is None:
                return
            asked = self.running and not state.preemptions and not self.queue.promotes_oldest
            if asked and may_start is not None and not may_start(state):
                state = next(filter(may_start, self.queue.instead_of(state, now)), None)
                shared = None if state is None else self._pages_to_start(state)
                if state is None or shared is None:
                    return
            self.queue.take(state, now)
            self._start(state, shared)

    def _pages_to_start(self, state: SequenceState) -> np.ndarray | None:
        """Decide whether a sequence can start now, preempting a worse one for it under strict priorities.

        It needs a slot and the pages of all its tokens, beside one more page of growth for every running sequence.
        Returns the pages that it shares with the prefix cache, i32[n]; it allocates the others. None: it cannot start.
        """
        while True:
            has_slot, wanted, shared = len(self.running) < self.capacity, 0, _NO_PAGES
            if has_slot or self._preempts_for_priority:
                if self.prefixes is not None:
                    shared = self.prefixes.find(state)
                # a shared page that somebody holds costs nothing; a cached one stops being free once it is taken
                wanted = self.pool.pages_for(state.num_tokens) - int(np.count_nonzero(self.pool.references(shared)))
                if has_slot and wanted + len(self.running) <= self.pool.num_free:
                    return shared
            if not self._preempt_for(state, wanted, shared):
                self.blocked_on_pages = has_slot
                return None

    def _preempt_for(self, state: SequenceState, wanted: int, shared: np.ndarray) -> bool:
        """Under strict priorities, preempt the running sequence of highest rank among those of lower priority.

        Preempts none if all of them together do not hold the `wanted` pages, beside those that others or the `shared`
        ones keep: they would lose their KV in vain.
        """
        if not self._preempts_for_priority:
            return False
        own = bounded_priority(state.sequence.priority)
        worse = [running for running in self.running if bounded_priority(running.sequence.priority) > own]
        if not worse:
            return False
        pages = np.arange(self.pool.pages_in_force)
        held = np.bincount(np.concatenate([self.table.pages(each) for each in worse]), minlength=len(pages))
        freed = (held > 0) & (held == self.pool.references(pages))
        freed[shared] = False
        if wanted + len(self.running) - len(worse) > self.pool.num_free + np.count_nonzero(freed):
            return False
        self.preempt(max(worse, key=lambda running: running.rank))
        return True

    def _start(self, state: SequenceState, shared: np.ndarray) -> None:
        """Give a sequence a slot and the pages of all its tokens, `shared` first."""
        self.pool.retain(shared)
        own = self.pool.alloc(self.pool.pages_for(state.num_tokens) - len(shared))
        self.table.bind(state, np.concatenate([shared, own]))
        if self.prefixes is not None:
            self.prefixes.start(state, shared)
        self._slots[len(self.running)] = state.slot
        self.running.append(state)

    def remove(self, state: SequenceState) -> None:
        """Take a sequence, which runs or waits, out for good."""
        if state.is_running:
            self.release(state)
        else:
            self.queue.remove(state)
        if self.shares is not None:
            self.shares.close(state.flow)

    def release(self, state: SequenceState) -> None:
        """Take back the slot and the pages of a running sequence."""
        self.pool.free(self.table.pages(state))
        self.released.add(state.slot)
        self.table.release(state)
        row = self.running.index(state)
        del self.running[row]
        self._slots[row : len(self.running)] = self._slots[row + 1 : len(self.running) + 1]

    def remap(self, remap: np.ndarray) -> None:
        """Rename pages after they moved: page i is now page remap[i], i32[pages in force]. Between steps only."""
        slots = self.slots
        self.table.page_table[slots] = remap[self.table.page_table[slots]]  # unused entries name page 0, which stays

    def forget_draft(self) -> None:
        """Record that the draft lost all KV. Between steps only."""
        self.table.draft_computed[:] = 0
        if self.prefixes is not None:
            self.prefixes.forget_draft()

    def preempt(self, state: SequenceState) -> None:
        """Take a running sequence's slot and pages back, and queue it again with its tokens. Between steps only."""
        self.release(state)
        state.forget_kv()
        self.queue.put_back(state)
        self.preemptions += 1

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots, pages and progress of all running sequences agree."""
        self.pool.check_integrity()
        if self.prefixes is not None:
            self.prefixes.check_integrity(self.running)
        holders = np.zeros(self.pool.pages_in_force, np.int32)
        for state in self.running:
            holders[self.table.pages(state)] += 1
        if not np.array_equal(holders, self.pool.references(np.arange(self.pool.pages_in_force))):
            raise IntegrityError("the pool counts other holders of pages than the running sequences")
        slots = [state.slot for state in self.running]
        if len(set(slots)) != len(slots) or len(slots) + self.table.num_free != self.limits.max_requests:
            raise IntegrityError("a slot is held twice or lost")
        if self.slots.tolist() != slots or any(self.table.states[state.slot] is not state for state in self.running):
            raise IntegrityError("slots and running sequences do not refer to each other")
        for state in self.running:
            self._check_sequence(state)

    def _check_sequence(self, state: SequenceState) -> None:
        name = state.sequence.sequence_id
        if self.table.page_table[state.slot, state.num_pages :].any():
            raise IntegrityError(f"sequence {name!r} has page ids beyond its pages")
        if state.counts.base is not self.table.counts or state.token_ids.base is not self.table.token_ids:
            raise IntegrityError(f"sequence {name!r} runs on counts or tokens outside the slot table")
        if state.pending < 1 or not 0 <= state.draft_computed <= state.num_tokens:
            raise IntegrityError(f"sequence {name!r} counts more computed tokens than it has")
        if state.num_computed > state.num_pages * self.limits.page_size:
            raise IntegrityError(f"sequence {name!r} has KV beyond its pages")
