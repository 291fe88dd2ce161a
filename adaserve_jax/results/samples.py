"""Samples of an engine over time: one line of samples.jsonl each."""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.stats import StepStats

SAMPLE_S = 0.1
"""Interval between two samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """State of an engine at one moment of a point, and its counts since the point's start; columns: docs/metrics.md.

    t_s: since the start of the point. depth, width, budget: of the latest step; budget counts its verified tree nodes.
    Over several replicas counts, requests, pages and budgets are added up, depth and width are the greatest, and the
    draft is resident if it is on all replicas.
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
        return cls(
            run_id=run_id,
            point=point,
            t_s=round(t_s, 6),
            steps=stats.steps - since.steps,
            spec_steps=stats.spec_steps - since.spec_steps,
            generation_tokens=stats.generation_tokens - since.generation_tokens,
            draft_tokens=stats.draft_tokens - since.draft_tokens,
            accepted_tokens=stats.accepted_tokens - since.accepted_tokens,
            preemptions=stats.preemptions - since.preemptions,
            swaps=sum(stats.elastic_moves.values()) - sum(since.elastic_moves.values()),
            plan_s=round(stats.plan_s - since.plan_s, 6) if host else 0.0,
            draft_s=round(stats.draft_s - since.draft_s, 6),
            select_s=round(stats.select_s - since.select_s, 6) if host else 0.0,
            verify_s=round(stats.verify_s - since.verify_s, 6),
            commit_s=round(stats.commit_s - since.commit_s, 6) if host else 0.0,
            wait_s=round(stats.wait_s - since.wait_s, 6),
            running=stats.running,
            waiting=stats.waiting,
            pages_used=stats.pages_used,
            pages_total=stats.pages_total,
            extension_used=stats.extension_used,
            extension_total=stats.extension_total,
            depth=stats.last_depth,
            width=stats.last_width,
            budget=stats.last_verified_tree_tokens,
            draft_resident=stats.draft_resident,
        )
