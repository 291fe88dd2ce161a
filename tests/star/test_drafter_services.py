"""Services that refuse, are away, fall silent or come back: a step goes without them, and they are found again."""

from __future__ import annotations

from typing import Any

import pytest

from adaserve_jax.star.client.link import MISMATCH_RETRY_S, WELCOME_S
from adaserve_jax.star.messages import Close, Load, Open, Refused
from tests.star.scripted import WELCOME, Row, Scene, without
from tests.star.typist import Typist, text


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


def test_a_full_service_that_tells_of_its_load_each_time_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene.of(connected=False)
    for tokens_per_s in (3.1, 3.2, 3.3):
        scene.service.welcome = Refused("full", f"8 targets get {tokens_per_s} tokens/s", retry_after_s=1.0)
        assert scene.drafter.connect(1.5) is None
    assert scene.drafter.stats().refused >= 3
    assert scene.drafter.stats().services[scene.service.address].reason == "full: 8 targets get 3.3 tokens/s"
    assert [each.getMessage().count("refused: full") for each in caplog.records] == [1]


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


def test_an_idle_target_comes_back_to_its_service_as_its_metrics_are_read() -> None:
    scene = Scene.of()

    def connected() -> int:
        return scene.drafter.stats().services[scene.service.address].connected

    assert connected() == 1
    scene.service.cut()
    assert connected() == 0
    scene.world.sleep(1.0)
    assert connected() == 0, "it begins to connect"
    scene.world.sleep(0.1)
    assert connected() == 1


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


def test_a_service_that_says_nothing_to_hello_is_given_up_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene.of(connected=False)
    scene.service.listen = lambda frame: []
    assert scene.drafter.connect(WELCOME_S / 2) is None
    scene.world.sleep(WELCOME_S)
    scene.propose([Row(0, text(4))])
    assert scene.service.streams[0].ended
    assert scene.drafter.stats().lost == 1 and "stream lost: no Welcome within 10 s" in caplog.text
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

    def test_texts_go_where_there_is_room_for_them(self) -> None:
        scene = Scene.of(services=2, connected=False)
        small, large = scene.services
        small.welcome = without(WELCOME, max_context=16)
        scene.drafter.connect(1.0)
        scene.world.sleep(0.1)
        assert scene.propose([Row(slot, text(20, slot)) for slot in range(4)]) == [True] * 4
        assert (len(small.sessions), len(large.sessions)) == (0, 4), "whatever the load"
        growing = text(13)
        assert scene.propose([Row(9, growing)]) == [True]
        assert len(small.sessions) == 1
        assert scene.propose([Row(9, [*growing, 1, 2, 3], 13)]) == [True]
        assert (len(small.sessions), len(large.sessions), scene.drafter.stats().moved) == (0, 5, 1)
