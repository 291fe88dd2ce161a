"""Samples of an engine over time: one line of samples.jsonl each."""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.stats import StepStats

SAMPLE_S = 0.1
"""Interval between two samples."""
# Columns that StepStats has too, under the same name: increases since the start of the point, and latest values.
COUNTS = ("steps", "spec_steps", "generation_tokens", "draft_tokens", "accepted_tokens", "preemptions")
HOST_SECONDS = ("plan_s", "select_s", "commit_s")
SECONDS = (*HOST_SECONDS, "draft_s", "verify_s", "wait_s")
LATEST = (
    "running", "waiting", "pages_used", "pages_total", "extension_used", "extension_total", "draft_resident",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """State of an engine at one moment of a point, and its counts since the point's start; columns: docs/metrics.md.

    t_s: since the start of the point. depth, width, budget: of the latest step; budget counts its verified tree nodes,
    which may be fewer than the scheduler's budget. Over several replicas counts, requests, pages and budgets are added
    up, depth and width are the greatest, and the draft is resident if it is on all replicas.
    """

    run_id: str
    point: str
    t_s: float
    steps: int
    spec_steps: int
    generation_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    swaps: int
    plan_s: float
    draft_s: float
    select_s: float
    verify_s: float
    commit_s: float
    wait_s: float
    running: int
    waiting: int
    pages_used: int
    pages_total: int
    extension_used: int
    extension_total: int
    depth: int
    width: int
    budget: int
    draft_resident: bool

    @classmethod
    def of(
        cls, stats: StepStats, since: StepStats, *, run_id: str, point: str, t_s: float, host: bool = True
    ) -> Sample:  # fmt: skip
        """Build a sample from the statistics at t_s and at the start of the point.

        host: keep the times of host phases; otherwise they are 0.
        """
        seconds = {name: round(getattr(stats, name) - getattr(since, name), 6) for name in SECONDS}
        return cls(
            run_id=run_id,
            point=point,
            t_s=round(t_s, 6),
            swaps=sum(stats.elastic_moves.values()) - sum(since.elastic_moves.values()),
            depth=stats.last_depth,
            width=stats.last_width,
            budget=stats.last_verified_tree_tokens,
            **{name: getattr(stats, name) - getattr(since, name) for name in COUNTS},
            **(seconds if host else seconds | dict.fromkeys(HOST_SECONDS, 0.0)),
            **{name: getattr(stats, name) for name in LATEST},
        )
