"""Whatever becomes of a session, a step ends within its deadline, and no row gets another's tree."""

from __future__ import annotations

import numpy as np
import pytest

from adaserve_jax.star.messages import Open, Refused, Resync
from tests.star.scripted import WELCOME, Row, Scene
from tests.star.typist import Typist, text


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
    scene.drafter._table.update = None  # type: ignore[assignment, method-assign]
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
        patched.setattr("adaserve_jax.star.client.drafter.DraftRound", None)
        assert typist.step() == [False, False]
    assert "drafting failed" in caplog.text
    assert typist.steps(2) == [[True, True]] * 2
