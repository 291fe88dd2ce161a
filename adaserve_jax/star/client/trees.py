"""Trees of one step: the requests sent, the answers received, and the candidates made of them.

Trees from a service are untrusted: one that does not fit its request is dropped, as if it had not come; `wire` has
checked what every tree must be. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from adaserve_jax.star.messages import Tree, along_paths, log_f_of
from adaserve_jax.tree.acceptance_table import ChanceTable, log_chances
from adaserve_jax.types import CandidateTrees, StepPlan

_INTEGERS = ("index", "token", "parent", "cell")


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """Tree asked of a service. row: of the plan; service: its number; depth, width: of the search; the other fields are
    those of `messages.Draft`; length counts the tokens sent with it."""

    row: int
    service: int
    session: int
    epoch: int
    round: int
    length: int
    depth: int
    width: int

    def matches(self, tree: Tree) -> bool:
        """Return whether `tree` answers this request; its contents are not checked."""
        return (tree.epoch, tree.round, tree.length, tree.width) == (self.epoch, self.round, self.length, self.width)


class DraftRound:
    """Requests and answers of one step. Changed only while the drafter's lock is held.

    pending: requests without an answer, by session. reopen: requests whose session must be reopened first. asked:
    services that were asked; replied: those that answered anything, even a refusal; unreadable: those that sent an
    unreadable answer; lost: those whose stream ended meanwhile. empty: number of trees without nodes. last_s: time of
    the last tree.
    """

    def __init__(self) -> None:
        self.pending: dict[int, TreeRequest] = {}
        self.answers: list[tuple[TreeRequest, Tree]] = []
        self.reopen: list[TreeRequest] = []
        self.asked: set[int] = set()
        self.replied: set[int] = set()
        self.unreadable: set[int] = set()
        self.lost: set[int] = set()
        self.empty = 0
        self.last_s = 0.0
        self._reopened: set[int] = set()

    @property
    def waits(self) -> bool:
        """Return whether a tree may still come and nothing has to be sent first."""
        return bool(self.pending) and not self.reopen

    def add(self, request: TreeRequest) -> None:
        self.pending[request.session] = request
        self.asked.add(request.service)

    def receive(self, service: int, tree: Tree, now: float) -> bool:
        """Take a tree; return False if nobody waits for it."""
        request = self.pending.get(tree.session)
        if request is None or request.service != service or not request.matches(tree):
            return False
        del self.pending[tree.session]
        self.replied.add(service)
        if not len(tree.index):
            self.empty += 1
            return True
        self.answers.append((request, tree))
        self.last_s = now
        return True

    def give_up(self, session: int, *, reopen: bool = False) -> None:
        """Stop waiting for a session's tree, which its service will not send.

        reopen: reopen the session and ask again, at most once per round.
        """
        request = self.pending.pop(session, None)
        if request is None:
            return
        self.replied.add(request.service)
        if reopen and session not in self._reopened:
            self._reopened.add(session)
            self.reopen.append(request)

    def reject(self, session: int) -> None:
        """Note that the answer for a session was unreadable; no tree of it will come."""
        request = self.pending.pop(session, None)
        if request is not None:
            self.unreadable.add(request.service)

    def lose(self, service: int) -> None:
        """Stop waiting for a service whose stream has ended."""
        for session in [session for session, request in self.pending.items() if request.service == service]:
            del self.pending[session]
        self.reopen = [request for request in self.reopen if request.service != service]
        if service in self.asked:
            self.lost.add(service)

    def outcome(self, invalid: Iterable[TreeRequest]) -> tuple[set[int], set[int]]:
        """Return the services that sent a valid tree, and those that sent nothing usable on a live stream."""
        dropped = {id(request) for request in invalid}
        good = {request.service for request, _ in self.answers if id(request) not in dropped}
        unreadable = self.unreadable | {request.service for request, _ in self.answers if id(request) in dropped}
        return good, (self.asked - good - self.lost) & ((self.asked - self.replied) | unreadable)


class _Nodes(NamedTuple):
    """Nodes of some trees, one after another, all [N]. row, level: of each node; column, above: columns of the node and
    of its parent in the plan's layout, above -1 under the root."""

    row: np.ndarray
    level: np.ndarray
    column: np.ndarray
    above: np.ndarray
    token: np.ndarray
    cell: np.ndarray
    log_q: np.ndarray


class CandidateBuilder:
    """Builds candidates from trees. vocabulary: token ids are below it. table: chances until `set_chances`."""

    def __init__(self, table: ChanceTable, vocabulary: int) -> None:
        _, self._depths, *cells = table.chance.shape
        self._cells_per_depth = cells[0] * cells[1]
        self._vocabulary = vocabulary
        self._log_chance = log_chances(table.chance).reshape(2, -1)

    def set_chances(self, chances: np.ndarray) -> None:
        """Replace the chances, f32[2, D, ranks, bins] like the table's."""
        self._log_chance = log_chances(chances).reshape(2, -1)

    def build(
        self, plan: StepPlan, answers: Sequence[tuple[TreeRequest, Tree]]
    ) -> tuple[CandidateTrees, list[TreeRequest]]:
        """Return the candidates of every decode row, none without an answer, and the requests whose trees were invalid.

        answers: at most one per row, in any order.
        """
        draft = plan.draft
        assert draft is not None
        rows, depth, width = plan.num_decode, draft.depth, draft.width
        valid = sorted(answers, key=lambda answer: answer[0].row)
        nodes = self._nodes(valid, width)
        if nodes is None:
            valid = [answer for answer in valid if self._nodes([answer], width) is not None]
            nodes = self._nodes(valid, width)
            assert nodes is not None, "trees that are valid one by one are valid together"
        columns = depth * width
        at = nodes.row * columns + nodes.column
        flat = np.zeros((3, rows * columns), np.int32)
        flat[1:] = -1
        flat[:, at] = nodes.token, nodes.above, nodes.cell
        token, parent, cell = flat.reshape(3, rows, columns)
        log_q = np.full(rows * columns, -np.inf, np.float32)
        log_q[at] = nodes.log_q
        shape = (rows, depth, width)
        if draft.calibrated:
            coupled = plan.sampling.temperature[:rows] > 0
            log_f = log_f_of(cell.reshape(shape), parent.reshape(shape), self._log_chance, coupled)
        else:
            log_f = along_paths(log_q.reshape(shape), parent.reshape(shape))
        log_f, log_q = log_f.reshape(rows, columns), log_q.reshape(rows, columns)
        kept = {id(request) for request, _ in valid}
        invalid = [request for request, _ in answers if id(request) not in kept]
        return CandidateTrees(token, parent, log_f, _levels(depth, width), cell, log_q), invalid

    def _nodes(self, answers: Sequence[tuple[TreeRequest, Tree]], width: int) -> _Nodes | None:
        """Return the nodes of trees, in the order of their rows; None if any tree is invalid."""
        if not answers:
            none = np.zeros(0, np.int32)
            return _Nodes(none, none, none, none, none, none, np.zeros(0, np.float32))
        sizes = [len(tree.index) for _, tree in answers]
        asked = np.array([(request.row, request.depth, request.width) for request, _ in answers], np.int32)
        row, depth, own_width = asked.repeat(sizes, axis=0).T
        index, token, parent, cell = (
            np.concatenate([getattr(tree, name) for _, tree in answers]) for name in _INTEGERS
        )
        log_q = np.concatenate([tree.log_q for _, tree in answers])
        level, rank = np.divmod(index, own_width)
        level_above, rank_above = np.divmod(parent, own_width)
        column = level * width + rank
        above = np.where(parent < 0, -1, level_above * width + rank_above)
        valid = (
            (index >= 0) & (level < depth) & (parent >= -1) & (level_above == level - 1)
            & (token >= 0) & (token < self._vocabulary) & (log_q <= 0) & (log_q > -np.inf)
            & (cell >= 0) & (cell // self._cells_per_depth == np.minimum(level, self._depths - 1))
        )  # fmt: skip
        if not valid.all():
            return None
        stride = int((depth * width).max(initial=0))
        at = row * stride + column
        exists = np.zeros(int(at[-1]) + 1 if len(at) else 0, bool)
        exists[at] = True
        below = above >= 0
        if not exists[(row * stride + above)[below]].all():
            return None
        return _Nodes(row, level, column, above, token, cell, log_q)


@cache
def _levels(depth: int, width: int) -> np.ndarray:
    """Return the level of each column, from 1: i32[depth * width], shared and read-only."""
    levels = np.repeat(np.arange(1, depth + 1, dtype=np.int32), width)
    levels.setflags(write=False)
    return levels
