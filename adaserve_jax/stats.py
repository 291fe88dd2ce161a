"""What an engine has done so far, as the scheduler counts it and as metrics and benchmarks read it. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Literal, cast

GAUGES = frozenset({
    "running", "waiting", "pages_used", "pages_total", "pages_cached", "extension_used", "extension_cached",
    "extension_total", "last_depth", "last_width", "last_tree_token_cap",
    "last_verified_tree_tokens", "draft_resident", "calibration_error", "arms", "arm_regret_s",
})  # fmt: skip
"""Fields that say how things are; the others count what has happened."""
LEARNING_GAUGES = frozenset({"version", "held_out_acceptance", "loss", "records", "held_out"})
"""The same of LearningStats."""
DRAFTER_GAUGES = frozenset({"services"})
"""The same of DrafterStats."""
BREAKER_STATES = ("closed", "half_open", "open")
"""Of a link to a draft service: it is asked, it is tried, it is left alone for a while."""


@dataclass
class StepStats:
    """Running totals of the scheduler, read for metrics. All counts since start; gauges as of now.

    calibration_outcomes, calibration_error: by kind of rows (greedy, coupled); errors then by prediction (raw, loaded,
    online). pages_used, pages_total: of the base pool; extension_*: of the extension slab, 0 while there is none.
    pages_cached: of both, held by no request but kept for prompts that begin alike; they count as free;
    extension_cached: those of the extension.
    cache_queried_tokens, cache_hit_tokens: of the prompts admitted, and those of them whose KV was there.
    elastic_moves, elastic_s: expansions and contractions, and the seconds of the step loop they took, by kind. arms:
    the arm thought best, by bucket of batch sizes. arm_regret_s: seconds that the arms
    played are estimated to have cost beyond the best ones.
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
    accepted_per_position: list[int] = field(default_factory=list[int])
    finished: dict[str, int] = field(default_factory=dict[str, int])
    plan_s: float = 0.0
    draft_s: float = 0.0
    select_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    wait_s: float = 0.0
    calibration_outcomes: dict[str, int] = field(default_factory=dict[str, int])
    calibration_error: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    last_depth: int = 0
    last_width: int = 0
    last_tree_token_cap: int = 0
    last_verified_tree_tokens: int = 0
    pages_cached: int = 0
    extension_used: int = 0
    extension_cached: int = 0
    extension_total: int = 0
    draft_resident: bool = False
    cache_queried_tokens: int = 0
    cache_hit_tokens: int = 0
    elastic_moves: dict[str, int] = field(default_factory=dict[str, int])
    elastic_s: dict[str, float] = field(default_factory=dict[str, float])
    arms: dict[str, str] = field(default_factory=dict[str, str])
    arm_regret_s: float = 0.0

    def ended(self) -> StepStats:
        """The counts of an engine that is gone: nothing runs on it, and it has no pages."""
        empty = StepStats()
        return replace(self, **{name: getattr(empty, name) for name in GAUGES})

    def after(self, earlier: StepStats) -> StepStats:
        """The counts of this engine and of those before it; gauges are this engine's."""
        return replace(self, **_sums(earlier, self, GAUGES))


def _sums(one: Any, other: Any, without: frozenset[str]) -> dict[str, Any]:
    """The sums of the fields of two totals, by name."""
    names = [f.name for f in fields(one) if f.name not in without]
    return {name: _sum(getattr(one, name), getattr(other, name)) for name in names}


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        counts = cast("dict[str, int]", one)
        return {key: counts.get(key, 0) + other.get(key, 0) for key in counts | other}
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(cast("list[int]", one), other, fillvalue=0)]
    return one + other


@dataclass
class LearningStats:
    """How drafts learn from what is served, by name of the draft; empty where none does. Counts since the start but for
    what is said to be as of now.

    version: of the draft in force, counted from 0, what it was loaded with; as of now. drafted_tokens, accepted_tokens:
    of requests that the draft speculated for. held_out_acceptance: mean over held-out positions of sum min(p, q), of
    the version in force; loss: of the latest update; as of now. updates: that serve or served; refused: that the
    held-out check, or a gradient that was no number, kept from serving; rolled_back: versions taken back because
    acceptance fell once they served. records: finished requests in the buffer, as of now; held_out: those of them that
    are held out. left_out: requests that were not learned from, by reason. micro_steps: pieces of training; train_s:
    seconds they took. delay_s: those of them in which requests ran and waited, and delay_max_s the longest piece then.
    target_tokens: positions whose target scores were kept; lost: those whose scores were fetched and not kept, by
    reason: no_room (running texts had all of it), not_finite (they were no distribution).
    """

    version: dict[str, int] = field(default_factory=dict[str, int])
    drafted_tokens: dict[str, int] = field(default_factory=dict[str, int])
    accepted_tokens: dict[str, int] = field(default_factory=dict[str, int])
    held_out_acceptance: dict[str, float] = field(default_factory=dict[str, float])
    loss: dict[str, float] = field(default_factory=dict[str, float])
    updates: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, int] = field(default_factory=dict[str, int])
    rolled_back: dict[str, int] = field(default_factory=dict[str, int])
    records: dict[str, int] = field(default_factory=dict[str, int])
    held_out: dict[str, int] = field(default_factory=dict[str, int])
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    micro_steps: int = 0
    train_s: float = 0.0
    delay_s: float = 0.0
    delay_max_s: float = 0.0
    target_tokens: int = 0
    lost: dict[str, int] = field(default_factory=dict[str, int])

    def ended(self) -> LearningStats:
        """The counts of an engine that is gone, with its drafts and what was kept for them."""
        return replace(self, **{name: {} for name in LEARNING_GAUGES})

    def after(self, earlier: LearningStats) -> LearningStats:
        """The counts of this engine and of those before it, and the longest delay of them all; what is as of now is
        this engine's."""
        sums = _sums(earlier, self, LEARNING_GAUGES)
        return replace(self, **sums | {"delay_max_s": max(earlier.delay_max_s, self.delay_max_s)})


@dataclass
class ServiceState:
    """A draft service as a target sees it now. breaker: one of BREAKER_STATES; version: of its draft, "": not known;
    sessions: of this target there; busy: share of the last seconds that it worked, and queue_s: seconds of work that
    wait there, both as it said last; reason: why it is not asked, "" where it is."""

    breaker: Literal["closed", "half_open", "open"] = "closed"
    version: str = ""
    sessions: int = 0
    busy: float = 0.0
    queue_s: float = 0.0
    reason: str = ""


@dataclass
class DrafterStats:
    """What became of asking draft services. Counts since the start; services: by address, as of now.

    rounds: steps that asked for trees; trees: those that came in time; late: those that did not, or came empty; stale:
    answers to what was asked no more; resyncs: sessions that were sent anew because a service asked for it; refused:
    sessions and targets that got nothing; invalid: answers that make no sense; lost: streams that ended; breaker_opens;
    moved: sessions that went to another service; errors: steps whose drafting failed on this side, of which the first
    is logged.
    wait_s: seconds of the step loop spent waiting; round_s: sum over rounds of the time until the last tree was there.
    """

    rounds: int = 0
    trees: int = 0
    late: int = 0
    stale: int = 0
    resyncs: int = 0
    refused: int = 0
    invalid: int = 0
    lost: int = 0
    breaker_opens: int = 0
    moved: int = 0
    errors: int = 0
    wait_s: float = 0.0
    round_s: float = 0.0
    services: dict[str, ServiceState] = field(default_factory=dict[str, ServiceState])

    def ended(self) -> DrafterStats:
        """The counts of an engine that is gone, and with it its links."""
        return replace(self, services={})

    def after(self, earlier: DrafterStats) -> DrafterStats:
        """The counts of this engine and of those before it; the services are this engine's."""
        return replace(self, **_sums(earlier, self, DRAFTER_GAUGES))
