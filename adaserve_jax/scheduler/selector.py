"""Selection by the rules of a policy: from a planned step and its candidates to the trees to verify."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from adaserve_jax.scheduler import selection
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.objective import BudgetQuestion, Objective, choose_budget
from adaserve_jax.scheduler.planner import PlannedStep
from adaserve_jax.scheduler.policies import Policy
from adaserve_jax.scheduler.shapes import kernels
from adaserve_jax.scheduler.slo import need, need_capped, need_of_the_code
from adaserve_jax.types import CandidateTrees, DraftTrees, Limits

_RESTS = {
    "slo": selection.throughput_phase, "slo-equal": selection.equal_rest, "slo-only": selection.only_needed,
}  # fmt: skip
"""Spend what the SLO phase leaves of the budget, by selector."""
CODE_NODES_FACTOR = 1.2
"""Multiple of an equal share of the budget that is n_max in the authors' code."""


class Selector:
    """Selection rule, need rule and budget search of one policy."""

    def __init__(
        self, policy: Policy, limits: Limits, cost: CostTable, objective: Objective,
        *, search_budget: bool, max_slo_nodes: int,
    ):  # fmt: skip
        """Set up for one policy.

        search_budget: choose the verify budget again, over the token edges, once the candidates are known.
        max_slo_nodes: most nodes per sequence in the SLO phase; 0 for no limit.
        """
        self._policy = policy
        self._cost = cost
        self._objective = objective
        self._search_budget = search_budget
        self._max_slo_nodes = max_slo_nodes
        self._edges = np.array(limits.token_edges)
        # the other rules may leave room: a static tree has fewer nodes than its candidates, a rule that asks what nodes
        # are worth may refuse some, and the budget of the horizon form may be less than the plan's
        self._takes_all = policy.selector in ("equal", "best") or (
            policy.selector in ("slo", "slo-equal") and policy.need != "horizon"
        )
        if policy.uses_draft:
            kernels()  # so that no step compiles them

    def trees(self, planned: PlannedStep, candidates: CandidateTrees, now: float) -> DraftTrees:
        """Return the trees to verify. candidates: of every source. now: read after drafting, so that the time that
        drafting took counts.
        """
        plan = planned.plan
        if not candidates.log_f.size or plan.tree_token_cap <= plan.num_decode:
            return selection.roots_only(plan.root_token)
        candidates = _within_reach(candidates, planned.remaining)
        left = plan.tree_token_cap - plan.num_decode
        if self._takes_all and planned.decided_depth and candidates.log_f.size <= left:
            return selection.pack_all(candidates, plan.root_token)
        ranked = selection.rank(candidates)
        # without a draft only text is offered, and its f alone says how much of it is worth verifying
        if not planned.decided_depth and self._policy.selector != "slo":
            budget, _ = self._in_horizon(planned, ranked, int(candidates.depth.max()), now, search=True)
            chosen = selection.best_overall(ranked, budget - plan.num_decode)
        elif self._policy.selector == "equal":
            chosen = selection.equal_share(ranked, left)
        elif self._policy.selector == "best":
            chosen = selection.best_overall(ranked, left)
        elif self._policy.selector == "static":
            chosen = selection.static_tree(candidates, ranked, self._policy.tree_widths, left)
        elif self._policy.selector in ("throughput", "slo-throughput"):
            chosen = self._by_throughput(planned, ranked, now)
        elif callable(self._policy.selector):
            budget, wanted = self._budget_and_need(planned, ranked, int(candidates.depth.max()), now)
            f, wanted = (np.broadcast_to(each, each.shape) for each in (ranked.f, wanted))  # views for reading only
            offered = selection.Offered(f, wanted, budget - plan.num_decode)
            chosen = selection.only_needed(ranked, selection.taken_by(self._policy.selector, offered), 0)
        else:
            return self._by_need(planned, candidates, ranked, now)
        return selection.pack(candidates, plan.root_token, ranked, chosen)

    def _by_need(
        self, planned: PlannedStep, candidates: CandidateTrees, ranked: selection.Ranked, now: float
    ) -> DraftTrees:
        """Run Algorithm 2 with the policy's form of need."""
        plan, policy, most = planned.plan, self._policy, self._max_slo_nodes
        assert not callable(policy.selector)
        budget, wanted = self._budget_and_need(planned, ranked, int(candidates.depth.max()), now)
        if policy.need == "code":
            most = int(CODE_NODES_FACTOR * budget / max(plan.num_decode, 1))
        return selection.select_slo(
            candidates, plan.root_token, ranked, wanted,
            budget=budget, max_slo_nodes=most, order=policy.slo_order, rest=_RESTS[policy.selector],
        )  # fmt: skip

    def _budget_and_need(
        self, planned: PlannedStep, ranked: selection.Ranked, depth: int, now: float
    ) -> tuple[int, np.ndarray]:
        """Return the verify budget and A_cap, f64[R], in the policy's form of need."""
        if self._policy.need == "horizon":
            return self._in_horizon(planned, ranked, depth, now, search=self._search_budget)
        return planned.plan.tree_token_cap, self._in_one_step(planned, depth)

    def _by_throughput(self, planned: PlannedStep, ranked: selection.Ranked, now: float) -> np.ndarray:
        """Return the nodes of most expected tokens per second, bool[R, C]; the best number is on a token edge.

        `throughput` has the profile of the warm-up, drafting included. `slo-throughput` has the tables that learn, the
        time that drafting took, and what each row must gain by the end of the step.
        """
        plan, pace = planned.plan, planned.pace
        load = self._cost.context_load(plan.ctx_len)
        most = plan.tree_token_cap - plan.num_decode
        sizes = np.clip(self._edges - plan.num_prefill_tokens - plan.num_decode, 0, most)
        edges = np.searchsorted(self._edges, sizes + plan.num_prefill_tokens + plan.num_decode)
        if self._policy.selector == "throughput":
            levels, width = (plan.draft.depth, plan.draft.width) if plan.draft is not None else (0, 1)
            step_s = self._cost.steps_at_warm_up_s(plan.num_rows, levels, width, load)[edges]
            return selection.most_per_second(ranked, sizes, step_s)
        step_s = self._cost.verify_s(plan.num_rows, load)[edges] + max(now - planned.made_s, 0.0)
        decode_time_s = planned.made_s - pace.start_s
        wanted = need(decode_time_s[:, None], step_s, pace.tpot_slo_s[:, None], pace.num_decoded[:, None])
        return selection.most_per_second(ranked, sizes, step_s, wanted)

    def _in_horizon(
        self, planned: PlannedStep, ranked: selection.Ranked, depth: int, now: float, *, search: bool
    ) -> tuple[int, np.ndarray]:
        """Return the budget, on a token edge, and A_cap f64[R] in its horizon form. search: choose the budget."""
        plan = planned.plan
        edges, verify_s = self._edges, self._cost.verify_s(plan.num_rows, self._cost.context_load(plan.ctx_len))
        if not search:
            edge = int(np.searchsorted(edges, plan.tree_token_cap + plan.num_prefill_tokens))
            edges, verify_s = edges[edge : edge + 1], verify_s[edge : edge + 1]
        question = BudgetQuestion(
            need_rate=planned.pace.need_rate(now),
            edges=edges,
            verify_s=verify_s,
            spent_s=max(now - planned.made_s, 0.0),
            prefill_tokens=plan.num_prefill_tokens,
            prefill_weight=self._objective.prefill_weight(planned.wait_ratio),
            tree_token_cap=plan.tree_token_cap,
            depth=depth,
            baseline_s=self._cost.baseline_s,
        )
        return choose_budget(self._objective, ranked.f, question)

    def _in_one_step(self, planned: PlannedStep, depth: int) -> np.ndarray:
        """Return A_cap f64[R] as in the papers: all catching up happens in this step, whose seconds, drafting included,
        are as the warm-up measured them.
        """
        plan, pace = planned.plan, planned.pace
        tokens = plan.tree_token_cap + plan.num_prefill_tokens
        load = self._cost.context_load(plan.ctx_len)
        levels, width = (plan.draft.depth, plan.draft.width) if plan.draft is not None else (0, 1)
        step_time_s = self._cost.step_at_warm_up_s(tokens, plan.num_rows, levels, width, load)
        wanted = need(planned.made_s - pace.start_s, step_time_s, pace.tpot_slo_s, pace.num_decoded)
        return need_of_the_code(wanted, depth) if self._policy.need == "code" else need_capped(wanted, depth)


def _within_reach(candidates: CandidateTrees, remaining: np.ndarray) -> CandidateTrees:
    """Drop nodes that a sequence cannot emit before its end: a node at depth d is emitted beside d other tokens."""
    reach = remaining - 1
    cut = (reach < candidates.depth.max()).nonzero()[0]
    if not len(cut):
        return candidates
    log_f = candidates.log_f.copy()
    log_f[cut] = np.where(candidates.depth <= reach[cut, None], log_f[cut], np.float32(-np.inf))
    return replace(candidates, log_f=log_f)
