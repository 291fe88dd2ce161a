"""Who is connected to a draft service, and which sessions they have: what begins and ends them, and which are busy.

No thread, clock or device. What is said, and whether it may be, is reception.py's; trees are core.py's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from adaserve_jax.star.messages import Open
from adaserve_jax.star.service.limits import Allowance, DraftLimits, Quotas, is_id
from adaserve_jax.star.service.session import Asked, CoreStats, Session, Target

# KV room of a draft service: which sessions hold some, and who loses it when it is short.
#
# No thread, clock or device: pages and pools are behind `Room`, which `star.model.DraftModel` implements.


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


class Registry:
    """Targets and their sessions. busy: sessions by key that wait for the device, or are on it."""

    def __init__(self, limits: DraftLimits, quotas: Quotas, keeper: Keeper, stats: CoreStats):
        self.busy: dict[int, Session] = {}
        self._limits = limits
        self._quotas = quotas
        self._keeper = keeper
        self._stats = stats
        self._targets: dict[str, Target] = {}
        self._next_key = 1

    @property
    def num_sessions(self) -> int:
        return sum(len(target.sessions) for target in self._targets.values())

    @property
    def num_sessions_connected(self) -> int:
        """Of targets whose stream stands."""
        return sum(len(target.sessions) for target in self._targets.values() if target.here)

    @property
    def connected(self) -> list[str]:
        """Ids of the targets whose stream stands."""
        return [target_id for target_id, target in self._targets.items() if target.here]

    def find(self, target_id: str) -> Target | None:
        """The target, where its stream stands."""
        target = self._targets.get(target_id)
        return target if target is not None and target.here else None

    def note(self, session: Session) -> None:
        """It may have something to do now, or nothing any more."""
        if not session.closed and (session.asked is not None or (session.feed and session.lag > 0)):
            self.busy[session.key] = session
        else:
            self.busy.pop(session.key, None)

    # ---- targets ----

    def come(self, target_id: str, now: float) -> None:
        """Its stream stands from now on. That costs it one message."""
        if target_id not in self._targets:
            allowance = Allowance(self._quotas.messages_per_s, self._quotas.messages_at_once, now)
            self._targets[target_id] = Target(target_id, allowance)
        self._targets[target_id].allowance.take(now)
        self._targets[target_id].here = True

    def gone(self, target_id: str) -> None:
        """Its stream has ended: what it waits for is dropped; its sessions stay until their leases end."""
        target = self._targets.get(target_id)
        if target is None:
            return
        target.here = False
        for session in target.sessions.values():
            session.asked = None
            self.note(session)
        self._forget_if_empty(target)

    def _forget_if_empty(self, target: Target) -> None:
        if not target.here and not target.sessions:
            del self._targets[target.id]

    # ---- sessions ----

    def open(self, target: Target, opened: Open, now: float) -> Session:
        """A new one of the target."""
        session = Session(target, opened, self._next_key, now)
        self._next_key += 1
        target.sessions[session.number] = session
        return session

    def ask(self, session: Session, asked: Asked) -> None:
        """Its Draft waits from now on."""
        session.asked = asked
        session.wanted_s = None
        self.note(session)

    def expire(self, now: float) -> int:
        """End sessions that have said nothing for a lease; returns how many."""
        ended = 0
        for target in list(self._targets.values()):
            for session in list(target.sessions.values()):
                if now - session.heard_s > self._limits.lease_s:
                    self.end(session)
                    ended += 1
            self._forget_if_empty(target)
        self._stats.leases_ended += ended
        return ended

    def end_one_of_who_is_gone(self) -> bool:
        """Of sessions whose target is not connected, the one that was heard of least lately; False: there is none."""
        left = [s for target in self._targets.values() if not target.here for s in target.sessions.values()]
        oldest = min(left, key=lambda session: (session.heard_s, session.key), default=None)
        if oldest is None:
            return False
        self.end(oldest)
        self._forget_if_empty(oldest.target)
        self._stats.leases_ended += 1
        return True

    def end_number(self, target: Target, number: object) -> None:
        """End the target's session of that number, where there is one."""
        session = target.sessions.get(number) if is_id(number) else None  # type: ignore[arg-type]
        if session is not None:
            self.end(session)

    def end(self, session: Session) -> None:
        """It is over; its KV is given back."""
        del session.target.sessions[session.number]
        self._keeper.close(session)
        self.note(session)
