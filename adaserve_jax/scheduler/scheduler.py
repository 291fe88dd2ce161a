"""The scheduler: plan, select and commit. It decides what each step runs and holds all host state of sequences.

Reads no clock and touches no device: callers pass the time, `step.py` runs the plans. Not thread-safe.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from adaserve_jax.config import EngineConfig, drafts_from_text
from adaserve_jax.errors import IntegrityError, QueueFullError, RequestError
from adaserve_jax.memory.residency import ElasticRule
from adaserve_jax.scheduler.acceptance import AdapterAcceptance, Calibrator, LearnedAcceptance
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.commit import (
    StepUpdates,
    Verified,
    apply_outcome,
    feedback_of,
    finish,
    rows_with_drafts,
)
from adaserve_jax.scheduler.controllers.base import SoloSpeed
from adaserve_jax.scheduler.controllers.baselines import ClosedFormController
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.draft_planner import DraftPlanner
from adaserve_jax.scheduler.elastic import ElasticMemory, PageWorth, may_expand
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.scheduler.output_lengths import UPPER, OutputLengths
from adaserve_jax.scheduler.planner import PlannedStep, Planner
from adaserve_jax.scheduler.policies import Parts, find_policy, longest_chain, sources_of
from adaserve_jax.scheduler.queue import order_key
from adaserve_jax.scheduler.selector import Selector
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.scheduler.slack import SlackTracker
from adaserve_jax.scheduler.slo import Feasibility
from adaserve_jax.stats import StepStats
from adaserve_jax.types import (
    CandidateTrees,
    CostSamples,
    DraftSessions,
    DraftTrees,
    FinishReason,
    Limits,
    Sequence,
    SequenceUpdate,
    StepOutcome,
    StepPlan,
    StopCheck,
)

if TYPE_CHECKING:  # numba is imported where text drafts alone
    from adaserve_jax.scheduler.text_drafter import MergedTrees, TextDrafter

LEAST_PATIENCE_S = 1e-3
"""Patience, in seconds, of a sequence that cannot keep its deadline: it is late as soon as it comes."""


class Scheduler:
    """Continuous batching with one verification budget per step.

    Call plan, select and commit in turn; add and abort at any time between those calls.
    """

    def __init__(
        self, config: EngineConfig, limits: Limits, samples: CostSamples, calibrator: Calibrator | None = None,
        elastic_rule: ElasticRule | None = None, draft_sessions: DraftSessions | None = None,
    ):  # fmt: skip
        """Compose the parts that `config.policy` names; every "auto" in `config` is resolved.

        samples: times that the executor measured when it warmed up. calibrator: may have learned with other schedulers
        before. elastic_rule: when the draft's memory becomes KV pages, where it may. draft_sessions: state of a draft
        service, which is told of slots that were given back. Raises ConfigError if the policy is unknown or needs a
        draft that is not there.
        """
        self.limits = limits
        self._policy, parameter = find_policy(
            config.policy, longest_chain(config, limits.max_depth, limits.suffix_depth)
        )
        self._config = config
        self._calibrator = calibrator
        self._draft_sessions = draft_sessions
        objective = Objective()
        self._adapters = AdapterAcceptance()
        self._corrected: CandidateTrees | None = None
        policy, sources = self._policy, sources_of(config, self._policy)
        uses_model = policy.uses_draft and limits.max_depth > 0 and "model" in sources.split("+")
        uses_text = policy.uses_draft and limits.suffix_depth > 0 and drafts_from_text(sources)
        # a policy that knows no suffix source takes text alone for a draft, of the same depths, that costs nothing
        text_as_draft = uses_text and not uses_model and not drafts_from_text(policy.sources)
        decided = limits if uses_model else replace(limits, max_depth=0, max_width=0)
        if text_as_draft:
            decided = replace(limits, max_depth=min(config.max_depth, limits.suffix_depth), max_width=config.max_width)
        self.costs = costs = CostTable(samples, decided, drafts_cost=not text_as_draft)
        """Predicted seconds of steps; learns from every commit."""
        self._acceptance = LearnedAcceptance(decided.max_depth, decided.max_width)
        parts = Parts(
            decided, costs, self._acceptance, objective, parameter, config.eq8_eq9, config.eq8_c1, config.eq9_c2,
            config.seed,
        )  # fmt: skip
        self.controller = self._policy.built(parts)
        """Decides depth, width and most tree tokens; for benchmarks."""
        max_prefill = min(config.max_prefill_tokens or limits.max_tokens, limits.max_tokens)
        solo = SoloSpeed(decided, costs, self._acceptance)
        self._feasibility = Feasibility(limits, costs, self.controller, solo, max_prefill=max_prefill)
        remote = config.drafter is not None
        self.batch = Batch(
            limits, self._policy.ordering, gives_up=self._policy.gives_up, prefix_cache=config.prefix_cache,
            holds_draft=not remote, fair_tenants=config.fair_tenants,
        )  # fmt: skip
        """Running sequences, their slots and pages, and the queue. While a step is in flight, the scheduler alone
        changes it."""
        self._stats = StepStats(pages_total=limits.num_pages)
        self.elastic_memory: ElasticMemory | None = None
        """Expansion of the KV pool into the draft's memory; None where the draft always stays."""
        if may_expand(self._policy.elastic, limits, config):
            weighs = self._policy.weighs_pages and uses_model
            worth = PageWorth(self.batch, parts.chain_costs, self._stats) if weighs else None
            self.elastic_memory = ElasticMemory(self.batch, elastic_rule or ElasticRule(), self._stats, worth)
        self._draft = DraftPlanner(
            self.batch,
            costs,
            used=uses_model,
            calibrated=self._policy.calibrated,
            calibrator=calibrator,
            residency=None if self.elastic_memory is None else self.elastic_memory.residency,
            several_drafts=bool(config.drafts),
            remote=remote,
        )
        self._text: TextDrafter | None = None
        if uses_text:
            from adaserve_jax.scheduler.text_drafter import TextDrafter
            from adaserve_jax.suffix.source import SuffixSource

            texts = SuffixSource(limits.max_requests, limits.suffix_depth, config.suffix_kept_tokens)
            self._text = TextDrafter(self.batch, self._acceptance, texts, learn=config.calibrate)
        self._merged: MergedTrees | None = None
        self._lengths = OutputLengths()
        self._planner = Planner(
            self.batch, self.controller, self._draft, self._text, lengths=self._lengths, max_prefill=max_prefill,
            horizon=objective.horizon, decision_limits=decided, text_without_draft=not text_as_draft,
            extends_horizon=self._policy.bounds_lengths,
        )  # fmt: skip
        self._selector = Selector(
            self._policy, limits, costs, objective,
            search_budget=self._policy.search_budget and not isinstance(self.controller, ClosedFormController),
            max_slo_nodes=config.max_slo_nodes,
        )  # fmt: skip
        self._slack = SlackTracker(self.batch.capacity)
        self._states: dict[str, SequenceState] = {}
        self._in_flight: PlannedStep | None = None
        self._left_s: float | None = None
        """Time of the last commit, where work was left that could go on at once."""
        self._between_s = 0.0
        """Seconds between the step before and the one in flight, in which its outcome was taken in and delivered."""
        self._added = 0
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """True while any sequence runs or waits."""
        return bool(self._states)

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences, new and preempted, without the copies of `stats`."""
        return len(self.batch.queue)

    @property
    def num_new(self) -> int:
        """Number of waiting sequences that never ran, which `max_waiting` bounds."""
        return self.batch.queue.num_new

    def adapters_in_use(self) -> set[int]:
        """Return the slots of the adapters that running and waiting sequences go through."""
        return {state.sequence.adapter for state in self._states.values()}

    def forget_adapter(self, slot: int) -> None:
        """Forget what was learned of the adapter that had a slot."""
        self._adapters.forget(slot)

    @property
    def draft_resident(self) -> bool:
        """False from an expansion into the draft's memory until the draft is back."""
        return self._draft.is_resident

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose lengths `engine.client.check_request` has admitted.

        Raises:
            RequestError: The id is in use, the draft is unknown, or the targets are infeasible and the configuration
                says to refuse those.
            QueueFullError: Too many new sequences wait; preempted ones do not count, they had their turn.
            IntegrityError: The prompt is empty, or does not fit with a token of output.
        """
        name, prompt_tokens = sequence.sequence_id, len(sequence.prompt_ids)
        max_total = min(prompt_tokens + sequence.sampling.max_tokens, self.limits.max_context)
        if not 0 < prompt_tokens < max_total <= self.limits.kv_tokens:
            raise IntegrityError(f"sequence {name!r} of {prompt_tokens} prompt tokens can never run; check it first")
        if name in self._states:
            raise RequestError(f"request id {name!r} is in use; choose another", param="request_id")
        if not 0 <= sequence.draft <= len(self._config.drafts):
            most = len(self._config.drafts)
            raise RequestError(f"draft must be from 0 to {most}, by index, got {sequence.draft}", param="draft")
        if self.num_new >= self._config.max_waiting:
            raise QueueFullError(f"{self._config.max_waiting} requests wait already; retry later or raise max_waiting")
        prefixes, page_keys = self.batch.prefixes, list[bytes]()
        cached = 0 if prefixes is None else prefixes.cached_tokens(sequence, page_keys)
        verdict = self._feasibility.judge(sequence, cached)
        if verdict.feasible is False and self._config.infeasible_slo == "refuse":
            raise verdict.refusal(sequence)
        scheduled = verdict.without_infeasible(sequence) if self._policy.gives_up else sequence
        patience_s = self._patience_s(scheduled, max_total - prompt_tokens)
        state = SequenceState(
            scheduled,
            max_total=max_total,
            order_key=order_key(scheduled, self._policy.ordering, patience_s, self._most_output(sequence)),
            number=self._added,
            asked=sequence,
            feasible=verdict.feasible,
            patience_s=patience_s,
            prompt_s=verdict.prompt_s,
            least_tpot_s=verdict.token_s,
            flow=0 if self.batch.shares is None else self.batch.shares.open(sequence),
        )
        state.page_keys, state.cached_tokens = page_keys, cached
        self._added += 1
        self._states[name] = state
        self.batch.queue.add(state)

    def _patience_s(self, sequence: Sequence, most: int) -> float | None:
        """Return the seconds from arrival within which the first token must come for TTFT target and deadline."""
        if sequence.e2e_slo_s is None:
            return sequence.ttft_slo_s
        tokens = self._lengths.left(sequence.slo_class, len(sequence.prompt_ids), 0, most)
        latest_s = max(sequence.e2e_slo_s - tokens * self._feasibility.least_tpot_s(), LEAST_PATIENCE_S)
        return latest_s if sequence.ttft_slo_s is None else min(latest_s, sequence.ttft_slo_s)

    def abort(self, sequence_id: str, reason: FinishReason = "abort") -> SequenceUpdate | None:
        """End a sequence; safe while its step is in flight. Returns its last update, or None for an unknown id."""
        state = self._states.pop(sequence_id, None)
        if state is None:
            return None
        update = finish(self.batch, state, reason, [], self._stats)
        self._report_released_slots()
        return update

    def withdraw(self, sequence_id: str) -> None:
        """Take back a sequence that was just added, as if it had never come."""
        self.batch.remove(self._states.pop(sequence_id))

    def never_ran(self, sequence_id: str) -> bool:
        """Return whether a sequence is known and no step has had it."""
        state = self._states.get(sequence_id)
        return state is not None and state.first_scheduled_s is None

    def plan(self, now: float) -> StepPlan | None:
        """Return what to run next, or None without sequences.

        A plan that was never committed is dropped, but its admissions, preemptions and pages stand.
        """
        started = time.perf_counter()
        if self._draft_sessions is not None:
            self._draft.is_away = not self._draft_sessions.available
        planned = self._planner.plan(now, self._steps)
        self._between_s = 0.0 if self._left_s is None else max(now - self._left_s, 0.0)
        self._left_s = None
        self._set_in_flight(planned)
        self._steps += 1
        self._stats.plan_s += time.perf_counter() - started
        self._report_released_slots()  # those of preempted sequences, before a plan names the slots' new sequences
        return None if planned is None else planned.plan

    def select(self, plan: StepPlan, candidates: CandidateTrees, now: float) -> DraftTrees:
        """Return the trees to verify. now: read after drafting, so that every sequence's need is up to date."""
        started = time.perf_counter()
        planned = self._expect(plan)
        self._merged = self._corrected = None
        if candidates.log_f.size and self._knows_adapters(plan):
            self._corrected = candidates = self._adapters.corrected(candidates, _adapter_slots(plan))
        if self._text is not None and planned.text is not None:
            self._merged = self._text.merge(candidates, planned.text)
            candidates = self._merged.candidates
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
        """Take in what the step brought; return new tokens and the ends of sequences."""
        started = time.perf_counter()
        planned = self._expect(plan)
        self._set_in_flight(None)
        step_s = now - planned.made_s + self._between_s
        self._slack.observe(now, len(self.batch.running), self.num_waiting, step_s, outcome.counts[: plan.num_decode])
        verified = Verified.of(trees, outcome.accepted, plan.num_decode)
        updates = apply_outcome(self.batch, planned, candidates, verified, outcome, now, stop_check, self._stats)
        for row, update in updates.ended.items():
            state = updates.states[row]
            self._lengths.observe(state.sequence.slo_class, state.prompt_len, state.num_output)
            if self._text is not None:
                self._text.keep(state)
            del self._states[update.sequence_id]
        self._learn(planned, trees, candidates, verified, outcome, step_s)
        self._left_s = now if self.has_work else None
        self._feasibility.forget()
        self._count(plan, trees, verified, outcome)
        if self.elastic_memory is not None:
            self.elastic_memory.speculates = self._draft.used and planned.decided_depth > 0 if plan.num_decode else None
        self._stats.commit_s += time.perf_counter() - started
        self._report_released_slots()
        return updates

    def sequence_ids(self, plan: StepPlan) -> list[str]:
        """Return the ids of the rows of the step in flight; "" for one that was aborted since."""
        states = (self.batch.table.states[slot] for slot in self._expect(plan).slots.tolist())
        return ["" if state is None else state.sequence.sequence_id for state in states]

    def retime_draft(self, samples: CostSamples) -> None:
        """Plan by the draft's times in these samples from now on. Between steps only."""
        self.costs.retime_draft(samples)
        self.controller.retimed(self.costs)

    def pause(self) -> None:
        """Leave the time until the next plan out of what steps take, since other work fills it. Between steps only."""
        self._left_s = None

    def is_loaded(self, now: float) -> bool:
        """Return whether there is, or was lately, so much work that background work must wait."""
        return self._slack.is_loaded(now)

    def slack_s(self, now: float) -> float:
        """Return the seconds by which the next step may be put off without endangering a TPOT target.

        0 under load, while a sequence waits or while a prompt is computed; inf if no sequence with a target runs.
        Between steps only.
        """
        if not self.has_work:
            return math.inf
        if self.num_waiting or self._slack.is_loaded(now):
            return 0.0
        pace = self._planner.pace(now)
        return 0.0 if pace is None else self._slack.seconds(pace, now)

    @property
    def totals(self) -> StepStats:
        """The live totals with current gauges, without copies: the next step changes them.

        Arms, calibration and the prefix cache are left out; `stats` has them.
        """
        for name, value in self._gauges().items():
            setattr(self._stats, name, value)
        return self._stats

    @property
    def stats(self) -> StepStats:
        """A copy of all totals and gauges. Changes nothing, so that any thread may ask."""
        pool, prefixes, calibrator, stats = self.batch.pool, self.batch.prefixes, self._calibrator, self._stats
        text = self._text
        report = self.controller.arms()
        return replace(
            stats,
            **self._gauges(),
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
            calibration_outcomes=calibrator.outcomes if calibrator is not None else {},
            calibration_error=calibrator.errors if calibrator is not None else {},
            suffix_kept_tokens=text.source.kept_tokens if text is not None else 0,
            suffix_calibration_error=text.calibrator.errors if text is not None else {},
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless sequences, slots, pages and queue agree; for tests and debugging."""
        self.batch.check_integrity()
        if len(self._states) != len(self.batch.running) + len(self.batch.queue):
            raise IntegrityError("a sequence is neither running nor waiting, or both")

    def _gauges(self) -> dict[str, Any]:
        batch, pool = self.batch, self.batch.pool
        extension_used = pool.extension_used
        return {
            "running": len(batch.running), "waiting": len(batch.queue), "waiting_new": self.num_new,
            "preemptions": batch.preemptions,
            "pages_used": pool.num_used - extension_used, "extension_used": extension_used,
            "extension_total": pool.pages_in_force - pool.base_pages,
            "draft_resident": self.limits.max_depth > 0 and not self._draft.remote and self._draft.is_resident,
        }  # fmt: skip

    def _learn(
        self, planned: PlannedStep, trees: DraftTrees, candidates: CandidateTrees, verified: Verified,
        outcome: StepOutcome, step_s: float,
    ) -> None:  # fmt: skip
        plan, merged = planned.plan, self._merged
        columns = None if merged is None else merged.drafted_columns(trees)
        drafted = rows_with_drafts(plan, candidates)
        predicted_s = self.costs.observe(plan, outcome, step_s, drafted=drafted is not None)
        expected = 0.0
        if plan.draft is not None and drafted is not None:
            accepted, edited = outcome.accepted, outcome.edited
            weighed = candidates if self._corrected is None else self._corrected
            expected = self._acceptance.observe(weighed, plan.draft.width, drafted, trees, accepted, edited, columns)
            if self._knows_adapters(plan):
                self._adapters.observe(candidates, trees, accepted, _adapter_slots(plan), edited, columns)
            if self._calibrator is not None:
                if plan.draft.chances is not None:
                    self._calibrator.mark_sent()
                self._calibrator.observe(candidates, trees, accepted, plan.sampling.temperature, edited, columns)
        elif plan.num_decode and self._policy.uses_draft:
            if planned.text is None or not planned.text.covered.all():  # the draft was declined for its own worth
                self._acceptance.forget()
            if self._draft.remote:
                self.costs.forget_draft()
        feedback = None
        if plan.num_decode:
            feedback = feedback_of(plan, drafted, verified, outcome, step_s, predicted_s, expected)
        if merged is not None and self._text is not None:
            assert planned.text is not None and columns is not None and feedback is not None
            self._text.observe(
                planned.text, merged.text_columns(trees), trees, outcome.accepted, plan.sampling.temperature,
                outcome.edited, self._stats,
            )  # fmt: skip
            if drafted is not None:  # shapes of the draft answer for its own nodes
                own = columns >= 0
                hits = int(np.count_nonzero(outcome.accepted & own))
                feedback = replace(feedback, drafted=int(np.count_nonzero(own)), accepted=hits)
            elif not self._draft.used:  # text is the only draft
                feedback = replace(feedback, rows=plan.num_decode, emitted=feedback.decoded)
            else:  # they are nodes of text alone
                feedback = replace(feedback, drafted=0, accepted=0)
        if feedback is not None:
            self.controller.learn(feedback)

    def _knows_adapters(self, plan: StepPlan) -> bool:
        """Return whether chances are learned by adapter: once a row goes, or went, through one."""
        return self._policy.calibrated and (plan.adapters is not None or self._adapters.is_needed)

    def _most_output(self, sequence: Sequence) -> float:
        """Return the upper bound on the output of a new sequence; its `max_tokens` where none was learned.

        Only `goodput` ordering asks for one.
        """
        if self._policy.ordering != "goodput":
            return 1.0
        found = self._lengths.learned_left(sequence.slo_class, len(sequence.prompt_ids), 0, UPPER)
        return float(found or sequence.sampling.max_tokens)

    def _count(self, plan: StepPlan, trees: DraftTrees, verified: Verified, outcome: StepOutcome) -> None:
        stats = self._stats
        verified.count(stats)
        stats.steps += 1
        stats.draft_s += outcome.draft_s
        stats.verify_s += outcome.verify_s
        stats.wait_s += outcome.wait_s
        stats.last_depth = plan.draft.depth if plan.draft else 0
        stats.last_width = plan.draft.width if stats.last_depth and plan.draft else 0
        stats.last_tree_token_cap = plan.tree_token_cap
        stats.last_verified_tree_tokens = trees.num_nodes

    def _set_in_flight(self, planned: PlannedStep | None) -> None:
        self._in_flight = planned
        if self.elastic_memory is not None:
            self.elastic_memory.step_in_flight = planned is not None

    def _report_released_slots(self) -> None:
        """Tell a draft service which slots' sequences run no more."""
        released = self.batch.released
        if self._draft_sessions is not None and released:
            self._draft_sessions.ended(np.array(sorted(released), np.int32))
            released.clear()

    def _expect(self, plan: StepPlan) -> PlannedStep:
        if self._in_flight is None or self._in_flight.plan is not plan:
            raise IntegrityError(f"step {plan.step} is not the one in flight; call plan, select and commit in turn")
        return self._in_flight


def _adapter_slots(plan: StepPlan) -> np.ndarray:
    """Return i32[num_decode], the adapter slots of the decode rows."""
    if plan.adapters is None:
        return np.zeros(plan.num_decode, np.int32)
    return plan.adapters[: plan.num_decode]
