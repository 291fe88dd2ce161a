"""One session: what it takes for granted, what it refuses, and how much of its KV stays good."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from adaserve_jax.star.service.limits import RateLimiter
from adaserve_jax.star.service.session import DraftSession, TargetState
from adaserve_jax.star.service.session import MessageOutcome as Outcome
from tests.star.toys import SAMPLED, draft, opened


def session(tokens=(1, 2, 3), computed: int = 0) -> DraftSession:
    made = DraftSession(TargetState("a", RateLimiter(1.0, 1, 0.0)), opened(1, 0, tokens), key=1, now=0.0)
    made.computed = computed
    return made


def test_a_text_grows_by_drafts_that_follow_it():
    held = session()
    assert held.apply_draft(draft(1, 0, 0, 3, [4, 5])) is Outcome.APPLIED
    assert held.apply_draft(draft(1, 0, 5, 4, [5, 6])) is Outcome.APPLIED  # one token again, rounds in between lost
    assert held.text.tolist() == [1, 2, 3, 4, 5, 6]
    assert held.apply_draft(draft(1, 0, 6, 2, [3])) is Outcome.APPLIED  # the text ends earlier than was said
    assert held.text.tolist() == [1, 2, 3]
    assert held.apply_draft(draft(1, 0, 7, 3, range(200))) is Outcome.APPLIED
    assert held.text.tolist() == [1, 2, 3, *range(200)]


@pytest.mark.parametrize(
    ("message", "heard"),
    [
        (draft(1, 0, 8, 4, [9]), Outcome.GAP),  # begins behind the text
        (draft(1, 0, 8, 2, [4]), Outcome.GAP),  # another text
        (draft(1, 0, 8, 0, [1, 2, 4, 5]), Outcome.GAP),
        (draft(1, 1, 8, 3, [4]), Outcome.GAP),  # its Open was lost
        (draft(1, 0, 6, 3, [4]), Outcome.STALE),
        (draft(1, 0, 7, 3, []), Outcome.DUPLICATE),
        (draft(1, 0, 7, 3, [], depth=3), Outcome.CONFLICT),
        (draft(1, 0, 7, 2, [3]), Outcome.CONFLICT),
        (draft(1, 0, 7, 3, [], give_up_s=2.0), Outcome.CONFLICT),
    ],
)
def test_what_does_not_follow_changes_no_text(message, heard: Outcome):
    held = session(computed=2)
    assert held.apply_draft(draft(1, 0, 7, 3, [])) is Outcome.APPLIED
    assert held.apply_draft(message) is heard
    assert held.text.tolist() == [1, 2, 3] and held.computed == 2


def test_of_an_older_epoch_nothing_is_heard():
    held = session()
    assert held.reopen(opened(1, 4, [1, 2])) is Outcome.APPLIED
    assert held.apply_draft(draft(1, 3, 99, 2, [3])) is Outcome.STALE
    assert held.reopen(opened(1, 3, [7])) is Outcome.STALE
    assert held.reopen(opened(1, 4, [1, 2])) is Outcome.DUPLICATE
    assert held.reopen(opened(1, 4, [1, 3])) is Outcome.CONFLICT
    assert held.reopen(opened(1, 4, [1, 2], SAMPLED)) is Outcome.CONFLICT
    assert held.text.tolist() == [1, 2]


def test_an_open_said_again_after_drafts_is_still_the_same():
    held = session()
    held.apply_draft(draft(1, 0, 0, 3, [4]))
    assert held.reopen(opened(1, 0, [1, 2, 3])) is Outcome.DUPLICATE
    assert held.text.tolist() == [1, 2, 3, 4]


def test_rounds_count_across_epochs():
    held = session()
    held.apply_draft(draft(1, 0, 7, 3, []))
    held.reopen(opened(1, 1, [1]))
    assert held.apply_draft(draft(1, 1, 7, 1, [])) is Outcome.STALE
    assert held.apply_draft(draft(1, 1, 8, 1, [])) is Outcome.APPLIED


def test_the_kv_of_the_common_beginning_stays_whatever_the_text_becomes():
    """All texts of up to four tokens of two kinds, after all such texts, by brute force."""
    texts = [list(text) for length in range(5) for text in product([0, 1], repeat=length)]
    for before, after in product(texts, texts):
        for computed in range(len(before) + 1):
            held = session(before, computed)
            held.reopen(opened(1, 1, after))
            common = next((at for at, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), None)
            common = min(len(before), len(after)) if common is None else common
            assert held.computed == min(common, computed)
            assert held.needs_feed == (held.computed < len(after))


def test_kv_that_lands_counts_as_far_as_the_text_is_still_that():
    """The text becomes any other while its tokens from `start` on are on the device."""
    texts = [list(text) for length in range(1, 5) for text in product([0, 1], repeat=length)]
    for before, after in product(texts, texts):
        for start in range(len(before)):
            held = session(before, start)
            kv = np.array(before)
            held.reopen(opened(1, 1, after))
            held.commit_kv(start, kv[start:])
            assert held.text[: held.computed].tolist() == before[: held.computed]
            if after[: len(before)] == before:
                assert held.computed == len(before)


def test_what_the_kv_lacks_is_worth_feeding_until_it_is_fed():
    held = session([1, 2, 3])
    assert held.needs_feed and held.lag == 3
    held.commit_kv(0, held.text[:2])
    assert held.needs_feed and held.lag == 1
    held.commit_kv(2, held.text[2:])
    assert not held.needs_feed and held.search_from == 2
    held.drop_kv()
    assert not held.needs_feed and held.computed == 0
    held.apply_draft(draft(1, 0, 0, 3, []))
    assert held.needs_feed
