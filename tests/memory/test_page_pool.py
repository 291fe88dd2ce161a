from collections.abc import Callable

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError, IntegrityError
from adaserve_jax.memory.page_pool import Migration, PagePool
from adaserve_jax.memory.prefix_cache import PrefixCache, first_key, next_key


def test_double_free_and_foreign_pages_are_refused():
    pool = PagePool(4, 16)
    pages = pool.alloc(2)
    pool.free(pages)
    with pytest.raises(IntegrityError, match="not all in use"):
        pool.free(pages)
    with pytest.raises(IntegrityError, match="from 0 to 3"):
        pool.retain(np.array([7]))
    with pytest.raises(IntegrityError, match="named twice"):
        pool.free(np.repeat(pool.alloc(1), 2))


class Nobody:
    """A cache that knows nothing of what it is told."""

    def evicted(self, pages: list[int]) -> None:
        pass

    def moved(self, migration: Migration) -> None:
        pass


def kept_pool() -> PagePool:
    """Of 4 pages and 4 more, in force: 3 of the first held, one of these known, another cached."""
    pool = PagePool(4, 16, 4)
    pool.attach_cache(Nobody())
    pool.extend()
    pages = pool.alloc(4)
    for page in (int(pages[0]), int(pages[3])):
        pool.remember(page)
    pool.free(pages[3:])
    pool.check_integrity()
    return pool


def hold_no_page(pool: PagePool) -> None:
    pool._refs[0] = 0


def free_a_page_twice(pool: PagePool) -> None:
    pool._extension.take(1)
    pool._extension.give(pool._extension.ids[:1].copy())


def free_a_held_page(pool: PagePool) -> None:
    pool._base.give(np.array([1]))


def know_a_free_page(pool: PagePool) -> None:
    pool._known[7] = True


def forget_a_cached_page(pool: PagePool) -> None:
    pool._known[3] = False


def free_beyond_what_is_in_force(pool: PagePool) -> None:
    pool.extended = False


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (hold_no_page, "neither free nor held"),
        (free_a_page_twice, "a KV page is free twice"),
        (free_a_held_page, "a free KV page has holders"),
        (know_a_free_page, "a KV page is free and known to the cache"),
        (forget_a_cached_page, "a KV page is cached and not known to the cache"),
        (free_beyond_what_is_in_force, "a KV page that is not in force is free or held"),
    ],
)
def test_check_integrity_sees_damage(damage: Callable[[PagePool], None], message: str):
    pool = kept_pool()
    damage(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


def test_what_must_not_be_done_is_refused_and_changes_nothing():
    pool = kept_pool()
    with pytest.raises(IntegrityError, match="a page pool has one cache"):
        pool.attach_cache(Nobody())
    with pytest.raises(IntegrityError, match="KV page 7 cannot be kept: there is no cache, or it has no holder"):
        pool.remember(7)
    with pytest.raises(IntegrityError, match=r"KV pages \[1, 7\] are not all in use or cached"):
        pool.retain(np.array([1, 7]))
    migration = pool.plan_contraction()
    with pytest.raises(IntegrityError, match="planned once, while extended"):
        pool.plan_contraction()
    with pytest.raises(IntegrityError, match="cannot end: extended True, 0 pages of it in use"):
        pool.trim()
    pool.abandon(migration)
    for late in (pool.abandon, pool.publish):
        with pytest.raises(IntegrityError, match="a migration ends once, while it is the open plan"):
            late(migration)
    pool.check_integrity()
    pool.trim()
    with pytest.raises(IntegrityError, match="planned once, while extended"):
        pool.plan_contraction()
    with pytest.raises(IntegrityError, match="there is no cache, or it has no holder"):
        PagePool(4, 16).remember(0)


def test_sizes():
    assert PagePool(4, 16).pages_for(0) == 0
    assert PagePool(4, 16).pages_for(17) == 2
    with pytest.raises(ConfigError, match="at least 1"):
        PagePool(0, 16)
    with pytest.raises(ConfigError, match="extension_pages must be at least 0, got -1"):
        PagePool(4, 16, -1)


def test_who_leaves_between_plan_and_publication_takes_no_part_in_the_move():
    """Nobody remembers pages here, so that those of a holder who left are free, on both sides."""
    pool = PagePool(4, 16, 4)
    base = pool.alloc(4)
    pool.extend()
    leaves, stays = pool.alloc(2), pool.alloc(2)
    pool.free(base)
    migration = pool.plan_contraction()
    assert migration is not None and migration.from_pages.tolist() == [*leaves, *stays]
    pool.free(leaves)
    remap = pool.publish(migration)
    pool.check_integrity()
    moved_to = migration.to_pages[2:]
    assert remap.tolist() == [0, 1, 2, 3, *leaves, *moved_to]
    assert pool.references(np.arange(8)).tolist() == [int(page in moved_to) for page in range(8)]
    pool.trim()
    assert sorted(pool.alloc(2).tolist() + moved_to.tolist()) == [0, 1, 2, 3]


def test_a_prefix_cache_that_disagrees_with_itself_or_the_pool_is_told():
    pool = PagePool(4, 2)
    cache = PrefixCache(pool)
    pages = pool.alloc(2).tolist()
    keys = [next_key(first_key(""), np.full(2, token, np.int32)) for token in (1, 2)]
    for key, page in zip(keys, pages, strict=True):
        cache.enter(key, page, draft_whole=False)
    cache.check_integrity()
    cache._page_of[keys[0]] = pages[1]
    with pytest.raises(IntegrityError, match="do not name each other"):
        cache.check_integrity()
    cache._page_of[keys[0]] = pages[0]
    pool._known[pages[1]] = False
    with pytest.raises(IntegrityError, match="know different pages"):
        cache.check_integrity()


def entered(cache: PrefixCache, page: int) -> bytes:
    """Page `page` becomes known by a text of its own, whose draft is whole; its key."""
    key = next_key(first_key(""), np.full(2, page, np.int32))
    cache.enter(key, page, draft_whole=True)
    return key


def test_of_cached_pages_those_used_last_come_along_and_only_to_places_that_are_free():
    """Of 4 base pages 2 are held, 1 is cached and 1 is free, to which the last used of 2 cached pages moves; what the
    cache knows of it goes along, but for the draft's KV."""
    pool = PagePool(4, 2, 2)
    cache = PrefixCache(pool)
    pool.extend()
    pool.alloc(6)
    keys = {page: entered(cache, page) for page in (2, 4, 5)}
    for page in (2, 3, 4, 5):
        pool.free(np.array([page]))
    assert pool.num_cached == 3 and pool.num_free == 4
    migration = pool.plan_contraction()
    assert migration is not None and (migration.from_pages.tolist(), migration.to_pages.tolist()) == ([5], [3])
    pool.publish(migration)
    assert [cache.find(keys[page]) for page in (2, 4, 5)] == [2, 4, 3]
    assert [cache.draft_prefix(np.array([page])) for page in (2, 3)] == [1, 0]
    pool.trim()
    assert [cache.find(keys[page]) for page in (2, 4, 5)] == [2, None, 3]
    pool.check_integrity()
    cache.check_integrity()
    assert pool.alloc(2).tolist() == [2, 3], "least recently used first, and nothing else is left"
