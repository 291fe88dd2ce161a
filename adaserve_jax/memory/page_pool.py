"""Which KV pages are free, and who else holds a page: ids and reference counts only.

Host side; knows nothing of arrays on a device, of requests, or of what a page contains.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.errors import ConfigError, IntegrityError, OutOfPagesError


class PagePool:
    """Hands out page ids 0 <= id < num_pages; a page returns to the free list when its last holder frees it.

    Every operation costs O(pages named in it). Not thread-safe: one engine thread owns it.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the first _num_free entries are free ids
        self._num_free = num_pages
        self._refs = np.zeros(num_pages, np.int32)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self._num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def alloc(self, count: int) -> np.ndarray:
        """Take `count` free pages with one reference each: i32[count], or raise OutOfPagesError and take none."""
        if count > self._num_free:
            raise OutOfPagesError(
                f"asked for {count} KV pages, {self._num_free} of {self.num_pages} are free; "
                "preempt or finish a request, or raise num_pages"
            )
        first = self._num_free - count
        pages = self._stack[first : self._num_free][::-1].copy()
        self._num_free = first
        self._refs[pages] = 1
        return pages

    def retain(self, pages: np.ndarray) -> None:
        """Add one holder to each page of `pages` (i32[n], distinct, all in use)."""
        self._require_held(pages)
        self._refs[pages] += 1

    def fork(self, pages: np.ndarray) -> np.ndarray:
        """The page list of a second holder of the same content: retains `pages` and returns a copy."""
        self.retain(pages)
        return np.array(pages, np.int32)

    def free(self, pages: np.ndarray) -> None:
        """Drop one holder of each page of `pages` (i32[n], distinct); pages without holders become free."""
        self._require_held(pages)
        self._refs[pages] -= 1
        empty = np.asarray(pages, np.int32)[self._refs[pages] == 0]
        self._stack[self._num_free : self._num_free + len(empty)] = empty[::-1]
        self._num_free += len(empty)

    def references(self, pages: np.ndarray) -> np.ndarray:
        """Holders of each page: i32[n]."""
        return self._refs[pages]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page is either free once or held at least once."""
        free = self._stack[: self._num_free]
        if len(np.unique(free)) != self._num_free:
            raise IntegrityError("a KV page is in the free list twice")
        if self._refs[free].any():
            raise IntegrityError("a free KV page has holders")
        if np.count_nonzero(self._refs > 0) != self.num_used or (self._refs < 0).any():
            raise IntegrityError("a KV page is neither free nor held")

    def _require_held(self, pages: np.ndarray) -> None:
        ids = np.asarray(pages).tolist()
        if ids and (min(ids) < 0 or max(ids) >= self.num_pages):
            raise IntegrityError(f"KV page ids must be from 0 to {self.num_pages - 1}, got {ids}")
        if np.count_nonzero(self._refs[pages] < 1):
            raise IntegrityError(f"KV pages {ids} are not all in use")
        if len(set(ids)) != len(ids):
            raise IntegrityError(f"KV pages {ids} are named twice in one call")
