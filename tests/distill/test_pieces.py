"""Which piece of training runs next, and when none does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from adaserve_jax.distill.pieces import PieceScheduler
from adaserve_jax.distill.updates import PieceKind
from adaserve_jax.learn_config import LearnConfig
from tests.clock import Clock

CONFIG = LearnConfig(learn_delay_ms=50, learn_share=0.25)
TIMES = {"check": 0.03, "copy": 0.08}


class Draft:
    """Has one update, of these kinds of pieces, each of which takes `seconds`."""

    def __init__(self, name: str, kinds: list[PieceKind], clock: Clock, done: list[str], seconds: float = 0.04):
        self.due = True
        self._given = name, kinds, clock, done, seconds

    def run(self) -> Iterator[PieceKind]:
        name, kinds, clock, done, seconds = self._given
        self.due = False
        for kind in kinds:
            yield kind
            clock.now_s += seconds
            done.append(f"{name} {kind}")


def pieces_of(*drafts: Any, times: dict[str, float] = TIMES) -> PieceScheduler:
    return PieceScheduler(drafts, CONFIG, times)


def test_one_draft_after_the_other_and_one_piece_at_a_time():
    clock, done = Clock(), []
    first, other = Draft("first", ["check", "copy"], clock, done), Draft("other", ["check"], clock, done)
    pieces = pieces_of(first, other)
    assert pieces.is_due and pieces.run(None, clock) and done == ["other check"]
    assert pieces.run(None, clock) and pieces.is_due and pieces.run(None, clock)
    assert done == ["other check", "first check", "first copy"]
    assert not pieces.is_due and not pieces.run(None, clock)
    assert (pieces.count, pieces.delay_s) == (3, 0.0) and pieces.train_s == pytest.approx(0.12)


def test_while_requests_run_a_piece_waits_for_time_and_until_the_last_is_paid_for():
    """40 ms at a quarter of the time."""
    clock, done = Clock(), []
    pieces = pieces_of(Draft("it", ["check", "check", "copy"], clock, done))
    pieces.allowance.pass_time(clock(), busy=True)
    assert not pieces.run(0.029, clock) and not done
    assert pieces.run(0.031, clock)
    assert pieces.count == 1 and pieces.delay_s == pieces.delay_max_s == pytest.approx(0.04)
    clock.now_s += 0.119  # the piece's own time counts too
    pieces.allowance.pass_time(clock(), busy=True)
    assert not pieces.run(math.inf, clock)
    clock.now_s += 0.002
    pieces.allowance.pass_time(clock(), busy=True)
    assert pieces.run(math.inf, clock)
    clock.now_s += 9.0
    pieces.allowance.pass_time(clock(), busy=False)
    assert not pieces.run(math.inf, clock)  # a copy is longer than the delay
    assert pieces.run(None, clock)
    assert pieces.count == 3 and pieces.delay_s == pytest.approx(0.08)
    assert pieces.delay_max_s == pytest.approx(0.04) and pieces.train_s == pytest.approx(0.12)


def test_a_kind_is_expected_to_take_what_its_pieces_took():
    clock, done = Clock(), []
    pieces = pieces_of(Draft("it", ["check"] * 40, clock, done, seconds=0.06))
    while pieces.count < 20:
        assert pieces.run(None, clock)
    pieces.allowance.pass_time(clock(), busy=True)
    assert not pieces.run(math.inf, clock)  # 30 ms when it was measured, 60 since


def test_what_is_under_way_is_left():
    clock, done = Clock(), []
    pieces = pieces_of(Draft("it", ["check", "copy"], clock, done))
    assert pieces.run(None, clock)
    pieces.stop()
    assert not pieces.is_due and not pieces.run(None, clock) and done == ["it check"]
