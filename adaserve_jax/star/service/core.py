"""`DraftCore`, the draft service without device and connections: sessions, order of batches, and answers.

It is deterministic: no thread, clock, device or gRPC. Its owner calls it from one thread at a time: `receive` with what
targets send, `next_batch` and `done` around each batch of the device, `expire` now and then. Every method takes `now`,
seconds of a clock that never goes back; only `receive` may be given a time before the end of the latest batch. Frames
may also be received while a batch is on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from adaserve_jax.star.messages import FromService, FromTarget, Tree
from adaserve_jax.star.service.admission import TargetAdmission
from adaserve_jax.star.service.dispatch import Dispatcher, DraftBatch, DraftBatchRow
from adaserve_jax.star.service.kv_manager import KvAllocator, KvManager
from adaserve_jax.star.service.limits import DraftLimits, Quotas
from adaserve_jax.star.service.message_handler import MessageHandler
from adaserve_jax.star.service.registry import TargetRegistry
from adaserve_jax.star.service.session import DraftSession
from adaserve_jax.star.service.stats import CoreStats
from adaserve_jax.types import CandidateTrees

Replies = list[tuple[str, list[FromService]]]
"""Messages to send in one frame, by target."""
_TreeArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""index, token, parent, cell: i32[C]; log_q: f32[C]; as in `messages.Tree`."""
_NO_INTEGERS = np.zeros(0, np.int32)
_EMPTY: _TreeArrays = (_NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS, np.zeros(0, np.float32))


class DraftCore:
    """Sessions, order and answers of one draft service.

    batching, tie_s: as in `Dispatcher`. admission: decides which targets may connect; None: all may.
    """

    def __init__(
        self,
        limits: DraftLimits,
        kv: KvAllocator,
        *,
        quotas: Quotas | None = None,
        batching: bool = True,
        tie_s: float = 0.001,
        admission: TargetAdmission | None = None,
    ):
        self.limits = limits
        self.stats = CoreStats()
        self._admission = admission
        self._kv = KvManager(kv)
        self._dispatcher = Dispatcher(limits, self._kv, batching=batching, tie_s=tie_s)
        longest = min(limits.max_context, kv.capacity)
        quotas = quotas or Quotas()
        self._registry = TargetRegistry(limits, quotas, self._kv, self.stats)
        self._handler = MessageHandler(self._registry, limits, quotas, longest, self.stats, admission)
        self._running: dict[int, DraftSession] = {}  # by key
        self._given_up: dict[str, list[FromService]] = {}

    # ---- state ----

    @property
    def sessions(self) -> list[DraftSession]:
        """Sessions of all targets; for reading only."""
        return self._registry.sessions

    @property
    def num_sessions(self) -> int:
        return self._registry.num_sessions

    @property
    def targets(self) -> list[str]:
        """Ids of the connected targets."""
        return self._registry.connected

    @property
    def num_waiting(self) -> int:
        """Number of Drafts that wait for a batch."""
        return len(self._waiting())

    @property
    def num_holding(self) -> int:
        """Number of sessions that hold KV, including closed ones on the device."""
        return len(self._kv)

    def backlog_s(self) -> float:
        """Return the seconds of waiting work by the measured times, over the rows of a batch."""
        return self._dispatcher.work_s(self._waiting())

    def _waiting(self) -> list[DraftSession]:
        return [s for s in self._registry.busy.values() if s.pending is not None and not s.running]

    # ---- targets ----

    def receive(self, target_id: str, messages: Sequence[FromTarget], now: float) -> list[FromService]:
        """Process one frame of a target that came at `now`, and return the immediate answers.

        Never raises: an invalid message ends its own session.
        """
        answers = (self._handler.handle(target_id, message, now) for message in messages)
        return [answer for answer in answers if answer is not None]

    def disconnect(self, target_id: str, now: float) -> None:
        """Drop the waiting Drafts of a target whose stream has ended.

        Its sessions stay until their leases end, so that it can come back to them.
        """
        self._registry.disconnect(target_id)
        if self._admission is not None:
            self._admission.leave(target_id)
        self._registry.expire(now)

    def expire(self, now: float) -> int:
        """End the sessions whose lease is over, and return their number."""
        return self._registry.expire(now)

    def stop(self) -> Replies:
        """Accept no more work; return the refusals for the connected targets."""
        refusal = self._handler.stop()
        return [(target_id, [refusal]) for target_id in self.targets]

    # ---- device ----

    def next_batch(self, now: float) -> DraftBatch | None:
        """Return the next batch, or None if nothing can run. Each is given back once, to `done` or `failed`.

        Drafts that cannot be ready in time are given up; `given_up` returns their answers.
        """
        ready = [session for session in self._registry.busy.values() if not session.running]
        for session in ready:
            if session.pending is not None and self._dispatcher.is_late(session, now):
                self._dispatcher.give_up(session)
                self._answer_empty(session, now, self._given_up)
                self._registry.update_busy(session)
                self.stats.expired += 1
        batch = self._dispatcher.next([session for session in ready if session.key in self._registry.busy], now)
        if batch is not None:
            self._running |= {row.key: self._registry.busy[row.key] for row in batch.rows}
        self.stats.evicted = self._kv.evicted
        return batch

    def given_up(self) -> Replies:
        """Return empty trees for the Drafts that `next_batch` gave up, each once."""
        replies, self._given_up = self._given_up, {}
        return list(replies.items())

    def done(self, batch: DraftBatch, trees: CandidateTrees | None, now: float) -> Replies:
        """Process the result of a batch that ended at `now`.

        trees: of its rows in their order, batch.depth levels of batch.width columns each, as `LocalDrafter` returns
        them; None if the batch had no search.
        """
        replies: dict[str, list[FromService]] = {}
        arrays = [_EMPTY] * len(batch.rows) if trees is None else _tree_arrays(batch, trees)
        for (row, session), tree in zip(self._end(batch), arrays, strict=True):
            if session.closed:
                continue
            session.commit_kv(row.start, row.tokens)
            self.stats.fed_tokens += len(row.tokens)
            if row.depth:
                self.stats.rounds += 1
                pending = session.pending
                if pending is not None and (session.epoch, pending.draft.round) == (row.epoch, row.round):
                    queue_s, service_s = batch.started_s - pending.received_s, now - batch.started_s
                    self._answer(session, batch.width, tree, queue_s, service_s, now, replies)
                    self.stats.trees += 1
                    self.stats.queue_s += queue_s
                else:
                    self.stats.stale += 1
            self._registry.update_busy(session)
        if self._admission is not None and batch.depth:
            self._admission.record_search(len(batch.rows), now - batch.started_s)
        return list(replies.items())

    def failed(self, batch: DraftBatch, now: float) -> Replies:
        """Process the failure of a batch, which left the KV of its rows below their `start` as it was.

        Waiting Drafts of its sessions get empty trees; the tokens are fed anew at the sessions' next messages.
        """
        replies: dict[str, list[FromService]] = {}
        for row, session in self._end(batch):
            if session.closed:
                continue
            session.drop_kv(row.start)
            self.stats.failed += session.pending is not None or row.depth > 0
            if session.pending is not None:
                self._answer_empty(session, now, replies)
            self._registry.update_busy(session)
        return list(replies.items())

    def _end(self, batch: DraftBatch) -> list[tuple[DraftBatchRow, DraftSession]]:
        """Take the batch off the device; return its rows and their sessions."""
        self.stats.batches += 1
        ended = [(row, self._running.pop(row.key)) for row in batch.rows]
        for _, session in ended:
            self._kv.batch_ended(session)
        return ended

    def _answer_empty(self, session: DraftSession, now: float, replies: dict[str, list[FromService]]) -> None:
        """Answer the waiting Draft with an empty tree."""
        pending = session.pending
        assert pending is not None
        self._answer(session, max(pending.draft.width, 1), _EMPTY, now - pending.received_s, 0.0, now, replies)

    def _answer(
        self, session: DraftSession, width: int, arrays: _TreeArrays, queue_s: float, service_s: float, now: float,
        replies: dict[str, list[FromService]],
    ) -> None:  # fmt: skip
        """Answer the waiting Draft, which is about the present text."""
        assert session.pending is not None
        draft, gives_up_s = session.pending.draft, session.pending.give_up_s
        name = session.number, session.epoch, draft.round
        tree = Tree(*name, session.length, width, *arrays, queue_s, service_s)
        session.answer, session.pending = (draft, tree), None
        session.answered_s = now if now <= gives_up_s else math.inf
        replies.setdefault(session.target.id, []).append(tree)


def _tree_arrays(batch: DraftBatch, trees: CandidateTrees) -> list[_TreeArrays]:
    """Return the present nodes of each row, cut to its own depth."""
    assert trees.cell is not None and trees.log_q is not None
    own = np.array([row.depth * batch.width for row in batch.rows])
    row, index = np.nonzero((trees.log_f > -np.inf) & (np.arange(trees.log_f.shape[1]) < own[:, None]))
    nodes = (
        index.astype(np.int32),
        *(part[row, index] for part in (trees.token, trees.parent, trees.cell, trees.log_q)),
    )
    ends = np.searchsorted(row, np.arange(len(own) + 1)).tolist()
    return [tuple(part[start:end] for part in nodes) for start, end in pairwise(ends)]  # type: ignore[misc]
