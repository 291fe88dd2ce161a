"""A target that writes given texts: an executor that lets it draw only the next token of a reference.

The embedded target is too small to follow an instruction such as "rewrite this file". Replay makes the tokens those
of a real reference, while everything else stays real: the forwards, the trees, the drafts and the times. A node on
the reference's path draws its next token; other nodes draw freely. The forced draw is the engine's own second draw
from edited logits, so that every policy pays for it alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.types import DraftTrees, LogitEdits, StepOutcome, StepPlan


@dataclass(frozen=True)
class Reference:
    """A text to write. prompt_tokens: length of its prompt. token_ids: i32[n], the output."""

    prompt_tokens: int
    token_ids: np.ndarray


class Replay:
    """References by the seeds of their requests. `observe` is an argument of `LocalEngine`."""

    def __init__(self) -> None:
        self.references: dict[int, Reference] = {}

    def observe(self, executor: ModelExecutor) -> Any:
        """Return the executor with a `verify` that forces references."""
        return _Replaying(executor, self.references)


class _Replaying:
    def __init__(self, executor: ModelExecutor, references: dict[int, Reference]):
        self._executor = executor
        self._references = references
        self._words = -(-executor.target.config.vocab_size // 32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def verify(
        self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepOutcome:  # fmt: skip
        forced = self._forced(plan, trees)
        if not (forced >= 0).any():
            return self._executor.verify(plan, trees, edits, meanwhile)
        outcome = self._executor.verify(plan, trees, self._edits(plan, forced), meanwhile)
        return replace(outcome, edited=None, logprobs=None)  # so that the engine learns from what it sees

    def _forced(self, plan: StepPlan, trees: DraftTrees) -> np.ndarray:
        """Return i32[N], the token to draw after each tree node and each prompt's end; -1: any."""
        of_row = [self._references.get(int(seed)) for seed in plan.sampling.seed]
        forced = np.full(trees.num_nodes, -1, np.int32)
        on_path = np.zeros(trees.num_nodes, bool)
        for node, (row, parent, depth) in enumerate(zip(trees.row, trees.parent, trees.depth, strict=True)):
            reference = of_row[row]
            if reference is None:
                continue
            place = int(plan.ctx_len[row]) + int(depth) + 1 - reference.prompt_tokens
            on_path[node] = parent < 0 or (on_path[parent] and trees.token[node] == forced[parent])
            if on_path[node] and place < len(reference.token_ids):
                forced[node] = reference.token_ids[place]
        ends = [of_row[plan.num_decode + index] for index in np.flatnonzero(plan.prefill_final)]
        firsts = [-1 if reference is None else int(reference.token_ids[0]) for reference in ends]
        return np.concatenate([forced, np.array(firsts, np.int32)])

    def _edits(self, plan: StepPlan, forced: np.ndarray) -> LogitEdits:
        rows, changed = plan.num_rows, forced >= 0
        allowed = np.full((len(forced), self._words), 0xFFFFFFFF, np.uint32)
        allowed[changed] = 0
        at = np.flatnonzero(changed)
        allowed[at, forced[at] // 32] = np.uint32(1) << (forced[at] % 32).astype(np.uint32)
        nothing = np.zeros(0, np.int32)
        return LogitEdits(
            np.zeros(rows, np.float32), np.zeros(rows, np.float32), np.ones(rows, np.float32), nothing, nothing,
            nothing, np.zeros(0, bool), np.zeros(0, np.float32), allowed, changed, np.full(rows, -1, np.int32),
        )  # fmt: skip
