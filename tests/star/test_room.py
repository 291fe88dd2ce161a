"""Who loses KV room to whom."""

from __future__ import annotations

import pytest

from adaserve_jax.star.service.limits import Allowance
from adaserve_jax.star.service.registry import Keeper
from adaserve_jax.star.service.session import Asked, Session, Target
from tests.star.toys import ToyRoom, draft, opened


def session(key: int, *, due_s: float | None = None, feed: bool = False) -> Session:
    made = Session(Target("a", Allowance(1.0, 1, 0.0)), opened(key, 0, [1] * 4), key, 0.0)
    made.feed = feed
    if due_s is not None:
        made.asked = Asked(draft(key, 0, 0, 4, []), 0.0, due_s, 1.0, key)
    return made


def kept(*sessions: Session, pages: int = 4) -> tuple[Keeper, ToyRoom]:
    """A keeper with room for so many sessions, and these in it."""
    room = ToyRoom(pages)
    keeper = Keeper(room)
    for each in sessions:
        assert keeper.reserve(each, 4, by_force=False)
    return keeper, room


def test_idle_ones_lose_it_first_then_what_is_fed_then_what_is_less_urgent():
    idle, fed, late, soon = session(1), session(2, feed=True), session(3, due_s=0.9), session(4, due_s=0.2)
    keeper, room = kept(soon, late, fed, idle)
    for key, lost in ((5, idle), (6, fed), (7, late)):
        assert keeper.reserve(session(key, due_s=0.1), 4, by_force=True)
        assert lost.key not in room.held
    assert not keeper.reserve(session(8, due_s=0.5), 4, by_force=True)  # all that are left are more urgent
    assert sorted(room.held) == [4, 5, 6, 7] and keeper.evicted == 3


@pytest.mark.parametrize(("due_s", "by_force"), [(0.1, False), (None, True), (None, False)])
def test_without_force_or_a_draft_only_idle_ones_lose_it(due_s: float | None, by_force: bool):
    keeper, room = kept(session(1, due_s=0.9), session(2, feed=True), session(3), pages=3)
    assert keeper.reserve(session(4, due_s=due_s), 4, by_force=by_force) and sorted(room.held) == [1, 2, 4]
    other = session(5, due_s=due_s, feed=True)
    keeper, room = kept(session(1, due_s=0.9), session(2, feed=True), pages=2)
    assert not keeper.reserve(other, 4, by_force=by_force) and sorted(room.held) == [1, 2]


def test_who_was_used_last_keeps_it_longest():
    first, second = session(1), session(2)
    keeper, room = kept(first, second, pages=2)
    assert keeper.reserve(first, 4, by_force=False)
    assert keeper.reserve(session(3), 4, by_force=False) and sorted(room.held) == [1, 3]


def test_what_is_on_the_device_keeps_it():
    flying = session(1)
    keeper, room = kept(flying, pages=1)
    flying.flying = True
    assert not keeper.reserve(session(2, due_s=0.0), 4, by_force=True)
    keeper.close(flying)
    assert room.held == {1: 1}
    keeper.landed(flying)
    assert room.held == {} and len(keeper) == 0


def test_an_allowance_fills_up_again():
    allowance = Allowance(10.0, 2, 0.0)
    assert [allowance.take(0.0) for _ in range(3)] == [0.0, 0.0, pytest.approx(0.1)]
    assert allowance.take(0.05) == pytest.approx(0.05)
    assert allowance.take(0.11) == 0.0 and allowance.take(0.11) > 0.0
    assert [allowance.take(9.0) for _ in range(3)] == [0.0, 0.0, pytest.approx(0.1)]
    assert allowance.take(8.0) > 0.0  # a clock that goes back gives nothing


def test_what_is_owed_is_paid_over_time():
    allowance = Allowance(10.0, 4, 0.0)
    assert allowance.owe(3, 0.0) == 0.0 and allowance.owe(6, 0.0) == pytest.approx(0.5)
    assert allowance.owe(1, 0.3) == pytest.approx(0.3) and allowance.take(0.6) > 0.0
    assert allowance.owe(1, 0.7) == pytest.approx(0.0)
