"""Which sessions the device works for next: by deadline, compatible ones together, long catch-ups in between.

No thread, clock or device: `Dispatcher.next` looks at the sessions that have something to do and says what one batch
runs. Source: StarSD, section 4.1, which serves first come, first served, one by one; the departures are in
docs/architecture/star.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adaserve_jax.star.service.limits import DraftLimits, Expected
from adaserve_jax.star.service.registry import Keeper
from adaserve_jax.star.service.session import Sampling, Session, Target

# Which Drafts are searched together: those that are served no later so than one after another, each of them in
# time.
#
# Knows what is expected of searches, and no device. In which order Drafts come is dispatch.py's, who has room
# is asked.


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


@dataclass(frozen=True, eq=False)
class BatchRow:
    """One session of a batch. key: whose KV (`Room`). tokens: i32[n], n >= 1, fed at positions `start` on. depth:
    of the tree that its Draft of this round asked for; 0: only fed."""

    target_id: str
    session: int
    epoch: int
    round: int
    key: int
    start: int
    tokens: np.ndarray
    depth: int
    sampling: Sampling


@dataclass(frozen=True, eq=False)
class Batch:
    """What the device runs at once. Either every row is searched, or none (depth 0). depth: of the deepest tree; width,
    calibrated: of all. started_s: when it was handed out."""

    rows: tuple[BatchRow, ...]
    depth: int
    width: int
    calibrated: bool
    started_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens that are fed, of all rows."""
        return sum(len(row.tokens) for row in self.rows)


class Dispatcher:
    """Chooses batches. batching: False takes one session at a time. tie_s: Drafts whose deadlines fall into the same
    span of so many seconds are equally urgent; then the target that was served least lately goes first."""

    def __init__(self, limits: DraftLimits, keeper: Keeper, *, batching: bool, tie_s: float):
        self._max_feed = limits.max_feed
        self._keeper = keeper
        self._max_rows = limits.max_rows if batching else 1
        self._company = Company(Expected(limits), self._max_rows, limits.max_feed)
        self._tie_s = tie_s
        self._turn = 0
        self._fed_last = False

    def is_late(self, session: Session, now: float) -> bool:
        """Whether its tree cannot be ready before its target gives up."""
        assert session.asked is not None
        return now + self._company.alone_s(session) > session.asked.give_up_s

    def give_up(self, session: Session) -> None:
        """Its tree cannot be ready. Where that is for its own lag, not for others that come first, the lag goes on
        being fed among those that wait, so that a later Draft finds it there. The caller answers it."""
        asked = session.asked
        assert asked is not None
        is_long = asked.received_s + self._company.alone_s(session) > asked.give_up_s
        session.feed = session.lag > 0
        session.wanted_s = asked.deadline_s if session.feed and is_long else None

    def next(self, sessions: Iterable[Session], now: float) -> Batch | None:
        """The next batch of those that have something to do (`asked`, or `feed`) and are not on the device."""
        short: list[Session] = []
        long: list[tuple[float, int, Session]] = []  # with their deadlines
        feeds: list[Session] = []
        for session in sessions:
            if session.asked is not None and need_of(session) <= self._max_feed:
                short.append(session)
            elif session.asked is not None:
                long.append((session.asked.deadline_s, session.key, session))
            elif session.wanted_s is not None:
                long.append((session.wanted_s, session.key, session))
            else:
                feeds.append(session)
        short = self._in_order(short, now)
        catching_up = [session for *_, session in sorted(long)]
        first_due = short[0].asked.deadline_s if short and short[0].asked else math.inf
        if short and (not long or self._fed_last or first_due <= min(long)[0]):
            batch = self._search(short, now) or self._feed(catching_up, now)
        else:
            batch = self._feed(catching_up, now) or self._search(short, now)
        if batch is None and feeds:
            return self._feed(sorted(feeds, key=lambda session: (session.heard_s, session.key)), now)
        return batch

    def takes_s(self, waiting: Sequence[Session]) -> float:
        """What the Drafts that wait take in all: each alone, over the rows of a batch."""
        alone_s = (self._company.alone_s(session) for session in waiting if session.asked is not None)
        return sum(alone_s) / self._max_rows

    # ---- searches ----

    def _in_order(self, waiting: list[Session], now: float) -> list[Session]:
        """By deadline; where deadlines are equal, or over, targets take turns, the one served least lately first."""
        spans: dict[float, dict[Target, list[Session]]] = {}
        for session in sorted(waiting, key=lambda session: session.urgency):
            assert session.asked is not None
            deadline_s = max(session.asked.deadline_s, now)
            span = deadline_s / self._tie_s if self._tie_s else deadline_s
            span = math.floor(span) if self._tie_s and math.isfinite(span) else span
            spans.setdefault(span, {}).setdefault(session.target, []).append(session)
        ordered: list[Session] = []
        for span in sorted(spans):
            of = spans[span]
            turns = [(target.served, at, target, 0) for at, target in enumerate(of)]
            heapq.heapify(turns)
            turn = self._turn
            while turns:
                _, at, target, taken = heapq.heappop(turns)
                ordered.append(of[target][taken])
                if taken + 1 < len(of[target]):
                    heapq.heappush(turns, (turn, at, target, taken + 1))
                turn += 1
        return ordered

    def _search(self, ordered: Sequence[Session], now: float) -> Batch | None:
        """The most urgent one that there is room for, with its company."""
        chosen = self._company.choose(ordered, now, self._has_room)
        drafts = [(session, session.asked.draft) for session in chosen if session.asked is not None]
        if not drafts:
            return None
        self._fed_last = False
        rows = tuple(_row(session, session.search_from, need_of(session), draft.depth) for session, draft in drafts)
        for session in chosen:
            self._serve(session)
        first = drafts[0][1]
        return Batch(rows, max(row.depth for row in rows), int(first.width), bool(first.calibrated), now)

    def _has_room(self, session: Session, by_force: bool) -> bool:
        return self._keeper.reserve(session, session.length, by_force=by_force)

    # ---- feeding ----

    def _feed(self, ordered: Sequence[Session], now: float) -> Batch | None:
        """One chunk: what the first ones lack, as far as it goes."""
        rows: list[BatchRow] = []
        left = self._max_feed
        for session in ordered:
            count = min(session.lag, left)
            if not session.feed and session.asked is None:
                continue  # it has just lost its room to a more urgent one; it is fed when it speaks
            if not count or not self._keeper.reserve(session, session.computed + count, by_force=not rows):
                continue
            rows.append(_row(session, session.computed, count, 0))
            self._serve(session)
            left -= count
            if not left or len(rows) == self._max_rows:
                break
        if not rows:
            return None
        self._fed_last = True
        return Batch(tuple(rows), 0, 1, True, now)

    def _serve(self, session: Session) -> None:
        session.flying = True
        session.target.served = self._turn
        self._turn += 1


def _row(session: Session, start: int, count: int, depth: int) -> BatchRow:
    tokens = session.text[start : start + count].copy()
    asked = session.asked.draft.round if session.asked is not None else session.round
    return BatchRow(
        session.target.id,
        session.number,
        session.epoch,
        int(asked),
        session.key,
        start,
        tokens,
        int(depth),
        session.sampling,
    )
