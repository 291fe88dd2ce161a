"""Controllers without a model of cost: constant chains and trees, and AdaServe's eq. 8 and 9."""

from __future__ import annotations

from dataclasses import dataclass, replace

from adaserve_jax.scheduler.controllers.alone import Alone
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load
from adaserve_jax.types import Limits

PREFILL_SHARE = 4
"""While prompts wait, tree tokens leave at least one token in this many of the step to prefill."""
PAPER_VERIFY_TOKENS, PAPER_DRAFT_TOKENS = 512, 96
"""B1 and B2 of AdaServe's artifact; a smaller machine keeps their ratio."""


@dataclass(frozen=True)
class FixedController(Controller):
    """Every decode row drafts `depth` levels of `width` in every step; prefill takes the rest of the token budget.

    nodes: most nodes verified per row, its root left out; None: all that were drafted. step_tokens: most tokens of a
    step with prefill, tree and prefill together; None: what the buckets hold.
    """

    limits: Limits
    depth: int
    width: int = 1
    nodes: int | None = None
    step_tokens: int | None = None

    def decide(self, load: Load) -> Decision:
        width = self.width if self.depth else 0
        decision = fill(self.limits, load, depth=self.depth, width=width, nodes=self.nodes)
        if self.step_tokens is None:
            return decision
        room = max(self.step_tokens - decision.budget, 1)
        return replace(decision, prefill_tokens=min(decision.prefill_tokens, room))

    def fastest_alone(self, alone: Alone) -> float:
        """Of a static tree, at its best size: where a level's parents were not drafted it is smaller than `nodes`."""
        if self.nodes is None or self.width == 1:
            return super().fastest_alone(alone)
        sizes = range(self.decide(Load.of_one()).budget)
        return max(alone.rate(self.depth, self.width, nodes) for nodes in sizes)


@dataclass(frozen=True)
class ClosedFormController(Controller):
    """AdaServe eq. 8 and 9: d = clip(floor(B1 / (n + c1)) - 1, Dmin, Dmax), w = clip(floor(B2 / n) + c2, 1, Wmax).

    verify_tokens: B1. draft_tokens: B2, draft tokens of one level. rounds_up: d = min(ceil(B1 / n), Dmax), as in the
    authors' code.
    """

    limits: Limits
    verify_tokens: int
    draft_tokens: int
    depth_offset: int = 0
    width_offset: int = 0
    min_depth: int = 1
    rounds_up: bool = False

    @classmethod
    def for_limits(
        cls, limits: Limits, *, depth_offset: int = 0, width_offset: int = 0, rounds_up: bool = False
    ) -> ClosedFormController:
        tokens = limits.max_tree_tokens
        draft_tokens = max(1, tokens * PAPER_DRAFT_TOKENS // PAPER_VERIFY_TOKENS)
        return cls(limits, tokens, draft_tokens, depth_offset, width_offset, rounds_up=rounds_up)

    def decide(self, load: Load) -> Decision:
        rows = max(load.num_decode, 1)
        depth = -(-self.verify_tokens // rows)
        if not self.rounds_up:
            depth = self.verify_tokens // (rows + self.depth_offset) - 1
        depth = min(max(depth, self.min_depth), self.limits.max_depth)
        width = min(max(self.draft_tokens // rows + self.width_offset, 1), self.limits.max_width)
        return fill(self.limits, load, depth=depth, width=width)


def fill(limits: Limits, load: Load, *, depth: int, width: int, nodes: int | None = None) -> Decision:
    """Trees as large as fit, then prefill with what is left, no less than its share. nodes: most per row."""
    reserved = min(load.prefill_tokens, max(1, limits.max_tokens // PREFILL_SHARE))
    most = min(limits.max_tree_tokens, limits.max_tokens - reserved)
    each = depth * width if nodes is None else min(nodes, depth * width)
    budget = max(load.num_decode, min(load.num_decode * (1 + each), most))
    prefill = min(load.prefill_tokens, limits.max_tokens - budget)
    return Decision(depth, width, budget, prefill, feed_draft=depth > 0)
