"""Which Drafts are searched together: those that are served no later so than one after another, each of them in time.

Knows what is expected of searches, and no device. In which order Drafts come is dispatch.py's, who has room is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from adaserve_jax.star.limits import Expected
from adaserve_jax.star.session import Session


class _Group(NamedTuple):
    """Sessions of one batch. tokens: that are fed; depth: of the deepest; give_up_s: when the first one does; takes_s,
    alone_s: all of them together, and one after another."""

    sessions: tuple[Session, ...] = ()
    tokens: int = 0
    depth: int = 0
    give_up_s: float = math.inf
    takes_s: float = 0.0
    alone_s: float = 0.0


class Company:
    """Chooses who goes with whom. Sessions have Drafts that wait. max_rows, max_feed: of one batch."""

    def __init__(self, expected: Expected, max_rows: int, max_feed: int):
        self._expected, self._max_rows, self._max_feed = expected, max_rows, max_feed

    def alone_s(self, session: Session) -> float:
        """What its lag and its search take when nobody else is there."""
        return self._grown(_Group(), session).takes_s

    def choose(self, ordered: Sequence[Session], now: float, reserve: Callable[[Session, bool], bool]) -> list[Session]:
        """The first one that there is room for, and after it in order those that can go with it: no fewer than begin
        the order; who makes them slower than one after another is passed over, with others like it. reserve: have room
        for a session, by force for the first one; asked of who is chosen, only."""
        at = next((at for at, s in enumerate(ordered) if need_of(s) <= self._max_feed and reserve(s, True)), None)
        if at is None:
            return []
        group = self._grown(_Group(), ordered[at])
        waiting = [session for session in ordered[at + 1 :] if _kind(session) == _kind(ordered[at])]
        while waiting and len(group.sessions) < self._max_rows:
            tried, best, seen = self._joined(group, waiting, now)
            lacking = [session for session in best.sessions[len(group.sessions) :] if not reserve(session, False)]
            if lacking:
                waiting = [session for session in waiting if session not in lacking]
            elif seen:
                group, waiting = best, waiting[seen:]
            elif len(tried.sessions) > len(group.sessions):
                work = _work(tried.sessions[len(group.sessions)])
                waiting = [session for session in waiting if _work(session) != work]
            else:
                break
        return list(group.sessions)

    def _joined(self, group: _Group, waiting: Sequence[Session], now: float) -> tuple[_Group, _Group, int]:
        """The group with all that fit in time, and with the most of their beginning that help; how many of those that
        wait were looked at for that."""
        tried = best = group
        seen = 0
        for place, session in enumerate(waiting, 1):
            if len(tried.sessions) == self._max_rows:
                break
            grown = self._grown(tried, session)
            if grown.tokens > self._max_feed or now + grown.takes_s > grown.give_up_s:
                continue
            tried = grown
            if tried.takes_s <= tried.alone_s:
                best, seen = tried, place
        return tried, best, seen

    def _grown(self, group: _Group, session: Session) -> _Group:
        """With one more."""
        asked, need, expected = session.asked, need_of(session), self._expected
        assert asked is not None
        draft = asked.draft
        sessions, tokens, depth = (*group.sessions, session), group.tokens + need, max(group.depth, draft.depth)
        return _Group(
            sessions, tokens, depth, min(group.give_up_s, asked.give_up_s),
            expected.feed_s(tokens) + expected.search_s(len(sessions), depth, draft.width),
            group.alone_s + expected.feed_s(need) + expected.search_s(1, draft.depth, draft.width),
        )  # fmt: skip


def need_of(session: Session) -> int:
    """Tokens that are fed before its search."""
    return session.length - session.search_from


def _kind(session: Session) -> tuple[int, bool]:
    """What all of a batch have in common."""
    assert session.asked is not None
    return int(session.asked.draft.width), bool(session.asked.draft.calibrated)


def _work(session: Session) -> tuple[int, int]:
    """What it makes of a batch."""
    assert session.asked is not None
    return int(session.asked.draft.depth), need_of(session)
