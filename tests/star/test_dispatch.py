"""Who is served when: deadlines, batches, turns, chunks, room."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adaserve_jax.star.service.limits import BatchTimes, Quotas
from tests.slow import longer_when_slow
from tests.star.toys import ToyService, close, draft, hello, limits, opened

TIMES = {"level_s": {(1, 3): 0.010, (4, 3): 0.016}, "catchup_s": {4: 0.004, 16: 0.012}}


def waiting(service: ToyService, *who: tuple[str, int], **shape) -> None:
    """Sessions whose text of three tokens is fed already, each with one Draft."""
    for target_id, number in who:
        service.say(target_id, opened(number, 0, [number, 2, 3]))
    while any(service.run()):
        pass
    for target_id, number in who:
        service.say(target_id, draft(number, 0, 0, 3, [4], **shape))


def drained(service: ToyService) -> list[list[tuple[str, int]]]:
    """Targets and sessions of the batches until nothing is left."""
    batches = []
    while True:
        rows, _ = service.run()
        if not rows:
            return batches
        batches.append([row[:2] for row in rows])


def test_the_most_urgent_goes_first_with_those_that_fit():
    service = ToyService("ab", max_rows=2)
    waiting(service, ("a", 1), ("a", 2), ("b", 1), ("b", 2))
    for number, (target_id, due_s) in enumerate([("b", 0.03), ("a", 0.01), ("b", 0.02)]):
        service.say(target_id, opened(9 - number, 0, [1]))
        service.say(target_id, draft(9 - number, 0, 0, 1, [], due_s=due_s))
    assert drained(service) == [[("a", 8), ("b", 7)], [("b", 9), ("a", 1)], [("b", 1), ("a", 2)], [("b", 2)]]


def test_a_deadline_is_when_the_token_is_due_or_nobody_waits():
    service = ToyService(max_rows=1)
    waiting(service, ("a", 1), ("a", 2), ("a", 3))
    for number, due_s, give_up_s in ((1, 0.5, 0.9), (2, math.inf, 0.2), (3, -4.0, 9.0)):
        service.say("a", draft(number, 0, 1, 4, [], due_s=due_s, give_up_s=give_up_s))
    assert drained(service) == [[("a", 3)], [("a", 2)], [("a", 1)]]


def test_only_one_shape_goes_together_whatever_its_depth():
    service = ToyService()
    waiting(service, ("a", 1), ("a", 2), ("a", 3), ("a", 4), ("a", 5))
    shapes = [(2, 2, True), (4, 2, True), (2, 3, True), (2, 2, False), (1, 2, True)]
    for number, (depth, width, calibrated) in enumerate(shapes, 1):
        service.say("a", draft(number, 0, 1, 4, [], depth=depth, width=width, calibrated=calibrated))
    batch = service.core.next_batch(0.0)
    assert batch is not None and (batch.depth, batch.width, batch.calibrated) == (4, 2, True)
    assert [(row.session, row.depth) for row in batch.rows] == [(1, 2), (2, 4), (5, 1)]
    assert drained(service) == [[("a", 3)], [("a", 4)]]


@pytest.mark.parametrize(
    ("level_s", "sizes"),
    [
        ({1: 10, 2: 13, 4: 15}, [4]),
        ({1: 10, 2: 20, 4: 40}, [4]),  # no worse
        ({1: 10, 2: 21, 4: 45}, [1, 1, 1, 1]),
        ({1: 10, 2: 22, 4: 30}, [4]),  # two do not go together, four do
        ({1: 10, 2: 19, 3: 31, 4: 45}, [2, 2]),
        ({}, [4]),  # not known
    ],
)
def test_nobody_goes_together_where_one_after_another_is_quicker(level_s: dict[int, int], sizes: list[int]):
    service = ToyService("abcd", level_s={(rows, 3): ms / 1e3 for rows, ms in level_s.items()})
    waiting(service, ("a", 1), ("b", 2), ("c", 3), ("d", 4))
    service.say("a", draft(1, 0, 1, 4, []))
    for target_id, number in (("b", 2), ("c", 3), ("d", 4)):
        service.say(target_id, draft(number, 0, 1, 4, []))
    batches = drained(service)
    assert [len(batch) for batch in batches] == sizes
    assert [row for batch in batches for row in batch] == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    assert service.core.stats.expired == 0


def test_a_deep_tree_does_not_make_shallow_ones_wait_for_it():
    """Together: four levels of 12.6 ms; one after the other: four and one of 10."""
    service = ToyService("ab", level_s={(1, 3): 0.010, (4, 3): 0.0126})
    waiting(service, ("a", 1), ("b", 2))
    service.say("a", draft(1, 0, 1, 4, [], depth=4))
    service.say("b", draft(2, 0, 1, 4, [], depth=1))
    batch = service.core.next_batch(0.0)
    assert batch is not None and [(row.session, row.depth) for row in batch.rows] == [(1, 4)] and batch.depth == 4


def asked_in_order(service: ToyService, *drafts: dict) -> None:
    """Sessions 1, 2, .. of target a with one Draft each, in this order; their texts are fed but for the last token."""
    waiting(service, *[("a", number) for number in range(1, len(drafts) + 1)])
    drained(service)
    for number, changes in enumerate(drafts, 1):
        service.say("a", draft(number, 0, 1, 4, **({"tokens": [], "depth": 1, "due_s": number / 1e3} | changes)))


def test_a_deep_tree_between_shallow_ones_is_passed_over():
    """In a prefix it makes everybody slower: 40 + 10, 40 + 20 and 40 + 30 ms alone; 52, 72 and 72 together."""
    service = ToyService(level_s={(1, 3): 0.010, (2, 3): 0.013, (4, 3): 0.018})
    asked_in_order(service, {}, {"depth": 4}, {}, {})
    batch = service.core.next_batch(0.0)
    assert batch is not None and [(row.session, row.depth) for row in batch.rows] == [(1, 1), (3, 1), (4, 1)]
    assert batch.depth == 1
    service.core.done(batch, service.device.run(batch), 0.0)
    assert drained(service) == [[("a", 2)]]


def test_a_deep_tree_goes_with_others_where_they_are_enough():
    """64 ms together, 70 one after another."""
    service = ToyService(level_s={(1, 3): 0.010, (2, 3): 0.013, (4, 3): 0.016})
    asked_in_order(service, {}, {"depth": 4}, {}, {})
    assert [len(batch) for batch in drained(service)] == [4]


def test_who_is_passed_over_makes_nobody_else_stay():
    """Neither by when it gives up (55 ms; three rows would take it 72) nor by the tokens it needs."""
    service = ToyService(level_s={(1, 3): 0.010, (2, 3): 0.013, (4, 3): 0.018})
    asked_in_order(service, {}, {"depth": 4, "give_up_s": 0.055}, {}, {})
    assert drained(service) == [[("a", 1), ("a", 3), ("a", 4)], [("a", 2)]]
    service = ToyService(level_s={(1, 3): 0.010, (2, 3): 0.013, (4, 3): 0.018}, max_feed=8)
    asked_in_order(service, {}, {"depth": 4, "tokens": [1] * 7}, {}, {})
    assert drained(service) == [[("a", 1), ("a", 3), ("a", 4)], [("a", 2)]]


def test_who_is_passed_over_takes_nobodys_room():
    """Pages of 4 tokens: two for who waits, two for 3, who is idle."""
    service = ToyService(pages=4, level_s={(1, 3): 0.010, (2, 3): 0.030})
    service.say("a", opened(3, 0, [3] * 8), draft(3, 0, 0, 8, []))
    service.run()
    service.say("a", opened(1, 0, [1] * 4), opened(2, 0, [2] * 12))
    service.say("a", draft(1, 0, 0, 4, [], due_s=0.1), draft(2, 0, 0, 12, [], due_s=0.2))
    assert service.run()[0] == [("a", 1, 4)] and service.core.stats.evicted == 0
    assert service.run()[0] == [("a", 2, 12)] and service.core.stats.evicted == 1


def test_who_finds_no_room_leaves_the_place_to_others():
    """Three pages that waiting ones hold: 4, who has none, does not go; 2 does, in a batch of two."""
    service = ToyService(pages=3, max_rows=2)
    asked_in_order(service, {"due_s": 0.1}, {"due_s": 0.3}, {"due_s": 0.4, "width": 3})
    service.say("a", opened(4, 0, [4]), draft(4, 0, 0, 1, [], due_s=0.2, depth=1))
    assert [row[:2] for row in service.run()[0]] == [("a", 1), ("a", 2)] and service.core.stats.evicted == 0


def longest_prefix(shapes, takes_s, *, now: float, max_rows: int, max_feed: int) -> list[int]:
    """Who goes with the first by the plain rule: the most that begin the order and are served no later together."""
    taken, helps = [0], 1
    for number in range(1, len(shapes)):
        more = [*taken, number]
        if (
            len(taken) < max_rows
            and sum(shapes[at][1] for at in more) <= max_feed
            and now + takes_s([shapes[at] for at in more]) <= min(shapes[at][2] for at in more)
        ):
            taken = more
            if takes_s([shapes[at] for at in more]) <= sum(takes_s([shapes[at]]) for at in more) + 1e-12:
                helps = len(more)
    return taken[:helps]


@pytest.mark.parametrize(
    ("rounds", "least_more", "least_total"), longer_when_slow([(150, 10, 300), (300, 20, 600)], several=True)
)
def test_company_is_never_late_nor_slower_and_no_fewer_than_the_plain_rule_has(
    rounds: int, least_more: int, least_total: int
):
    """Any times, depths, lags and deadlines."""
    rng, more, total = np.random.default_rng(0), 0, 0
    for _ in range(rounds):
        levels_s = np.cumsum(rng.uniform((6, 0, 0, 0), 14)) / 1e3
        level_s = {(rows, 3): float(each) for rows, each in zip((1, 2, 4, 8), levels_s, strict=True)}
        feeds_s = np.cumsum(rng.uniform(0, 9, 3)) / 1e3
        feed_s = {edge: float(each) for edge, each in zip((4, 8, 16), feeds_s, strict=True)}
        service = ToyService(level_s=level_s, catchup_s=feed_s, max_rows=int(rng.integers(2, 9)), max_feed=16)

        def takes_s(shapes, level_s=level_s, feed_s=feed_s) -> float:
            tokens, rows = sum(need for _, need, _ in shapes), len(shapes)
            fed_s = feed_s[min(edge for edge in feed_s if edge >= tokens)]
            return fed_s + max(depth for depth, _, _ in shapes) * level_s[min(key for key in level_s if key[0] >= rows)]

        shapes = [(int(rng.integers(1, 5)), int(rng.integers(1, 5)), 0.0) for _ in range(8)]
        shapes = [(depth, need, takes_s([(depth, need, 0)]) + float(rng.choice([0.01, 0.1, 9.0])))
                  for depth, need, _ in shapes]  # fmt: skip
        asked_in_order(service, *({"depth": depth, "tokens": [1] * need, "give_up_s": give_up_s, "due_s": number / 1e6}
                                  for number, (depth, need, give_up_s) in enumerate(shapes)))  # fmt: skip
        batch = service.core.next_batch(service.now)
        assert batch is not None
        chosen = [row.session - 1 for row in batch.rows]
        group = [shapes[at] for at in chosen]
        assert [len(row.tokens) for row in batch.rows] == [need for _, need, _ in group]
        assert chosen == sorted(chosen) and chosen[0] == 0 and len(chosen) <= service.bounds.max_rows
        if len(chosen) > 1:
            assert takes_s(group) <= min(give_up_s for _, _, give_up_s in group)
            assert takes_s(group) <= sum(takes_s([each]) for each in group) + 1e-12
        plain = longest_prefix(shapes, takes_s, now=0.0, max_rows=service.bounds.max_rows, max_feed=16)
        assert set(plain) <= set(chosen)
        more, total = more + (len(chosen) > len(plain)), total + len(chosen)
    assert more > least_more and total > least_total, (more, total)


def test_one_by_one_takes_one():
    service = ToyService(core={"batching": False})
    waiting(service, ("a", 1), ("a", 2))
    assert drained(service) == [[("a", 1)], [("a", 2)]]


def test_at_equal_deadlines_targets_take_turns():
    service = ToyService("ab", max_rows=3, max_feed=64, core={"tie_s": 0.01})
    waiting(service, *[("a", number) for number in range(1, 7)], ("b", 1))
    assert drained(service) == [[("a", 1), ("b", 1), ("a", 2)], [("a", 3), ("a", 4), ("a", 5)], [("a", 6)]]
    service.say("a", *[draft(number, 0, 1, 4, []) for number in range(1, 7)])
    service.now += 0.001
    service.say("b", draft(1, 0, 1, 4, []))
    assert drained(service)[0] == [("b", 1), ("a", 1), ("a", 2)]  # a was served last


def test_a_later_deadline_does_not_take_turns():
    service = ToyService("ab", max_rows=3, max_feed=64, core={"tie_s": 0.001})
    waiting(service, *[("a", number) for number in range(1, 4)])
    service.now += 0.5
    waiting(service, ("b", 1))
    service.say("a", *[draft(number, 0, 1, 4, [], give_up_s=0.1) for number in range(1, 4)])
    assert drained(service)[0] == [("a", 1), ("a", 2), ("a", 3)]


def test_a_batch_feeds_no_more_than_the_largest_bucket():
    service = ToyService(max_feed=8, max_rows=4)
    service.say("a", *[opened(number, 0, range(5)) for number in (1, 2, 3)])
    service.say("a", *[draft(number, 0, 0, 5, []) for number in (1, 2, 3)])
    service.say("a", opened(4, 0, [1]), draft(4, 0, 0, 1, []))
    assert service.run()[0] == [("a", 1, 5), ("a", 4, 1)]
    assert service.run()[0] == [("a", 2, 5)]


def test_what_is_only_fed_waits_for_what_is_asked():
    service = ToyService()
    service.say("a", opened(1, 0, range(6)))
    service.say("a", draft(1, 0, 0, 6, [7], depth=0))
    service.say("a", opened(2, 0, [1, 2]), draft(2, 0, 0, 2, []))
    assert service.run()[0] == [("a", 2, 2)]
    rows, trees = service.run()
    assert rows == [("a", 1, 7)] and not trees
    assert service.run()[0] == []


def test_feeds_share_a_chunk():
    service = ToyService(max_feed=8)
    service.say("a", opened(1, 0, range(5)), opened(2, 0, range(6)))
    assert service.run()[0] == [("a", 1, 5), ("a", 2, 3)]
    assert service.run()[0] == [("a", 2, 3)]


def test_others_go_between_the_chunks_of_a_long_text():
    service = ToyService(max_feed=8)
    service.say("a", opened(1, 0, range(30)), draft(1, 0, 0, 30, [], due_s=0.0))
    waiting_drafts = [draft(2, 0, number, 2, [], due_s=0.5) for number in range(3)]
    service.say("a", opened(2, 0, [1, 2]))
    order = []
    for number in range(7):
        if number < 3:
            service.say("a", waiting_drafts[number])
        rows, trees = service.run()
        order.append((*rows[0][1:], len(trees)) if rows else None)
    assert order == [(1, 8, 0), (2, 2, 1), (1, 8, 0), (2, 1, 1), (1, 8, 0), (1, 6, 1), None]


def test_a_text_too_long_for_its_deadline_is_fed_all_the_same():
    """The Draft is dropped, since nobody waits so long; its text is fed among the others, then trees come in time."""
    service = ToyService(max_feed=16, **TIMES)
    service.say("a", opened(1, 0, range(40)), draft(1, 0, 0, 40, [], give_up_s=0.03))
    service.say("a", opened(2, 0, [1]), draft(2, 0, 0, 1, [], give_up_s=1.0))
    fed = [service.run()[0] for _ in range(4)]
    assert fed == [[("a", 1, 16)], [("a", 2, 1)], [("a", 1, 16)], [("a", 1, 8)]]
    assert service.core.stats.expired == 1
    service.say("a", draft(1, 0, 1, 40, [], give_up_s=0.03))
    assert len(service.run()[1]) == 1


def test_what_cannot_be_ready_is_not_computed():
    service = ToyService(**TIMES)
    waiting(service, ("a", 1), ("a", 2))  # 4 ms to feed a token, two levels of 10 ms
    service.say("a", draft(1, 0, 1, 4, [], give_up_s=0.023), draft(2, 0, 1, 4, [], give_up_s=0.025))
    rows, trees = service.run()
    assert rows == [("a", 2, 1)] and [tree.session for tree in trees] == [2]
    assert service.core.stats.expired == 1 and service.core.num_waiting == 0
    (nothing,) = service.nothing
    assert (nothing.session, nothing.round, nothing.length, nothing.width, len(nothing.index)) == (1, 1, 4, 2, 0)
    assert service.say("a", draft(1, 0, 1, 4, [], give_up_s=0.023)) == [nothing], "said again, answered again"
    assert service.core.given_up() == []


def test_nobody_is_made_late_by_company():
    service = ToyService(**TIMES)
    waiting(service, ("a", 1), ("a", 2), ("a", 3))  # 24 ms alone, 36 ms with two rows or more
    service.say("a", draft(1, 0, 1, 4, [], give_up_s=0.030), draft(2, 0, 1, 4, [], give_up_s=0.5))
    service.say("a", draft(3, 0, 1, 4, [], give_up_s=0.5))
    assert drained(service) == [[("a", 1)], [("a", 2), ("a", 3)]]


def test_expected_times_are_of_the_least_bucket_that_holds_them():
    expected = BatchTimes(limits(max_feed=16, **TIMES))
    assert [expected.feed_s(tokens) for tokens in (1, 4, 5, 16)] == pytest.approx([0.004, 0.004, 0.012, 0.012])
    assert expected.feed_s(36) == pytest.approx(2 * 0.012 + 0.004)
    assert [expected.search_s(rows, 2, 2) for rows in (1, 2, 4, 9)] == pytest.approx([0.02, 0.032, 0.032, 0.032])
    unknown = BatchTimes(limits())
    assert unknown.feed_s(100) == unknown.search_s(1, 4, 3) == 0.0


# ---- room ----


def test_the_least_recently_used_idle_session_gives_its_room():
    service = ToyService(pages=4)  # of 4 tokens each
    for number in (1, 2, 3):
        service.say("a", opened(number, 0, [number] * 4), draft(number, 0, 0, 4, []))
        service.run()
    service.say("a", draft(1, 0, 1, 4, [9]))  # 1 is used again: now 2 is the eldest
    service.run()
    service.say("a", opened(4, 0, [4] * 4), draft(4, 0, 0, 4, []))
    assert len(service.run()[1]) == 1
    assert sorted(service.pages.held) == [1, 3, 4] and service.core.stats.evicted == 1
    assert service.run()[0] == []  # 2 is not fed before it speaks
    service.say("a", draft(2, 0, 1, 4, [9]))
    rows, trees = service.run()
    assert rows == [("a", 2, 5)] and len(trees) == 1


def test_the_most_urgent_always_gets_room():
    """Two long texts, each half fed, hold all there is; neither fits beside the other."""
    service = ToyService(pages=10, max_feed=8, max_rows=1)
    for number, due_s in ((1, 0.9), (2, 0.8)):
        service.say("a", opened(number, 0, [number] * 30))
        service.say("a", draft(number, 0, 0, 30, [], due_s=due_s, give_up_s=9.0))
    trees = [tree.session for _ in range(20) for tree in service.run()[1]]
    assert trees == [2, 1]


def test_company_takes_no_room_from_those_that_wait():
    service = ToyService(pages=4, max_feed=64)
    service.say("a", *[opened(number, 0, [number] * 4) for number in (1, 2, 5, 6)])
    while service.run()[0]:
        pass
    service.say("a", *[opened(number, 0, [number] * 4) for number in (3, 4)])
    service.say("a", draft(4, 0, 0, 4, [], due_s=0.2))
    service.say("a", *[draft(number, 0, 0, 4, [], due_s=0.3) for number in (1, 2, 3)])
    service.say("a", *[draft(number, 0, 0, 4, [], width=3, due_s=0.1 * number) for number in (5, 6)])
    assert [row[1] for row in service.run()[0]] == [4, 1, 2]  # 4 took the room of 6, the last; 3 takes none of 5
    assert service.core.stats.evicted == 1 and len(service.pages.held) == 4
    assert [row[1] for row in service.run()[0]] == [3]


def test_what_is_only_fed_takes_no_room_from_those_that_wait():
    service = ToyService(pages=4, max_rows=1)
    service.say("a", opened(1, 0, [1] * 12), draft(1, 0, 0, 12, []))
    service.run()
    service.say("a", draft(1, 0, 1, 12, [2]))
    flying = service.core.next_batch(0.0)
    assert flying is not None
    service.say("a", opened(2, 0, [2] * 8))
    assert service.core.next_batch(0.0) is None  # one session is on the device, and no room beside it
    service.core.done(flying, service.device.run(flying), 0.0)
    assert service.run()[0] == [("a", 2, 8)]
    assert service.core.stats.evicted == 1


def test_room_of_what_is_on_the_device_is_nobodys():
    service = ToyService(pages=3, max_rows=1)
    service.say("a", opened(1, 0, [1] * 8), draft(1, 0, 0, 8, []))
    flying = service.core.next_batch(0.0)
    assert flying is not None
    service.say("a", close(1), opened(2, 0, [2] * 8), draft(2, 0, 0, 8, [], due_s=-9.0))
    assert service.core.next_batch(0.0) is None and service.pages.held == {1: 2}
    assert service.core.done(flying, service.device.run(flying), 0.0) == []
    assert service.pages.held == {} and len(service.run()[1]) == 1


def test_who_claims_to_be_late_is_no_earlier_than_who_is():
    """Overdue is overdue: those take turns, whatever they claim, whenever they came."""
    service = ToyService("ab", max_rows=1)
    waiting(service, ("a", 1), ("a", 2), ("a", 3), ("b", 1))
    for number in (1, 2, 3):
        service.say("a", draft(number, 0, 1, 4, [], due_s=-1e9))
    service.now = 0.5
    service.say("b", draft(1, 0, 1, 4, [], due_s=-0.001))
    service.now = 0.6
    order = [rows[0] for rows in drained(service)]
    assert order == [("a", 1), ("b", 1), ("a", 2), ("a", 3)] or order == [("b", 1), ("a", 1), ("a", 2), ("a", 3)]


def test_who_was_evicted_while_it_was_fed_waits_until_it_speaks():
    """Else it would take the room back as soon as it is idle, and lose it again, round after round."""
    service = ToyService("ab", pages=4, max_feed=8)
    service.say("a", opened(1, 0, [1] * 16))
    assert service.run()[0] == [("a", 1, 8)]
    service.say("b", opened(1, 0, [2] * 16), draft(1, 0, 0, 16, [], depth=0))
    service.say("b", draft(1, 0, 1, 12, []))
    assert drained(service) == [[("b", 1)]] * 2, "a's room goes to b, whose Draft waits"
    for number in range(2, 5):
        service.say("b", draft(1, 0, number, 12, []))
        assert drained(service) == [[("b", 1)]]
    assert service.core.stats.evicted == 1


def test_one_target_cannot_have_everything():
    quotas = Quotas(max_sessions=3, max_sessions_in_all=5, max_waiting=2, messages_per_s=10.0, messages_at_once=9)
    service = ToyService("ab", core={"quotas": quotas})
    answers = service.say("a", *[opened(number, 0, [1]) for number in (1, 2, 3, 4)])
    assert [(refused.code, refused.session) for refused in answers] == [("quota", 4)]
    assert "3 sessions of this target" in answers[0].message and answers[0].retry_after_s > 0
    answers = service.say("a", *[draft(number, 0, 0, 1, []) for number in (1, 2, 3)])
    assert [(refused.code, refused.session) for refused in answers] == [("quota", 3)]
    assert "2 drafts of this target wait" in answers[0].message
    (refused,) = service.say("a", draft(1, 0, 1, 1, [], depth=0), draft(1, 0, 2, 1, []))
    assert refused.code == "rate" and refused.retry_after_s == pytest.approx(0.1)
    assert service.say("b", *[opened(number, 0, [1]) for number in (1, 2)]) == []
    (refused,) = service.say("b", opened(3, 0, [1]))
    assert refused.code == "quota" and "5 sessions are open" in refused.message
    service.now += 0.1
    service.say("a", close(1))  # costs nothing
    assert service.say("b", opened(3, 0, [1])) == []
    assert service.core.stats.refused == {"quota": 3, "rate": 1}
    assert service.say("c", hello("c"))[0].max_sessions == 3
