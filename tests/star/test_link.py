"""Backoff and circuit breaker: which wait and which state after which rounds."""

from __future__ import annotations

from adaserve_jax.star.client.link import BAD_ROUNDS, FIRST_TRIAL_S, LAST_TRIAL_S, CircuitBreaker, RetryBackoff


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
    breaker = CircuitBreaker(lambda: 0.0)
    now, waits = 0.0, []
    for _ in range(BAD_ROUNDS):
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
    for _ in range(BAD_ROUNDS):
        breaker.bad(now)
    assert not breaker.allows(now + FIRST_TRIAL_S - 1e-6) and breaker.allows(now + FIRST_TRIAL_S)
