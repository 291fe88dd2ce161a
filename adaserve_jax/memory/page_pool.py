"""Page pool: free KV pages, reference counts and cached pages, by id. Two slabs: the base pool and an elastic
extension.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from adaserve_jax.errors import ConfigError, IntegrityError, OutOfPagesError


@dataclass(frozen=True, eq=False)
class Migration:
    """Move of pages in use out of the extension slab before it is freed.

    from_pages, to_pages: i32[N], distinct. from_pages are in the extension slab, to_pages in the base pool, reserved
    until the pool publishes or abandons the migration.
    """

    from_pages: np.ndarray
    to_pages: np.ndarray

    def remap(self, num_pages: int) -> np.ndarray:
        """Return the id that each page has afterwards, i32[num_pages]; pages that do not move keep theirs."""
        remap = np.arange(num_pages, dtype=np.int32)
        remap[self.from_pages] = self.to_pages
        return remap

    def only(self, mask: np.ndarray) -> Migration:
        """Return the moves where `mask` (bool[N]) is True."""
        return Migration(self.from_pages[mask], self.to_pages[mask])


class PageCache(Protocol):
    """Owner of cached pages: it knows what pages contain, and is told of evictions and moves."""

    def evicted(self, pages: list[int]) -> None:
        """Forget these cached pages; they are taken for something else."""
        ...

    def moved(self, migration: Migration) -> None:
        """Follow these pages: their content is in others now."""
        ...


class _FreeList:
    """Free page ids of one slab; the last one given back is the first to be taken."""

    def __init__(self, first: int, end: int):
        self._ids = np.arange(end - 1, first - 1, -1, dtype=np.int32)  # the first `count` entries are free
        self.count = end - first

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: self.count]

    def take(self, count: int) -> np.ndarray:
        end = self.count
        self.count = end - count
        return self._ids[self.count : end][::-1].copy()

    def give(self, pages: np.ndarray) -> None:
        self._ids[self.count : self.count + len(pages)] = pages[::-1]
        self.count += len(pages)


class PagePool:
    """Allocator of page ids with reference counts.

    A page returns to the free list when its last holder frees it. If the prefix cache knows the page, it becomes cached
    instead: it counts as free, and is taken, least recently used first, only when no page is truly free.

    Base pages are ids below base_pages (K of the paper); while extended, ids K to K + extension_pages - 1 exist too.
    Every operation costs O(pages named in it), except those of a contraction, O(all). Not thread-safe: one engine
    thread owns it.
    """

    def __init__(self, num_pages: int, page_size: int, extension_pages: int = 0):
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        if extension_pages < 0:
            raise ConfigError(f"extension_pages must be at least 0, got {extension_pages}")
        total = num_pages + extension_pages
        self.base_pages = num_pages
        self.page_size = page_size
        self.extended = False
        self.total_pages = total
        self._base = _FreeList(0, num_pages)
        self._extension = _FreeList(num_pages, num_pages)
        self._refs = np.zeros(total, np.int32)
        self._cache: PageCache | None = None
        self._known = np.zeros(total, bool)  # by the cache
        self._cached: OrderedDict[int, None] = OrderedDict()  # known, without holders; least recently used first
        self._planned: Migration | None = None

    @property
    def pages_in_force(self) -> int:
        """Pages of both slabs as of now; `Limits.num_pages` counts those of the base."""
        return self.total_pages if self.extended else self.base_pages

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out: truly free ones and cached ones."""
        return self._base.count + self._extension.count + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that have holders."""
        return self.pages_in_force - self.num_free

    @property
    def num_cached(self) -> int:
        """Cached pages of both slabs."""
        return len(self._cached)

    @property
    def extension_used(self) -> int:
        """Pages of the extension slab that have holders."""
        return int(np.count_nonzero(self._refs[self.base_pages :]))

    @property
    def extension_cached(self) -> int:
        """Cached pages of the extension slab."""
        known = self._known[self.base_pages :]
        return int(np.count_nonzero(known & (self._refs[self.base_pages :] == 0)))

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def alloc(self, count: int) -> np.ndarray:
        """Take `count` pages with one reference each: i32[count]. Raises OutOfPagesError and takes none if too few are
        free.

        Base pages come first, then those of the extension, then cached ones, which are evicted.
        """
        if count <= self._base.count and self._planned is None:
            pages = self._base.take(count)
        else:
            pages = self._alloc_beyond_base(count)
        self._refs[pages] = 1
        return pages

    def retain(self, pages: np.ndarray) -> None:
        """Add one holder to each page of `pages` (i32[n], distinct, all in use or cached)."""
        self._require_ids(pages)
        resting = np.asarray(pages)[self._refs[pages] == 0].tolist()
        if any(page not in self._cached for page in resting):
            raise IntegrityError(f"KV pages {np.asarray(pages).tolist()} are not all in use or cached")
        for page in resting:
            del self._cached[page]
        self._refs[pages] += 1

    def free(self, pages: np.ndarray) -> None:
        """Drop one holder of each page of `pages` (i32[n], distinct).

        Pages without holders become free, or cached if the prefix cache knows them; the last one named is evicted
        first.
        """
        self._require_ids(pages)
        if np.count_nonzero(self._refs[pages] < 1):
            raise IntegrityError(f"KV pages {np.asarray(pages).tolist()} are not all in use")
        self._refs[pages] -= 1
        empty = np.asarray(pages, np.int32)[self._refs[pages] == 0]
        if self._cache is not None:
            known = self._known[empty]
            for page in empty[known][::-1].tolist():
                self._cached[page] = None
            empty = empty[~known]
        self._give(empty)

    def references(self, pages: np.ndarray) -> np.ndarray:
        """Return the number of holders of each page, i32[n]."""
        return self._refs[pages]

    @property
    def known(self) -> np.ndarray:
        """Pages that the prefix cache knows, held or cached: i64[n], increasing."""
        return self._known.nonzero()[0]

    # ---- cached pages ----

    def attach_cache(self, cache: PageCache) -> None:
        """Let `cache` know pages from now on. Raises IntegrityError if there is a cache already."""
        if self._cache is not None:
            raise IntegrityError("a page pool has one cache")
        self._cache = cache

    def remember(self, page: int) -> None:
        """Record that the cache knows this page, which has a holder, until it is evicted."""
        if self._cache is None or self._refs[page] < 1:
            raise IntegrityError(f"KV page {page} cannot be kept: there is no cache, or it has no holder")
        self._known[page] = True

    def _evict(self, pages: list[int]) -> None:
        """Free cached pages."""
        for page in pages:
            del self._cached[page]
        self._known[pages] = False
        if self._cache is not None and pages:
            self._cache.evicted(pages)
        self._give(np.array(pages, np.int32))

    # ---- the extension ----

    def extend(self) -> None:
        """Add the pages of the extension slab as free pages. Raises IntegrityError if extended already, or without
        such a slab.
        """
        if self.extended or self.total_pages == self.base_pages:
            raise IntegrityError(f"there is no extension of {self.total_pages - self.base_pages} pages to begin")
        self.extended = True
        self._extension = _FreeList(self.base_pages, self.total_pages)

    def plan_contraction(self) -> Migration | None:
        """Choose base pages for the pages of the extension that have holders; None, and nothing changed, without space.

        The targets are reserved. Cached base pages are evicted for pages in use; cached pages of the extension move
        too, most recently used first, only as far as truly free base pages are left. Raises IntegrityError if not
        extended, or if a plan is open.
        """
        if not self.extended or self._planned is not None:
            raise IntegrityError("a contraction is planned once, while extended")
        live = (self.base_pages + self._refs[self.base_pages :].nonzero()[0]).astype(np.int32)
        lacking = len(live) - self._base.count
        if lacking > 0:
            cached = self._cached_where(self._cached, below=True)
            if lacking > len(cached):
                return None
            self._evict(cached[:lacking])
        along = self._cached_where(reversed(self._cached), below=False)[: self._base.count - len(live)]
        from_pages = np.concatenate([live, np.array(along, np.int32)])
        self._planned = Migration(from_pages, self._base.take(len(from_pages)))
        return self._planned

    def abandon(self, migration: Migration) -> None:
        """Free the targets of a migration; nothing moves. Raises IntegrityError unless `migration` is the open plan."""
        self._close(migration)
        self._base.give(migration.to_pages)

    def publish(self, migration: Migration) -> np.ndarray:
        """Rename pages after their content was moved: holders, the order of cached pages and the cache follow.

        Pages that became free since the plan do not count as moved, cached ones do. The sources become free. Returns
        i32[pages_in_force], remap[old] = new. Raises IntegrityError unless `migration` is the open plan.
        """
        self._close(migration)
        alive = (self._refs[migration.from_pages] > 0) | self._known[migration.from_pages]
        self._base.give(migration.to_pages[~alive])
        moves = migration.only(alive)
        for values in (self._refs, self._known):
            values[moves.to_pages] = values[moves.from_pages]
            values[moves.from_pages] = 0
        remap = moves.remap(self.pages_in_force)
        self._cached = OrderedDict.fromkeys(remap[list(self._cached)].tolist() if self._cached else ())
        if self._cache is not None:
            self._cache.moved(moves)
        self._extension.give(moves.from_pages)
        return remap

    def trim(self) -> None:
        """Remove the extension and what is cached in it. Raises IntegrityError while any of its pages has a holder."""
        if not self.extended or self._planned is not None or self.extension_used:
            raise IntegrityError(
                f"the extension cannot end: extended {self.extended}, {self.extension_used} pages of it in use"
            )
        self._evict(self._cached_where(self._cached, below=False))
        self.extended = False
        self._extension = _FreeList(self.base_pages, self.base_pages)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page in force is exactly one of free, cached, held, or reserved."""
        state = np.zeros(self.total_pages, np.int32)
        for name, pages in (
            ("free", np.concatenate([self._base.ids, self._extension.ids])),
            ("cached", np.array(list(self._cached), np.int32)),
            ("reserved", self._planned.to_pages if self._planned is not None else np.zeros(0, np.int32)),
        ):
            np.add.at(state, pages, 1)
            if len(np.unique(pages)) != len(pages):
                raise IntegrityError(f"a KV page is {name} twice")
            if self._refs[pages].any():
                raise IntegrityError(f"a {name} KV page has holders")
            if (self._known[pages] != (name == "cached")).any():
                raise IntegrityError(f"a KV page is {name} and {'not ' if name == 'cached' else ''}known to the cache")
        state += self._refs > 0
        if (state[: self.pages_in_force] != 1).any() or (self._refs < 0).any():
            raise IntegrityError("a KV page is neither free nor held, or both")
        if state[self.pages_in_force :].any() or (self._base.ids >= self.base_pages).any():
            raise IntegrityError("a KV page that is not in force is free or held")

    def _alloc_beyond_base(self, count: int) -> np.ndarray:
        if self._planned is not None:
            raise IntegrityError("KV pages are not handed out between the plan of a contraction and its end")
        if count > self.num_free:
            raise OutOfPagesError(
                f"asked for {count} KV pages, {self.num_free} of {self.pages_in_force} are free; "
                "preempt or finish a request, or raise num_pages"
            )
        lacking = count - self._base.count - self._extension.count
        if lacking > 0:
            self._evict([page for page, _ in zip(self._cached, range(lacking), strict=False)])
        base = self._base.take(min(count, self._base.count))
        return np.concatenate([base, self._extension.take(count - len(base))])

    def _give(self, pages: np.ndarray) -> None:
        if not self.extended:
            self._base.give(pages)
            return
        base = pages < self.base_pages
        self._base.give(pages[base])
        self._extension.give(pages[~base])

    def _cached_where(self, cached: Iterable[int], *, below: bool) -> list[int]:
        """Return those of `cached` that are base pages, or those that are not."""
        return [page for page in cached if (page < self.base_pages) == below]

    def _close(self, migration: Migration) -> None:
        if self._planned is not migration:
            raise IntegrityError("a migration ends once, while it is the open plan")
        self._planned = None

    def _require_ids(self, pages: np.ndarray) -> None:
        ids = np.asarray(pages).tolist()
        if ids and (min(ids) < 0 or max(ids) >= self.pages_in_force):
            raise IntegrityError(f"KV page ids must be from 0 to {self.pages_in_force - 1}, got {ids}")
        if len(set(ids)) != len(ids):
            raise IntegrityError(f"KV pages {ids} are named twice in one call")
