"""Targets of a draft service and their sessions: what begins and ends them, and which ones have work.

No thread, clock or device.
"""

from __future__ import annotations

from collections.abc import Iterable

from adaserve_jax.star.messages import Open
from adaserve_jax.star.service.kv_manager import KvManager
from adaserve_jax.star.service.limits import DraftLimits, Quotas, RateLimiter
from adaserve_jax.star.service.session import DraftSession, TargetState
from adaserve_jax.star.service.stats import CoreStats


class TargetRegistry:
    """Targets and their sessions. busy: sessions by key that wait for the device or are on it."""

    def __init__(self, limits: DraftLimits, quotas: Quotas, kv: KvManager, stats: CoreStats):
        self.busy: dict[int, DraftSession] = {}
        self._limits = limits
        self._quotas = quotas
        self._kv = kv
        self._stats = stats
        self._targets: dict[str, TargetState] = {}
        self._next_key = 1

    @property
    def sessions(self) -> list[DraftSession]:
        """Sessions of all targets."""
        return [session for target in self._targets.values() for session in target.sessions.values()]

    @property
    def num_sessions(self) -> int:
        return sum(len(target.sessions) for target in self._targets.values())

    @property
    def num_sessions_connected(self) -> int:
        """Number of sessions whose target is connected."""
        return sum(len(target.sessions) for target in self._targets.values() if target.connected)

    @property
    def connected(self) -> list[str]:
        """Ids of the connected targets."""
        return [target_id for target_id, target in self._targets.items() if target.connected]

    def find(self, target_id: str) -> TargetState | None:
        """Return the target if it is connected."""
        target = self._targets.get(target_id)
        return target if target is not None and target.connected else None

    def update_busy(self, session: DraftSession) -> None:
        """Update `busy` after a change of the session."""
        if not session.closed and (session.pending is not None or (session.needs_feed and session.lag > 0)):
            self.busy[session.key] = session
        else:
            self.busy.pop(session.key, None)

    # ---- targets ----

    def connect(self, target_id: str, now: float) -> None:
        """Note that a target's stream is open. Its Hello counts as one message."""
        if target_id not in self._targets:
            limiter = RateLimiter(self._quotas.messages_per_s, self._quotas.messages_at_once, now)
            self._targets[target_id] = TargetState(target_id, limiter)
        target = self._targets[target_id]
        target.rate_limiter.take(now)
        target.connected, target.connected_s = True, now

    def disconnect(self, target_id: str) -> None:
        """Drop the target's waiting Drafts; its sessions stay until their leases end."""
        target = self._targets.get(target_id)
        if target is None:
            return
        target.connected = False
        for session in target.sessions.values():
            session.pending = None
            self.update_busy(session)
        self._forget_if_empty(target)

    def _forget_if_empty(self, target: TargetState) -> None:
        if not target.connected and not target.sessions:
            del self._targets[target.id]

    # ---- sessions ----

    def open(self, target: TargetState, opened: Open, now: float) -> DraftSession:
        """Open a new session of the target."""
        session = DraftSession(target, opened, self._next_key, now)
        self._next_key += 1
        target.sessions[session.number] = session
        return session

    def expire(self, now: float) -> int:
        """End the sessions whose lease is over, and return their number."""
        ended = 0
        for target in list(self._targets.values()):
            for session in list(target.sessions.values()):
                if now - session.last_message_s > self._limits.lease_s:
                    self.end(session)
                    ended += 1
            self._forget_if_empty(target)
        self._stats.leases_ended += ended
        return ended

    def end_oldest_left(self, sessions: Iterable[DraftSession]) -> bool:
        """End the longest silent of these sessions whose stream has ended; return False if there is none.

        A target opens each session that it still needs anew in its next stream, and may have lost the Close of others.
        """
        left = [each for each in sessions if not each.target.connected or each.last_message_s < each.target.connected_s]
        oldest = min(left, key=lambda session: (session.last_message_s, session.key), default=None)
        if oldest is None:
            return False
        self.end(oldest)
        self._forget_if_empty(oldest.target)
        self._stats.leases_ended += 1
        return True

    def end_number(self, target: TargetState, number: int) -> None:
        """End the target's session of that number, if there is one."""
        session = target.sessions.get(number)
        if session is not None:
            self.end(session)

    def end(self, session: DraftSession) -> None:
        """End a session and free its KV."""
        del session.target.sessions[session.number]
        self._kv.close(session)
        self.update_busy(session)
