import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from adaserve_jax.errors import ConfigError, IntegrityError, OutOfPagesError
from adaserve_jax.memory.page_pool import PagePool


class PagePoolMachine(RuleBasedStateMachine):
    """Drives the pool beside a plain dict of holders."""

    owners = Bundle("owners")

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages):
        self.pool = PagePool(num_pages, 8)
        self.holders = dict.fromkeys(range(num_pages), 0)

    @rule(target=owners, count=st.integers(0, 6))
    def alloc(self, count):
        free = [page for page, held in self.holders.items() if not held]
        if count > len(free):
            with pytest.raises(OutOfPagesError, match=f"asked for {count} KV pages, {len(free)} of"):
                self.pool.alloc(count)
            return np.zeros(0, np.int32)
        pages = self.pool.alloc(count)
        assert len(pages) == count
        assert all(self.holders[int(page)] == 0 for page in pages)
        for page in pages:
            self.holders[int(page)] += 1
        return pages

    @rule(target=owners, pages=owners)
    def fork(self, pages):
        if any(self.holders[int(page)] == 0 for page in pages):
            return np.zeros(0, np.int32)
        for page in pages:
            self.holders[int(page)] += 1
        return self.pool.fork(pages)

    @rule(pages=consumes(owners))
    def free(self, pages):
        self.pool.free(pages)
        for page in pages:
            self.holders[int(page)] -= 1

    @invariant()
    def agrees(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.num_free == sum(held == 0 for held in self.holders.values())
            ids = np.arange(self.pool.num_pages)
            assert self.pool.references(ids).tolist() == list(self.holders.values())


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


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


def test_check_integrity_sees_damage():
    pool = PagePool(4, 16)
    pages = pool.alloc(3)
    pool._refs[pages[0]] = 0
    with pytest.raises(IntegrityError, match="neither free nor held"):
        pool.check_integrity()


def test_sizes():
    assert PagePool(4, 16).pages_for(0) == 0
    assert PagePool(4, 16).pages_for(17) == 2
    with pytest.raises(ConfigError, match="at least 1"):
        PagePool(0, 16)


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
