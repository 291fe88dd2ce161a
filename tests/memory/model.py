"""The page pool and the prefix cache beside a brute-force model of both, under a hypothesis state machine.

The model shares no code with them: sets of free pages, a list of cached ones, a dict of texts, and what every page of
the device contains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaserve_jax.errors import IntegrityError, OutOfPagesError
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.memory.prefix_cache import PrefixCache, first_key, next_key

PAGE_SIZE = 2
MAX_PAGES = 4
Text = tuple[int, ...]

WHOLE_TEXTS: list[Text] = [(0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 1, 1, 0, 0, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1)]
texts = st.builds(lambda text, end: text[:end], st.sampled_from(WHOLE_TEXTS), st.integers(1, 8).map(lambda n: 9 - n))
picks = st.integers(0, 10_000)


@dataclass(eq=False)
class Holder:
    """One request: its tokens, its pages, and how many of its first pages were entered, and fed to the draft."""

    salt: str
    text: Text
    pages: np.ndarray
    entered: int
    drafted: int


@dataclass
class Model:
    """What should be: page lists by state, least recently used first; texts that are found; contents by page."""

    base: int
    extension: int
    free: list[int]
    cached: list[int] = field(default_factory=list)
    found: dict[tuple[str, Text], int] = field(default_factory=dict)
    draft_whole: set[int] = field(default_factory=set)
    content: dict[int, Text] = field(default_factory=dict)

    def longest(self, salt: str, text: Text) -> list[int]:
        """Pages of the longest prefix of whole pages that is found and leaves a token of `text`."""
        pages: list[int] = []
        while PAGE_SIZE * (len(pages) + 1) < len(text):
            page = self.found.get((salt, text[: PAGE_SIZE * (len(pages) + 1)]))
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, count: int, taken: list[int]) -> None:
        """`taken` were handed out for `count` pages: check the choice, then follow it."""
        assert len(set(taken)) == len(taken) == count
        free_base = sum(page < self.base for page in self.free)
        assert sum(page < self.base for page in taken if page in self.free) == min(count, free_base)
        evicted = self.cached[: max(0, count - len(self.free))]
        assert set(taken) <= set(self.free) | set(evicted)
        assert set(evicted) <= set(taken)
        self.free = [page for page in self.free if page not in taken]
        self.forget(evicted)
        for page in taken:
            self.content.pop(page, None)

    def forget(self, pages: list[int]) -> None:
        self.cached = [page for page in self.cached if page not in pages]
        self.found = {key: page for key, page in self.found.items() if page not in pages}

    def move(self, sources: list[int], targets: list[int]) -> None:
        to = dict(zip(sources, targets, strict=True))
        self.cached = [to.get(page, page) for page in self.cached]
        self.found = {key: to.get(page, page) for key, page in self.found.items()}
        self.draft_whole -= {*sources, *targets}


class MemoryMachine(RuleBasedStateMachine):
    """start, grow, draft, share, free (as at an end or an abort), preempt, and swaps that fail at every point."""

    @initialize(base=st.integers(MAX_PAGES, 8), extension=st.integers(1, 6), extended=st.booleans())
    def begin(self, base: int, extension: int, extended: bool) -> None:
        self.pool = PagePool(base, PAGE_SIZE, extension)
        self.cache = PrefixCache(self.pool)
        self.model = Model(base, extension, list(range(base)))
        self.holders: list[Holder] = []
        self.preempted: list[tuple[str, Text]] = []
        if extended:
            self.expand()

    # ---- requests ----

    @rule(text=texts, salt=st.sampled_from("aab"), drafts=st.booleans())
    def start(self, text: Text, salt: str, drafts: bool) -> None:
        shared = self._find(salt, text)
        assert shared.tolist() == self.model.longest(salt, text), "the longest prefix that is known"
        assert all(self.model.content[page] == text[: PAGE_SIZE * (i + 1)] for i, page in enumerate(shared.tolist()))
        count = self.pool.pages_for(len(text)) - len(shared)
        rests = sum(page in self.model.cached for page in shared.tolist())
        if count > len(self.model.free) + len(self.model.cached) - rests:
            return
        drafted = self.cache.draft_prefix(shared)
        assert all(page in self.model.draft_whole for page in shared[:drafted].tolist())
        assert drafted == len(shared) or shared[drafted] not in self.model.draft_whole
        self.pool.retain(shared)
        self.model.cached = [page for page in self.model.cached if page not in shared]
        own = self._alloc(count)
        holder = Holder(salt, text, np.concatenate([shared, own]), len(shared), drafted)
        self.holders.append(holder)
        self._write(holder, len(shared))
        if drafts:
            self._draft(holder)
        self._enter(holder)

    @precondition(lambda self: self.preempted)
    @rule(pick=picks, drafts=st.booleans())
    def resume(self, pick: int, drafts: bool) -> None:
        salt, text = self.preempted.pop(pick % len(self.preempted))
        self.start(text, salt, drafts)

    @precondition(lambda self: self.holders)
    @rule(pick=picks, token=st.integers(0, 1))
    def grow(self, pick: int, token: int) -> None:
        holder = self._holder(pick)
        if len(holder.text) >= PAGE_SIZE * MAX_PAGES:
            return
        if self.pool.pages_for(len(holder.text) + 1) > len(holder.pages):
            if not self.pool.num_free:
                with pytest.raises(OutOfPagesError, match="preempt or finish a request"):
                    self.pool.alloc(1)
                return
            holder.pages = np.concatenate([holder.pages, self._alloc(1)])
        elif self.pool.references(holder.pages[-1:])[0] > 1:
            return  # its last page is shared: copying it is its holder's affair
        holder.text = (*holder.text, token)
        self._write(holder, len(holder.pages) - 1)
        self._enter(holder)

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def draft(self, pick: int) -> None:
        self._draft(self._holder(pick))

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def share(self, pick: int) -> None:
        holder = self._holder(pick)
        self.pool.retain(holder.pages)
        self.holders.append(Holder(holder.salt, holder.text, holder.pages.copy(), holder.entered, holder.drafted))

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        holder = self.holders.pop(pick % len(self.holders))
        self.pool.free(holder.pages)
        held = {page for other in self.holders for page in other.pages.tolist()}
        for page in reversed(holder.pages.tolist()):
            if page not in held:
                (self.model.cached if page in self.model.found.values() else self.model.free).append(page)

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        holder = self._holder(pick)
        self.preempted.append((holder.salt, holder.text))
        self.free(pick)

    # ---- swaps ----

    @rule()
    def expand(self) -> None:
        if self.pool.extended:
            with pytest.raises(IntegrityError, match="no extension"):
                self.pool.extend()
            return
        self._forget_draft()
        self.pool.extend()
        self.model.free += range(self.model.base, self.model.base + self.model.extension)

    @precondition(lambda self: self.pool.extended)
    @rule(fails=st.sampled_from(["no", "moving", "trimming"]), leaves=st.lists(picks, max_size=2))
    def contract(self, fails: str, leaves: list[int]) -> None:
        """leaves: requests that are aborted between the plan and its publication."""
        base = self.model.base
        live = sorted({page for holder in self.holders for page in holder.pages.tolist() if page >= base})
        free_base = [page for page in self.model.free if page < base]
        cached_base = [page for page in self.model.cached if page < base]
        migration = self.pool.plan_contraction()
        if len(live) > len(free_base) + len(cached_base):
            assert migration is None
            return
        assert migration is not None
        sources, targets = migration.from_pages.tolist(), migration.to_pages.tolist()
        evicted = cached_base[: max(0, len(live) - len(free_base))]
        cached_extension = [page for page in reversed(self.model.cached) if page >= base]
        assert sources == live + cached_extension[: max(0, len(free_base) - len(live))]
        assert set(targets) <= set(free_base + evicted)
        assert len(set(targets)) == len(targets) == len(sources), "the map is injective"
        self.model.forget(evicted)
        self.model.free = [page for page in [*self.model.free, *evicted] if page not in targets]
        with pytest.raises(IntegrityError, match="not handed out"):
            self.pool.alloc(1)
        for pick in leaves:
            self.pool.check_integrity()
            if self.holders:
                self.free(pick)
        if fails == "moving":
            self.pool.abandon(migration)
            self.model.free += targets
            return
        for source, target in zip(sources, targets, strict=True):
            if source in self.model.content:
                self.model.content[target] = self.model.content.pop(source)
        self._publish(migration, sources, targets)
        if fails == "no":
            self.pool.trim()
            self.model.forget([page for page in self.model.cached if page >= base])
            self.model.free = [page for page in self.model.free if page < base]
            self.model.content = {page: text for page, text in self.model.content.items() if page < base}

    def _publish(self, migration, sources: list[int], targets: list[int]) -> None:
        remap = self.pool.publish(migration)
        gone = [source in self.model.free for source in sources]
        expected = dict(zip(sources, targets, strict=True))
        for source, target, left in zip(sources, targets, gone, strict=True):
            assert remap[source] == (source if left else target)
            self.model.free.append(target if left else source)
        assert [int(page) for page in remap] == [
            expected[page] if page in expected and not gone[sources.index(page)] else page for page in range(len(remap))
        ]
        moved = [(source, target) for source, target, left in zip(sources, targets, gone, strict=True) if not left]
        self.model.move([source for source, _ in moved], [target for _, target in moved])
        for holder in self.holders:
            holder.pages = remap[holder.pages]

    @precondition(lambda self: self.pool.extended)
    @rule()
    def trim_too_early(self) -> None:
        if any((holder.pages >= self.model.base).any() for holder in self.holders):
            with pytest.raises(IntegrityError, match="cannot end"):
                self.pool.trim()

    @rule()
    def lose_the_draft(self) -> None:
        self._forget_draft()

    # ---- what always holds ----

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        pool.check_integrity()
        self.cache.check_integrity()
        holders = np.zeros(pool.pages_in_force, int)
        for holder in self.holders:
            holders[holder.pages] += 1
            for index, page in enumerate(holder.pages.tolist()):
                assert model.content[page] == holder.text[: PAGE_SIZE * (index + 1)], "contents are never lost"
        assert pool.references(np.arange(pool.pages_in_force)).tolist() == holders.tolist()
        assert (pool.num_free, pool.num_cached) == (len(model.free) + len(model.cached), len(model.cached))
        assert pool.num_used == np.count_nonzero(holders)
        assert sorted([*model.free, *model.cached, *holders.nonzero()[0].tolist()]) == list(range(pool.pages_in_force))
        for (salt, text), page in model.found.items():
            assert self.cache.find(self._keys(salt, text)[-1]) == page
            assert model.content[page] == text
        assert len(self.cache) == len(model.found)

    # ---- helpers ----

    def _holder(self, pick: int) -> Holder:
        return self.holders[pick % len(self.holders)]

    def _keys(self, salt: str, text: Text) -> list[bytes]:
        key, keys = first_key(salt), []
        for begin in range(0, len(text) - PAGE_SIZE + 1, PAGE_SIZE):
            key = next_key(key, np.array(text[begin : begin + PAGE_SIZE], np.int32))
            keys.append(key)
        return keys

    def _find(self, salt: str, text: Text) -> np.ndarray:
        pages = []
        for key in self._keys(salt, text)[: (len(text) - 1) // PAGE_SIZE]:
            page = self.cache.find(key)
            if page is None:
                break
            pages.append(page)
        return np.array(pages, np.int32)

    def _alloc(self, count: int) -> np.ndarray:
        pages = self.pool.alloc(count)
        self.model.take(count, pages.tolist())
        return pages

    def _write(self, holder: Holder, first: int) -> None:
        for index in range(first, len(holder.pages)):
            self.model.content[int(holder.pages[index])] = holder.text[: PAGE_SIZE * (index + 1)]

    def _draft(self, holder: Holder) -> None:
        """The draft is fed all that the request has."""
        pages = holder.pages[holder.drafted : len(holder.text) // PAGE_SIZE]
        self.cache.mark_draft(pages)
        self.model.draft_whole.update(pages.tolist())
        holder.drafted += len(pages)

    def _enter(self, holder: Holder) -> None:
        """Its whole pages become known, but those whose text is already."""
        while PAGE_SIZE * (holder.entered + 1) <= len(holder.text):
            page, text = int(holder.pages[holder.entered]), holder.text[: PAGE_SIZE * (holder.entered + 1)]
            whole = holder.drafted > holder.entered
            self.cache.enter(self._keys(holder.salt, text)[-1], page, draft_whole=whole)
            if (holder.salt, text) not in self.model.found and page not in self.model.found.values():
                self.model.found[holder.salt, text] = page
                self.model.draft_whole = self.model.draft_whole - {page} | ({page} if whole else set())
            holder.entered += 1

    def _forget_draft(self) -> None:
        self.cache.forget_draft()
        self.model.draft_whole.clear()
        for holder in self.holders:
            holder.drafted = 0
