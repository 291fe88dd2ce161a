"""Which of several draft services a session goes to: the least loaded, and always the same among equals.

A session stays where it is; only one whose service cannot be asked is placed anew. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

QUEUE_WEIGHT = 200.0
BUSY_WEIGHT = 4.0
"""In sessions: 5 ms of work that waits at a service count as one session of this target there, and a device that works
all the time as four. What a service says of itself is up to `LOAD_EVERY_S` old; a target's own sessions are known at
once, so that many of them placed at a time spread."""


@dataclass(frozen=True)
class Place:
    """A service that can be asked. number: whose the caller knows it by; queue_s, busy: as it said last; sessions: of
    this target there."""

    number: int
    address: str
    queue_s: float
    busy: float
    sessions: int

    @property
    def load(self) -> float:
        """In sessions of this target."""
        return self.sessions + QUEUE_WEIGHT * self.queue_s + BUSY_WEIGHT * self.busy


def choose(key: str, places: Iterable[Place]) -> int | None:
    """The number of the least loaded place, of equals that which `key` prefers to all others; None without any."""
    best = min(places, key=lambda place: (place.load, -preference(key, place.address)), default=None)
    return None if best is None else best.number


def preference(key: str, address: str) -> int:
    """Rendezvous hashing: how much `key` likes a service; does not depend on which others there are."""
    return int.from_bytes(hashlib.blake2b(f"{key} {address}".encode(), digest_size=8).digest(), "big")
