"""The drafter of a target that has no draft of its own: it asks draft services, and waits no longer than is worth it.

What it cannot get in time it goes without: the text is the target's own in any case. It never raises, and keeps no
thread: transports call back in theirs, and `propose` waits on a condition for them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.star.answers import Answers, Asked
from adaserve_jax.star.link import AboutSession, Link
from adaserve_jax.star.messages import Hello, Refused, Resync, Tree, Welcome, WireError
from adaserve_jax.star.mirror import Mirror, Session
from adaserve_jax.star.rounds import Round
from adaserve_jax.star.telling import Frames, Telling
from adaserve_jax.star.transport import Transport
from adaserve_jax.stats import DrafterStats
from adaserve_jax.tree.chances import ChanceTable
from adaserve_jax.types import CandidateTrees, DraftPlan, StepPlan

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
