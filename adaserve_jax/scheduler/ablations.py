"""Policies between AdaServe's building blocks and `adaserve`, one part apart each, to see what a part is worth.

Every command that takes policies takes these too, and `ladder`, `halves` and `orders` for all of theirs.
"""

from __future__ import annotations

from dataclasses import replace

from adaserve_jax.scheduler.controllers.base import Controller
from adaserve_jax.scheduler.controllers.fixed import FixedController
from adaserve_jax.scheduler.controllers.joint import JointController
from adaserve_jax.scheduler.controllers.nightjar import V2
from adaserve_jax.scheduler.policies import POLICIES, Parts, Policy, closed_form, pure_arms

PREFILL_PARTS = 8
"""Without slack-sized prefill a step computes at most one token in this many of the largest step: 128 of AdaServe's
1024."""


def _budget_by_cost(parts: Parts) -> Controller:
    most = max(1, parts.limits.max_tokens // PREFILL_PARTS)
    return JointController(
        parts.limits, parts.cost, parts.acceptance, parts.objective, prefill_tokens=most, admits_by_pace=False
    )


def _slack_sized_prefill(parts: Parts) -> Controller:
    return JointController(parts.limits, parts.cost, parts.acceptance, parts.objective, admits_by_pace=False)


def _off(parts: Parts) -> Controller:
    return FixedController(parts.limits, 0)


def _model_alone(parts: Parts) -> Controller:
    return JointController(parts.limits, parts.cost, parts.acceptance, parts.objective)


_EQUAL = Policy(
    "eq. 8 and 9, as many nodes for each request, uncalibrated f, by arrival", closed_form, selector="equal",
    calibrated=False, needs_draft=True,
)  # fmt: skip
_SLO = replace(_EQUAL, about="+ SLO phase; equal shares of the rest", selector="slo-equal")
_THROUGHPUT = replace(_SLO, about="+ throughput phase: the likeliest nodes of all with the rest", selector="slo")
_CALIBRATED = replace(_THROUGHPUT, about="+ calibrated f", calibrated=True)
_BUDGET = replace(
    _CALIBRATED, about="+ depth, width and budget by predicted cost", controller=_budget_by_cost, search_budget=True,
    needs_draft=False,
)  # fmt: skip
_PREFILL = replace(_BUDGET, about="+ prefill in chunks of the slack's size", controller=_slack_sized_prefill)
_ADAPTED = POLICIES["adaserve"]

ABLATIONS: dict[str, Policy] = {
    "ladder-equal": _EQUAL,
    "ladder-slo": _SLO,
    "ladder-throughput": _THROUGHPUT,
    "ladder-calibrated": _CALIBRATED,
    "ladder-budget": _BUDGET,
    "ladder-prefill": _PREFILL,
    "half-model": replace(_ADAPTED, about="`adaserve`, but the cost model alone decides", controller=_model_alone),
    "half-bandit": replace(
        _ADAPTED, about="`adaserve`, but a bandit over chains alone decides: `nightjar`'s", controller=pure_arms(V2)
    ),
    "order-slowest": replace(_ADAPTED, about="`adaserve`, but the slowest first", slo_order="slowest-first"),
    "order-fastest": replace(_ADAPTED, about="`adaserve`, but the fastest first", slo_order="fastest-first"),
    "off": replace(
        _ADAPTED,
        about="`adaserve`, but speculation is off, with the draft loaded",
        controller=_off,
        elastic=False,
        weighs_pages=False,
    ),
}
LADDER = (*(name for name in ABLATIONS if name.startswith("ladder-")), "adaserve")
"""Each adds one part to the one before; `adaserve` adds admission by pace, the order by deadline and, where the draft's
memory may become KV pages, that."""
HALVES = ("half-model", "half-bandit", "adaserve")
"""Who decides: the tables, what was earned, or both."""
ORDERS = ("order-slowest", "order-fastest", "adaserve")
