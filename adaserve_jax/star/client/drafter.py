"""The drafter of a target that has no draft of its own: it asks draft services, and waits no longer than is worth it.

What it cannot get in time it goes without: the text is the target's own in any case. It never raises, and keeps no
thread: transports call back in theirs, and `propose` waits on a condition for them.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.star.client.answers import Answers, Asked, Round
from adaserve_jax.star.client.link import AboutSession, Link, Transport
from adaserve_jax.star.client.mirror import Mirror, Session
from adaserve_jax.star.messages import Close, Draft, FromTarget, Hello, Open, Refused, Resync, Tree, Welcome, WireError
from adaserve_jax.stats import DrafterStats
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.types import CandidateTrees, DraftPlan, StepPlan

# Which of several draft services a session goes to: the least loaded, and always the same among equals.
#
# A session stays where it is; only one whose service cannot be asked is placed anew. Pure.

QUEUE_WEIGHT = 200.0
BUSY_WEIGHT = 4.0
"""In sessions: 5 ms of work that waits at a service count as one session of this target there, and a device that works
all the time as four. What a service says of itself is up to `LOAD_EVERY_S` old; a target's own sessions are known at
once, so that many of them placed at a time spread."""


@dataclass(frozen=True)
class Place:
    """A service that can be asked. number: whose the caller knows it by; queue_s, busy: as it said last; sessions: of
    this target there."""

    number: int
    address: str
    queue_s: float
    busy: float
    sessions: int

    @property
    def load(self) -> float:
        """In sessions of this target."""
        return self.sessions + QUEUE_WEIGHT * self.queue_s + BUSY_WEIGHT * self.busy


def choose(key: str, places: Iterable[Place]) -> int | None:
    """The number of the least loaded place, of equals that which `key` prefers to all others; None without any."""
    best = min(places, key=lambda place: (place.load, -preference(key, place.address)), default=None)
    return None if best is None else best.number


def preference(key: str, address: str) -> int:
    """Rendezvous hashing: how much `key` likes a service; does not depend on which others there are."""
    return int.from_bytes(hashlib.blake2b(f"{key} {address}".encode(), digest_size=8).digest(), "big")


# What draft services are told of a target's rows: where each session is, what opens, continues and closes it.
#
# Only puts frames together; `star.remote` sends them, and waits. Its lock holds for all of this.

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


_log = logging.getLogger(__name__)

PATIENCE = 2.0
"""How many times the usual round a step waits, though a row's next token is due before."""
USUAL_RATE = 0.2
"""Weight of the latest round in what is usual."""


class RemoteDrafter:
    """Implements `types.Drafter` with one or more draft services.

    transports: one for each service. hello: how the target introduces itself; `config.drafter_version` goes into it.
    table: the acceptance table, whose chances hold until a plan brings others. max_rows: slots of the engine.
    vocabulary: token ids are below it. clock: seconds. changed: what `propose` waits on, and the lock of it all. draw:
    uniform in [0, 1), for waits. wait_s: seconds that the last call of `propose` waited.
    """

    def __init__(
        self, transports: Sequence[Transport], config: DrafterConfig, *, hello: Hello, table: ChanceTable,
        max_rows: int, vocabulary: int = 2**31 - 1, clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None, draw: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        self.wait_s = 0.0
        self._config = config
        self._hello = replace(hello, draft_version=config.drafter_version or hello.draft_version)
        self._clock = clock
        self._changed = changed or threading.Condition()
        self._answers = Answers(table, vocabulary)
        self._mirror = Mirror(max_rows)
        self._round = Round()
        self._usual_s = 0.0
        self._stats = DrafterStats()
        self._links = [
            Link(number, transport, self._hello, self._changed, clock, draw, self._deliver, self._link_changed)
            for number, transport in enumerate(transports)
        ]
        self._telling = Telling(self._links, hello.target_id)

    def connect(self, timeout_s: float) -> Welcome | None:
        """Wait until a service has admitted this target, at most so long, and return its Welcome: that of the first of
        them. None: none has, and `propose` goes on trying."""
        until = self._clock() + timeout_s
        while True:
            self._keep()
            with self._changed:
                welcomes = [link.welcome for link in self._links if link.ready]
                if welcomes:
                    return welcomes[0]
                now, next_s = self._clock(), min(link.retry_s for link in self._links)
                if now >= until or (next_s > until and all(link.is_idle for link in self._links)):
                    return None
                self._changed.wait(max(min(until, next_s) - now, 0.0))

    @property
    def available(self) -> bool:
        """Whether any service may be asked now; connects where it is time to. Whoever plans need not ask for drafts
        while none can be: what the rows become meanwhile, the next plan with a draft brings."""
        self._keep()
        with self._changed:
            now = self._clock()
            return any(link.ready and link.breaker.allows(now) for link in self._links)

    def propose(self, plan: StepPlan) -> CandidateTrees:
        """Tell the services what the rows have become, and wait for the trees of those that speculate: `longest_s` at
        most. Rows without a tree in time have no candidates."""
        assert plan.draft is not None
        self.wait_s = 0.0
        try:
            return self._propose(plan, plan.draft)
        except Exception:
            with self._changed:
                self._stats.errors += 1
                if self._stats.errors == 1:  # the others are likely the same, step after step
                    _log.exception("step %d: drafting failed; it is decoded without", plan.step)
                for session in self._mirror.sessions():
                    session.stream = -1
            return CandidateTrees.empty(plan.num_decode)

    def ended(self, slots: np.ndarray) -> None:
        """The requests in these slots, i32[n], have ended: their sessions are closed."""
        frames: Frames = {}
        with self._changed:
            for slot in slots.tolist():
                session = self._mirror.drop(slot)
                if session is not None:
                    self._telling.close(session, frames)
        self._send(frames)

    def stats(self) -> DrafterStats:
        """Counts since the start, and the services as of now."""
        with self._changed:
            links = self._links
            return replace(
                self._stats,
                moved=self._telling.moved,
                lost=sum(link.lost for link in links),
                refused=self._stats.refused + sum(link.refused for link in links),
                breaker_opens=sum(link.breaker.opens for link in links),
                services={link.address: link.state() for link in links},
            )

    def count_anew(self) -> None:
        """Forget the rounds that were counted until now."""
        with self._changed:
            self._stats = DrafterStats()

    def close(self) -> None:
        """Close all sessions and streams."""
        frames: Frames = {}
        with self._changed:
            self._telling.close_all(frames)
        self._send(frames)
        for link in self._links:
            link.close()

    def longest_s(self, draft: DraftPlan) -> float:
        """Longest that this step waits: the deadline; less where a row's next token is due before, but never less
        than PATIENCE usual rounds, without which the step would not have been planned with a draft."""
        most = self._config.deadline_s
        if draft.due_s is None or not len(draft.due_s) or not self._usual_s:
            return most
        slack_s = float(draft.due_s.min()) - self._hello.verify_s
        return min(most, max(slack_s, PATIENCE * self._usual_s))

    def _propose(self, plan: StepPlan, draft: DraftPlan) -> CandidateTrees:
        started = self._clock()
        with self._changed:
            rows, gone = self._mirror.follow(plan)
        if draft.chances is not None:
            self._answers.use(draft.chances)
        self._keep()
        give_up = started + self.longest_s(draft)
        with self._changed:
            this = self._round = Round()
            frames = self._telling.tell(rows, gone, draft, this, started, give_up)
        self._send(frames)
        if not this.places:
            return CandidateTrees.empty(plan.num_decode)
        self._wait(draft, this, give_up)
        with self._changed:
            self._round = Round()  # what comes from now on is late
        found, invalid = self._answers.candidates(plan, this.answers)
        with self._changed:
            self._learn(this, invalid, started, give_up)
        return found if this.answers else CandidateTrees.empty(plan.num_decode)

    def _wait(self, draft: DraftPlan, this: Round, give_up: float) -> None:
        """Until no tree is waited for any more, or until `give_up`."""
        while True:
            frames: Frames = {}
            with self._changed:
                began = now = self._clock()
                while this.waits and now < give_up:
                    self._changed.wait(give_up - now)
                    now = self._clock()
                self.wait_s += now - began
                self._stats.wait_s += now - began
                if now >= give_up or not this.again:
                    return
                for asked in this.again:
                    self._telling.ask_again(asked, draft, this, frames, give_up - now)
                this.again = []
            self._send(frames)

    def _learn(self, this: Round, invalid: list[Asked], started: float, give_up: float) -> None:
        """Count a round, tell the breakers, and note how long rounds take. A tree that the service could not have ready
        is a late one, though nobody had to wait for it."""
        stats, now = self._stats, self._clock()
        stats.rounds += 1
        stats.trees += len(this.answers) - len(invalid)
        stats.invalid += len(invalid)
        stats.late += len(this.pending) + this.empty
        if this.answers:
            stats.round_s += this.last_s - started
        good, bad = this.judged(invalid)
        for number in good:
            self._links[number].worked()
        for number in bad:
            self._links[number].breaker.bad(now)
        if this.pending or this.empty:  # no round takes less, so the next wait is twice this one
            self._usual_s = max(self._usual_s, (give_up if this.empty else now) - started)
        elif this.answers:
            took_s = this.last_s - started
            self._usual_s += (took_s - self._usual_s) * (USUAL_RATE if self._usual_s else 1.0)

    def _keep(self) -> None:
        for link in self._links:
            link.keep()

    def _send(self, frames: Frames) -> None:
        for number, frame in frames.items():
            if frame:
                self._links[number].send(frame)

    def _deliver(self, link: Link, message: AboutSession) -> None:
        """Called by links, with the lock, in threads of their transports."""
        stats, this = self._stats, self._round
        if isinstance(message, WireError):
            stats.invalid += 1
            if self._telling.present(link, message.session, message.epoch) is not None:
                this.spoil(message.session)
        elif isinstance(message, Tree):
            if not this.take(link.number, message, self._clock()):
                stats.stale += 1
        else:
            session = self._telling.present(link, message.session, message.epoch)
            if session is None:
                stats.stale += 1
            elif isinstance(message, Resync):
                stats.resyncs += 1
                session.stream = -1
                this.give_up(session.number, again=True)
            else:
                stats.refused += 1
                self._refuse(session, link.number, message)
                this.give_up(session.number)
        if not this.waits:
            self._changed.notify_all()

    def _refuse(self, session: Session, place: int, refused: Refused) -> None:
        session.stream = -1
        session.refused[place] = self._clock() + refused.retry_after_s if refused.retry_after_s else np.inf

    def _link_changed(self, link: Link) -> None:
        """A stream has begun or ended; called by links, with the lock."""
        if not link.ready:
            self._round.lose(link.number)
        self._changed.notify_all()
