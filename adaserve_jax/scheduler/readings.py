"""What `StepStats` has that is not counted in it step by step: gauges, and counts that other parts keep (preemptions,
the prefix cache, calibration), read off them when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.calibration import Calibrator
from adaserve_jax.scheduler.controllers.base import Controller
from adaserve_jax.scheduler.draft_planning import DraftPlanner
from adaserve_jax.stats import StepStats


class Readings:
    """Of one scheduler. has_draft: whether there is a draft here that could be resident."""

    def __init__(
        self, batch: Batch, controller: Controller, calibrator: Calibrator | None, draft: DraftPlanner, *,
        has_draft: bool,
    ):  # fmt: skip
        self._batch = batch
        self._controller = controller
        self._calibrator = calibrator
        self._draft = draft
        self._has_draft = has_draft

    def write(self, stats: StepStats) -> None:
        """Those that cost little: of requests, pages and the draft."""
        for name, value in self._cheap().items():
            setattr(stats, name, value)

    def snapshot(self, stats: StepStats) -> StepStats:
        """A copy with all of them. Changes nothing, so that any thread may ask."""
        pool, prefixes = self._batch.pool, self._batch.prefixes
        report = self._controller.arms()
        return replace(
            stats,
            **self._cheap(),
            pages_cached=pool.num_cached,
            extension_cached=pool.extension_cached,
            cache_queried_tokens=prefixes.queried_tokens if prefixes is not None else 0,
            cache_hit_tokens=prefixes.hit_tokens if prefixes is not None else 0,
            swaps=dict(stats.swaps),
            swap_s=dict(stats.swap_s),
            accepted_per_position=list(stats.accepted_per_position),
            finished=dict(stats.finished),
            arms=report.arms,
            arm_regret_s=report.regret_s,
            calibration_outcomes=self._calibrator.outcomes if self._calibrator is not None else {},
            calibration_error=self._calibrator.errors if self._calibrator is not None else {},
        )

    def _cheap(self) -> dict[str, Any]:
        batch, pool = self._batch, self._batch.pool
        extension_used = pool.extension_used
        return {
            "running": len(batch.running), "waiting": len(batch.queue), "preemptions": batch.preemptions,
            "pages_used": pool.num_used - extension_used, "extension_used": extension_used,
            "extension_total": pool.pages_in_force - pool.base_pages,
            "draft_resident": self._has_draft and self._draft.is_resident,
        }  # fmt: skip
