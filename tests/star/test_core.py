"""What a draft service answers: greetings, trees, duplicates, nonsense, lost streams, leases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.star.messages import REFUSALS, Refused, Resync, Welcome
from adaserve_jax.star.service.limits import Quotas
from tests.star.test_core_machine import refused_messages
from tests.star.toys import (
    PLAIN,
    SAMPLED,
    ToyService,
    close,
    columns_of,
    draft,
    hello,
    opened,
    toy_columns,
)


def test_a_welcome_says_what_the_service_can():
    service = ToyService("", level_s={(1, 3): 0.01}, catchup_s={16: 0.02}, pages=10)
    (welcome,) = service.say("a", hello())
    assert welcome == Welcome("v1", 4, 3, 40, 64, 60.0, {(1, 3): 0.01}, {16: 0.02})  # ten pages hold 40 tokens
    assert service.say("a", hello()) == [] and service.core.stats.duplicates == 1  # once for each stream
    service.core.disconnect("a", 0.0)
    assert service.say("a", hello(draft_version="v1")) == [welcome] and service.core.targets == ["a"]


@pytest.mark.parametrize("message", [hello(), close(7), draft(1, 0, 0, 0, []), opened(1, 0, [2])])
def test_every_message_is_paid_for_whatever_it_says(message):
    service = ToyService(core={"quotas": Quotas(messages_per_s=1.0, messages_at_once=10)})
    service.say("a", opened(1, 0, [1]))
    service.say("a", *[message] * 8)
    (refused,) = service.say("a", opened(2, 0, [1]))
    assert refused.code == "rate" and refused.session == 2
    service.say("a", close(1))
    assert service.core.num_sessions == 0, "what ends something is done in any case"
    service.now = 1.5
    assert service.say("a", opened(2, 0, [1])) == [] and service.core.num_sessions == 1


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"protocol_version": 2}, "protocol_version", "has 1, the target 2"),
        ({"vocabulary_hash": "other"}, "vocabulary", "has voc, the target 'other'"),
        ({"draft_version": "v0"}, "draft_version", "has v1, the target 'v0'"),
        ({"cells_hash": ""}, "cells", "has cells, the target ''"),
    ],
)
def test_who_does_not_fit_is_told_why(changes: dict, code: str, said: str):
    service = ToyService("")
    (refused,) = service.say("a", hello(**changes))
    assert (refused.code, refused.session, refused.retry_after_s) == (code, 0, 0.0) and said in refused.message
    assert code in REFUSALS and service.core.targets == []
    assert service.say("a", opened(1, 0, [1]))[0].message == "say Hello first"


def test_trees_are_of_the_text_the_sampling_and_the_depth_asked_for():
    service = ToyService("ab")
    service.say("a", opened(1, 0, [1, 2]), opened(2, 0, [1, 2], SAMPLED), draft(1, 0, 0, 2, [3], depth=1))
    service.say("a", draft(2, 0, 0, 2, [3], depth=4))
    service.say("b", opened(1, 0, [5]), draft(1, 0, 0, 1, [], depth=2))
    batch = service.core.next_batch(1.0)
    assert batch is not None and len(batch.rows) == 3
    answers = dict(service.core.done(batch, service.device.run(batch), 1.25))
    (first, second), (third,) = answers["a"], answers["b"]
    assert columns_of(first) == toy_columns([1, 2, 3], PLAIN, 1, 2, True)
    assert columns_of(second) == toy_columns([1, 2, 3], SAMPLED, 4, 2, True)
    assert columns_of(third) == toy_columns([5], PLAIN, 2, 2, True)
    assert (first.length, third.length, first.queue_s, first.service_s) == (3, 1, 1.0, 0.25)
    stats = service.core.stats
    assert (stats.batches, stats.rounds, stats.trees, stats.fed_tokens) == (1, 3, 3, 7)
    assert stats.queue_s == 3.0


def test_a_tree_is_asked_for_again_at_the_same_text():
    service = ToyService()
    service.say("a", opened(1, 0, [1, 2]), draft(1, 0, 0, 2, []))
    (_, (tree,)) = service.run()
    service.say("a", draft(1, 0, 1, 2, []))
    rows, (again,) = service.run()
    assert rows == [("a", 1, 1)] and columns_of(again) == columns_of(tree)


def test_a_draft_said_twice_is_answered_twice_and_searched_once():
    service = ToyService()
    said = draft(1, 0, 0, 2, [3])
    service.say("a", opened(1, 0, [1, 2]), said)
    assert service.say("a", said) == []  # it waits
    (_, (tree,)) = service.run()
    assert service.say("a", said) == [tree]
    assert service.core.stats.rounds == 1 and service.core.stats.trees == 2 and service.core.stats.duplicates == 2
    (refused,) = service.say("a", replace(said, depth=3))
    assert (refused.code, refused.session) == ("invalid", 1) and service.core.num_sessions == 0
    assert service.say("a", said) == [Resync(1, 0)]


def test_what_does_not_follow_the_text_is_opened_anew():
    service = ToyService()
    assert service.say("a", draft(1, 3, 0, 2, [3])) == [Resync(1, 3)]
    service.say("a", opened(1, 4, [1, 2]))
    assert service.say("a", draft(1, 4, 0, 3, [3])) == [Resync(1, 4)]
    assert service.say("a", draft(1, 5, 1, 2, [3])) == [Resync(1, 5)]
    assert service.say("a", draft(1, 3, 2, 2, [3])) == [] and service.core.stats.stale == 1
    service.say("a", opened(1, 5, [1, 2, 3]), draft(1, 5, 3, 3, []))
    assert len(service.run()[1]) == 1


def test_a_newer_draft_takes_the_place_of_one_that_waits():
    service = ToyService()
    service.say("a", opened(1, 0, [1]), draft(1, 0, 0, 1, [2]), draft(1, 0, 1, 2, [3]))
    (_, (tree,)) = service.run()
    assert tree.round == 1 and columns_of(tree) == toy_columns([1, 2, 3], PLAIN, 2, 2, True)
    assert service.run()[0] == []


def test_a_newer_draft_is_answered_when_the_one_on_the_device_is_not_wanted_any_more():
    service = ToyService()
    service.say("a", opened(1, 0, [1]), draft(1, 0, 0, 1, [2]))
    batch = service.core.next_batch(0.0)
    assert batch is not None
    service.say("a", draft(1, 0, 1, 2, [3]))
    assert service.core.next_batch(0.0) is None  # one batch at a time for a session
    assert service.core.done(batch, service.device.run(batch), 0.0) == [] and service.core.stats.stale == 1
    rows, (tree,) = service.run()
    assert rows == [("a", 1, 1)] and columns_of(tree) == toy_columns([1, 2, 3], PLAIN, 2, 2, True)


def test_a_refused_message_ends_its_own_session_only():
    for message in refused_messages(1, 0, 1):
        service = ToyService("ab")
        for target_id, number in (("a", 1), ("a", 2), ("b", 1)):
            service.say(target_id, opened(number, 0, [1, 2]), draft(number, 0, 0, 2, []))
        (refused,) = service.say("a", message)
        assert isinstance(refused, Refused) and (refused.code, refused.session) in (("invalid", 1), ("too_long", 1))
        rows, trees = service.run()
        assert [row[:2] for row in rows] == [("a", 2), ("b", 1)] and len(trees) == 2
        assert service.say("a", opened(1, 1, [1, 2]), draft(1, 1, 1, 2, [])) == [] and len(service.run()[1]) == 1


def test_a_tree_needs_a_token_and_room_for_itself():
    service = ToyService()
    service.say("a", opened(1, 0, []))
    (refused,) = service.say("a", draft(1, 0, 0, 0, []))
    assert refused.code == "invalid" and "grows from a token" in refused.message
    service.say("a", opened(2, 0, range(61)))
    assert service.say("a", draft(2, 0, 0, 61, [], depth=3)) == []
    (refused,) = service.say("a", draft(2, 0, 1, 61, [], depth=4))
    assert refused.code == "too_long" and "65 tokens with the tree, the most are 64" in refused.message
    assert service.core.num_sessions == 0


def test_what_came_back_from_a_lost_stream_keeps_its_kv():
    service = ToyService()
    service.say("a", opened(1, 0, range(10)), draft(1, 0, 0, 10, []))
    service.run()
    service.say("a", draft(1, 0, 1, 10, [11]))
    service.core.disconnect("a", 0.0)
    assert service.core.targets == [] and service.core.num_sessions == 1 and service.core.num_waiting == 0
    assert service.say("a", draft(1, 0, 1, 10, [11]))[0].message == "say Hello first"
    service.say("a", hello(), opened(1, 1, [*range(8), 20]), draft(1, 1, 2, 9, []))
    assert service.run()[0] == [("a", 1, 1)]


def test_who_is_gone_is_not_answered():
    service = ToyService()
    service.say("a", opened(1, 0, [1]), draft(1, 0, 0, 1, []))
    batch = service.core.next_batch(0.0)
    assert batch is not None
    service.core.disconnect("a", 0.0)
    service.core.disconnect("nobody", 0.0)
    assert service.core.done(batch, service.device.run(batch), 0.0) == []


def test_leases_give_room_back():
    service = ToyService("ab", lease_s=10.0)
    for number in (1, 2):
        service.say("a", opened(number, 0, [1, 2]), draft(number, 0, 0, 2, []))
    service.run()
    service.now = 8.0
    service.say("a", draft(2, 0, 0, 2, []))  # also what was said before keeps a session
    service.core.disconnect("a", service.now)
    assert service.core.expire(10.0) == 0 and service.core.expire(10.5) == 1
    assert list(service.pages.held) == [2] and service.core.stats.leases_ended == 1
    assert service.core.expire(18.5) == 1 and service.pages.held == {}
    assert service.core.targets == ["b"]


def test_full_of_sessions_the_dead_make_room():
    quotas = Quotas(max_sessions_in_all=1)
    service = ToyService("ab", lease_s=10.0, core={"quotas": quotas})
    service.say("a", opened(1, 0, [1]))
    service.now = 11.0
    assert service.say("b", opened(1, 0, [1])) == [] and service.core.num_sessions == 1


def test_a_batch_that_fails_is_answered_at_once_and_fed_anew():
    service = ToyService()
    service.say("a", opened(1, 0, [1, 2]), draft(1, 0, 0, 2, []), opened(2, 0, [1]))
    batch = service.core.next_batch(0.0)
    assert batch is not None
    ((target_id, (tree,)),) = service.core.failed(batch, 0.5)
    assert target_id == "a" and len(tree.index) == 0 and tree.length == 2 and service.core.stats.failed == 1
    service.say("a", draft(1, 0, 1, 2, []))
    rows, (tree,) = service.run()
    assert rows == [("a", 1, 2)] and columns_of(tree) == toy_columns([1, 2], PLAIN, 2, 2, True)
    feed = service.core.next_batch(1.0)
    assert feed is not None and service.core.failed(feed, 1.5) == []
    assert service.core.next_batch(1.5) is None  # not again before it speaks


@pytest.mark.parametrize("fed_only", [True, False])
def test_a_draft_that_came_meanwhile_is_answered_when_the_batch_fails(fed_only: bool):
    service = ToyService()
    service.say("a", opened(1, 0, [1, 2]), draft(1, 0, 0, 2, [], depth=0 if fed_only else 2))
    batch = service.core.next_batch(0.0)
    assert batch is not None
    service.say("a", draft(1, 0, 1, 2, [3], width=3))
    ((_, (tree,)),) = service.core.failed(batch, 0.5)
    assert (tree.round, tree.length, tree.width, len(tree.index)) == (1, 3, 3, 0)
    assert service.core.num_waiting == 0 and service.core.next_batch(0.5) is None
    service.say("a", draft(1, 0, 2, 3, []))
    assert len(service.run()[1]) == 1


def test_full_of_sessions_those_of_who_is_gone_make_room_the_oldest_first():
    service = ToyService("abc", core={"quotas": Quotas(max_sessions=2, max_sessions_in_all=3)})
    for target_id, number, now in (("a", 1, 0.0), ("b", 1, 1.0), ("b", 2, 2.0)):
        service.now = now
        service.say(target_id, opened(number, 0, [1]))
    assert service.say("c", opened(1, 0, [1]))[0].code == "quota", "all are here"
    service.core.disconnect("b", 3.0)
    assert service.say("c", opened(1, 0, [1])) == []
    service.say("b", hello("b"))
    assert service.say("b", draft(1, 0, 0, 1, [])) == [Resync(1, 0)] and service.say("b", draft(2, 0, 0, 1, [])) == []
    assert service.core.num_sessions == 3
    service.core.disconnect("b", 4.0)
    assert service.say("c", opened(2, 0, [1])) == [] and service.say("c", opened(3, 0, [1]))[0].code == "quota"


def test_sessions_that_were_not_opened_again_in_the_next_stream_make_room():
    """Their Close may have been lost with the stream before."""
    service = ToyService("ab", core={"quotas": Quotas(max_sessions=3, max_sessions_in_all=4)})
    for number in (1, 2, 3):
        service.now = float(number)
        service.say("a", opened(number, 0, [1]))
    service.core.disconnect("a", 4.0)
    service.now = 5.0
    service.say("a", hello("a"), opened(1, 1, [1]))
    assert service.say("a", opened(4, 0, [1])) == [], "in the place of 2"
    assert service.say("a", draft(2, 0, 0, 1, [])) == [Resync(2, 0)]
    assert service.say("b", opened(1, 0, [1])) == []
    assert service.say("b", opened(2, 0, [1])) == [], "in the place of 3"
    assert service.say("a", draft(1, 1, 0, 1, []), draft(3, 0, 0, 1, []), draft(4, 0, 0, 1, [])) == [Resync(3, 0)]
    assert service.core.num_sessions == 4 and service.core.stats.leases_ended == 2
    service.say("a", hello("a"))  # the same stream
    (refused,) = service.say("a", opened(5, 0, [1]))
    assert refused.code == "quota" and "4 sessions are open, as many as there may be" in refused.message


def test_when_it_stops_it_says_so():
    service = ToyService("ab")
    service.say("a", opened(1, 0, [1]))
    answers = service.core.stop()
    assert [target_id for target_id, _ in answers] == ["a", "b"]
    assert all(frame[0].code == "shutting_down" and frame[0].session == 0 for _, frame in answers)
    assert service.say("a", draft(1, 0, 0, 1, []))[0].code == "shutting_down"
    assert service.say("c", hello("c"))[0].code == "shutting_down"


def test_work_that_waits_is_told_in_seconds():
    service = ToyService(level_s={(4, 3): 0.01}, catchup_s={16: 0.02}, max_rows=2)
    assert service.core.backlog_s() == 0.0
    service.say("a", *[opened(number, 0, [1]) for number in (1, 2)])
    service.say("a", *[draft(number, 0, 0, 1, [], depth=2) for number in (1, 2)])
    assert service.core.backlog_s() == pytest.approx(2 * (0.02 + 2 * 0.01) / 2)


def test_tokens_of_any_integer_type_are_taken():
    service = ToyService()
    for at, kind in enumerate((np.int64, np.uint32, np.int32), 1):
        text = np.array([1, 2, 3], kind)
        assert service.say("a", replace(opened(at, 0, []), tokens=text), draft(at, 0, 0, 3, [])) == []
        (_, (tree,)) = service.run()
        assert columns_of(tree) == toy_columns([1, 2, 3], PLAIN, 2, 2, True)
