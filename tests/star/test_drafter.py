"""What a remote drafter tells its service of the rows' texts, and what it makes of the answers, where nothing fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adaserve_jax.star.messages import Close, Draft, Open
from adaserve_jax.types import DraftPlan
from tests.star.scripted import Row, Scene, plan_of, sampling_of, toy, without
from tests.star.typist import text


def drafts(scene: Scene) -> list[Draft]:
    return [message for message in scene.service.heard if isinstance(message, Draft)]


def opens(scene: Scene) -> list[Open]:
    return [message for message in scene.service.heard if isinstance(message, Open)]


def test_rows_get_the_trees_of_their_own_texts_and_only_what_is_new_is_told() -> None:
    scene = Scene.of()
    rows = [Row(slot, text(20, slot), seed=slot, temperature=slot / 2) for slot in (3, 0, 5)]
    assert scene.propose(rows, depth=4, width=3) == [True] * 3
    assert scene.service.kinds() == ["Hello", "Open", "Draft", "Open", "Draft", "Open", "Draft"]
    assert [opened.tokens.tolist() for opened in opens(scene)] == [row.text for row in rows]
    grown = [Row(row.slot, [*row.text, 1, 2], 20, seed=row.seed, temperature=row.temperature) for row in rows]
    assert scene.propose(grown, depth=2, width=1) == [True] * 3
    assert [(draft.base, draft.tokens.tolist()) for draft in drafts(scene)[3:]] == [(20, [1, 2])] * 3
    stats = scene.drafter.stats()
    assert (stats.rounds, stats.trees, stats.late, stats.stale) == (2, 6, 0, 0)
    assert stats.wait_s == stats.round_s == pytest.approx(2 * 0.004)
    assert stats.services[scene.service.address].sessions == 3


def test_the_service_is_told_how_each_request_samples_and_when_its_token_is_due() -> None:
    scene = Scene.of()
    row = Row(0, text(5), seed=2**63, temperature=0.7, due_s=0.031)
    scene.propose([row, Row(1, text(5))], calibrated=False)
    opened, draft = opens(scene)[0], drafts(scene)[0]
    said = opened.sampling
    assert said == sampling_of(row)
    assert (draft.depth, draft.width, draft.calibrated, draft.due_s, draft.give_up_s) == (3, 2, False, 0.031, 0.1)
    assert drafts(scene)[1].due_s == np.inf


def test_what_is_only_fed_is_told_and_not_waited_for() -> None:
    scene = Scene.of()
    prompt = text(300)
    began = scene.world.now
    assert scene.propose([Row(0, prompt, 0, 100, decodes=False)], depth=0) == []
    assert scene.propose([Row(0, prompt, 100, 250, decodes=False)], depth=0) == []
    assert scene.world.now == began
    assert scene.propose([Row(0, prompt, 250)]) == [True]
    assert len(opens(scene)) == 1
    assert [(draft.base, len(draft.tokens), draft.depth) for draft in drafts(scene)] == [(100, 150, 0), (250, 50, 3)]
    assert scene.drafter.stats().rounds == 1


def test_rows_that_do_not_speculate_are_fed_beside_those_that_do() -> None:
    scene = Scene.of()
    rows = [Row(0, text(9)), Row(1, text(9, 1), end=4, speculates=False), Row(2, text(9, 2), end=5, decodes=False)]
    assert scene.propose(rows) == [True, False]
    assert [draft.session for draft in drafts(scene)] == [1]
    assert scene.propose([Row(1, text(9, 1), 4), Row(2, text(9, 2), 5)]) == [True, True]


def test_a_slot_that_is_fed_from_the_beginning_is_another_request() -> None:
    scene = Scene.of()
    scene.propose([Row(0, text(9))])
    assert scene.propose([Row(0, text(9, 1))]) == [True]
    assert scene.service.kinds()[3:] == ["Close", "Open", "Draft"]
    assert list(scene.service.sessions) == [2]
    assert scene.propose([Row(0, text(12, 1), seed=8)]) == [True]
    assert list(scene.service.sessions) == [3], "the same text with another noise is another request"


def test_a_request_that_is_fed_anew_with_all_of_its_text_goes_on() -> None:
    scene = Scene.of()
    scene.propose([Row(0, text(9))])
    assert scene.propose([Row(0, [*text(9), 4])]) == [True]
    assert [(draft.base, draft.tokens.tolist()) for draft in drafts(scene)[1:]] == [(9, [4])]


def test_overlapping_tokens_that_agree_are_not_told_twice_and_others_open_the_session_anew() -> None:
    scene = Scene.of()
    scene.propose([Row(0, text(9))])
    assert scene.propose([Row(0, [*text(9), 4], 5)]) == [True]
    assert drafts(scene)[-1].base == 9
    other = [*text(9)[:7], 500, 501, 502]
    assert scene.propose([Row(0, other, 6)]) == [True]
    assert [(opened.session, opened.epoch, len(opened.tokens)) for opened in opens(scene)] == [(1, 1, 9), (1, 2, 10)]
    assert scene.propose([Row(0, other, 3, 8)]) == [True], "shorter than what was told"
    assert opens(scene)[-1].epoch == 3


def test_what_is_known_already_is_not_told_at_all() -> None:
    scene = Scene.of()
    scene.propose([Row(0, text(9))])
    told = len(scene.service.heard)
    assert scene.propose([Row(0, text(9), 5, speculates=False)], depth=0) == [False]
    scene.world.sleep(0.01)
    assert len(scene.service.heard) == told


def test_a_text_with_a_gap_is_not_known_and_gets_nothing_until_it_begins_again() -> None:
    scene = Scene.of()
    assert scene.propose([Row(0, text(9), 3)]) == [False]
    scene.propose([Row(0, text(9))])
    assert scene.propose([Row(0, text(12), 10)]) == [False]
    scene.world.sleep(0.01)
    assert scene.service.sessions == {}
    assert scene.propose([Row(0, text(12))]) == [True]


def test_ended_requests_are_closed_at_once() -> None:
    scene = Scene.of()
    scene.propose([Row(slot, text(9, slot)) for slot in range(3)])
    scene.drafter.ended(np.array([0, 2, 7], np.int32))
    scene.world.sleep(0.01)
    assert [message.session for message in scene.service.heard if isinstance(message, Close)] == [1, 3]
    assert list(scene.service.sessions) == [2]
    assert scene.drafter.stats().services[scene.service.address].sessions == 1


def test_closing_closes_every_session_and_the_stream() -> None:
    scene = Scene.of()
    scene.propose([Row(slot, text(9, slot)) for slot in range(3)])
    scene.drafter.close()
    assert scene.service.streams[-1].ended
    assert scene.propose([Row(0, text(9), 0)]) == [False]
    assert len(scene.service.streams) == 1


def test_trees_are_cut_to_the_room_that_the_service_has_for_the_text() -> None:
    def cut(text: np.ndarray, sampling: tuple[float, ...], draft: DraftPlan) -> tuple[Any, ...]:
        return toy(text, sampling, min(draft.depth, 12 - len(text)), draft.width)

    scene = Scene.of(connected=False, oracle=cut)
    scene.service.welcome = without(scene.service.welcome, max_context=12)
    scene.drafter.connect(1.0)
    assert scene.propose([Row(0, text(9))], depth=3) == [True]
    assert scene.propose([Row(0, text(10), 9)], depth=3) == [True]
    assert scene.propose([Row(0, text(11), 10)], depth=3) == [True]
    assert scene.propose([Row(0, text(12), 11)], depth=3) == [False]
    scene.world.sleep(0.1)
    assert scene.service.heard[-1] == Close(1), "its place is for others"


def test_searches_are_cut_to_what_the_service_does_and_stand_in_the_plans_columns() -> None:
    scene = Scene.of(connected=False)
    scene.service.welcome = without(scene.service.welcome, max_depth=2, max_width=1)
    scene.drafter.connect(1.0)
    found = scene.drafter.propose(plan_of([Row(0, text(9))], depth=4, width=3))
    assert found.token.shape == (1, 12)
    assert set(np.flatnonzero(found.log_f[0] > -np.inf).tolist()) <= {0, 3}
    assert found.parent[0, 3] in (-1, 0) and found.depth.tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


def test_a_service_that_searches_nothing_is_asked_for_nothing_and_no_round_counts() -> None:
    scene = Scene.of(connected=False)
    scene.service.welcome = without(scene.service.welcome, max_depth=0)
    scene.drafter.connect(1.0)
    assert scene.propose([Row(0, text(9))], depth=3) == [False]
    assert scene.drafter.stats().rounds == 0


def test_rounds_before_a_new_count_are_not_in_it() -> None:
    scene = Scene.of()
    scene.propose([Row(0, text(9))])
    assert scene.drafter.stats().rounds == 1
    scene.drafter.count_anew()
    scene.propose([Row(0, text(10), 9)])
    assert scene.drafter.stats().rounds == 1


def test_it_waits_for_its_deadline_or_less_where_tokens_are_due_but_no_less_than_usual_rounds_take() -> None:
    scene = Scene.of(deadline_ms=80.0)
    rows = [Row(0, text(9), due_s=0.001)]
    assert scene.drafter.longest_s(plan_of(rows).draft) == 0.080, "nothing is usual yet"
    scene.propose(rows)
    usual_s = 0.004
    assert scene.drafter.longest_s(plan_of(rows).draft) == pytest.approx(2 * usual_s)
    mixed = [Row(0, text(9), due_s=np.inf), Row(1, text(9), due_s=0.030, speculates=False)]
    assert scene.drafter.longest_s(plan_of(mixed).draft) == pytest.approx(0.030 - 0.010)
    assert scene.drafter.longest_s(plan_of([Row(0, text(9), due_s=1.0)]).draft) == 0.080
    assert scene.drafter.longest_s(plan_of(rows, due=False).draft) == 0.080


def test_a_slower_service_gets_more_time_as_rounds_become_longer() -> None:
    scene = Scene.of()
    scene.propose([Row(0, text(9))])
    scene.service.work_s = 0.020
    waited, got = [], []
    for length in range(10, 30):
        got += scene.propose([Row(0, text(length), length - 1, due_s=0.0)])
        waited.append(scene.drafter.wait_s)
    assert got[0] is False and got[-1] is True, waited
