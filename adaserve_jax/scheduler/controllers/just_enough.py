"""Controller of just-enough service: the shortest chain that keeps every request on pace, and prompts with the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.controllers.base import ChainController, Decision, Load
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.scheduler.controllers.slack_chunks import LEAST_CHUNK
from adaserve_jax.types import Limits

CHUNKS = 16
"""Sizes of a prefill chunk that are tried."""


@dataclass(frozen=True)
class JustEnough(ChainController):
    """JITServe's serving bandwidth (NSDI'26, arXiv 2504.20068; policy `jitserve`): what targets need, and no more.

    The paper gives a request a share of the batches. Here every decode row is in every step, and bandwidth is the
    length of the chain: of the chains that keep every row on pace beside LEAST_CHUNK tokens of prompts, the shortest,
    then the largest chunk beside it. Where none does, the chain of most tokens per second. Rows that no rate can save
    have no say.
    """

    limits: Limits
    chains: ChainCosts

    def decide(self, load: Load) -> Decision:
        rows, waiting = load.num_decode, load.prefill_tokens
        if not rows:
            return Decision(0, 0, 0, min(waiting, self.limits.max_tokens), feed_draft=self.limits.max_depth > 0)
        least = min(LEAST_CHUNK, waiting, self.limits.max_tokens - rows)
        largest = min(waiting, self.limits.max_tokens - rows)
        chunks = np.unique(np.linspace(least, largest, CHUNKS).round().astype(np.int64))
        seconds, tokens = self.chains.beside_prompts(rows, chunks)
        needed = float(load.need_rate[np.isfinite(load.need_rate)].max(initial=0.0))
        rate = tokens / seconds
        enough = rate >= needed
        depth = 0
        if load.speculates:
            depth = int(enough[0].argmax() if enough[0].any() else rate[0].argmax())
        chunk = int(chunks[enough[:, depth]].max(initial=least))
        cap = min(rows * (1 + depth), self.limits.max_tree_tokens, self.limits.max_tokens - chunk)
        return Decision(depth, min(depth, 1), max(cap, rows), chunk, feed_draft=depth > 0)
