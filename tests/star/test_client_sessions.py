"""Placement of sessions: which service a session goes to."""

from __future__ import annotations

from collections import Counter

import pytest

from adaserve_jax.star.client.sessions import ServiceLoad, least_loaded, preference


def service(number: int, queue_s: float = 0.0, busy: float = 0.0, sessions: int = 0) -> ServiceLoad:
    return ServiceLoad(number, f"host{number}:7070", queue_s, busy, sessions)


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        ([], None),
        ([service(3)], 3),
        ([service(0, sessions=2), service(1, sessions=1)], 1),
        ([service(0, queue_s=0.02), service(1, sessions=3)], 1),
        ([service(0, queue_s=0.01), service(1, sessions=3)], 0),
        ([service(0, busy=1.0), service(1, sessions=3)], 1),
        ([service(0, busy=0.5), service(1, sessions=3)], 0),
    ],
)
def test_the_least_loaded_is_chosen(services: list[ServiceLoad], expected: int | None) -> None:
    assert least_loaded("target 1", services) == expected
    assert least_loaded("target 1", services[::-1]) == expected


def test_equals_share_the_sessions_and_one_that_goes_takes_only_its_own_along() -> None:
    services = [service(number) for number in range(4)]
    keys = [f"target {number}" for number in range(2000)]
    chosen = {key: least_loaded(key, services) for key in keys}
    counts = Counter(chosen.values())
    assert sorted(counts) == [0, 1, 2, 3] and all(400 < count < 600 for count in counts.values())
    without = {key: least_loaded(key, services[:2] + services[3:]) for key in keys}
    assert {key for key in keys if without[key] != chosen[key]} == {key for key in keys if chosen[key] == 2}
    assert preference("a", "b:1") == preference("a", "b:1") != preference("b", "b:1")
