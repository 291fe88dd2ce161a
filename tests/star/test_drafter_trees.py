"""Trees that come late, twice, empty or garbled, or are another's: none is taken for the one that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adaserve_jax.star.messages import Draft, Tree, WireError
from tests.star.scripted import VOCABULARY, Row, Scene, plan_of
from tests.star.typist import Typist, text


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


def test_garbage_opens_the_breaker_like_silence() -> None:
    scene = Scene.of()
    scene.service.answer = nodes(token=[-1, 0, 0, 0])
    typist = Typist(scene)
    typist.steps(3)
    assert scene.drafter.stats().services[scene.service.address].breaker == "open"
    assert scene.drafter.stats().invalid == 6
