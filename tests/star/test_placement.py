"""Breakers and placement, by the definitions: which state after which rounds, which service for which session."""

from __future__ import annotations

from collections import Counter

import pytest

from adaserve_jax.star.client.link import BAD_ROUNDS, FIRST_TRIAL_S, LAST_TRIAL_S, CircuitBreaker, RetryBackoff
from adaserve_jax.star.client.sessions import ServiceLoad, least_loaded, preference


def test_waits_double_up_to_the_longest_and_are_shortened_by_up_to_a_half() -> None:
    assert [RetryBackoff(0.5, 3.0, lambda: 0.0).next_s()] == [0.5]
    longest = RetryBackoff(0.5, 3.0, lambda: 0.0)
    assert [longest.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    longest.reset()
    assert longest.next_s() == 0.5
    shortest = RetryBackoff(0.5, 3.0, lambda: 1.0)
    assert [shortest.next_s() for _ in range(4)] == [0.25, 0.5, 1.0, 1.5]
    for _ in range(2000):
        assert longest.next_s() <= 3.0


def test_a_breaker_opens_after_bad_rounds_in_a_row_only() -> None:
    breaker = CircuitBreaker(lambda: 0.0)
    for _ in range(5):
        for _ in range(BAD_ROUNDS - 1):
            breaker.bad(0.0)
        breaker.good()
    assert breaker.state == "closed" and breaker.opens == 0 and breaker.allows(0.0)
    for _ in range(BAD_ROUNDS):
        breaker.bad(10.0)
    assert breaker.state == "open" and breaker.opens == 1
    assert not breaker.allows(10.0 + FIRST_TRIAL_S - 1e-6)


def test_a_trial_decides() -> None:
    breaker = CircuitBreaker(lambda: 0.0, bad_rounds=1)
    now, waits = 0.0, []
    breaker.bad(now)
    for _ in range(8):
        began = now
        while not breaker.allows(now):
            now += 0.25
        waits.append(now - began)
        assert breaker.state == "half_open"
        breaker.bad(now)
    assert waits == [FIRST_TRIAL_S * 2**n for n in range(6)] + [LAST_TRIAL_S] * 2
    now += LAST_TRIAL_S
    assert breaker.allows(now)
    breaker.good()
    assert breaker.state == "closed"
    breaker.bad(now)
    assert not breaker.allows(now + FIRST_TRIAL_S - 1e-6) and breaker.allows(now + FIRST_TRIAL_S)


def place(number: int, queue_s: float = 0.0, busy: float = 0.0, sessions: int = 0) -> ServiceLoad:
    return ServiceLoad(number, f"host{number}:7070", queue_s, busy, sessions)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], None),
        ([place(3)], 3),
        ([place(0, sessions=2), place(1, sessions=1)], 1),
        ([place(0, queue_s=0.02), place(1, sessions=3)], 1),
        ([place(0, queue_s=0.01), place(1, sessions=3)], 0),
        ([place(0, busy=1.0), place(1, sessions=3)], 1),
        ([place(0, busy=0.5), place(1, sessions=3)], 0),
    ],
)
def test_the_least_loaded_is_chosen(places: list[ServiceLoad], expected: int | None) -> None:
    assert least_loaded("target 1", places) == expected
    assert least_loaded("target 1", places[::-1]) == expected


def test_equals_share_the_sessions_and_one_that_goes_takes_only_its_own_along() -> None:
    places = [place(number) for number in range(4)]
    keys = [f"target {number}" for number in range(2000)]
    chosen = {key: least_loaded(key, places) for key in keys}
    counts = Counter(chosen.values())
    assert sorted(counts) == [0, 1, 2, 3] and all(400 < count < 600 for count in counts.values())
    without = {key: least_loaded(key, places[:2] + places[3:]) for key in keys}
    assert {key for key in keys if without[key] != chosen[key]} == {key for key in keys if chosen[key] == 2}
    assert preference("a", "b:1") == preference("a", "b:1") != preference("b", "b:1")
