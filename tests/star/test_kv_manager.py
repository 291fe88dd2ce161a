"""Who loses KV pages to whom."""

from __future__ import annotations

import pytest

from adaserve_jax.star.service.kv_manager import KvManager
from adaserve_jax.star.service.limits import RateLimiter
from adaserve_jax.star.service.session import DraftSession, PendingDraft, TargetState
from tests.star.toys import ToyPages, draft, opened


def session(key: int, *, due_s: float | None = None, feed: bool = False) -> DraftSession:
    made = DraftSession(TargetState("a", RateLimiter(1.0, 1, 0.0)), opened(key, 0, [1] * 4), key, 0.0)
    made.needs_feed = feed
    if due_s is not None:
        made.pending = PendingDraft(draft(key, 0, 0, 4, []), 0.0, due_s, 1.0, key)
    return made


def kept(*sessions: DraftSession, pages: int = 4) -> tuple[KvManager, ToyPages]:
    """A manager with space for so many sessions, and these in it."""
    pages = ToyPages(pages)
    manager = KvManager(pages)
    for each in sessions:
        assert manager.reserve(each, 4, force=False)
    return manager, pages


def test_idle_ones_lose_it_first_then_what_is_fed_then_what_is_less_urgent():
    idle, fed, late, soon = session(1), session(2, feed=True), session(3, due_s=0.9), session(4, due_s=0.2)
    manager, pages = kept(soon, late, fed, idle)
    for key, lost in ((5, idle), (6, fed), (7, late)):
        assert manager.reserve(session(key, due_s=0.1), 4, force=True)
        assert lost.key not in pages.held
    assert not manager.reserve(session(8, due_s=0.5), 4, force=True)  # all that are left are more urgent
    assert sorted(pages.held) == [4, 5, 6, 7] and manager.evicted == 3


@pytest.mark.parametrize(("due_s", "force"), [(0.1, False), (None, True), (None, False)])
def test_without_force_or_a_draft_only_idle_ones_lose_it(due_s: float | None, force: bool):
    manager, pages = kept(session(1, due_s=0.9), session(2, feed=True), session(3), pages=3)
    assert manager.reserve(session(4, due_s=due_s), 4, force=force) and sorted(pages.held) == [1, 2, 4]
    other = session(5, due_s=due_s, feed=True)
    manager, pages = kept(session(1, due_s=0.9), session(2, feed=True), pages=2)
    assert not manager.reserve(other, 4, force=force) and sorted(pages.held) == [1, 2]


def test_an_limiter_fills_up_again():
    limiter = RateLimiter(10.0, 2, 0.0)
    assert [limiter.take(0.0) for _ in range(3)] == [0.0, 0.0, pytest.approx(0.1)]
    assert limiter.take(0.05) == pytest.approx(0.05)
    assert limiter.take(0.11) == 0.0 and limiter.take(0.11) > 0.0
    assert [limiter.take(9.0) for _ in range(3)] == [0.0, 0.0, pytest.approx(0.1)]
    assert limiter.take(8.0) > 0.0  # a clock that goes back gives nothing


def test_what_is_owed_is_paid_over_time():
    limiter = RateLimiter(10.0, 4, 0.0)
    assert limiter.owe(3, 0.0) == 0.0 and limiter.owe(6, 0.0) == pytest.approx(0.5)
    assert limiter.owe(1, 0.3) == pytest.approx(0.3) and limiter.take(0.6) > 0.0
    assert limiter.owe(1, 0.7) == pytest.approx(0.0)
