"""Policies by name. A policy is a composition of parts, not a class: adding one is adding an entry to POLICIES.

README has the table that is made from POLICIES. By name they are found in policy_names.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.bandit import Exp3Spec, UcbSpec
from adaserve_jax.scheduler.controllers.base import Controller
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.scheduler.controllers.corrected import CorrectedController
from adaserve_jax.scheduler.controllers.fixed import ClosedFormController, FixedController
from adaserve_jax.scheduler.controllers.goodput import GoodputController
from adaserve_jax.scheduler.controllers.joint import JointController
from adaserve_jax.scheduler.controllers.linear import LinearSampling, LinUcb
from adaserve_jax.scheduler.controllers.nightjar import BINGREEDY, V1, V2, NightjarController, Rule
from adaserve_jax.scheduler.controllers.switching import SwitchTable
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.scheduler.queue import Ordering
from adaserve_jax.scheduler.selection import SloOrder
from adaserve_jax.types import Limits

SelectionRule = Literal["slo", "slo-equal", "equal", "best", "static"]
NeedRule = Literal["horizon", "step", "code"]

SPECINFER_NODES = (1, 1, 3, 3, 3, 3, 3, 3)
"""Nodes by level: its published expansion is 1, 1, 3, 1, 1, 1, 1, 1 children of each node."""
TETRIS_EXTRA = 2
"""Tokens that `tetris:<k>` drafts beyond k, to choose from."""
DSD_PROBE_STEPS = 50
SARATHI_TOKENS = 512


@dataclass(frozen=True)
class Parts:
    """What a controller may be built from. parameter: the k of a policy `<name>:<k>`, else 0. depth_offset,
    width_offset: c1 and c2 of eq. 8 and 9."""

    limits: Limits
    cost: CostTable
    acceptance: LearnedAcceptance
    objective: Objective
    parameter: int
    eq8_eq9: bool
    depth_offset: int
    width_offset: int
    seed: int

    @property
    def switch(self) -> SwitchTable:
        """What turning speculation on costs."""
        return SwitchTable.of(self.cost, self.limits)

    @property
    def chain_costs(self) -> ChainCosts:
        return ChainCosts(self.limits, self.cost, self.acceptance)


@dataclass(frozen=True)
class Policy:
    """Controller (depth, width, budget) x selector (which nodes) x ordering (which requests) x memory rule.

    about: what it is, for the table of policies. selector: "slo" is Algorithm 2; "slo-equal" its SLO phase, then
    equal shares of the rest. need, slo_order: how the SLO phase counts and whom it serves first. tree_widths: nodes
    by level (selector "static" only). search_budget: whether the verify budget is chosen again, over the token
    edges, once the candidates are known. calibrated: whether f is made of calibrated chances, or of the draft's own
    probabilities. uses_draft: whether the draft is fed and searched at all, when one is loaded. needs_draft: whether
    it is refused without one.
    """

    about: str
    controller: Callable[[Parts], Controller]
    selector: SelectionRule
    ordering: Ordering = "arrival"
    need: NeedRule = "horizon"
    slo_order: SloOrder = "cheapest-first"
    tree_widths: tuple[int, ...] = ()
    search_budget: bool = False
    calibrated: bool = True
    uses_draft: bool = True
    needs_draft: bool = False

    @property
    def gives_up(self) -> bool:
        """Whether targets that are out of reach, or no longer all to be met, are pursued no more; the published
        rules of need go on pursuing them."""
        return self.need == "horizon"


def _adaserve(parts: Parts) -> Controller:
    if parts.eq8_eq9 and parts.limits.max_depth:
        return closed_form(parts)
    joint = JointController(parts.limits, parts.cost, parts.acceptance, parts.objective)
    if not parts.limits.max_depth:
        return joint
    plain_step_s = parts.cost.baseline_s
    return CorrectedController(joint, parts.limits, parts.switch, parts.seed, plain_step_s=plain_step_s)


def closed_form(parts: Parts) -> Controller:
    """AdaServe's eq. 8 and 9."""
    return ClosedFormController.for_limits(
        parts.limits, depth_offset=parts.depth_offset, width_offset=parts.width_offset
    )


def _closed_form_of_the_code(parts: Parts) -> Controller:
    return ClosedFormController.for_limits(parts.limits, rounds_up=True)


def _chain(parts: Parts) -> Controller:
    return FixedController(parts.limits, parts.parameter)


def _no_speculation(parts: Parts) -> Controller:
    return FixedController(parts.limits, 0)


def _static_tree(parts: Parts) -> Controller:
    limits = parts.limits
    nodes = [min(count, limits.max_width) for count in SPECINFER_NODES[: limits.max_depth]]
    return FixedController(limits, len(nodes), max(nodes), nodes=sum(nodes))


def _over_drafting(parts: Parts) -> Controller:
    depth = min(parts.parameter + TETRIS_EXTRA, parts.limits.max_depth)
    return FixedController(parts.limits, depth, nodes=parts.parameter)


def _goodput(parts: Parts) -> Controller:
    return GoodputController(parts.limits, parts.cost)


def _probing_goodput(parts: Parts) -> Controller:
    return GoodputController(parts.limits, parts.cost, probe_steps=DSD_PROBE_STEPS)


def pure_arms(rule: Rule) -> Callable[[Parts], Controller]:
    def build(parts: Parts) -> Controller:
        return NightjarController(parts.limits, parts.chain_costs, parts.switch, rule, parts.seed)

    return build


POLICIES: dict[str, Policy] = {
    "adaserve": Policy(
        "depth, width, budget and prefill chunk chosen together by predicted cost, corrected by what was earned; ours",
        _adaserve, selector="slo", ordering="deadline", search_budget=True,
    ),
    "adaserve-paper": Policy(
        "AdaServe's Algorithm 2 as in its text: eq. 8 and 9, one step's need, a constant t_spec",
        closed_form, selector="slo", need="step", slo_order="slowest-first", calibrated=False, needs_draft=True,
    ),
    "adaserve-code": Policy(
        "the same as its authors' code has it: need 5 % up and at least 1, nodes capped, the least needy first",
        _closed_form_of_the_code, selector="slo", need="code", slo_order="fastest-first", calibrated=False,
        needs_draft=True,
    ),
    "spec:<k>": Policy("a chain of k for every request, always", _chain, selector="equal", needs_draft=True),
    "specinfer": Policy(
        "SpecInfer's static tree, 1, 1, 3, 3, 3, 3, 3, 3 nodes by level, as far as max_depth and max_width go",
        _static_tree, selector="static", tree_widths=SPECINFER_NODES, needs_draft=True,
    ),
    "dsd": Policy("SmartSpec: the chain of highest predicted goodput, every 20 steps", _goodput, selector="equal"),
    "dsd-probe": Policy(
        "the same, and a chain of 1 every 50 steps while it is off, so that it learns", _probing_goodput,
        selector="equal",
    ),
    "tetris:<k>": Policy(
        "TETRIS: chains longer than k, of which the k n likeliest nodes of all requests are verified",
        _over_drafting, selector="best", calibrated=False, needs_draft=True,
    ),
    "ucbspec": Policy(
        "BanditSpec: chain length by UCB on emitted tokens", lambda parts: UcbSpec(parts.limits), selector="equal",
        needs_draft=True,
    ),
    "exp3spec": Policy(
        "BanditSpec: chain length by EXP3", lambda parts: Exp3Spec(parts.limits, parts.seed), selector="equal",
        needs_draft=True,
    ),
    "nightjar": Policy(
        "Nightjar: chain length by seconds per token, none included, learned by size of batch; an arm for each bin",
        pure_arms(V2), selector="equal",
    ),
    "nightjar-v1": Policy(
        "its first version: explores more, and chooses anew in each step", pure_arms(V1), selector="equal"
    ),
    "bingreedy": Policy(
        "ADA-BINGREEDY: the same, blind to the size of the batch and to what switching costs", pure_arms(BINGREEDY),
        selector="equal",
    ),
    "linucb": Policy(
        "LinUCB: chain length by tokens per second, linear in the size of the batch",
        lambda parts: LinUcb(parts.limits, parts.chain_costs), selector="equal",
    ),
    "lints": Policy(
        "the same by linear Thompson sampling",
        lambda parts: LinearSampling(parts.limits, parts.chain_costs, parts.seed), selector="equal",
    ),
    "ar": Policy("no speculation", _no_speculation, selector="equal", uses_draft=False),
    "sarathi": Policy(
        "Sarathi-Serve: no speculation; decodes first, prefill chunks in what is left of 512 tokens per step",
        lambda parts: FixedController(parts.limits, 0, step_tokens=SARATHI_TOKENS), selector="equal", uses_draft=False,
    ),
    "priority": Policy(
        "no speculation; strictly by (priority, arrival), the worst is preempted for a better one",
        _no_speculation, selector="equal", ordering="priority", uses_draft=False,
    ),
}  # fmt: skip
