"""Prefix cache: the page that holds the KV of a text, found by a hash of all tokens up to the page's end.

Full pages only. Pages that no sequence holds stay cached in the pool until it evicts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from adaserve_jax.errors import IntegrityError
from adaserve_jax.memory.page_pool import Migration, PagePool

KEY_BYTES = 16
DRAFT_BYTES = 2


def first_key(salt: str, draft: int = 0) -> bytes:
    """Return the key from which a text's keys are chained.

    No key is shared between salts, nor between drafts: a page holds KV of both models, and that of one draft is of no
    use to another.
    """
    own = draft.to_bytes(DRAFT_BYTES, "little")
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=KEY_BYTES, person=b"salt", salt=own).digest()


def next_key(parent: bytes, token_ids: np.ndarray) -> bytes:
    """Return the key of a page, of its tokens (i32[page_size]) and of all tokens before it through the key `parent`."""
    return blake2b(parent + token_ids.tobytes(), digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Pages by key, and whether the draft's KV of a page is complete too. Implements `PageCache`.

    A page is entered by a holder and stays until the pool evicts it.
    """

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._draft_whole = np.zeros(pool.total_pages, bool)
        pool.attach_cache(self)

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, key: bytes) -> int | None:
        """Return the page of a key, or None."""
        return self._page_of.get(key)

    def enter(self, key: bytes, page: int, *, draft_whole: bool) -> None:
        """Enter `page` under `key`. The caller holds the page and will not write to it again.

        If the key or the page is known already, the old entry stays.
        """
        if key in self._page_of or page in self._key_of:
            return
        self._pool.remember(page)
        self._page_of[key] = page
        self._key_of[page] = key
        self._draft_whole[page] = draft_whole

    # ---- the draft's KV ----

    def mark_draft(self, pages: np.ndarray) -> None:
        """Record that the draft has been fed all tokens of these pages (i32[n])."""
        self._draft_whole[pages] = True

    def draft_prefix(self, pages: np.ndarray) -> int:
        """Return how many of the first of `pages` (i32[n], known) the draft has been fed."""
        whole = self._draft_whole[pages]
        return len(pages) if whole.all() else int(whole.argmin())

    def forget_draft(self) -> None:
        """Record that the draft lost its KV."""
        self._draft_whole[:] = False

    # ---- what the pool says ----

    def evicted(self, pages: Iterable[int]) -> None:
        """Forget cached pages that the pool took for something else."""
        for page in pages:
            del self._page_of[self._key_of.pop(page)]

    def moved(self, migration: Migration) -> None:
        """Follow pages whose content moved. The draft's KV does not move."""
        for old, new in zip(migration.from_pages.tolist(), migration.to_pages.tolist(), strict=True):
            key = self._key_of.pop(old, None)
            if key is not None:
                self._key_of[new] = key
                self._page_of[key] = new
        self._draft_whole[migration.to_pages] = False

    def check_integrity(self) -> None:
        """Raise IntegrityError unless keys and pages refer to each other and the pool knows the same pages."""
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise IntegrityError("a key and a page of the prefix cache do not name each other")
        if sorted(self._key_of) != self._pool.known.tolist():
            raise IntegrityError("the prefix cache and the page pool know different pages")
