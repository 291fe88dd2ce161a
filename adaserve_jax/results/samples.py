"""One line of samples.jsonl: what an engine had done by a moment of a measured point, and how it was then."""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.stats import StepStats

SAMPLE_S = 0.1
"""Seconds from one sample to the next."""


@dataclass(frozen=True, slots=True)
class Sample:
    """t_s: since the start of the point; what was counted is counted from there too. docs/metrics.md has the columns.

    depth, width, budget: of the latest step, the budget being its verified tree nodes. Of several replicas counts,
    requests, pages and budgets are added up, depth and width the greatest, and the draft is resident where all have it.
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
        """The sample of `stats`, which were read t_s after a start at which they were `since`. host: whether phases of
        the host count; else they are 0."""
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
