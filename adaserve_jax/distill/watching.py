"""From the steps to records: which sampled positions say what the target thought of a text, and when they are fetched.

Costs a step a few array operations, however many texts are watched. Knows no draft, and no device but by its promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from adaserve_jax.distill.records import Record, Recorder, Rows
from adaserve_jax.runtime.overruled import overruled
from adaserve_jax.scheduler.updates import StepUpdates
from adaserve_jax.types import CandidateTrees, DraftTrees, FinishReason, Request, StepOutcome, StepPlan

FINISHED = ("stop", "length")
"""Ends of texts that are learned from."""


class Promise(Protocol):
    """Rows on their way to the host."""

    def collect(self) -> Rows: ...


@dataclass(frozen=True, eq=False)
class Sampled:
    """M positions of one step. at: i32[M], indices of its sampled positions, tree nodes in packed order, then the ends
    of prompts in row order. row: i32[M], whose of choice_ids; position: i32[M], of the token that was fed, from 0 in
    its text."""

    choice_ids: Sequence[str]
    at: np.ndarray
    row: np.ndarray
    position: np.ndarray

    @classmethod
    def of(
        cls, plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome,
        choice_ids: Sequence[str], watched: np.ndarray, *, only_overruled: bool,
    ) -> Sampled:  # fmt: skip
        """The accepted nodes of the watched rows (bool[R]), roots among them, and the ends of their prompts; or only
        the nodes whose next token was none of those that the draft proposed there."""
        nodes = overruled(plan, trees, candidates, outcome) if only_overruled else np.flatnonzero(outcome.accepted)
        row = trees.row[nodes]
        position = plan.ctx_len[row] + trees.depth[nodes]
        final = np.flatnonzero(plan.prefill_final)
        if len(final) and not only_overruled:
            ends = plan.num_decode + final
            nodes = np.concatenate([nodes, trees.num_nodes + np.arange(len(final))])
            row = np.concatenate([row, ends])
            position = np.concatenate([position, plan.ctx_len[ends] + plan.prefill_counts[final] - 1])
        kept = watched[row]
        at, row, position = (part[kept].astype(np.int32) for part in (nodes, row, position))
        return cls(choice_ids, at, row, position)


@dataclass(frozen=True, eq=False)
class _Ended:
    """A text that is over. output: i32[tokens], all that it has beside its prompt."""

    choice_id: str
    reason: FinishReason | None
    output: np.ndarray


class Watcher:
    """Watches choices from their start to their end.

    capture: begins to fetch sampled positions of the last step, i32[M]. only_overruled: whether to ask for no others
    than those where the draft was wrong. left_out: choices of which no record was made, by reason.
    """

    def __init__(self, recorder: Recorder, capture: Callable[[np.ndarray], Promise], *, only_overruled: bool):
        self._recorder = recorder
        self._capture = capture
        self._only_overruled = only_overruled
        self._promised: tuple[Sampled, Promise] | None = None
        self._ended: list[_Ended] = []
        self.left_out: dict[str, int] = {}

    @property
    def rows_kept(self) -> int:
        """Since the start."""
        return self._recorder.kept

    @property
    def rows_lost(self) -> dict[str, int]:
        """Since the start, by reason."""
        return {"no_room": self._recorder.no_room, "not_finite": self._recorder.not_finite}

    @property
    def is_waiting(self) -> bool:
        """Whether `take_in` has something to do."""
        return self._promised is not None or bool(self._ended)

    def begin(self, choice: Request, tenant: str) -> None:
        self._recorder.begin(choice.request_id, choice.prompt_ids, draft=choice.draft, tenant=tenant)

    def drop(self, choice_id: str, reason: str) -> None:
        """A choice has ended outside a step. Nothing happens where it is not watched."""
        if choice_id in self._recorder:
            self._recorder.abandon(choice_id)
            self.leave_out(reason)

    def leave_out(self, reason: str, choices: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + choices

    def ask(
        self, plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome,
        choice_ids: Sequence[str],
    ) -> None:  # fmt: skip
        """Ask what the target thought in the step that has just been committed; `take_in` was called before."""
        watched = np.array([choice_id in self._recorder for choice_id in choice_ids], bool)
        if not watched.any():
            return
        only = self._only_overruled
        sampled = Sampled.of(plan, trees, candidates, outcome, choice_ids, watched, only_overruled=only)
        if len(sampled.at):
            self._promised = sampled, self._capture(sampled.at)

    def end(self, updates: StepUpdates) -> None:
        """These choices ended in that step."""
        for index, update in updates.ended.items():
            if update.request_id in self._recorder:
                state = updates.requests[index]
                output = state.token_ids[state.prompt_len : state.num_tokens]
                self._ended.append(_Ended(update.request_id, update.finish_reason, output))

    def take_in(self) -> list[Record]:
        """Fetch what was asked of the last step, and make records of the texts that ended in it."""
        promised, self._promised = self._promised, None
        if promised is not None:
            sampled, rows = promised[0], promised[1].collect()
            self._recorder.add_rows(sampled.choice_ids, sampled.row, sampled.position, rows)
        ended, self._ended = self._ended, []
        records = []
        for text in ended:
            self._recorder.output(text.choice_id, text.output.tolist())
            record = self._recorder.end(text.choice_id, keep=text.reason in FINISHED)
            if record is not None:
                records.append(record)
            else:
                self.leave_out("no_positions" if text.reason in FINISHED else str(text.reason))
        return records

    def stop(self, reason: str) -> None:
        """Forget everything; choices that are watched are left out."""
        self._promised, self._ended = None, []
        self.leave_out(reason, max(len(self._recorder), 1))
