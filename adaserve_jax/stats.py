"""What an engine has done so far, as the scheduler counts it and as metrics and benchmarks read it. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepStats:
    """Running totals of the scheduler, read for metrics. All counts since start; gauges as of now.

    calibration_outcomes, calibration_error: by kind of rows (greedy, coupled); errors then by prediction (raw, loaded,
    online). pages_used, pages_total: of the base pool; extension_*: of the extension slab, 0 while there is none.
    pages_cached: of both, held by no request but kept for prompts that begin alike; they count as free;
    extension_cached: those of the extension.
    cache_queried_tokens, cache_hit_tokens: of the prompts admitted, and those of them whose KV was there. swaps,
    swap_s: exchanges of the draft and pages, and seconds of the step loop that they took, by kind. arms: the arm
    thought best, by bucket of batch sizes. arm_regret_s: seconds that the arms played are estimated to have cost beyond
    the best ones.
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    spec_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    plan_s: float = 0.0
    draft_s: float = 0.0
    select_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    wait_s: float = 0.0
    calibration_outcomes: dict[str, int] = field(default_factory=dict)
    calibration_error: dict[str, dict[str, float]] = field(default_factory=dict)
    last_depth: int = 0
    last_width: int = 0
    last_budget: int = 0
    pages_cached: int = 0
    extension_used: int = 0
    extension_cached: int = 0
    extension_total: int = 0
    draft_resident: bool = False
    cache_queried_tokens: int = 0
    cache_hit_tokens: int = 0
    swaps: dict[str, int] = field(default_factory=dict)
    swap_s: dict[str, float] = field(default_factory=dict)
    arms: dict[str, str] = field(default_factory=dict)
    arm_regret_s: float = 0.0
