"""`RemoteDrafter`, the drafter of a target without a draft of its own: it asks draft services for trees.

Drafts are optional: a row without a tree in time is decoded plainly, and its text is the target's own in any case. The
drafter never raises and has no thread: transports call back in theirs, and `propose` waits on a condition.
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
from adaserve_jax.star.client.link import Link, SessionMessage, Transport
from adaserve_jax.star.client.sessions import Frames, RemoteSession, SessionPlacer, SessionTable
from adaserve_jax.star.client.trees import CandidateBuilder, DraftRound, TreeRequest
from adaserve_jax.star.messages import Hello, Refused, Resync, Tree, Welcome, WireError
from adaserve_jax.stats import DrafterStats
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.types import CandidateTrees, DraftPlan, StepPlan

_log = logging.getLogger(__name__)

MIN_WAIT_ROUNDS = 2.0
"""A step waits at least so many usual rounds, even if a row's next token is due before."""
USUAL_WEIGHT = 0.2
"""Weight of the latest round in the usual round's moving average."""


class RemoteDrafter:
    """Implements `types.Drafter` with one or more draft services. wait_s: seconds that the last `propose` waited.

    Args:
        transports: one per service.
        config: deadline and required draft version, which is put into `hello`.
        table: acceptance table, whose chances hold until a plan brings others.
        max_rows: slots of the engine.
        vocabulary: token ids are below it.
        changed: condition on which `propose` waits; its lock guards all state.
        draw: uniform in [0, 1), for random waits.
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
        self._candidates = CandidateBuilder(table, vocabulary)
        self._table = SessionTable(max_rows)
        self._round = DraftRound()
        self._usual_s = 0.0
        self._stats = DrafterStats()
        self._links = [
            Link(number, transport, self._hello, self._changed, clock, draw, self._deliver, self._link_changed)
            for number, transport in enumerate(transports)
        ]
        self._placer = SessionPlacer(self._links, hello.target_id)

    def connect(self, timeout_s: float) -> Welcome | None:
        """Wait up to `timeout_s` until a service has admitted this target, and return the first one's Welcome.

        Returns None if none has; `propose` goes on trying.
        """
        until = self._clock() + timeout_s
        while True:
            self._connect_links()
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
        """Return whether any service may be asked now; connect where it is time to.

        While none may, plans need no drafts: the next plan with a draft brings what the rows have become.
        """
        self._connect_links()
        with self._changed:
            now = self._clock()
            return any(link.ready and link.breaker.allows(now) for link in self._links)

    def propose(self, plan: StepPlan) -> CandidateTrees:
        """Send the rows' new tokens, and wait up to `longest_s` for the trees of those that speculate.

        Rows without a tree in time have no candidates.
        """
        assert plan.draft is not None
        self.wait_s = 0.0
        try:
            return self._propose(plan, plan.draft)
        except Exception:
            with self._changed:
                self._stats.errors += 1
                if self._stats.errors == 1:  # later ones are likely the same, step after step
                    _log.exception("step %d: drafting failed; it is decoded without", plan.step)
                for session in self._table:
                    session.stream = -1
            return CandidateTrees.empty(plan.num_decode)

    def ended(self, slots: np.ndarray) -> None:
        """Close the sessions of slots, i32[n], whose requests have ended."""
        frames: Frames = {}
        with self._changed:
            for slot in slots.tolist():
                session = self._table.remove(slot)
                if session is not None:
                    self._placer.close(session, frames)
        self._send(frames)

    def stats(self) -> DrafterStats:
        """Return counts since the start, and the present state of the services; connect where it is time to, so that an
        idle target comes back to a service that was away."""
        self._connect_links()
        with self._changed:
            links = self._links
            return replace(
                self._stats,
                moved=self._placer.moved,
                lost=sum(link.lost for link in links),
                refused=self._stats.refused + sum(link.refused for link in links),
                breaker_opens=sum(link.breaker.opens for link in links),
                services={link.address: link.state() for link in links},
            )

    def count_anew(self) -> None:
        """Reset the counts of rounds."""
        with self._changed:
            self._stats = DrafterStats()

    def close(self) -> None:
        """Close all sessions and streams."""
        frames: Frames = {}
        with self._changed:
            self._placer.close_all(frames)
        self._send(frames)
        for link in self._links:
            link.close()

    def longest_s(self, draft: DraftPlan) -> float:
        """Return the longest time that this step waits: the deadline, or less if a row's next token is due before.

        It is never below MIN_WAIT_ROUNDS usual rounds, because the step was planned with a draft.
        """
        most = self._config.deadline_s
        if draft.due_s is None or not len(draft.due_s) or not self._usual_s:
            return most
        slack_s = float(draft.due_s.min()) - self._hello.verify_s
        return min(most, max(slack_s, MIN_WAIT_ROUNDS * self._usual_s))

    def _propose(self, plan: StepPlan, draft: DraftPlan) -> CandidateTrees:
        started = self._clock()
        with self._changed:
            rows, ended = self._table.update(plan)
        if draft.chances is not None:
            self._candidates.set_chances(draft.chances)
        self._connect_links()
        give_up = started + self.longest_s(draft)
        with self._changed:
            this = self._round = DraftRound()
            frames = self._placer.request(rows, ended, draft, this, started, give_up)
        self._send(frames)
        if not this.asked:
            return CandidateTrees.empty(plan.num_decode)
        self._wait(draft, this, give_up)
        with self._changed:
            self._round = DraftRound()  # a tree that comes from now on is late
        found, invalid = self._candidates.build(plan, this.answers)
        with self._changed:
            self._count(this, invalid, started, give_up)
        return found if this.answers else CandidateTrees.empty(plan.num_decode)

    def _wait(self, draft: DraftPlan, this: DraftRound, give_up: float) -> None:
        """Wait until no tree is pending, or until `give_up`; reopen sessions that services ask for meanwhile."""
        while True:
            frames: Frames = {}
            with self._changed:
                began = now = self._clock()
                while this.waits and now < give_up:
                    self._changed.wait(give_up - now)
                    now = self._clock()
                self.wait_s += now - began
                self._stats.wait_s += now - began
                if now >= give_up or not this.reopen:
                    return
                for request in this.reopen:
                    self._placer.retry(request, draft, this, frames, give_up - now)
                this.reopen = []
            self._send(frames)

    def _count(self, this: DraftRound, invalid: list[TreeRequest], started: float, give_up: float) -> None:
        """Count a finished round, update the breakers and the usual round. An empty tree counts as a late one."""
        stats, now = self._stats, self._clock()
        stats.rounds += 1
        stats.trees += len(this.answers) - len(invalid)
        stats.invalid += len(invalid)
        stats.late += len(this.pending) + this.empty
        if this.answers:
            stats.round_s += this.last_s - started
        good, bad = this.outcome(invalid)
        for number in good:
            self._links[number].worked()
        for number in bad:
            self._links[number].breaker.bad(now)
        if this.pending or this.empty:  # a round takes at least this long, so the next wait is twice this one
            self._usual_s = max(self._usual_s, (give_up if this.empty else now) - started)
        elif this.answers:
            taken_s = this.last_s - started
            self._usual_s += (taken_s - self._usual_s) * (USUAL_WEIGHT if self._usual_s else 1.0)

    def _connect_links(self) -> None:
        for link in self._links:
            link.connect_if_due()

    def _send(self, frames: Frames) -> None:
        for number, frame in frames.items():
            if frame:
                self._links[number].send(frame)

    def _deliver(self, link: Link, message: SessionMessage) -> None:
        """Handle a message about a session. Called by links with the lock held, in threads of their transports."""
        stats, this = self._stats, self._round
        if isinstance(message, Tree):
            if not this.receive(link.number, message, self._clock()):
                stats.stale += 1
        else:
            session = self._placer.find(link, message.session, message.epoch)
            if isinstance(message, WireError):
                stats.invalid += 1
                if session is not None:
                    this.reject(message.session)
            elif session is None:
                stats.stale += 1
            elif isinstance(message, Resync):
                stats.resyncs += 1
                session.stream = -1
                this.give_up(session.number, reopen=True)
            else:
                stats.refused += 1
                self._refuse(session, link.number, message)
                this.give_up(session.number)
        if not this.waits:
            self._changed.notify_all()

    def _refuse(self, session: RemoteSession, service: int, refused: Refused) -> None:
        session.stream = -1
        session.refused[service] = self._clock() + refused.retry_after_s if refused.retry_after_s else np.inf

    def _link_changed(self, link: Link) -> None:
        """Note that a stream has begun or ended. Called by links with the lock held."""
        if not link.ready:
            self._round.lose(link.number)
        self._changed.notify_all()
