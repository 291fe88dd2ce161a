"""Who is connected to a draft service, and which sessions they have: what begins and ends them, and which are busy.

No thread, clock or device. What is said, and whether it may be, is reception.py's; trees are core.py's.
"""

from __future__ import annotations

from adaserve_jax.star.counters import CoreStats
from adaserve_jax.star.limits import Allowance, DraftLimits, Quotas, is_id
from adaserve_jax.star.messages import Open
from adaserve_jax.star.room import Keeper
from adaserve_jax.star.session import Asked, Session, Target


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
