"""The scheduler: plan, select, commit. Decides what each step runs and keeps all host state of requests.

Never touches a device and reads no clock: every method that needs the time is given it. Not thread-safe.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import IntegrityError, QueueFullError, RequestError
from adaserve_jax.memory.residency import ElasticRule
from adaserve_jax.scheduler.acceptance import Calibrator, LearnedAcceptance
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.commit import StepUpdates, Verified, apply_outcome, finish
from adaserve_jax.scheduler.controllers.base import Alone, Controller, Feedback
from adaserve_jax.scheduler.controllers.baselines import ClosedFormController
from adaserve_jax.scheduler.cost_model import CostTable, PredictionLog, Served
from adaserve_jax.scheduler.elastic import ElasticMemory, PageWorth, may_expand
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.scheduler.planner import DraftPlanner, PlannedStep, Planner, SpareTime
from adaserve_jax.scheduler.policies import Parts, find_policy
from adaserve_jax.scheduler.queue import order_key
from adaserve_jax.scheduler.selector import Selector
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.scheduler.slo import Feasibility, fit
from adaserve_jax.stats import StepStats
from adaserve_jax.types import (
    CandidateTrees,
    CostSamples,
    DraftTrees,
    FinishReason,
    Limits,
    Sequence,
    SequenceUpdate,
    StepOutcome,
    StepPlan,
    StopCheck,
)

# What `StepStats` has that is not counted in it step by step: gauges, and counts that other parts keep
# (preemptions, the prefix cache, calibration), read off them when it is asked for.


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
            elastic_moves=dict(stats.elastic_moves),
            elastic_s=dict(stats.elastic_s),
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


# What a committed step tells the controller that decided it. Knows no table and no request.


def rows_with_drafts(plan: StepPlan, candidates: CandidateTrees) -> np.ndarray | None:
    """bool[num_decode], rows that asked for candidates and got any, which of a draft service not all need; None where
    there are none."""
    draft = plan.draft
    if draft is None or not draft.depth or not candidates.log_f.size:
        return None
    if not draft.is_remote:
        return draft.speculates
    found = draft.speculates & (candidates.log_f > -np.inf).any(axis=1)
    return found if found.any() else None


def feedback_of(
    plan: StepPlan, drafted: np.ndarray | None, verified: Verified, outcome: StepOutcome, step_s: float,
    predicted_s: float, expected: float,
) -> Feedback:  # fmt: skip
    """drafted: bool[num_decode], rows that got a draft; None: none did."""
    draft, counts = plan.draft, outcome.counts[: plan.num_decode]
    decoded = int(counts.sum())
    rows = emitted = catchup_tokens = 0
    if draft is not None:
        fed = draft.catchup_counts[: plan.num_decode]
        catchup_tokens = draft.waited_tokens if draft.is_remote else int(fed.sum())
    if drafted is not None:
        rows = int(np.count_nonzero(drafted))
        emitted = decoded if rows == plan.num_decode else int(counts[drafted].sum())
    return Feedback(
        rows=rows,
        drafted=verified.num_drafted,
        accepted=verified.num_accepted,
        emitted=emitted,
        decode_rows=plan.num_decode,
        decoded=decoded,
        prefill_tokens=plan.num_prefill_tokens,
        catchup_tokens=catchup_tokens,
        step_s=step_s,
        predicted_s=predicted_s,
        expected=expected,
    )


class Scheduler:
    """Continuous batching with one verification budget per step. Call plan, select and commit in turn; add and abort
    at any time between those calls."""

    def __init__(
        self, limits: Limits, policy: str, costs: CostTable, config: EngineConfig,
        calibrator: Calibrator | None = None, elastic_rule: ElasticRule | None = None,
    ):  # fmt: skip
        """policy: a name that `policy_names.find_policy` knows. calibrator: what verifications teach; it may have
        learned from other schedulers before. elastic_rule: when the draft's memory becomes pages, where it may; None:
        as by default. Raises ConfigError: an unknown policy, or one that needs a draft."""
        self._policy, parameter = find_policy(policy, limits.max_depth)
        self._limits = limits
        self._cost = costs
        self._config = config
        self._calibrator = calibrator
        objective = Objective()
        self._acceptance = LearnedAcceptance(limits.max_depth, limits.max_width)
        parts = Parts(
            limits, costs, self._acceptance, objective, parameter, config.eq8_eq9, config.eq8_c1, config.eq9_c2,
            config.seed,
        )  # fmt: skip
        self._controller = self._policy.controller(parts)
        max_prefill = min(config.max_prefill_tokens or limits.max_tokens, limits.max_tokens)
        alone = Alone(limits, costs, self._acceptance)
        self._feasibility = Feasibility(limits, costs, self._controller, alone, max_prefill=max_prefill)
        remote = config.drafter is not None
        self._batch = Batch(
            limits, self._policy.ordering, gives_up=self._policy.gives_up, prefix_cache=config.prefix_cache,
            holds_draft=not remote,
        )  # fmt: skip
        self._stats = StepStats(pages_total=limits.num_pages)
        self.elastic_memory: ElasticMemory | None = None
        """Of the draft and KV pages; None where the draft stays."""
        if may_expand(self._policy.elastic, limits, config):
            worth = PageWorth(self._batch, parts.chain_costs, self._stats) if self._policy.weighs_pages else None
            self.elastic_memory = ElasticMemory(self._batch, elastic_rule or ElasticRule(), self._stats, worth)
        residency = None if self.elastic_memory is None else self.elastic_memory.residency
        self._draft = DraftPlanner(
            self._batch,
            costs,
            used=self._policy.uses_draft and limits.max_depth > 0,
            calibrated=self._policy.calibrated,
            calibrator=calibrator,
            residency=residency,
            several_drafts=bool(config.drafts),
            remote=remote,
        )
        has_draft = limits.max_depth > 0 and not remote
        self._readings = Readings(self._batch, self._controller, calibrator, self._draft, has_draft=has_draft)
        self._planner = Planner(
            self._batch, self._controller, self._draft, max_prefill=max_prefill, horizon=objective.horizon
        )
        self._selector = Selector(
            self._policy, limits, costs, objective,
            search_budget=self._policy.search_budget and not isinstance(self._controller, ClosedFormController),
            max_slo_nodes=config.max_slo_nodes,
        )  # fmt: skip
        self._spare = SpareTime(self._batch.capacity)
        self._requests: dict[str, SequenceState] = {}
        self._in_flight: PlannedStep | None = None
        self._added = 0
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, as `stats` says too: for who asks often."""
        return len(self._batch.queue)

    @property
    def is_stepping(self) -> bool:
        """Whether a step was planned and not committed."""
        return self._in_flight is not None

    @property
    def controller(self) -> Controller:
        """Who decides; for benchmarks."""
        return self._controller

    @property
    def predictions(self) -> PredictionLog:
        """Predicted and measured seconds of the latest steps."""
        return self._cost.predictions

    @property
    def served(self) -> Served:
        """What steps took so far, beside what the samples say."""
        return self._cost.served

    @property
    def totals(self) -> StepStats:
        """The totals themselves, for who asks often: the next step changes them. Readings of requests, pages, the draft
        and the latest step are as of now; arms, calibration and the prefix cache are left out."""
        self._readings.write(self._stats)
        return self._stats

    @property
    def stats(self) -> StepStats:
        """A snapshot of the totals, with all readings as of now. Changes nothing, so that any thread may ask."""
        return self._readings.snapshot(self._stats)

    def fit(self, prompt_tokens: int, max_tokens: int) -> int:
        """Most tokens of a request, prompt and output, whatever else runs; reads only what never changes. Raises
        RequestError when not even one output token fits."""
        return fit(prompt_tokens, max_tokens, self._limits)

    def add(self, request: Sequence) -> None:
        """Queue a request. Raises RequestError when it can never be served, or its targets are out of reach and
        `infeasible_slo` says to refuse; QueueFullError when the queue is full (preempted requests, which had their
        turn, take no room in it)."""
        max_total = self.fit(len(request.prompt_ids), request.sampling.max_tokens)
        if request.sequence_id in self._requests:
            raise RequestError(f"request id {request.sequence_id!r} is in use; choose another", param="request_id")
        if not 0 <= request.draft <= len(self._config.drafts):
            most = len(self._config.drafts)
            raise RequestError(f"draft must be from 0 to {most}, by index, got {request.draft}", param="draft")
        if self._batch.queue.num_new >= self._config.max_waiting:
            raise QueueFullError(f"{self._config.max_waiting} requests wait already; retry later or raise max_waiting")
        verdict = self._feasibility.judge(request)
        if verdict.feasible is False and self._config.infeasible_slo == "refuse":
            raise verdict.refusal(request)
        pursued = verdict.pursued(request) if self._policy.gives_up else request
        state = SequenceState(
            pursued,
            max_total=max_total,
            order_key=order_key(pursued, self._policy.ordering),
            sequence=self._added,
            asked=request,
            feasible=verdict.feasible,
        )
        self._added += 1
        self._requests[request.sequence_id] = state
        self._batch.queue.add(state)

    def abort(self, sequence_id: str, reason: FinishReason = "abort") -> SequenceUpdate | None:
        """End a request, for the reason given; its last update, or None for an unknown id. Safe while its step is in
        flight."""
        state = self._requests.pop(sequence_id, None)
        return None if state is None else finish(self._batch, state, reason, [], self._stats)

    def plan(self, now: float) -> StepPlan | None:
        """What to run next; None when no request is there. A plan that was never committed is forgotten."""
        started = time.perf_counter()
        planned = self._planner.plan(now, self._steps)
        self._in_flight = planned
        self._steps += 1
        self._stats.plan_s += time.perf_counter() - started
        return None if planned is None else planned.plan

    def sequence_ids(self, plan: StepPlan) -> list[str]:
        """Of the rows of the step in flight; "" for one that was aborted since."""
        states = (self._batch.table.states[slot] for slot in self._expect(plan).slots.tolist())
        return ["" if state is None else state.request.sequence_id for state in states]

    def select(self, plan: StepPlan, candidates: CandidateTrees, now: float) -> DraftTrees:
        """The trees to verify, with every request's need as of `now`, which is read after drafting."""
        started = time.perf_counter()
        planned = self._expect(plan)
        trees = self._selector.trees(planned, candidates, now)
        self._stats.select_s += time.perf_counter() - started
        return trees

    def commit(
        self,
        plan: StepPlan,
        trees: DraftTrees,
        candidates: CandidateTrees,
        outcome: StepOutcome,
        now: float,
        stop_check: StopCheck | None = None,
    ) -> StepUpdates:
        """Take in what the step brought; returns the new tokens and the ends of requests."""
        started = time.perf_counter()
        planned = self._expect(plan)
        self._in_flight = None
        self._spare.observe(
            now, len(self._batch.running), self.num_waiting, now - planned.made_s, outcome.counts[: plan.num_decode]
        )
        verified = Verified.of(trees, outcome.accepted, plan.num_decode)
        updates = apply_outcome(self._batch, planned, candidates, verified, outcome, now, stop_check, self._stats)
        for update in updates.ended.values():
            del self._requests[update.sequence_id]
        self._learn(planned, trees, candidates, verified, outcome, now)
        self._feasibility.forget()
        self._count(plan, trees, verified, outcome)
        if self.elastic_memory is not None:
            self.elastic_memory.speculates = planned.decided_depth > 0 if plan.num_decode else None
        self._stats.commit_s += time.perf_counter() - started
        return updates

    @property
    def draft_resident(self) -> bool:
        """False from when a swap took the draft's memory until the draft is back; True where none can."""
        return self._draft.is_resident

    @property
    def draft_is_away(self) -> bool:
        """Whether a draft service cannot be asked now, so that plans have no draft. Set between steps."""
        return self._draft.is_away

    @draft_is_away.setter
    def draft_is_away(self, away: bool) -> None:
        self._draft.is_away = away

    def retime_draft(self, samples: CostSamples) -> None:
        """Plan by the draft's times in these samples from now on. Between steps."""
        self._cost.retime_draft(samples)
        self._controller.retimed(self._cost)

    def take_released(self) -> np.ndarray:
        """Slots whose requests run there no more, i32[n], since this was last asked."""
        released = self._batch.released
        slots = np.array(sorted(released), np.int32)
        released.clear()
        return slots

    def is_loaded(self, now: float) -> bool:
        """Whether there is, or was lately, so much to do that nothing else should be."""
        return self._spare.is_loaded(now)

    def spare_s(self, now: float) -> float:
        """By how many seconds the next step may be put off so that no running request's target is in danger: 0 under
        load, and while anybody waits or a prompt is computed; inf where no target runs. Between steps only."""
        if not self.has_work:
            return math.inf
        if self.num_waiting or self._spare.is_loaded(now):
            return 0.0
        pace = self._planner.pace(now)
        return 0.0 if pace is None else self._spare.seconds(pace, now)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless requests, slots, pages and queue agree; for tests and debugging."""
        self._batch.check_integrity()
        if len(self._requests) != len(self._batch.running) + len(self._batch.queue):
            raise IntegrityError("a request is neither running nor waiting, or both")

    def _learn(
        self, planned: PlannedStep, trees: DraftTrees, candidates: CandidateTrees, verified: Verified,
        outcome: StepOutcome, now: float,
    ) -> None:  # fmt: skip
        plan = planned.plan
        drafted = rows_with_drafts(plan, candidates)
        predicted_s = self._cost.observe(plan, outcome, now - planned.made_s, drafted=drafted is not None)
        expected = 0.0
        if plan.draft is not None and drafted is not None:
            accepted, edited = outcome.accepted, outcome.edited
            expected = self._acceptance.observe(candidates, plan.draft.width, drafted, trees, accepted, edited)
            if self._calibrator is not None:
                if plan.draft.chances is not None:
                    self._calibrator.mark_sent()
                self._calibrator.observe(candidates, trees, accepted, plan.sampling.temperature, edited)
        elif plan.num_decode and self._policy.uses_draft:
            self._acceptance.forget()
            if self._draft.remote:
                self._cost.forget_draft()
        if plan.num_decode:
            step_s = now - planned.made_s
            self._controller.learn(feedback_of(plan, drafted, verified, outcome, step_s, predicted_s, expected))

    def _count(self, plan: StepPlan, trees: DraftTrees, verified: Verified, outcome: StepOutcome) -> None:
        stats = self._stats
        verified.count(stats)
        stats.steps += 1
        stats.draft_s += outcome.draft_s
        stats.verify_s += outcome.verify_s
        stats.wait_s += outcome.wait_s
        stats.last_depth = plan.draft.depth if plan.draft else 0
        stats.last_width = plan.draft.width if stats.last_depth and plan.draft else 0
        stats.last_verified_tree_tokens = trees.num_nodes

    def _expect(self, plan: StepPlan) -> PlannedStep:
        if self._in_flight is None or self._in_flight.plan is not plan:
            raise IntegrityError(f"step {plan.step} is not the one in flight; call plan, select and commit in turn")
        return self._in_flight


def build_scheduler(
    config: EngineConfig, limits: Limits, samples: CostSamples, calibrator: Calibrator | None = None,
    elastic_rule: ElasticRule | None = None,
) -> Scheduler:  # fmt: skip
    """The scheduler of a configured engine whose executor has warmed up."""
    return Scheduler(limits, config.policy, CostTable(samples, limits), config, calibrator, elastic_rule)
