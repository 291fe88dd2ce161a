"""Controllers without a model of cost: a constant chain (`spec:k`, `ar` as k = 0) and AdaServe's eq. 8 and 9."""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.scheduler.controllers.base import Decision, Load
from adaserve_jax.types import Limits

PREFILL_SHARE = 4
"""While prompts wait, tree tokens leave at least one token in this many of the step to prefill."""
PAPER_VERIFY_TOKENS, PAPER_DRAFT_TOKENS = 512, 96
"""B1 and B2 of AdaServe's artifact; a smaller machine keeps their ratio."""


@dataclass(frozen=True)
class FixedController:
    """Every decode row drafts a chain of `depth` in every step; prefill takes the rest of the token budget."""

    limits: Limits
    depth: int

    def decide(self, load: Load) -> Decision:
        return _fill(self.limits, load, depth=self.depth, width=1 if self.depth else 0)


@dataclass(frozen=True)
class ClosedFormController:
    """AdaServe eq. 8 and 9: d = clip(floor(B1 / (n + c1)) - 1, Dmin, Dmax), w = clip(floor(B2 / n) + c2, 1, Wmax).

    verify_tokens: B1. draft_tokens: B2, draft tokens of one level.
    """

    limits: Limits
    verify_tokens: int
    draft_tokens: int
    depth_offset: int = 0
    width_offset: int = 0
    min_depth: int = 1

    @classmethod
    def for_limits(cls, limits: Limits) -> ClosedFormController:
        tokens = limits.max_tree_tokens
        return cls(limits, tokens, max(1, tokens * PAPER_DRAFT_TOKENS // PAPER_VERIFY_TOKENS))

    def decide(self, load: Load) -> Decision:
        rows = max(load.num_decode, 1)
        depth = self.verify_tokens // (rows + self.depth_offset) - 1
        depth = min(max(depth, self.min_depth), self.limits.max_depth)
        width = min(max(self.draft_tokens // rows + self.width_offset, 1), self.limits.max_width)
        return _fill(self.limits, load, depth=depth, width=width)


def _fill(limits: Limits, load: Load, *, depth: int, width: int) -> Decision:
    """Trees as large as fit, then prefill with what is left, no less than its share."""
    reserved = min(load.prefill_tokens, max(1, limits.max_tokens // PREFILL_SHARE))
    most = min(limits.max_tree_tokens, limits.max_tokens - reserved)
    budget = max(load.num_decode, min(load.num_decode * (1 + depth * width), most))
    prefill = min(load.prefill_tokens, limits.max_tokens - budget)
    return Decision(depth, width, budget, prefill, feed_draft=depth > 0)
