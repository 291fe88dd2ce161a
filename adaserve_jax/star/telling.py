"""What draft services are told of a target's rows: where each session is, what opens, continues and closes it.

Only puts frames together; `star.remote` sends them, and waits. Its lock holds for all of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from adaserve_jax.star.answers import Asked
from adaserve_jax.star.link import Link
from adaserve_jax.star.messages import Close, Draft, FromTarget, Open
from adaserve_jax.star.mirror import Session
from adaserve_jax.star.placement import Place, choose
from adaserve_jax.star.rounds import Round
from adaserve_jax.types import DraftPlan

Frames = dict[int, list[FromTarget]]
"""What to send, by number of the link."""


class Telling:
    """Sessions at the services of a target. moved: how often one went to another service."""

    def __init__(self, links: Sequence[Link], target_id: str) -> None:
        self.moved = 0
        self._links = links
        self._target_id = target_id
        self._sessions: dict[int, Session] = {}

    def present(self, link: Link, number: int, epoch: int) -> Session | None:
        """The session of that number, if that is its service, in its present stream, and its present epoch."""
        session = self._sessions.get(number)
        if session is None or (session.place, session.stream) != (link.number, link.generation):
            return None
        return session if session.epoch == epoch else None

    def close_all(self, frames: Frames) -> None:
        """Close every session."""
        for session in list(self._sessions.values()):
            self.close(session, frames)

    def tell(
        self, rows: list[Session | None], gone: list[Session], draft: DraftPlan, this: Round, now: float, give_up: float
    ) -> Frames:
        """What to send for the rows of a plan, and of sessions that are no more; what is asked for stands in `this`."""
        frames: Frames = {}
        for session in gone:
            self.close(session, frames)
        usable = {link.number: link for link in self._links if link.ready and link.breaker.allows(now)}
        searched = draft.speculates.tolist() if draft.depth else []
        for row, session in enumerate(rows):
            link = None if session is None else self._home(session, usable, frames, now)
            if session is None or link is None:
                continue
            assert link.welcome is not None
            width = min(draft.width, link.welcome.max_width)
            searches = row < len(searched) and searched[row] and width
            depth = min(draft.depth, link.welcome.max_depth) if searches else 0
            if session.length + depth > link.welcome.max_context:
                continue
            messages = frames.setdefault(link.number, [])
            self._open(session, link, messages)
            if depth or session.told < session.length:
                messages.append(self._draft(session, draft, row, depth, width, give_up - now))
            if depth:
                name = (session.number, session.epoch, session.round)
                this.ask(Asked(row, link.number, *name, session.length, depth, width))
        return frames

    def ask_again(self, asked: Asked, draft: DraftPlan, this: Round, frames: Frames, give_up_s: float) -> None:
        """Open a session anew, and ask for its tree once more."""
        session, link = self._sessions.get(asked.session), self._links[asked.place]
        if session is None or not link.ready:
            return
        messages = frames.setdefault(link.number, [])
        self._open(session, link, messages)
        messages.append(self._draft(session, draft, asked.row, asked.depth, asked.width, give_up_s))
        this.ask(replace(asked, epoch=session.epoch, round=session.round))

    def close(self, session: Session, frames: Frames) -> None:
        """Tell its service, if it can be told, that nobody needs the session any more."""
        if session.place is None:
            return
        link = self._links[session.place]
        link.sessions -= 1
        if link.ready and session.epoch:
            frames.setdefault(link.number, []).append(Close(session.number))
        session.place, session.stream = None, -1
        self._sessions.pop(session.number, None)

    def _home(self, session: Session, usable: dict[int, Link], frames: Frames, now: float) -> Link | None:
        """The link of a session's service, which is another one if its own cannot be asked, or has refused it; None:
        nobody can be."""
        refusing = {place for place, until in session.refused.items() if now < until}
        if session.place in usable and session.place not in refusing:
            return usable[session.place]
        moves = session.place is not None
        number = choose(
            f"{self._target_id} {session.number}",
            (
                Place(link.number, link.address, link.load.queue_s, link.load.busy, link.sessions)
                for link in usable.values()
                if link.number not in refusing
                if link.welcome is not None and link.sessions < link.welcome.max_sessions
                if not moves or link.breaker.state == "closed"
            ),
        )
        if session.place in refusing:
            self.close(session, frames)  # it has no place there that others could not have
        if number is None:
            return None
        if moves:
            self.moved += 1
            self.close(session, frames)
        session.place = number
        self._sessions[session.number] = session
        usable[number].sessions += 1
        return usable[number]

    def _open(self, session: Session, link: Link, messages: list[FromTarget]) -> None:
        """Open a session anew unless the present stream has it open."""
        if session.stream == link.generation:
            return
        session.epoch += 1
        session.stream = link.generation
        session.told = session.length
        messages.append(Open(session.number, session.epoch, session.tokens(), *session.sampling))

    def _draft(self, session: Session, draft: DraftPlan, row: int, depth: int, width: int, give_up_s: float) -> Draft:
        """The session's next Draft, with what its service does not have of the text."""
        session.round += 1
        base, session.told = session.told, session.length
        due_s = np.inf if draft.due_s is None or row >= len(draft.due_s) else float(draft.due_s[row])
        return Draft(
            session.number, session.epoch, session.round, base, session.tokens(base), depth, width, draft.calibrated,
            due_s, max(give_up_s, 0.0),
        )  # fmt: skip
