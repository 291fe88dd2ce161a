"""The draft's part of a plan: which rows speculate, and which tokens the draft is fed."""

from __future__ import annotations

import numpy as np

from adaserve_jax.memory.residency import Residency
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.base import Decision
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import DraftPlan


class DraftPlanner:
    """Planner of the draft's part of a step, for a local draft or a draft service."""

    def __init__(
        self, batch: Batch, cost: CostTable, *, used: bool, calibrated: bool = True,
        calibrator: Calibrator | None = None, residency: Residency | None = None, several_drafts: bool = False,
        remote: bool = False,
    ):  # fmt: skip
        """Set up for one draft.

        cost: its limit of catch-up tokens bounds what the draft is fed in a step, or with a draft service what the step
        waits for; a service is fed any number of tokens while the target goes on. used: plans have a draft at all.
        calibrator: source of new chances, which plans carry to the draft. residency: whether the draft is on the
        device; None: always. several_drafts: plans name the draft model of each row. remote: a draft service drafts.
        """
        self._batch = batch
        self._limits = batch.limits
        self._cost = cost
        self.used = used
        """True if plans may have a draft."""
        self._calibrated = calibrated
        self._calibrator = calibrator
        self._residency = residency
        self._several_drafts = several_drafts
        self.remote = remote
        self.is_away = False
        """True while no draft service can be asked."""

    @property
    def is_resident(self) -> bool:
        """False from an expansion into the draft's memory until the draft is back."""
        return self._residency is None or self._residency.draft_is_here

    @property
    def can_draft(self) -> bool:
        """False while plans have a draft that cannot be asked now."""
        return not self.used or (self.is_resident and not self.is_away)

    def can_speculate(self, remaining: np.ndarray, lag: np.ndarray) -> np.ndarray:
        """Return bool[num_decode], rows that can use a draft.

        A row whose draft needs several steps to catch up decodes without a tree until then, and can use the draft only
        if tokens are left afterwards. remaining, lag: i64[num_decode], tokens to the end and tokens that the draft
        lacks.
        """
        if not (self.used and self.can_draft):
            return np.zeros(len(lag), bool)
        catching_up = (lag - 1) // self._cost.max_catchup_tokens
        return remaining > 1 + (np.minimum(catching_up, 1) if self.remote else catching_up)

    def lag_in_step(self, lag: np.ndarray) -> np.ndarray:
        """Return the part of the lag that a step waits for."""
        return np.minimum(lag, self._limits.max_depth + 1) if self.remote else lag

    def plan(
        self, decision: Decision, slots: np.ndarray, can_speculate: np.ndarray, lag: np.ndarray, chunks: list[int],
        due_s: np.ndarray | None,
    ) -> DraftPlan | None:  # fmt: skip
        """Return the draft's part of a step; None if the draft is neither searched nor fed.

        Rows that speculate are fed first, shortest lag first; then lagging rows, with half of what is left if prompts
        wait too; then the prefill chunks.

        slots: i64[R]. can_speculate: bool[num_decode]. lag: i64[num_decode], tokens that the draft lacks. chunks:
        prefill tokens of the last rows. due_s: f64[num_decode], as in `DraftPlan`.
        """
        if not (self.used and self.can_draft and (decision.depth or decision.feed_draft)):
            return None
        num_decode = len(slots) - len(chunks)
        counts = np.zeros(len(slots), np.int64)
        speculates = np.zeros(num_decode, bool)
        room = self._cost.max_catchup_tokens
        if decision.depth:
            speculates = self._speculating(slots[:num_decode], can_speculate, lag, decision.depth)
            np.multiply(lag, speculates, out=counts[:num_decode])
            room -= int(counts.sum())
        if self.remote:
            room = len(slots) * self._limits.max_context
        if decision.depth and np.count_nonzero(speculates) < num_decode:
            lagging = room // 2 if chunks else room
            behind = can_speculate & ~speculates & (lag > 1)
            for index in behind.nonzero()[0].tolist():
                counts[index] = min(int(lag[index]), lagging)
                lagging -= int(counts[index])
                room -= int(counts[index])
        draft_ctx = self._batch.table.draft_computed[slots]
        if decision.feed_draft and chunks:
            behind = self._batch.table.num_computed[slots] - draft_ctx
            for index, chunk in enumerate(chunks, num_decode):
                ahead = 1 if self._limits.draft_is_head else chunk
                counts[index] = min(int(behind[index]) + ahead, room)
                room -= int(counts[index])
        if not np.count_nonzero(counts):
            return None
        return DraftPlan(
            depth=decision.depth if np.count_nonzero(speculates) else 0,
            width=max(decision.width, 1),
            catchup_tokens=self._batch.table.gather(slots, draft_ctx, counts),
            catchup_counts=counts.astype(np.int32),
            draft_ctx=draft_ctx.astype(np.int32),
            speculates=speculates,
            calibrated=self._calibrated,
            chances=self._calibrator.unsent if self._calibrator is not None else None,
            drafts=self._batch.table.draft[slots] if self._several_drafts else None,
            due_s=due_s,
        )

    def _speculating(self, slots: np.ndarray, can: np.ndarray, lag: np.ndarray, depth: int) -> np.ndarray:
        """Return bool[num_decode], rows whose lag fits this step's catch-up and that hold the pages of their trees."""
        speculates, most = can, self._cost.max_catchup_tokens
        if int(lag.sum()) > most:
            order = np.argsort(np.where(speculates, lag, most + 1), kind="stable")
            fits = speculates[order] & (np.cumsum(lag[order]) <= most)
            speculates = np.zeros(len(lag), bool)
            speculates[order] = fits
        table = self._batch.table
        # the deepest node that selection may take is emitted beside one more token
        ends = np.minimum(table.num_tokens[slots] + depth, table.max_total[slots] - 1)
        rows = speculates.nonzero()[0]
        holds = self._batch.reserve_for_trees(slots[rows], ends[rows])
        if np.count_nonzero(holds) == len(rows):
            return speculates
        got = np.zeros(len(lag), bool)
        got[rows] = holds
        return got
