"""Sessions of a target at its draft services: the text of each slot's request, its service, and what to send.

Builds frames; `drafter` sends them. Imports no jax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from adaserve_jax.sampling import RowSampling
from adaserve_jax.star.client.link import Link
from adaserve_jax.star.client.trees import DraftRound, TreeRequest
from adaserve_jax.star.messages import Close, Draft, FromTarget, Open, SessionSampling
from adaserve_jax.types import DraftPlan, StepPlan

_INITIAL_TOKENS = 256
"""Initial capacity of a session's text."""
QUEUE_WEIGHT = 200.0
BUSY_WEIGHT = 4.0
"""Weights in units of sessions: 5 ms of work waiting at a service count as one session of this target there, a device
that is always busy as four. A service's own numbers are up to `LOAD_EVERY_S` old; a target's sessions are known at
once, so many of them placed at a time spread."""

Frames = dict[int, list[FromTarget]]
"""Messages to send, by number of the link."""


class RemoteSession:
    """One request at the draft services.

    number: its name there. epoch, round: the last ones used, see `star.messages`. length: tokens of its text. sent: how
    many of them its service has. service: number of that service; None before the first. stream: generation of the
    stream in which the session was opened; -1 when it must be reopened. refused: services that refused it, with the
    time from which each may be asked again.
    """

    __slots__ = (
        "_tokens", "epoch", "length", "number", "refused", "round", "sampling", "sent", "service", "stream",
    )  # fmt: skip

    def __init__(self, number: int, sampling: SessionSampling) -> None:
        self.number = number
        self.sampling = sampling
        self.epoch = 0
        self.round = 0
        self.length = 0
        self.sent = 0
        self.service: int | None = None
        self.stream = -1
        self.refused: dict[int, float] = {}
        self._tokens = np.empty(_INITIAL_TOKENS, np.int32)

    def tokens(self, start: int = 0) -> np.ndarray:
        """Return a copy of the text from `start` on, i32[length - start]."""
        return self._tokens[start : self.length].copy()

    def write(self, start: int, tokens: np.ndarray) -> None:
        """Set the text to its first `start` <= length tokens and `tokens`. The session must be reopened if its service
        has another text or a longer one."""
        end = start + len(tokens)
        same = start
        if start < self.length:
            overlap = min(end, self.length)
            differs = np.flatnonzero(self._tokens[start:overlap] != tokens[: overlap - start])
            same = start + int(differs[0]) if len(differs) else overlap
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(end, 2 * len(self._tokens)))
        self._tokens[start:end] = tokens
        self.length = end
        if self.sent > same:
            self.stream = -1

    def is_prefix_of(self, tokens: np.ndarray) -> bool:
        """Return whether `tokens` begin with the whole text."""
        return len(tokens) >= self.length and np.array_equal(self._tokens[: self.length], tokens[: self.length])


class SessionTable:
    """Sessions by slot, from 0 to max_rows - 1."""

    def __init__(self, max_rows: int) -> None:
        self._sessions: list[RemoteSession | None] = [None] * max_rows
        self._opened = 0

    def __iter__(self) -> Iterator[RemoteSession]:
        return iter([session for session in self._sessions if session is not None])

    def update(self, plan: StepPlan) -> tuple[list[RemoteSession | None], list[RemoteSession]]:
        """Apply the tokens that a step feeds to the draft.

        A row fed from its beginning is a new request, unless its sampling and the whole text match the slot's session:
        then the same request is fed anew and its session goes on. Returns the session of each row, None where nothing
        is fed or the whole text is unknown; and the sessions that have ended because their slots were given to others.
        """
        draft = plan.draft
        assert draft is not None
        rows: list[RemoteSession | None] = []
        ended: list[RemoteSession] = []
        start = 0
        columns = (plan.slots.tolist(), draft.draft_ctx.tolist(), draft.catchup_counts.tolist())
        for row, (slot, known, count) in enumerate(zip(*columns, strict=True)):
            if not count:
                rows.append(None)
                continue
            tokens = draft.catchup_tokens[start : start + count]
            start += count
            session = self._sessions[slot]
            if session is not None and (known > session.length or known == 0):
                is_same = known == 0 and session.is_prefix_of(tokens)
                if not is_same or session.sampling != _sampling(plan.sampling, row):
                    ended.append(session)
                    session = self._sessions[slot] = None
            if session is None and known == 0:
                self._opened += 1
                session = self._sessions[slot] = RemoteSession(self._opened, _sampling(plan.sampling, row))
            if session is not None:
                session.write(known, tokens)
            rows.append(session)
        return rows, ended

    def remove(self, slot: int) -> RemoteSession | None:
        """Remove and return the session of a slot; None if it has none."""
        session, self._sessions[slot] = self._sessions[slot], None
        return session


def _sampling(rows: RowSampling[np.ndarray], row: int) -> SessionSampling:
    return SessionSampling(*(column[row].item() for column in rows))


def least_loaded(key: str, links: Iterable[Link]) -> Link | None:
    """Return the link of the least loaded service; ties go to the one that `key` prefers. None without any."""

    def cost(link: Link) -> tuple[float, int]:
        load = link.sessions + QUEUE_WEIGHT * link.load.queue_s + BUSY_WEIGHT * link.load.busy
        return load, -preference(key, link.address)

    return min(links, key=cost, default=None)


def preference(key: str, address: str) -> int:
    """Return the rendezvous hash of a key and a service, which does not depend on the other services."""
    return int.from_bytes(hashlib.blake2b(f"{key} {address}".encode(), digest_size=8).digest(), "big")


class SessionPlacer:
    """Places sessions on services and builds the messages that open, continue and close them.

    A session stays on its service until that one cannot be asked, refuses it or has no room for its text. moved: how
    often a session went to another service. Called with the drafter's lock held.
    """

    def __init__(self, links: Sequence[Link], target_id: str) -> None:
        self.moved = 0
        self._links = links
        self._target_id = target_id
        self._sessions: dict[int, RemoteSession] = {}

    def find(self, link: Link, number: int, epoch: int) -> RemoteSession | None:
        """Return the session of that number if it is open in the link's present stream with that epoch."""
        session = self._sessions.get(number)
        if session is None or (session.service, session.stream) != (link.number, link.generation):
            return None
        return session if session.epoch == epoch else None

    def close_all(self, frames: Frames) -> None:
        """Close every session."""
        for session in list(self._sessions.values()):
            self.close(session, frames)

    def request(
        self,
        rows: list[RemoteSession | None],
        ended: list[RemoteSession],
        draft: DraftPlan,
        this: DraftRound,
        now: float,
        give_up: float,
    ) -> Frames:
        """Build the frames of a step: close ended sessions, feed all rows, ask for the trees of those that speculate.

        rows, ended: as `SessionTable.update` returns them. this: receives the requests. give_up: clock time until which
        the step waits.
        """
        frames: Frames = {}
        for session in ended:
            self.close(session, frames)
        usable = {link.number: link for link in self._links if link.ready and link.breaker.allows(now)}
        speculates = draft.speculates.tolist() if draft.depth else []
        for row, session in enumerate(rows):
            link = None if session is None else self._place(session, usable, frames, now)
            if session is None or link is None:
                continue
            assert link.welcome is not None
            width = min(draft.width, link.welcome.max_width)
            searches = row < len(speculates) and speculates[row] and width
            room = link.welcome.max_context - session.length
            depth = min(draft.depth, link.welcome.max_depth, room) if searches else 0
            messages = frames.setdefault(link.number, [])
            self._open(session, link, messages)
            if depth or session.sent < session.length:
                messages.append(self._draft(session, draft, row, depth, width, give_up - now))
            if depth:
                name = (session.number, session.epoch, session.round)
                this.add(TreeRequest(row, link.number, *name, session.length, depth, width))
        return frames

    def retry(self, request: TreeRequest, draft: DraftPlan, this: DraftRound, frames: Frames, give_up_s: float) -> None:
        """Reopen the session of a request and ask for its tree once more."""
        session, link = self._sessions.get(request.session), self._links[request.service]
        if session is None or not link.ready:
            return
        messages = frames.setdefault(link.number, [])
        self._open(session, link, messages)
        messages.append(self._draft(session, draft, request.row, request.depth, request.width, give_up_s))
        this.add(replace(request, epoch=session.epoch, round=session.round))

    def close(self, session: RemoteSession, frames: Frames) -> None:
        """Remove the session from its service, and tell the service if it can be reached."""
        if session.service is None:
            return
        link = self._links[session.service]
        link.sessions -= 1
        if link.ready and session.epoch:
            frames.setdefault(link.number, []).append(Close(session.number))
        session.service, session.stream = None, -1
        self._sessions.pop(session.number, None)

    def _place(self, session: RemoteSession, usable: dict[int, Link], frames: Frames, now: float) -> Link | None:
        """Return the link of the session's service, after moving it if that one is unusable; None if all are."""
        refusing = {service for service, until in session.refused.items() if now < until}
        refusing |= {
            link.number
            for link in usable.values()
            if link.welcome is not None and session.length >= link.welcome.max_context  # no room for a tree
        }
        if session.service in usable and session.service not in refusing:
            return usable[session.service]
        moves = session.service is not None
        place = least_loaded(
            f"{self._target_id} {session.number}",
            (
                link
                for link in usable.values()
                if link.number not in refusing
                if link.welcome is not None and link.sessions < link.welcome.max_sessions
                if not moves or link.breaker.state == "closed"
            ),
        )
        if session.service in refusing:
            self.close(session, frames)  # its place there is free for others
        if place is None:
            return None
        if moves:
            self.moved += 1
            self.close(session, frames)
        session.service = place.number
        self._sessions[session.number] = session
        place.sessions += 1
        return place

    def _open(self, session: RemoteSession, link: Link, messages: list[FromTarget]) -> None:
        """Reopen the session unless it is open in the present stream."""
        if session.stream == link.generation:
            return
        session.epoch += 1
        session.stream = link.generation
        session.sent = session.length
        messages.append(Open(session.number, session.epoch, session.tokens(), session.sampling))

    def _draft(
        self, session: RemoteSession, draft: DraftPlan, row: int, depth: int, width: int, give_up_s: float
    ) -> Draft:
        """Build the session's next Draft, with the tokens that its service lacks."""
        session.round += 1
        base, session.sent = session.sent, session.length
        due_s = np.inf if draft.due_s is None or row >= len(draft.due_s) else float(draft.due_s[row])
        return Draft(
            session.number, session.epoch, session.round, base, session.tokens(base), depth, width, draft.calibrated,
            due_s, max(give_up_s, 0.0),
        )  # fmt: skip
