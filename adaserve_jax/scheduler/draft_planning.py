"""The draft's part of a step: which rows may speculate, which do, and what the draft is fed. Runs nothing."""

from __future__ import annotations

import numpy as np

from adaserve_jax.memory.residency import Residency
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.calibration import Calibrator
from adaserve_jax.scheduler.controllers.base import Decision
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import DraftPlan


class DraftPlanner:
    """Plans for one draft, here or a service's.

    cost: whose limit of catch-up tokens, asked in each step, is the most that the draft is fed in it, or that it waits
    for where the draft is remote, which is fed any number while the target goes on. used: whether plans have a draft at
    all. calibrated: of the draft's f. calibrator: whose new chances plans carry. residency: where the draft is; None:
    here, always. several_drafts: whether plans say which draft is each row's. remote: whether a draft service drafts.
    """

    def __init__(
        self, batch: Batch, cost: CostTable, *, used: bool, calibrated: bool = True,
        calibrator: Calibrator | None = None, residency: Residency | None = None, several_drafts: bool = False,
        remote: bool = False,
    ):  # fmt: skip
        self._batch = batch
        self._limits = batch.limits
        self._cost = cost
        self._used = used
        self._calibrated = calibrated
        self._calibrator = calibrator
        self._residency = residency
        self._several_drafts = several_drafts
        self.remote = remote
        self.is_away = False
        """Whether nobody could draft now, where that is another's to say."""

    @property
    def is_resident(self) -> bool:
        """Whether its memory is its own: False from when that became KV pages until the draft is back."""
        return self._residency is None or self._residency.draft_is_here

    @property
    def can_draft(self) -> bool:
        """Whether it can be asked now, where there is one."""
        return self.is_resident and not self.is_away

    def can_speculate(self, remaining: np.ndarray, lag: np.ndarray) -> np.ndarray:
        """bool[num_decode]. A row whose draft lags by more than one step can catch up decodes plainly until it has.
        remaining, lag: i64[num_decode], tokens to the end and tokens that the draft lacks."""
        if not (self._used and self.can_draft):
            return np.zeros(len(lag), bool)
        catching_up = (lag - 1) // self._cost.max_catchup_tokens
        return remaining > 1 + (np.minimum(catching_up, 1) if self.remote else catching_up)

    def lag_in_step(self, lag: np.ndarray) -> np.ndarray:
        """As much of it as a step waits for."""
        return np.minimum(lag, self._limits.max_depth + 1) if self.remote else lag

    def plan(
        self, decision: Decision, slots: np.ndarray, can_speculate: np.ndarray, lag: np.ndarray, chunks: list[int],
        due_s: np.ndarray | None,
    ) -> DraftPlan | None:  # fmt: skip
        """Those that speculate are fed first, shortest lag first; then the lagging rows, with half of what is left when
        prompts wait too; then the prefill chunks. slots: i64[R]. lag: i64[num_decode]. due_s: f64[num_decode], seconds
        until each row's next token is due, where the draft is remote."""
        if not (self._used and self.can_draft and (decision.depth or decision.feed_draft)):
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
                counts[index] = min(int(behind[index]) + chunk, room)
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
        """bool[num_decode]: rows that can, whose lag fits this step's catch-up, and whose tree's pages are held."""
        speculates, most = can, self._cost.max_catchup_tokens
        if int(lag.sum()) > most:
            order = np.argsort(np.where(speculates, lag, most + 1), kind="stable")
            fits = speculates[order] & (np.cumsum(lag[order]) <= most)
            speculates = np.zeros(len(lag), bool)
            speculates[order] = fits
        table = self._batch.table
        # the deepest node that selection may take is emitted beside one more token
        ends = np.minimum(table.num_tokens[slots] + depth, table.max_total[slots] - 1)
        lacking = speculates & (ends > table.num_pages[slots] * self._limits.page_size)
        if not np.count_nonzero(lacking):
            return speculates
        got = speculates.copy()
        got[lacking] = self._batch.reserve(slots[lacking], ends[lacking])
        return got
