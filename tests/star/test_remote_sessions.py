"""Whatever a draft service and the way to it do, a step ends within its deadline, and no row gets another's tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adaserve_jax.star.link import MISMATCH_RETRY_S, WELCOME_S
from adaserve_jax.star.messages import Close, Draft, Load, Open, Refused, Resync, Tree, WireError
from tests.star.scripted import VOCABULARY, WELCOME, Row, Scene, plan_of, without


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


class Typist:
    """Requests that grow by two tokens each step; the same plans whatever the drafter brings."""

    def __init__(self, scene: Scene, rows: int = 2, seed: int = 0, due_s: float = np.inf) -> None:
        self.scene = scene
        self._due_s = due_s
        self._drawn = np.random.default_rng(seed)
        self._texts = [self._drawn.integers(0, VOCABULARY, 10).tolist() for _ in range(rows)]
        self._known = [0] * rows

    def step(self) -> list[bool]:
        rows = [
            Row(slot, text, known, due_s=self._due_s)
            for slot, (text, known) in enumerate(zip(self._texts, self._known, strict=True))
        ]
        got = self.scene.propose(rows)
        self._known = [len(text) for text in self._texts]
        self._texts = [[*text, *self._drawn.integers(0, VOCABULARY, 2).tolist()] for text in self._texts]
        return got

    def steps(self, count: int) -> list[list[bool]]:
        return [self.step() for _ in range(count)]


def test_a_tree_that_comes_too_late_is_dropped_and_the_next_one_is_taken() -> None:
    scene = Scene.of(deadline_ms=50.0)
    typist = Typist(scene)
    scene.service.spoil = lambda frame: [(0.060, frame)]
    assert typist.step() == [False, False]
    assert scene.drafter.wait_s == pytest.approx(0.050)
    scene.service.spoil = lambda frame: [(0.0, frame)]
    scene.world.sleep(0.1)
    assert typist.step() == [True, True]
    stats = scene.drafter.stats()
    assert (stats.late, stats.stale, stats.trees, stats.rounds) == (2, 2, 2, 2)


def test_a_late_tree_that_arrives_in_the_next_round_is_not_taken_for_its_tree() -> None:
    scene = Scene.of(deadline_ms=50.0)
    typist = Typist(scene)
    scene.service.spoil = lambda frame: [(0.049, frame)]
    assert typist.step() == [False, False]
    scene.service.spoil = lambda frame: [(0.003, frame)]
    assert typist.step() == [True, True], "checked against the toy"
    assert scene.drafter.stats().stale == 2


def test_one_late_row_costs_the_others_nothing_but_the_wait() -> None:
    scene = Scene.of(deadline_ms=50.0)
    scene.service.answer = lambda draft, tree: None if draft.session == 1 else tree
    assert Typist(scene, rows=3).step() == [False, True, True]
    assert (scene.drafter.stats().late, scene.drafter.stats().trees) == (1, 2)


def test_a_tree_that_comes_twice_is_taken_once() -> None:
    scene = Scene.of()
    scene.service.spoil = lambda frame: [(0.0, frame), (0.0, frame), (0.001, frame)]
    assert Typist(scene).steps(3) == [[True, True]] * 3
    scene.world.sleep(0.1)
    assert scene.drafter.stats().stale == 3 * 2 * 2
    assert scene.drafter.stats().trees == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 0}, {"epoch": 2}, {"round": 0}, {"round": 2}, {"length": 9}, {"session": 99}, {"session": 0},
        {"width": 3},
    ],
)  # fmt: skip
def test_a_tree_of_another_epoch_round_text_or_session_is_dropped(changes: dict[str, int]) -> None:
    scene = Scene.of()
    scene.service.answer = lambda draft, tree: replace(tree, **changes)
    assert Typist(scene, rows=1).step() == [False]
    assert (scene.drafter.stats().stale, scene.drafter.stats().late) == (1, 1)


def test_a_tree_of_another_services_session_is_dropped() -> None:
    scene = Scene.of(services=2)
    typist = Typist(scene)
    scene.services[0].answer = lambda draft, tree: None
    scene.services[1].answer = lambda draft, tree: None
    forged = []

    def copy(draft: Draft, tree: Tree) -> None:
        forged.append(tree)

    scene.services[0].answer = copy
    scene.services[1].answer = copy
    scene.world.later(0.010, lambda: [service.say(forged) for service in reversed(scene.services)] and None)
    got = typist.step()
    assert got == [True, True] and scene.drafter.stats().stale == 2


def nodes(**changes: Any) -> Callable[[Draft, Tree], Tree]:
    """A sound tree of two levels of two, and what is changed of it."""
    i32 = np.int32
    sound = {
        "index": np.array([0, 1, 2, 3], i32), "token": np.array([5, 6, 7, 8], i32),
        "parent": np.array([-1, -1, 0, 1], i32), "cell": np.array([0, 4, 8, 12], i32),
        "log_q": np.array([-1, -2, -3, -4], np.float32),
    }  # fmt: skip
    parts = {
        name: np.array(changes[name], part.dtype) if isinstance(changes.get(name), list) else changes.get(name, part)
        for name, part in sound.items()
    }
    return lambda draft, tree: replace(tree, **parts)


THREE_LEVELS = {"index": [0, 2, 4], "token": [5, 6, 7], "cell": [0, 8, 16], "log_q": [-1, -1, -1]}
GARBAGE: dict[str, dict[str, Any]] = {
    "a column beyond the search": {"index": [0, 1, 2, 6]},
    "a column below 0": {"index": [-1, 1, 2, 3]},
    "a column twice": {"index": [0, 1, 2, 2]},
    "columns that fall": {"index": [1, 0, 2, 3]},
    "a parent that is not there": THREE_LEVELS | {"parent": [-1, 0, 3]},
    "a parent two levels above": THREE_LEVELS | {"parent": [-1, 0, 0]},
    "a parent of the same level": {"parent": [-1, 0, 0, 1]},
    "a parent below -1": {"parent": [-1, -2, 0, 1]},
    "a node of the second level under the root": {"parent": [-1, -1, 0, -1]},
    "a token beyond the vocabulary": {"token": [5, 6, 7, VOCABULARY]},
    "a token below 0": {"token": [5, 6, 7, -1]},
    "NaN": {"log_q": [-1, -2, float("nan"), -4]},
    "a probability above 1": {"log_q": [-1, -2, 0.5, -4]},
    "a probability of 0": {"log_q": [-1, -2, -float("inf"), -4]},
    "a cell beyond the table": {"cell": [0, 4, 8, 24]},
    "a cell of another level": {"cell": [0, 4, 8, 0]},
    "a cell below 0": {"cell": [0, 4, 8, -1]},
    "fewer tokens": {"token": [5, 6, 7]},
    "more parents": {"parent": [-1, -1, 0, 1, 1]},
    "two axes": {"token": np.zeros((4, 1), np.int32)},
    "numbers that are none": {"index": np.zeros(4, np.float32)},
    "wider numbers": {"token": np.array([5, 6, 7, 8], np.int64)},
}  # fmt: skip


def test_the_tree_that_garbage_is_made_of_is_sound() -> None:
    scene = Scene.of()
    scene.service.answer = nodes()
    found = scene.drafter.propose(plan_of([Row(0, text(9))]))
    assert found.token[0].tolist() == [5, 6, 7, 8, 0, 0] and found.parent[0].tolist() == [-1, -1, 0, 1, -1, -1]
    assert scene.drafter.stats().invalid == 0


def test_as_is_the_one_of_three_levels() -> None:
    scene = Scene.of()
    scene.service.answer = nodes(**THREE_LEVELS, parent=[-1, 0, 2])
    found = scene.drafter.propose(plan_of([Row(0, text(9))]))
    assert found.parent[0].tolist() == [-1, -1, 0, -1, 2, -1]


@pytest.mark.parametrize("name", GARBAGE)
def test_a_tree_that_makes_no_sense_is_dropped_and_counted_alone(name: str) -> None:
    scene = Scene.of()
    garbled = nodes(**GARBAGE[name])
    scene.service.answer = lambda draft, tree: garbled(draft, tree) if draft.session == 2 else tree
    assert Typist(scene, rows=3).step() == [True, False, True]
    stats = scene.drafter.stats()
    assert (stats.invalid, stats.trees, stats.late) == (1, 2, 0)


def test_a_message_that_could_not_be_read_is_counted() -> None:
    scene = Scene.of()
    scene.service.spoil = lambda frame: [(0.0, [WireError("junk"), *frame, WireError("junk", 1, 7)])]
    assert Typist(scene).step() == [True, True]
    assert scene.drafter.stats().invalid == 2


def test_a_tree_that_could_not_be_read_is_not_waited_for() -> None:
    scene = Scene.of()
    scene.service.answer = lambda draft, tree: WireError("NaN", 1, draft.epoch) if draft.session == 1 else tree
    assert Typist(scene, rows=2).step() == [False, True]
    stats = scene.drafter.stats()
    assert scene.drafter.wait_s < 0.02 and (stats.invalid, stats.late, stats.trees) == (1, 0, 1)


def test_a_service_whose_trees_cannot_be_read_is_left_alone() -> None:
    scene = Scene.of()
    scene.service.answer = lambda draft, tree: WireError("NaN", draft.session, draft.epoch)
    Typist(scene).steps(3)
    assert scene.drafter.stats().services[scene.service.address].breaker == "open"


def no_nodes(tree: Tree) -> Tree:
    return replace(tree, **{name: getattr(tree, name)[:0] for name in ("index", "token", "parent", "cell", "log_q")})


def test_an_empty_tree_is_no_candidates_and_nobody_waits_for_more() -> None:
    scene = Scene.of()
    scene.service.answer = lambda draft, tree: no_nodes(tree) if draft.session == 1 else tree
    assert Typist(scene, rows=2).step() == [False, True]
    stats = scene.drafter.stats()
    assert scene.drafter.wait_s < 0.02 and (stats.late, stats.trees, stats.invalid) == (1, 1, 0)


def test_empty_trees_do_not_make_waits_shorter_until_nothing_can_be_in_time() -> None:
    """Who gives up within 30 ms gets empty trees; the row is overdue, so its wait follows usual rounds."""
    scene = Scene.of(deadline_ms=100.0)
    typist = Typist(scene, rows=1, due_s=-1.0)
    typist.steps(2)
    asked: list[float] = []

    def slow(draft: Draft, tree: Tree) -> Tree:
        asked.append(draft.give_up_s)
        return no_nodes(tree) if draft.give_up_s < 0.030 else tree

    scene.service.answer = slow
    assert typist.steps(6)[-1] == [True] and max(asked) >= 0.030
    assert asked[:3] == sorted(asked[:3]), "each wait is longer than the one before"


def test_a_session_that_one_service_refuses_goes_to_another() -> None:
    scene = Scene.of(services=2)
    typist = Typist(scene, rows=1)
    home = next(service for service in scene.services if typist.step() == [True] and service.sessions)
    other = next(service for service in scene.services if service is not home)
    home.answer = lambda draft, tree: Refused("quota", "no", draft.session, draft.epoch, retry_after_s=1.0)
    assert typist.step() == [False] and scene.drafter.wait_s < 0.02
    assert typist.steps(2) == [[True]] * 2 and len(other.sessions) == 1
    scene.world.sleep(0.1)
    assert not home.sessions, "it was told that nobody needs it there"
    stats = scene.drafter.stats()
    assert (stats.moved, stats.services[home.address].sessions, stats.services[other.address].sessions) == (1, 0, 1)
    other.answer = lambda draft, tree: Refused("too_long", "no", draft.session, draft.epoch)
    home.answer = lambda draft, tree: tree
    assert typist.steps(2) == [[False]] * 2, "the first one has not said yet that it may be asked"
    scene.world.sleep(1.0)
    assert typist.step() == [True] and home.sessions


def test_what_a_service_says_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene.of(connected=False)
    scene.service.welcome = Refused("full", "no\r\nERROR forged\x1b[2J")
    scene.drafter.connect(0.5)
    scene.service.welcome = WELCOME
    scene.world.sleep(10.0)
    assert scene.drafter.connect(1.0) is not None
    scene.service.cut("reset\nforged")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(line.isprintable() for line in said), said
    assert scene.drafter.stats().services[scene.service.address].reason.isprintable()


def test_errors_of_its_own_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene.of()
    typist = Typist(scene)
    typist.step()
    scene.drafter._mirror.follow = None  # type: ignore[assignment, method-assign]
    assert typist.steps(3) == [[False, False]] * 3
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert scene.drafter.stats().errors == 3


def test_resync_opens_the_session_anew_within_the_same_step() -> None:
    scene = Scene.of()
    typist = Typist(scene)
    typist.step()
    scene.service.sessions.clear()
    assert typist.step() == [True, True]
    assert [(opened.session, opened.epoch) for opened in scene.service.heard if isinstance(opened, Open)] == [
        (1, 1), (2, 1), (1, 2), (2, 2),
    ]  # fmt: skip
    assert (scene.drafter.stats().resyncs, scene.drafter.stats().late) == (2, 0)
    assert typist.step() == [True, True]


def test_resync_without_end_costs_one_more_try_in_each_step() -> None:
    scene = Scene.of()
    scene.service.answer = lambda draft, tree: Resync(draft.session, draft.epoch)
    typist = Typist(scene)
    assert typist.steps(4) == [[False, False]] * 4
    assert scene.drafter.stats().resyncs == 4 * 2 * 2
    assert scene.drafter.wait_s < 0.02, "nothing is waited for that will not come"
    scene.service.answer = lambda draft, tree: tree
    assert typist.step() == [True, True]


def test_resync_of_an_epoch_that_is_over_changes_nothing() -> None:
    scene = Scene.of()
    typist = Typist(scene)
    typist.step()
    scene.service.say([Resync(1, 0), Resync(7, 1), Refused("quota", "no", 1, 5)])
    assert typist.step() == [True, True]
    assert scene.drafter.stats().stale == 3 and scene.drafter.stats().resyncs == 0


def test_a_refused_session_is_not_asked_again_before_its_time() -> None:
    scene = Scene.of()
    typist = Typist(scene)
    refused = Refused("quota", "no room", 1, 1, retry_after_s=1.0)
    scene.service.answer = lambda draft, tree: refused if draft.session == 1 else tree
    assert typist.step() == [False, True]
    assert scene.drafter.wait_s < 0.02
    scene.service.answer = lambda draft, tree: tree
    assert typist.steps(3) == [[False, True]] * 3
    scene.world.sleep(1.0)
    assert typist.step() == [True, True]
    assert [opened.epoch for opened in scene.service.heard if isinstance(opened, Open) and opened.session == 1] == [
        1,
        2,
    ]
    assert scene.drafter.stats().refused == 1


def test_a_session_that_is_refused_for_good_is_not_asked_again_until_its_request_ends() -> None:
    scene = Scene.of()
    typist = Typist(scene)
    scene.service.answer = lambda draft, tree: Refused("invalid", "no", 1, draft.epoch) if draft.session == 1 else tree
    typist.step()
    scene.world.sleep(1e6)
    assert typist.step() == [False, True]
    scene.drafter.ended(np.array([0], np.int32))
    assert scene.propose([Row(0, text(4))]) == [True]


@pytest.mark.parametrize("code", ["vocabulary", "cells", "draft_version", "protocol_version", "unauthenticated"])
def test_a_service_of_another_kind_is_left_alone_for_long_and_the_reason_is_told(code: str) -> None:
    scene = Scene.of(connected=False)
    scene.service.welcome = Refused(code, "it is another one")
    began = scene.world.now
    assert scene.drafter.connect(5.0) is None
    assert scene.world.now - began < 0.1, "there is nothing to wait for"
    typist = Typist(scene)
    scene.world.sleep(MISMATCH_RETRY_S / 2)
    assert typist.step() == [False, False] and scene.drafter.wait_s == 0.0
    assert len(scene.service.streams) == 1 and scene.service.streams[0].ended
    stats = scene.drafter.stats()
    assert stats.services[scene.service.address].reason == f"{code}: it is another one" and stats.refused == 1
    scene.service.welcome = WELCOME
    scene.world.sleep(MISMATCH_RETRY_S)
    typist.step()
    scene.world.sleep(0.1)
    assert typist.step() == [True, True]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 9}, "protocol_version: expected protocol version 1, got 9"),
        ({"draft_version": "draft-2"}, "draft_version: expected draft draft-1, got draft-2"),
    ],
)
def test_a_welcome_of_another_version_is_refused_by_the_target(changes: dict[str, Any], reason: str) -> None:
    scene = Scene.of(connected=False, version="draft-1")
    scene.service.welcome = without(WELCOME, **changes)
    assert scene.drafter.connect(5.0) is None
    assert scene.service.streams[0].ended
    assert scene.drafter.stats().services[scene.service.address].reason == reason


def test_a_refused_target_comes_back_when_the_service_said() -> None:
    scene = Scene.of(connected=False)
    scene.service.welcome = Refused("full", "8 targets are enough", retry_after_s=3.0)
    assert scene.drafter.connect(1.0) is None
    scene.service.welcome = WELCOME
    assert scene.drafter.connect(1.0) is None
    assert scene.drafter.connect(3.5) == WELCOME


def test_a_target_that_is_refused_later_goes_without_and_comes_back() -> None:
    scene = Scene.of()
    typist = Typist(scene)
    typist.step()
    scene.service.answer = lambda draft, tree: Refused("shutting_down", "bye")
    assert typist.step() == [False, False]
    assert scene.drafter.wait_s < 0.02 and scene.drafter.stats().late == 0
    scene.service.answer = lambda draft, tree: tree
    scene.world.sleep(3.0)
    typist.step()
    scene.world.sleep(0.1)
    assert typist.step() == [True, True]


def test_a_stream_that_is_lost_in_mid_round_ends_the_wait_and_is_opened_again() -> None:
    scene = Scene.of()
    typist = Typist(scene)
    typist.step()
    scene.world.later(0.0015, scene.service.cut)
    assert typist.step() == [False, False]
    assert scene.drafter.wait_s == pytest.approx(0.0015)
    assert scene.drafter.stats().services[scene.service.address].reason == "reset"
    scene.world.sleep(0.2)
    typist.step()
    scene.world.sleep(0.1)
    assert typist.step() == [True, True]
    assert [opened.epoch for opened in scene.service.heard if isinstance(opened, Open)] == [1, 1, 2, 2]
    stats = scene.drafter.stats()
    assert stats.lost == 1 and stats.breaker_opens == 0


def test_a_service_that_was_killed_and_started_again_gets_every_text_anew() -> None:
    scene = Scene.of()
    typist = Typist(scene)
    typist.steps(3)
    scene.service.restart()
    assert typist.step() == [False, False]
    scene.world.sleep(0.3)
    typist.step()
    scene.world.sleep(0.1)
    assert typist.steps(2) == [[True, True]] * 2


def test_a_service_that_is_away_is_tried_again_ever_more_seldom_and_found_when_it_is_there() -> None:
    scene = Scene.of(connected=False)
    scene.service.up = False
    assert scene.drafter.connect(1.0) is None
    typist = Typist(scene)
    for _ in range(600):
        assert typist.step() == [False, False] and scene.drafter.wait_s == 0.0
        scene.world.sleep(0.1)
    assert 8 <= len(scene.service.streams) <= 16
    scene.service.up = True
    scene.world.sleep(11.0)
    typist.step()
    scene.world.sleep(0.1)
    assert typist.step() == [True, True]


def test_a_service_that_says_nothing_to_hello_is_given_up_and_tried_again() -> None:
    scene = Scene.of(connected=False)
    scene.service.listen = lambda frame: []
    assert scene.drafter.connect(WELCOME_S / 2) is None
    scene.world.sleep(WELCOME_S)
    scene.propose([Row(0, text(4))])
    assert scene.service.streams[0].ended
    scene.service.listen = lambda frame: frame
    assert scene.drafter.connect(1.0) == WELCOME


def test_one_that_welcomes_before_it_is_greeted_is_not_believed() -> None:
    scene = Scene.of(connected=False)
    opened = scene.service.open

    def eager(received: Any, lost: Any) -> Any:
        received([WELCOME, Load(0.5, 0.5, 1, 1)])
        return opened(received, lost)

    scene.service.open = eager  # type: ignore[method-assign]
    assert scene.drafter.connect(1.0) == WELCOME
    assert scene.service.kinds() == ["Hello"]


def test_a_transport_that_cannot_begin_is_a_service_that_is_not_there() -> None:
    scene = Scene.of(connected=False)
    opened = scene.service.open

    def broken(received: Any, lost: Any) -> Any:
        raise OSError("no such interface")

    scene.service.open = broken  # type: ignore[method-assign]
    assert scene.drafter.connect(1.0) is None
    assert scene.propose([Row(0, text(4))]) == [False]
    assert scene.drafter.stats().services[scene.service.address].reason == "OSError: no such interface"
    scene.service.open = opened  # type: ignore[method-assign]
    assert scene.drafter.connect(5.0) == WELCOME


def test_a_service_that_does_not_answer_is_left_alone_and_tried_again() -> None:
    scene = Scene.of(deadline_ms=50.0)
    typist = Typist(scene)
    typist.step()
    scene.service.answer = lambda draft, tree: None
    for _ in range(3):
        typist.step()
        assert scene.drafter.wait_s == pytest.approx(0.050)
    told = len(scene.service.heard)
    assert typist.steps(5) == [[False, False]] * 5
    assert scene.drafter.wait_s == 0.0 and len(scene.service.heard) == told
    state = scene.drafter.stats().services[scene.service.address]
    assert (state.breaker, state.reason) == ("open", "it did not answer in time")
    scene.world.sleep(0.5)
    typist.step()
    assert scene.drafter.wait_s == pytest.approx(0.050), "one trial"
    assert typist.step() == [False, False] and scene.drafter.wait_s == 0.0
    scene.service.answer = lambda draft, tree: tree
    scene.world.sleep(1.0)
    assert typist.step() == [True, True], "what was said meanwhile is told with the next Draft"
    stats = scene.drafter.stats()
    assert stats.breaker_opens == 2 and stats.services[scene.service.address].breaker == "closed"


def test_garbage_opens_the_breaker_like_silence() -> None:
    scene = Scene.of()
    scene.service.answer = nodes(token=[-1, 0, 0, 0])
    typist = Typist(scene)
    typist.steps(3)
    assert scene.drafter.stats().services[scene.service.address].breaker == "open"
    assert scene.drafter.stats().invalid == 6


def test_a_preempted_request_comes_back_in_another_slot() -> None:
    scene = Scene.of()
    first, second = text(20), text(20, 1)
    scene.propose([Row(0, first), Row(1, second)])
    scene.drafter.ended(np.array([0], np.int32))
    assert scene.propose([Row(1, [*second, 3], 20)]) == [True]
    scene.propose([Row(1, [*second, 3, 4], 21), Row(2, first, 0, 15, decodes=False)])
    assert scene.propose([Row(1, [*second, 3, 4, 5], 22), Row(2, [*first, 9], 15)]) == [True, True]
    assert sorted(scene.service.sessions) == [2, 3]


def test_a_failure_inside_is_a_step_without_drafts_and_nothing_is_mixed_up_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene.of()
    typist = Typist(scene)
    typist.step()
    with monkeypatch.context() as patched:
        patched.setattr("adaserve_jax.star.remote.Round", None)
        assert typist.step() == [False, False]
    assert "drafting failed" in caplog.text
    assert typist.steps(2) == [[True, True]] * 2


class TestSeveralServices:
    def test_sessions_spread_and_stay(self) -> None:
        scene = Scene.of(services=3)
        typist = Typist(scene, rows=6)
        assert all(all(got) for got in typist.steps(3))
        assert [len(service.sessions) for service in scene.services] == [2, 2, 2]
        assert all(service.kinds().count("Open") == 2 for service in scene.services)
        assert scene.drafter.stats().moved == 0

    def test_new_sessions_go_to_the_least_loaded(self) -> None:
        scene = Scene.of(services=2)
        scene.services[0].say([Load(0.9, 0.050, 9, 3)])
        scene.services[1].say([Load(0.2, 0.0, 9, 3)])
        assert Typist(scene, rows=4).step() == [True] * 4
        assert [len(service.sessions) for service in scene.services] == [0, 4]
        state = scene.drafter.stats().services[scene.services[0].address]
        assert (state.busy, state.queue_s) == (0.9, 0.050)

    def test_no_service_gets_more_than_it_takes(self) -> None:
        scene = Scene.of(services=2, connected=False)
        for service in scene.services:
            service.welcome = without(WELCOME, max_sessions=2)
        scene.drafter.connect(1.0)
        scene.world.sleep(0.1)
        assert sum(Typist(scene, rows=5).step()) == 4
        assert [len(service.sessions) for service in scene.services] == [2, 2]

    def test_one_that_is_dead_from_the_start_costs_nothing(self) -> None:
        scene = Scene.of(services=2, connected=False)
        scene.services[0].up = False
        assert scene.drafter.connect(1.0) == WELCOME
        assert Typist(scene, rows=4).steps(3) == [[True] * 4] * 3

    def test_one_that_dies_gives_its_sessions_to_the_others(self) -> None:
        scene = Scene.of(services=2)
        typist = Typist(scene, rows=4)
        typist.step()
        scene.services[0].up = False
        scene.services[0].restart()
        assert typist.steps(3) == [[True] * 4] * 3
        assert scene.drafter.stats().moved == 2
        scene.services[0].up = True
        scene.world.sleep(5.0)
        typist.step()
        scene.world.sleep(0.1)
        assert typist.step() == [True] * 4
        assert len(scene.services[1].sessions) == 4, "they stay"

    def test_one_that_falls_silent_gives_its_sessions_to_the_others_and_is_told(self) -> None:
        scene = Scene.of(services=2)
        typist = Typist(scene, rows=4)
        typist.step()
        silent = scene.services[0]
        silent.answer = lambda draft, tree: None
        got = typist.steps(5)
        assert [sum(each) for each in got] == [2, 2, 2, 4, 4]
        assert sum(isinstance(message, Close) for message in silent.heard) == 2
        assert scene.drafter.stats().services[silent.address].sessions == 0
        scene.world.sleep(1.0)
        silent.answer = lambda draft, tree: tree
        assert scene.propose([Row(9, text(5))]) == [True], "a new session tries it"
        assert scene.drafter.stats().services[silent.address].breaker == "closed"

    def test_one_of_another_version_is_not_used(self) -> None:
        scene = Scene.of(services=2, connected=False, version="draft-1")
        scene.services[1].welcome = without(WELCOME, draft_version="draft-0")
        scene.drafter.connect(1.0)
        scene.world.sleep(0.1)
        assert Typist(scene, rows=3).step() == [True] * 3
        assert scene.services[1].sessions == {}
