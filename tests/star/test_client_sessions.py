"""Placement of sessions: which service a session goes to."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from adaserve_jax.star.client.link import Link
from adaserve_jax.star.client.sessions import least_loaded, preference
from adaserve_jax.star.messages import Load


def service(number: int, queue_s: float = 0.0, busy: float = 0.0, sessions: int = 0) -> Link:
    load = Load(busy, queue_s, sessions, 1)
    return cast(Link, SimpleNamespace(number=number, address=f"host{number}:7070", load=load, sessions=sessions))


def chosen_by(key: str, services: list[Link]) -> int | None:
    link = least_loaded(key, services)
    return None if link is None else link.number


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
def test_the_least_loaded_is_chosen(services: list[Link], expected: int | None) -> None:
    assert chosen_by("target 1", services) == expected
    assert chosen_by("target 1", services[::-1]) == expected


def test_equals_share_the_sessions_and_one_that_goes_takes_only_its_own_along() -> None:
    services = [service(number) for number in range(4)]
    keys = [f"target {number}" for number in range(2000)]
    chosen = {key: chosen_by(key, services) for key in keys}
    counts = Counter(chosen.values())
    assert sorted(counts) == [0, 1, 2, 3] and all(400 < count < 600 for count in counts.values())
    without = {key: chosen_by(key, services[:2] + services[3:]) for key in keys}
    assert {key for key in keys if without[key] != chosen[key]} == {key for key in keys if chosen[key] == 2}
    assert preference("a", "b:1") == preference("a", "b:1") != preference("b", "b:1")
