"""The draft service without its device and its connections: what is said to it, what runs next, what it answers.

`DraftCore` is deterministic: no thread, no clock, no device, no gRPC. Who owns one calls it from one thread at a
time: `receive` for what targets say, `next_batch` and `done` around each batch of the device, `expire` now and then.
Every method takes `now`, seconds of one clock that never goes back; only what is received may have come before the
latest batch ended. Frames may also be received while a batch is on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from adaserve_jax.star.messages import FromService, FromTarget, Tree
from adaserve_jax.star.service.admission import Admission
from adaserve_jax.star.service.dispatch import Batch, BatchRow, Dispatcher
from adaserve_jax.star.service.limits import DraftLimits, Quotas
from adaserve_jax.star.service.reception import Reception
from adaserve_jax.star.service.registry import Keeper, Registry, Room
from adaserve_jax.star.service.session import CoreStats, Session
from adaserve_jax.types import CandidateTrees

Answers = list[tuple[str, list[FromService]]]
"""By target, what to send it in one frame."""
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""index, token, parent, cell: i32[C]; log_q: f32[C]; as in `messages.Tree`."""
_NONE = np.zeros(0, np.int32)
_NOTHING: Columns = (_NONE, _NONE, _NONE, _NONE, np.zeros(0, np.float32))


class DraftCore:
    """Sessions, order and answers of one draft service. room: KV for its sessions. batching: whether several sessions
    go to the device at once. tie_s: as of `Dispatcher`. admission: who may come; None: everybody."""

    def __init__(
        self,
        limits: DraftLimits,
        room: Room,
        *,
        quotas: Quotas | None = None,
        batching: bool = True,
        tie_s: float = 0.001,
        admission: Admission | None = None,
    ):
        self.limits = limits
        self.stats = CoreStats()
        self._admission = admission
        self._keeper = Keeper(room)
        self._dispatcher = Dispatcher(limits, self._keeper, batching=batching, tie_s=tie_s)
        longest = min(limits.max_context, room.capacity)
        quotas = quotas or Quotas()
        self._registry = Registry(limits, quotas, self._keeper, self.stats)
        self._reception = Reception(self._registry, limits, quotas, longest, self.stats, admission)
        self._flying: dict[int, Session] = {}  # by key
        self._given_up: dict[str, list[FromService]] = {}

    # ---- what is going on ----

    @property
    def num_sessions(self) -> int:
        return self._registry.num_sessions

    @property
    def targets(self) -> list[str]:
        """Ids of the connected targets."""
        return self._registry.connected

    @property
    def num_waiting(self) -> int:
        """Drafts that wait for a batch."""
        return sum(session.asked is not None and not session.flying for session in self._registry.busy.values())

    @property
    def num_holding(self) -> int:
        """Sessions that hold KV, with closed ones that are on the device."""
        return len(self._keeper)

    def backlog_s(self) -> float:
        """Seconds of work that waits: each Draft as long as `level_s` and `catchup_s` say, over the rows of a batch."""
        waiting = [s for s in self._registry.busy.values() if s.asked is not None and not s.flying]
        return self._dispatcher.takes_s(waiting)

    # ---- what targets say ----

    def receive(self, target_id: str, messages: Sequence[FromTarget], now: float) -> list[FromService]:
        """Take one frame of a target in, which came at `now`; returns what to answer at once. Never raises: what makes
        no sense ends its own session."""
        return self._reception.receive(target_id, messages, now)

    def gone(self, target_id: str, now: float) -> None:
        """Its stream has ended. What it waits for is dropped; its sessions stay until their leases end, for it to come
        back to."""
        self._reception.gone(target_id)
        self._registry.expire(now)

    def expire(self, now: float) -> int:
        """End sessions that have said nothing for a lease; returns how many."""
        return self._registry.expire(now)

    def stop(self) -> Answers:
        """Nothing more is taken on: says so to all that are connected, and from now on to whoever comes."""
        refusal = self._reception.stop()
        return [(target_id, [refusal]) for target_id in self.targets]

    # ---- the device ----

    def next_batch(self, now: float) -> Batch | None:
        """What to run now; None when nothing can. Each is given back once, to `done` or `failed`. What is given up for
        lack of time is answered by `given_up`."""
        ready = [session for session in self._registry.busy.values() if not session.flying]
        for session in ready:
            if session.asked is not None and self._dispatcher.is_late(session, now):
                self._dispatcher.give_up(session)
                self._nothing(session, now, self._given_up)
                self._registry.note(session)
                self.stats.expired += 1
        batch = self._dispatcher.next([session for session in ready if session.key in self._registry.busy], now)
        if batch is not None:
            self._flying |= {row.key: self._registry.busy[row.key] for row in batch.rows}
        self.stats.evicted = self._keeper.evicted
        return batch

    def given_up(self) -> Answers:
        """Empty trees for the Drafts that `next_batch` gave up, so that nobody waits for them; each once."""
        answers, self._given_up = self._given_up, {}
        return list(answers.items())

    def done(self, batch: Batch, trees: CandidateTrees | None, now: float) -> Answers:
        """A batch has run. trees: of its rows in their order, of batch.depth levels and batch.width columns each, as
        `LocalDrafter` gives them; None where none was searched."""
        answers: dict[str, list[FromService]] = {}
        nodes = [_NOTHING] * len(batch.rows) if trees is None else _found(batch, trees)
        for (row, session), found in zip(self._land(batch), nodes, strict=True):
            if session.closed:
                continue
            session.fed(row.start, row.tokens)
            self.stats.fed_tokens += len(row.tokens)
            if row.depth:
                self.stats.rounds += 1
                self._answer(batch, row, session, found, now, answers)
            self._registry.note(session)
        if self._admission is not None and batch.depth:
            self._admission.served(len(batch.rows), now - batch.started_s)
        return list(answers.items())

    def failed(self, batch: Batch, now: float) -> Answers:
        """A batch could not run, and left the KV of its rows below their `start` as it was. Who waits for a tree of its
        sessions is answered an empty one; the tokens are fed again when they speak."""
        answers: dict[str, list[FromService]] = {}
        for row, session in self._land(batch):
            if session.closed:
                continue
            session.unfed(row.start)
            self.stats.failed += session.asked is not None or row.depth > 0
            if session.asked is not None:
                self._nothing(session, now, answers)
            self._registry.note(session)
        return list(answers.items())

    def _land(self, batch: Batch) -> list[tuple[BatchRow, Session]]:
        """The batch is off the device: its rows and their sessions."""
        self.stats.batches += 1
        landed = [(row, self._flying.pop(row.key)) for row in batch.rows]
        for _, session in landed:
            self._keeper.landed(session)
        return landed

    def _nothing(self, session: Session, now: float, answers: dict[str, list[FromService]]) -> None:
        """Answer the Draft that waits with an empty tree."""
        asked = session.asked
        assert asked is not None
        times = now - asked.received_s, 0.0
        width = max(asked.draft.width, 1)
        tree = Tree(session.number, session.epoch, asked.draft.round, session.length, width, *_NOTHING, *times)
        session.answered, session.answered_s, session.asked = (asked.draft, tree), now, None
        answers.setdefault(session.target.id, []).append(tree)

    def _answer(
        self,
        batch: Batch,
        row: BatchRow,
        session: Session,
        columns: Columns,
        now: float,
        answers: dict[str, list[FromService]],
    ) -> None:
        """Answer the row's Draft, if it is still wanted."""
        asked = session.asked
        if asked is None or session.epoch != row.epoch or asked.draft.round != row.round:
            self.stats.stale += 1
            return
        length = row.start + len(row.tokens)
        times = batch.started_s - asked.received_s, now - batch.started_s
        tree = Tree(session.number, session.epoch, row.round, length, batch.width, *columns, *times)
        session.answered, session.answered_s, session.asked = (asked.draft, tree), now, None
        self.stats.trees += 1
        self.stats.queue_s += times[0]
        answers.setdefault(row.target_id, []).append(tree)


def _found(batch: Batch, trees: CandidateTrees) -> list[Columns]:
    """Of each row the nodes that are there, of its own levels."""
    assert trees.cell is not None and trees.log_q is not None
    own = np.array([row.depth * batch.width for row in batch.rows])
    row, index = np.nonzero((trees.log_f > -np.inf) & (np.arange(trees.log_f.shape[1]) < own[:, None]))
    nodes = (
        index.astype(np.int32),
        *(part[row, index] for part in (trees.token, trees.parent, trees.cell, trees.log_q)),
    )
    ends = np.searchsorted(row, np.arange(len(own) + 1)).tolist()
    return [tuple(part[start:end] for part in nodes) for start, end in pairwise(ends)]  # type: ignore[misc]
