"""Candidate trees from what draft services answer: checked, put into the plan's columns, with log f of this target.

A service is believed in nothing: a tree that makes no sense is left out, as if it had not come. Imports no jax.
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
class Asked:
    """One tree that was asked for. row: of the plan; place: number of the service; depth, width: of the search; the
    others as in `messages.Draft`, length with the tokens sent."""

    row: int
    place: int
    session: int
    epoch: int
    round: int
    length: int
    depth: int
    width: int

    def is_answered_by(self, tree: Tree) -> bool:
        """Whether the tree is the one that was asked for, whatever it holds."""
        return (tree.epoch, tree.round, tree.length, tree.width) == (self.epoch, self.round, self.length, self.width)


Answer = tuple[Asked, Tree]


class _Nodes(NamedTuple):
    """The nodes of some trees, one after another, all [N]. row, level: of each; column, above: of each node and its
    parent in the plan's columns of that row, above -1 under the root."""

    row: np.ndarray
    level: np.ndarray
    column: np.ndarray
    above: np.ndarray
    token: np.ndarray
    cell: np.ndarray
    log_q: np.ndarray


class Answers:
    """Makes candidates of answers. vocabulary: token ids are below it. The chances are those of `table` until others
    are given."""

    def __init__(self, table: ChanceTable, vocabulary: int) -> None:
        _, self._depths, *cells = table.chance.shape
        self._cells_per_depth = cells[0] * cells[1]
        self._vocabulary = vocabulary
        self._log_chance = log_chances(table.chance).reshape(2, -1)

    def use(self, chances: np.ndarray) -> None:
        """Take these chances from now on, f32[2, D, ranks, bins] as the table's."""
        self._log_chance = log_chances(chances).reshape(2, -1)

    def candidates(self, plan: StepPlan, answers: Sequence[Answer]) -> tuple[CandidateTrees, list[Asked]]:
        """The candidates of every decode row, none where there is no answer; and whose answers made no sense. answers:
        at most one for each row, in any order."""
        draft = plan.draft
        assert draft is not None
        rows, depth, width = plan.num_decode, draft.depth, draft.width
        readable = sorted((answer for answer in answers if _is_readable(answer[1])), key=lambda answer: answer[0].row)
        nodes = self._nodes(readable, width)
        if nodes is None:
            readable = [answer for answer in readable if self._nodes([answer], width) is not None]
            nodes = self._nodes(readable, width)
            assert nodes is not None, "trees that make sense one by one do so together"
        columns = depth * width
        at = nodes.row * columns + nodes.column
        whole = np.zeros((3, rows * columns), np.int32)
        whole[1:] = -1
        whole[:, at] = nodes.token, nodes.above, nodes.cell
        token, parent, cell = whole.reshape(3, rows, columns)
        log_q = np.full(rows * columns, -np.inf, np.float32)
        log_q[at] = nodes.log_q
        shape = (rows, depth, width)
        if draft.calibrated:
            coupled = plan.sampling.temperature[:rows] > 0
            log_f = log_f_of(cell.reshape(shape), parent.reshape(shape), self._log_chance, coupled)
        else:
            log_f = along_paths(log_q.reshape(shape), parent.reshape(shape))
        flat = (rows, columns)
        found = CandidateTrees(token, parent, log_f.reshape(flat), _levels(depth, width), cell, log_q.reshape(flat))
        sound = {id(asked) for asked, _ in readable}
        return found, [asked for asked, _ in answers if id(asked) not in sound]

    def _nodes(self, answers: Sequence[Answer], width: int) -> _Nodes | None:
        """The nodes of readable trees, in the order of their rows; None when any of the trees makes no sense."""
        if not answers:
            none = np.zeros(0, np.int32)
            return _Nodes(none, none, none, none, none, none, np.zeros(0, np.float32))
        sizes = [len(tree.index) for _, tree in answers]
        about = np.array([(asked.row, asked.depth, asked.width) for asked, _ in answers], np.int32).repeat(
            sizes, axis=0
        )
        row, depth, own_width = about.T
        index, token, parent, cell = (
            np.concatenate([getattr(tree, name) for _, tree in answers]) for name in _INTEGERS
        )
        log_q = np.concatenate([tree.log_q for _, tree in answers])
        level, rank = np.divmod(index, own_width)
        level_above, rank_above = np.divmod(parent, own_width)
        column = level * width + rank
        above = np.where(parent < 0, -1, level_above * width + rank_above)
        sound = (
            (index >= 0) & (level < depth) & (parent >= -1) & (level_above == level - 1)
            & (token >= 0) & (token < self._vocabulary) & (log_q <= 0) & (log_q > -np.inf)
            & (cell >= 0) & (cell // self._cells_per_depth == np.minimum(level, self._depths - 1))
        )  # fmt: skip
        if not sound.all():
            return None
        stride = int((depth * width).max(initial=0))
        at = row * stride + column
        if (at[1:] <= at[:-1]).any():
            return None
        there = np.zeros(int(at[-1]) + 1 if len(at) else 0, bool)
        there[at] = True
        below = above >= 0
        if not there[(row * stride + above)[below]].all():
            return None
        return _Nodes(row, level, column, above, token, cell, log_q)


def _is_readable(tree: Tree) -> bool:
    """Whether the parts of a tree are lists of the same length, of the types that they must have."""
    shape = (len(tree.index),)
    integers = all(
        part.shape == shape and part.dtype == np.int32 for part in (tree.index, tree.token, tree.parent, tree.cell)
    )
    return integers and tree.log_q.shape == shape and tree.log_q.dtype == np.float32


@cache
def _levels(depth: int, width: int) -> np.ndarray:
    """i32[depth * width], the level of each column, from 1; shared, so not to be written to."""
    levels = np.repeat(np.arange(1, depth + 1, dtype=np.int32), width)
    levels.setflags(write=False)
    return levels


# One round: what a step asked of the draft services, and what became of it until it stopped waiting.


class Round:
    """Asked trees by session, those that are still waited for and those that came; changed with the drafter's lock.

    again: those whose session has to be opened anew first. last_s: when the last tree came, on the clock. known: places
    that said anything of what they were asked, were it a refusal; garbled: those that said what cannot be read; lost:
    those whose stream ended meanwhile. empty: trees that came without nodes.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Asked] = {}
        self.answers: list[Answer] = []
        self.again: list[Asked] = []
        self.places: set[int] = set()
        self.known: set[int] = set()
        self.garbled: set[int] = set()
        self.lost: set[int] = set()
        self.empty = 0
        self.last_s = 0.0
        self._reopened: set[int] = set()

    @property
    def waits(self) -> bool:
        """Whether a tree may still come, and nothing has to be sent first."""
        return bool(self.pending) and not self.again

    def ask(self, asked: Asked) -> None:
        self.pending[asked.session] = asked
        self.places.add(asked.place)

    def take(self, place: int, tree: Tree, now: float) -> bool:
        """Whether the tree, which came from that place, was waited for; then it is kept, unless it is empty."""
        asked = self.pending.get(tree.session)
        if asked is None or asked.place != place or not asked.is_answered_by(tree):
            return False
        del self.pending[tree.session]
        self.known.add(place)
        if not len(tree.index):
            self.empty += 1
            return True
        self.answers.append((asked, tree))
        self.last_s = now
        return True

    def give_up(self, session: int, *, again: bool = False) -> None:
        """Wait no longer for a session's tree, since its service said that there will be none. again: unless the
        session is opened anew, which is done once in a round."""
        asked = self.pending.pop(session, None)
        if asked is None:
            return
        self.known.add(asked.place)
        if again and session not in self._reopened:
            self._reopened.add(session)
            self.again.append(asked)

    def spoil(self, session: int) -> None:
        """What came for a session cannot be read: no tree of it comes any more."""
        asked = self.pending.pop(session, None)
        if asked is not None:
            self.garbled.add(asked.place)

    def lose(self, place: int) -> None:
        """That place's stream has ended."""
        for session in [session for session, asked in self.pending.items() if asked.place == place]:
            del self.pending[session]
        self.again = [asked for asked in self.again if asked.place != place]
        if place in self.places:
            self.lost.add(place)

    def judged(self, invalid: Iterable[Asked]) -> tuple[set[int], set[int]]:
        """Places that brought a tree that makes sense, and those that brought nothing, though their stream stood."""
        unsound = {id(asked) for asked in invalid}
        good = {asked.place for asked, _ in self.answers if id(asked) not in unsound}
        garbled = self.garbled | {asked.place for asked, _ in self.answers if id(asked) in unsound}
        return good, (self.places - good - self.lost) & ((self.places - self.known) | garbled)
