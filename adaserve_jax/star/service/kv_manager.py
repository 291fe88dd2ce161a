"""KV space of a draft service: which sessions hold some, and which one loses it when there is too little.

No thread, clock or device: pages are behind `KvAllocator`, which `service.model.DraftModel` implements.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from adaserve_jax.star.service.session import DraftSession


class KvAllocator(Protocol):
    """KV space by session key (`DraftSession.key`, never used again)."""

    @property
    def capacity(self) -> int:
        """Most tokens of one session when no other session holds KV."""
        ...

    def reserve(self, key: int, tokens: int) -> bool:
        """Extend the session's space to its first `tokens` tokens. Return False, without a change, if there is too
        little."""
        ...

    def release(self, key: int) -> None:
        """Free all space of the session. Called once, and only after a successful `reserve`."""
        ...


class KvManager:
    """Reserves KV for sessions and evicts others where it must.

    Sessions without work lose their KV first, the least recently used one of them first. With `force`, so do sessions
    that are only fed, and then less urgent Drafts, the least urgent first. KV that a running batch uses stays until the
    batch has ended. evicted: number of evictions so far.
    """

    def __init__(self, allocator: KvAllocator):
        self._allocator = allocator
        self._holding: OrderedDict[int, DraftSession] = OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._holding)

    def reserve(self, session: DraftSession, tokens: int, *, force: bool) -> bool:
        """Reserve KV for the first `tokens` tokens of a session; return False if there is too little."""
        while not self._allocator.reserve(session.key, tokens):
            victim = self._victim(session, force)
            if victim is None:
                return False
            victim.drop_kv()
            self._release(victim)
            self.evicted += 1
        self._holding[session.key] = session
        self._holding.move_to_end(session.key)
        return True

    def close(self, session: DraftSession) -> None:
        """End a session; its KV is freed now, or when its batch has ended."""
        session.closed = True
        if not session.running:
            self._release(session)

    def batch_ended(self, session: DraftSession) -> None:
        """Note that the session's batch is off the device."""
        session.running = False
        if session.closed:
            self._release(session)

    def _victim(self, session: DraftSession, force: bool) -> DraftSession | None:
        others = [held for held in self._holding.values() if not held.running and held is not session]
        idle = (held for held in others if held.pending is None and not held.needs_feed)
        fed = (held for held in others if held.pending is None and held.needs_feed)
        victim = next(idle, None)
        if victim is None and force and session.pending is not None:
            less_urgent = (held for held in others if held.pending is not None and held.urgency > session.urgency)
            victim = next(fed, None) or max(less_urgent, key=lambda held: held.urgency, default=None)
        return victim

    def _release(self, session: DraftSession) -> None:
        if self._holding.pop(session.key, None) is not None:
            self._allocator.release(session.key)
