"""Policies by name. A policy is a composition of parts, not a class: adding one is adding an entry to POLICIES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Controller
from adaserve_jax.scheduler.controllers.fixed import ClosedFormController, FixedController
from adaserve_jax.scheduler.controllers.joint import JointController
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.scheduler.queue import Ordering
from adaserve_jax.scheduler.selection import SloOrder
from adaserve_jax.types import Limits

Selector = Literal["slo", "equal"]


@dataclass(frozen=True)
class Parts:
    """What a controller may be built from. parameter: the k of `spec:<k>`, else 0."""

    limits: Limits
    cost: CostTable
    acceptance: LearnedAcceptance
    objective: Objective
    parameter: int
    eq8_eq9: bool


@dataclass(frozen=True)
class Policy:
    """Controller (depth, width, budget) x selector (which nodes) x ordering (which requests) x memory rule.

    uses_draft: whether the draft is fed and searched at all, when one is loaded.
    search_budget: whether the verify budget is chosen again, over the bucket edges, once the candidates are known.
    """

    controller: Callable[[Parts], Controller]
    selector: Selector
    ordering: Ordering
    slo_order: SloOrder = "cheapest-first"
    search_budget: bool = False
    uses_draft: bool = True


def _adaserve(parts: Parts) -> Controller:
    if parts.eq8_eq9 and parts.limits.max_depth:
        return ClosedFormController.for_limits(parts.limits)
    return JointController(parts.limits, parts.cost, parts.acceptance, parts.objective)


def _chain(parts: Parts) -> Controller:
    return FixedController(parts.limits, parts.parameter)


def _no_speculation(parts: Parts) -> Controller:
    return FixedController(parts.limits, 0)


POLICIES: dict[str, Policy] = {
    "adaserve": Policy(_adaserve, selector="slo", ordering="deadline", search_budget=True),
    "spec:<k>": Policy(_chain, selector="equal", ordering="arrival"),
    "ar": Policy(_no_speculation, selector="equal", ordering="arrival", uses_draft=False),
}


def find_policy(name: str, max_depth: int) -> tuple[Policy, int]:
    """The policy called `name` and its parameter; needs nothing loaded. max_depth: deepest draft, 0 without one.

    Raises ConfigError for an unknown name, or one that drafts deeper than max_depth.
    """
    family, colon, parameter = name.partition(":")
    if not colon and name in POLICIES:
        return POLICIES[name], 0
    if not colon or f"{family}:<k>" not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known policies are {', '.join(POLICIES)}")
    if not (parameter.isascii() and parameter.isdecimal() and int(parameter) >= 1):
        raise ConfigError(f"policy {family}:<k> needs an integer k of at least 1, got {name!r}; for example {family}:4")
    depth = int(parameter)
    if depth > max_depth:
        has = f"max_depth is {max_depth}" if max_depth else "there is no draft"
        raise ConfigError(
            f"policy {name} needs a draft and max_depth of at least {depth}, but {has}; load a draft and raise "
            "max_depth, or choose a smaller k"
        )
    return POLICIES[f"{family}:<k>"], depth
