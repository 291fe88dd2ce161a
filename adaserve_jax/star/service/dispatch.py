"""Order of the device's work: Drafts by deadline, compatible ones together, long texts fed in chunks in between.

No thread, clock or device: `Dispatcher.next` takes the sessions with work and returns one batch. Source: StarSD,
section 4.1, which serves first come, first served, one by one; docs/architecture/star.md lists the departures.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adaserve_jax.star.messages import SessionSampling
from adaserve_jax.star.service.kv_manager import KvManager
from adaserve_jax.star.service.limits import BatchTimes, DraftLimits
from adaserve_jax.star.service.session import DraftSession, TargetState


@dataclass(frozen=True, eq=False)
class DraftBatchRow:
    """One session of a batch. key: of its KV (`KvAllocator`). tokens: i32[n], n >= 1, fed at positions `start` on.
    depth: of the tree that its Draft of this round asked for; 0: only fed."""

    target_id: str
    session: int
    epoch: int
    round: int
    key: int
    start: int
    tokens: np.ndarray
    depth: int
    sampling: SessionSampling


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """Work of the device for one run. Either every row is searched or none (depth 0). depth: of the deepest tree;
    width, calibrated: of all rows. started_s: when it was handed out."""

    rows: tuple[DraftBatchRow, ...]
    depth: int
    width: int
    calibrated: bool
    started_s: float


class Dispatcher:
    """Chooses batches.

    batching: False takes one session at a time. tie_s: Drafts whose deadlines fall into the same span of so many
    seconds are equally urgent; then the target that was served least recently goes first.
    """

    def __init__(self, limits: DraftLimits, kv: KvManager, *, batching: bool, tie_s: float):
        self._max_feed = limits.max_feed
        self._kv = kv
        self._max_rows = limits.max_rows if batching else 1
        self._search_batcher = _SearchBatcher(BatchTimes(limits), self._max_rows, limits.max_feed)
        self._tie_s = tie_s
        self._turn = 0
        self._fed_last = False

    def is_late(self, session: DraftSession, now: float) -> bool:
        """Return whether the session's tree cannot be ready before its target gives up."""
        assert session.pending is not None
        return now + self._search_batcher.alone_s(session) > session.pending.give_up_s

    def give_up(self, session: DraftSession) -> None:
        """Give up the session's Draft; the caller answers it.

        If the session's own lag was the reason, not others before it, the lag goes on being fed among the waiting
        Drafts, so that a later Draft finds it done.
        """
        pending = session.pending
        assert pending is not None
        is_long = pending.received_s + self._search_batcher.alone_s(session) > pending.give_up_s
        session.needs_feed = session.lag > 0
        session.feed_deadline_s = pending.deadline_s if session.needs_feed and is_long else None

    def next(self, sessions: Iterable[DraftSession], now: float) -> DraftBatch | None:
        """Return the next batch of sessions that have work and are not on the device."""
        searches: list[DraftSession] = []
        catching_up: list[tuple[float, int, DraftSession]] = []  # too much to feed in one batch; with deadlines
        feeds: list[DraftSession] = []
        for session in sessions:
            if session.pending is not None and session.search_feed <= self._max_feed:
                searches.append(session)
            elif session.pending is not None:
                catching_up.append((session.pending.deadline_s, session.key, session))
            elif session.feed_deadline_s is not None:
                catching_up.append((session.feed_deadline_s, session.key, session))
            else:
                feeds.append(session)
        searches = self._in_order(searches, now)
        long = [session for *_, session in sorted(catching_up)]
        first_due = searches[0].pending.deadline_s if searches and searches[0].pending else math.inf
        if searches and (not long or self._fed_last or first_due <= min(catching_up)[0]):
            batch = self._search(searches, now) or self._feed(long, now)
        else:
            batch = self._feed(long, now) or self._search(searches, now)
        if batch is None and feeds:
            return self._feed(sorted(feeds, key=lambda session: (session.last_message_s, session.key)), now)
        return batch

    def work_s(self, waiting: Sequence[DraftSession]) -> float:
        """Return the seconds of work of the waiting Drafts: each alone, over the rows of a batch."""
        alone_s = (self._search_batcher.alone_s(session) for session in waiting if session.pending is not None)
        return sum(alone_s) / self._max_rows

    # ---- searches ----

    def _in_order(self, waiting: list[DraftSession], now: float) -> list[DraftSession]:
        """Sort by deadline. Among equal or overdue deadlines targets take turns, the least recently served first."""
        spans: dict[float, dict[TargetState, list[DraftSession]]] = {}
        for session in sorted(waiting, key=lambda session: session.urgency):
            assert session.pending is not None
            deadline_s = max(session.pending.deadline_s, now)
            span = deadline_s / self._tie_s if self._tie_s else deadline_s
            span = math.floor(span) if self._tie_s and math.isfinite(span) else span
            spans.setdefault(span, {}).setdefault(session.target, []).append(session)
        ordered: list[DraftSession] = []
        for span in sorted(spans):
            by_target = spans[span]
            turns = [(target.last_turn, at, target, 0) for at, target in enumerate(by_target)]
            heapq.heapify(turns)
            turn = self._turn
            while turns:
                _, at, target, taken = heapq.heappop(turns)
                ordered.append(by_target[target][taken])
                if taken + 1 < len(by_target[target]):
                    heapq.heappush(turns, (turn, at, target, taken + 1))
                turn += 1
        return ordered

    def _search(self, ordered: Sequence[DraftSession], now: float) -> DraftBatch | None:
        """Search for the most urgent session that gets KV, and for those that can go with it."""
        chosen = self._search_batcher.choose(ordered, now, self._reserve)
        drafts = [(session, session.pending.draft) for session in chosen if session.pending is not None]
        if not drafts:
            return None
        self._fed_last = False
        rows = tuple(_row(session, session.search_from, session.search_feed, draft.depth) for session, draft in drafts)
        for session in chosen:
            self._take_turn(session)
        first = drafts[0][1]
        return DraftBatch(rows, max(row.depth for row in rows), first.width, first.calibrated, now)

    def _reserve(self, session: DraftSession, force: bool) -> bool:
        return self._kv.reserve(session, session.length, force=force)

    # ---- feeding ----

    def _feed(self, ordered: Sequence[DraftSession], now: float) -> DraftBatch | None:
        """Feed one chunk of what the first sessions lack."""
        rows: list[DraftBatchRow] = []
        left = self._max_feed
        for session in ordered:
            count = min(session.lag, left)
            if not session.needs_feed and session.pending is None:
                continue  # it has just lost its KV to a more urgent one; it is fed at its next message
            if not count or not self._kv.reserve(session, session.computed + count, force=not rows):
                continue
            rows.append(_row(session, session.computed, count, 0))
            self._take_turn(session)
            left -= count
            if not left or len(rows) == self._max_rows:
                break
        if not rows:
            return None
        self._fed_last = True
        return DraftBatch(tuple(rows), 0, 1, True, now)

    def _take_turn(self, session: DraftSession) -> None:
        session.running = True
        session.target.last_turn = self._turn
        self._turn += 1


def _row(session: DraftSession, start: int, count: int, depth: int) -> DraftBatchRow:
    tokens = session.text[start : start + count].copy()
    number = session.pending.draft.round if session.pending is not None else session.round
    return DraftBatchRow(
        session.target.id,
        session.number,
        session.epoch,
        number,
        session.key,
        start,
        tokens,
        depth,
        session.sampling,
    )


class _SearchGroup(NamedTuple):
    """Sessions searched together. tokens: fed for them; depth: of the deepest tree; give_up_s: the earliest one;
    takes_s, alone_s: seconds of all together, and of one after another."""

    sessions: tuple[DraftSession, ...] = ()
    tokens: int = 0
    depth: int = 0
    give_up_s: float = math.inf
    takes_s: float = 0.0
    alone_s: float = 0.0


class _SearchBatcher:
    """Chooses which Drafts are searched together: only if no row finishes later than one after another, and each in
    time. Its sessions have waiting Drafts."""

    def __init__(self, times: BatchTimes, max_rows: int, max_feed: int):
        self._times, self._max_rows, self._max_feed = times, max_rows, max_feed

    def alone_s(self, session: DraftSession) -> float:
        """Return the seconds of a session's lag and search in a batch of its own."""
        return self._added(_SearchGroup(), session).takes_s

    def choose(
        self, ordered: Sequence[DraftSession], now: float, reserve: Callable[[DraftSession, bool], bool]
    ) -> list[DraftSession]:
        """Choose the first session that gets KV, and those after it that can go with it.

        The longest beginning of the order that helps is taken. A session that makes the group slower than one after
        another is passed over, with others of the same work.

        ordered: sessions, the most urgent first. reserve: reserves KV for a session, by force for the first one; called
        for chosen sessions only.
        """
        first = next((at for at, s in enumerate(ordered) if s.search_feed <= self._max_feed and reserve(s, True)), None)
        if first is None:
            return []
        group = self._added(_SearchGroup(), ordered[first])
        waiting = [session for session in ordered[first + 1 :] if _kind(session) == _kind(ordered[first])]
        while waiting and len(group.sessions) < self._max_rows:
            largest, best, seen = self._extended(group, waiting, now)
            lacking = [session for session in best.sessions[len(group.sessions) :] if not reserve(session, False)]
            if lacking:
                waiting = [session for session in waiting if session not in lacking]
            elif seen:
                group, waiting = best, waiting[seen:]
            elif len(largest.sessions) > len(group.sessions):
                work = _work(largest.sessions[len(group.sessions)])
                waiting = [session for session in waiting if _work(session) != work]
            else:
                break
        return list(group.sessions)

    def _extended(
        self, group: _SearchGroup, waiting: Sequence[DraftSession], now: float
    ) -> tuple[_SearchGroup, _SearchGroup, int]:
        """Return the group with all sessions that fit in time; the largest group on the way that is no slower than one
        after another; and how many of `waiting` were looked at for that."""
        largest = best = group
        seen = 0
        for position, session in enumerate(waiting, 1):
            if len(largest.sessions) == self._max_rows:
                break
            added = self._added(largest, session)
            if added.tokens > self._max_feed or now + added.takes_s > added.give_up_s:
                continue
            largest = added
            if largest.takes_s <= largest.alone_s:
                best, seen = largest, position
        return largest, best, seen

    def _added(self, group: _SearchGroup, session: DraftSession) -> _SearchGroup:
        pending, fed, times = session.pending, session.search_feed, self._times
        assert pending is not None
        draft = pending.draft
        sessions, tokens, depth = (*group.sessions, session), group.tokens + fed, max(group.depth, draft.depth)
        return _SearchGroup(
            sessions, tokens, depth, min(group.give_up_s, pending.give_up_s),
            times.feed_s(tokens) + times.search_s(len(sessions), depth, draft.width),
            group.alone_s + times.feed_s(fed) + times.search_s(1, draft.depth, draft.width),
        )  # fmt: skip


def _kind(session: DraftSession) -> tuple[int, bool]:
    """Return the properties that all rows of a batch share."""
    assert session.pending is not None
    return session.pending.draft.width, session.pending.draft.calibrated


def _work(session: DraftSession) -> tuple[int, int]:
    """Return the properties that determine what a session adds to a batch's time."""
    assert session.pending is not None
    return session.pending.draft.depth, session.search_feed
