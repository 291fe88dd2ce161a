"""Work ahead: its trees are those that would have been searched, and it delays nobody unless that pays."""

from __future__ import annotations

import pytest

from adaserve_jax.star.ahead import FADE, RATE, Worth
from adaserve_jax.star.messages import Tree
from tests.star.toys import PLAIN, SAMPLED, VOCABULARY, ToyService, close, columns_of, draft, opened, toy_columns

TEXT = [1, 2, 3]


class Idle(ToyService):
    """A service with time to draft ahead, beside target a, who is there."""

    def __init__(self, targets="a", **changes):
        super().__init__(targets, core={"ahead": True}, **changes)

    def work_ahead(self, most: int = 9) -> list[list[tuple[str, int, int]]]:
        """Batches that nobody waits for, until there are none; nothing is answered meanwhile."""
        batches = []
        for _ in range(most):
            rows, trees = self.run()
            assert trees == []
            if not rows:
                break
            batches.append(rows)
        return batches

    @property
    def guessed(self) -> list[int]:
        """The text that session 1 of target a is drafted ahead for."""
        guess = self.core._registry._targets["a"].sessions[1].guess
        assert guess is not None
        return guess.text.tolist()


def first_path(text: list[int], sampling=PLAIN, depth: int = 2, width: int = 2) -> list[int]:
    """The likeliest path of a toy's tree, whose nodes are all as likely: the first of the deepest level."""
    index, token, parent, *_ = toy_columns(text, sampling, depth, width, True)
    at = next(place for place, column in enumerate(index) if column // width == depth - 1)
    path = [token[at]]
    while parent[at] >= 0:
        at = index.index(parent[at])
        path.insert(0, token[at])
    return path


def asked_once(sampling=PLAIN, **changes) -> tuple[Idle, list[int]]:
    """Session 1 got its first tree; and what it will say next, if it takes the path and what the draft would."""
    service = Idle(**changes)
    service.say("a", opened(1, 0, TEXT, sampling), draft(1, 0, 0, 3, []))
    service.run()
    path = first_path(TEXT, sampling)
    own = toy_columns([*TEXT, *path], sampling, 1, 2, True)[1][0]
    return service, [*path, own]


# ---- what comes of it ----


@pytest.mark.parametrize("sampling", [PLAIN, SAMPLED])
def test_what_was_guessed_is_answered_at_once(sampling):
    """The path is fed and the own token looked for, then that is fed and its tree searched; round after round."""
    service, said = asked_once(sampling)
    text = list(TEXT)
    for number in range(1, 4):
        assert service.work_ahead() == [[("a", 1, 2)], [("a", 1, 1)]]
        assert service.guessed == [*text, *said]
        (tree,) = service.say("a", draft(1, 0, number, len(text), said))
        text += said
        assert isinstance(tree, Tree) and (tree.round, tree.length, tree.width) == (number, len(text), 2)
        assert columns_of(tree) == toy_columns(text, sampling, 2, 2, True)
        path = first_path(text, sampling)
        said = [*path, toy_columns([*text, *path], sampling, 1, 2, True)[1][0]]
    stats = service.core.stats
    assert (stats.ahead_trees, stats.ahead_hits, stats.ahead_misses) == (3, 3, 0)
    assert (stats.rounds, stats.trees) == (4, 4)


def test_whatever_is_said_instead_gets_the_tree_of_its_text():
    """Every beginning of what was guessed with every kind of own token, after any number of batches ahead: the tree is
    that of the text, and no token is fed twice but the last."""
    for batches in range(3):
        for taken in range(3):
            for off in range(3):
                service, guess = asked_once()
                service.work_ahead(batches)
                said = [*guess[:taken], (guess[taken] + off) % VOCABULARY]
                answers = service.say("a", draft(1, 0, 1, 3, said))
                is_hit = batches == 2 and (taken, off) == (2, 0)
                assert bool(answers) == is_hit
                rows, trees = service.run() if not is_hit else ([], answers)
                assert columns_of(trees[0]) == toy_columns([*TEXT, *said], PLAIN, 2, 2, True)
                fed = min(taken + (off == 0), (0, 2, 3)[batches])
                assert is_hit or rows == [("a", 1, max(len(said) - fed, 1))]
                stats = service.core.stats
                assert (stats.ahead_hits, stats.ahead_misses) == (is_hit, batches == 2 and not is_hit)


def test_a_shape_that_can_be_cut_is_a_hit_and_another_is_not():
    others: list[dict] = [{"depth": 3}, {"width": 1}, {"calibrated": False}]
    for changes in [{"depth": 1}, *others]:
        is_hit = changes not in others
        service, said = asked_once()
        service.work_ahead()
        answers = service.say("a", draft(1, 0, 1, 3, said, **changes))
        assert bool(answers) == is_hit, changes
        (tree,) = answers or service.run()[1]
        shape = {"depth": 2, "width": 2, "calibrated": True} | changes
        assert columns_of(tree) == toy_columns([*TEXT, *said], PLAIN, **shape)
        assert service.core.stats.ahead_misses == (not is_hit)


def test_what_came_while_its_tree_was_made_has_waited_until_it_was():
    """It came at 1.1 and is taken in when the batch has landed, at 1.25; the next round begins then."""
    service, said = asked_once()
    service.work_ahead(1)
    batch = service.core.next_batch(1.0)
    assert batch is not None and batch.ahead
    assert service.core.done(batch, service.device.run(batch), 1.25) == []
    (tree,) = service.core.receive("a", [draft(1, 0, 1, 3, said)], 1.1)
    assert isinstance(tree, Tree) and columns_of(tree) == toy_columns([*TEXT, *said], PLAIN, 2, 2, True)
    assert (tree.queue_s, tree.service_s) == (pytest.approx(0.15), 0.0)
    stats = service.core.stats
    assert stats.ahead_hits == 1 and stats.queue_s == pytest.approx(0.15)
    (session,) = service.core._registry._targets["a"].sessions.values()
    assert session.answered_s == 1.25


def test_what_is_taken_in_while_its_tree_is_made_is_searched_after_it():
    service, said = asked_once()
    service.work_ahead(1)
    batch = service.core.next_batch(0.0)
    assert batch is not None and batch.ahead
    assert service.say("a", draft(1, 0, 1, 3, said)) == [] and service.core.next_batch(0.0) is None
    assert service.core.done(batch, service.device.run(batch), 0.25) == []
    rows, (tree,) = service.run()
    assert rows == [("a", 1, 1)] and columns_of(tree) == toy_columns([*TEXT, *said], PLAIN, 2, 2, True)
    assert service.core.stats.ahead_hits == service.core.stats.ahead_trees == 0


def test_said_again_it_is_answered_again():
    service, said = asked_once()
    service.work_ahead()
    asked = draft(1, 0, 1, 3, said)
    assert service.say("a", asked) == service.say("a", asked) != []
    assert service.core.stats.ahead_hits == 1 and service.core.stats.duplicates == 1


def test_a_tree_that_will_answer_none_is_a_miss():
    """Its session is opened anew, ends, loses its lease, or loses its room to a Draft; else it is still there."""

    def made(**changes) -> Idle:
        service, _ = asked_once(**changes)
        service.work_ahead()
        stats = service.core.stats
        assert (stats.ahead_trees, stats.ahead_hits, stats.ahead_misses) == (1, 0, 0)
        return service

    def opens(service: Idle) -> None:
        service.say("a", opened(1, 1, TEXT))

    def ends(service: Idle) -> None:
        service.say("a", close(1))

    def expires(service: Idle) -> None:
        service.core.expire(61.0)

    def needs_room(service: Idle) -> None:
        service.say("a", opened(2, 0, [7] * 5), draft(2, 0, 0, 5, []))
        service.run()

    for how in (opens, ends, expires, needs_room):
        service = made(pages=3, max_context=12)
        how(service)
        assert service.core.stats.ahead_misses == 1, how.__name__


def test_opened_anew_with_another_noise_nothing_made_ahead_counts():
    service, said = asked_once()
    service.work_ahead()
    service.say("a", opened(1, 1, TEXT, SAMPLED))
    assert service.say("a", draft(1, 1, 1, 3, said)) == []
    _, (tree,) = service.run()
    assert columns_of(tree) == toy_columns([*TEXT, *said], SAMPLED, 2, 2, True)


def test_a_batch_ahead_that_fails_costs_nothing_but_itself():
    service, said = asked_once()
    batch = service.core.next_batch(0.0)
    assert batch is not None and batch.ahead
    service.device.kv[batch.rows[0].key][batch.rows[0].start :] = [-1]
    assert service.core.failed(batch, 0.0) == [] and service.core.stats.failed == 0
    assert service.work_ahead() == []
    service.say("a", draft(1, 0, 1, 3, said))
    rows, (tree,) = service.run()
    assert rows == [("a", 1, 3)] and columns_of(tree) == toy_columns([*TEXT, *said], PLAIN, 2, 2, True)


def test_a_batch_ahead_that_fails_has_delayed_nobody_and_later_ones_are_measured():
    service, said = asked_once()
    worth = service.core._ahead.worth  # type: ignore[union-attr]
    batch, before = service.core.next_batch(0.0), vars(worth).copy()
    assert batch is not None and batch.ahead
    service.core.failed(batch, 0.5)
    service.now = 0.5
    assert service.core.receive("a", [draft(1, 0, 1, 3, said)], 0.25) == [] and vars(worth) == before
    service.run()
    worth.ran(1.0, 2.0)
    service.core.receive("a", [draft(1, 0, 2, 6, [9])], 1.75)
    worth.ran(5.0, 6.0)
    assert worth.delay_s == 0.25, "of the only one that ran before"


def test_a_target_that_cuts_its_trees_is_drafted_ahead_for_where_it_cuts():
    """It takes one node and an own token, which is the next of the path: two tokens of three levels."""
    service, text = Idle(), list(TEXT)
    service.say("a", opened(1, 0, TEXT), draft(1, 0, 0, 3, [], depth=3))
    service.run()
    hits = []
    for number in range(1, 30):
        service.work_ahead()
        said = first_path(text, depth=3)[:2]
        answers = service.say("a", draft(1, 0, number, len(text), said, depth=3))
        hits.append(bool(answers))
        text += said
        (tree,) = answers or service.run()[1]
        assert columns_of(tree) == toy_columns(text, PLAIN, 3, 2, True)
        if len(text) > 50:
            break
    assert not hits[0] and all(hits[-5:]), hits


# ---- whose turn it is ----


def test_work_ahead_waits_for_all_others():
    """Drafts first, then what is only fed; guesses of several sessions go together."""
    service = Idle("ab")
    service.say("a", opened(1, 0, TEXT), draft(1, 0, 0, 3, []))
    service.run()
    service.say("b", opened(1, 0, [5]), draft(1, 0, 0, 1, []), opened(2, 0, [7] * 20))
    batches = []
    while (batch := service.core.next_batch(0.0)) is not None:
        batches.append((batch.ahead, batch.depth, len(batch.rows)))
        service.core.done(batch, service.device.run(batch), 0.0)
    assert batches == [(False, 2, 1), (False, 0, 1), (False, 0, 1), (True, 1, 2), (True, 2, 2)]


def test_who_is_gone_or_has_ended_is_not_drafted_for():
    service, _ = asked_once()
    service.core.gone("a", 0.0)
    assert service.work_ahead() == []
    service, _ = asked_once()
    service.say("a", close(1))
    assert service.work_ahead() == [] and service.room.held == {}


def test_a_session_that_ends_on_the_device_gives_all_back():
    service, _ = asked_once()
    batch = service.core.next_batch(0.0)
    assert batch is not None and batch.ahead
    service.say("a", close(1))
    assert service.core.done(batch, service.device.run(batch), 0.0) == []
    assert service.room.held == {} and service.work_ahead() == []


def test_without_the_option_nothing_is_drafted_ahead():
    service = ToyService()
    service.say("a", opened(1, 0, TEXT), draft(1, 0, 0, 3, []))
    service.run()
    assert service.core.next_batch(0.0) is None


def test_text_that_would_not_fit_with_its_tree_is_not_guessed():
    service = Idle(max_context=8)
    service.say("a", opened(1, 0, TEXT), draft(1, 0, 0, 3, []))
    service.run()
    assert len(service.work_ahead()) == 2  # 3 + 3 tokens, and a tree of 2 levels
    service = Idle(max_context=7)
    service.say("a", opened(1, 0, TEXT), draft(1, 0, 0, 3, []))
    service.run()
    assert service.work_ahead() == []


def test_only_room_that_nobody_holds_is_used_and_it_is_given_back_first():
    """Pages of 4 tokens: two sessions hold one each, the third is free."""
    service = Idle(pages=3, max_context=12)
    service.say("a", opened(1, 0, TEXT), draft(1, 0, 0, 3, []), opened(2, 0, [7]), draft(2, 0, 0, 1, [], width=1))
    while service.run()[0]:
        pass
    assert sum(service.room.held.values()) == 3 and service.core.stats.evicted == 0
    one, other = (key for key in service.room.held)
    service.say("a", opened(3, 0, [9]), draft(3, 0, 0, 1, []))
    _, (tree,) = service.run()
    assert columns_of(tree) == toy_columns([9], PLAIN, 2, 2, True)
    assert service.core.stats.evicted == 0 and {service.room.held[one], service.room.held[other]} == {1}


# ---- whether it pays ----


def test_what_delays_nobody_pays_and_what_delays_much_does_not():
    worth = Worth()
    worth.searched(0.010)
    assert worth.pays(0.001, 2), "nobody was delayed yet"
    for start in range(3):
        worth.ran(start, start + 0.005)
        worth.asked(start + 0.001, rows=1, hits=0, share=0.0)  # 4 ms of each batch
    worth.ran(9.0, 9.005)
    assert worth.delay_s == pytest.approx(0.004)
    assert worth.pays(0.41, 1) and not worth.pays(0.39, 1) and not worth.pays(0.41, 2)
    assert worth.delay_s == pytest.approx(0.004 * FADE**2)


def test_hits_among_others_save_what_the_batch_is_smaller():
    worth = Worth()
    worth.searched(0.010)
    worth.asked(1.0, rows=4, hits=1, share=0.9)
    assert worth.saved_s == pytest.approx(0.001)
    worth.asked(1.0, rows=1, hits=1, share=0.0)
    assert worth.saved_s == pytest.approx(0.0055)
    for _ in range(100):
        worth.asked(1.0, rows=1, hits=1, share=0.0)
    before = worth.saved_s
    worth.asked(1.0, rows=4, hits=1, share=1.0)
    assert worth.saved_s == pytest.approx(before * (1 - RATE))


def test_what_would_not_pay_is_tried_again_later():
    """Half a second against 10 ms: once 0.5 * 0.998**n is no more than that."""
    worth = Worth()
    worth.searched(0.010)
    worth.ran(0.0, 0.5)
    worth.asked(0.0, rows=1, hits=0, share=0.0)
    worth.ran(1.0, 1.5)
    assert worth.delay_s == 0.5
    refused = 0
    while not worth.pays(1.0, 1):
        refused += 1
    assert refused == 1955


def test_a_first_hit_that_saves_nothing_is_not_the_last():
    """Beside 4 ms: once 10 * (1 - 0.998**n) is no less than 4 * 0.998**n."""
    worth = Worth()
    worth.searched(0.010)
    worth.asked(0.0, rows=4, hits=1, share=1.0)
    assert worth.saved_s == 0.0
    worth.delay_s, refused = 0.004, 0
    while not worth.pays(1.0, 1):
        refused += 1
    assert refused == 169
    assert worth.saved_s == pytest.approx(0.010 * (1 - FADE**refused))
    for _ in range(3000):
        worth.pays(0.0, 1)
    assert worth.saved_s < worth.search_s, "not beyond a search"


def test_what_a_batch_ahead_delays_is_seen_from_when_drafts_come():
    """One second of work ahead, of which a Draft that came in its middle waits the rest."""
    service, _ = asked_once()
    service.core._ahead.worth.ran(-2.0, -1.0)  # type: ignore[union-attr]
    service.now = 1.0
    batch = service.core.next_batch(1.0)
    assert batch is not None
    trees = service.device.run(batch)
    service.core.done(batch, trees, 2.0)
    service.core.receive("a", [draft(1, 0, 1, 3, [9])], 1.75)
    worth = service.core._ahead.worth  # type: ignore[union-attr]
    worth.ran(5.0, 6.0)
    assert worth.delay_s == pytest.approx(0.125), "0 and a quarter of a second"
