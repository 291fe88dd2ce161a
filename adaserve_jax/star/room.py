"""KV room of a draft service: which sessions hold some, and who loses it when it is short.

No thread, clock or device: pages and pools are behind `Room`, which `star.model.DraftModel` implements.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from adaserve_jax.star.session import Session


class Room(Protocol):
    """KV room by session key (`Session.key`, never used again)."""

    @property
    def capacity(self) -> int:
        """Tokens that one session can have room for when no other has any."""
        ...

    def reserve(self, key: int, tokens: int) -> bool:
        """Have room for the first `tokens` tokens of this session, keeping what it holds; False: there is not enough,
        nothing has changed."""
        ...

    def release(self, key: int) -> None:
        """Give back all of it. Only called for keys that `reserve` has said True to, once."""
        ...


class Keeper:
    """Reserves for sessions, and takes from others where it must: from those that wait for nothing, the least recently
    used first; by force also from those that are only fed, and from Drafts that are less urgent, the least first. What
    a batch on the device uses stays until it has landed. evicted: sessions that lost their KV so far."""

    def __init__(self, room: Room):
        self._room = room
        self._held: OrderedDict[int, Session] = OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def reserve(self, session: Session, tokens: int, *, by_force: bool) -> bool:
        """Room for the first `tokens` tokens of a session."""
        while not self._room.reserve(session.key, tokens):
            victim = self._victim(session, by_force)
            if victim is None:
                return False
            victim.unfed()
            self._give_back(victim)
            self.evicted += 1
        self._held[session.key] = session
        self._held.move_to_end(session.key)
        return True

    def close(self, session: Session) -> None:
        """The session has ended: what it holds is given back, now or when its batch has landed."""
        session.closed = True
        if not session.flying:
            self._give_back(session)

    def landed(self, session: Session) -> None:
        """The batch with it is done."""
        session.flying = False
        if session.closed:
            self._give_back(session)

    def _victim(self, session: Session, by_force: bool) -> Session | None:
        others = [held for held in self._held.values() if not held.flying and held is not session]
        idle = (held for held in others if held.asked is None and not held.feed)
        fed = (held for held in others if held.asked is None and held.feed)
        victim = next(idle, None)
        if victim is None and by_force and session.asked is not None:
            less_urgent = (held for held in others if held.asked is not None and held.urgency > session.urgency)
            victim = next(fed, None) or max(less_urgent, key=lambda held: held.urgency, default=None)
        return victim

    def _give_back(self, session: Session) -> None:
        if self._held.pop(session.key, None) is not None:
            self._room.release(session.key)
