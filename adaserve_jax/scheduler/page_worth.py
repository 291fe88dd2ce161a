"""Whether KV pages in the draft's place would bring more tokens per second than the draft does, by the tables of cost
and acceptance. Knows no residency and swaps nothing.
"""

from __future__ import annotations

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.stats import StepStats

WORTH_MARGIN = 1.1
"""Times as much as the draft that pages must bring: trees bring more than the chains that it is judged by."""
SLACK = 2.0
"""Plain steps that a TPOT target must leave time for: prompts are computed beside them."""


class PageWorth:
    """Judges the running batch, while requests wait for pages. stats: totals of the scheduler."""

    def __init__(self, batch: Batch, chains: ChainCosts, stats: StepStats):
        self._batch = batch
        self._chains = chains
        self._stats = stats

    def pages_pay(self) -> bool:
        """Rows in proportion to pages, as far as requests wait, without a draft, against the rows that run, with the
        best chain, none included. Every token has its prompt tokens to pay for too, whoever drafts. Never while a
        running request pursues a pace that plain steps would hardly keep."""
        batch, limits = self._batch, self._batch.limits
        rows = len(batch.running)
        if not rows:
            return False
        more = min(rows * limits.extension_pages // limits.num_pages, len(batch.queue), limits.max_requests - rows)
        seconds, tokens = self._chains.predicted(rows)
        plain_s = float(self._chains.predicted(rows + more)[0][0])
        if bool((batch.table.tpot_slo_s[batch.slots] < SLACK * plain_s).any()):
            return False
        prompts_s = self._prompts_s()
        drafting_s = float((seconds / tokens).min()) / rows + prompts_s
        return WORTH_MARGIN * (plain_s / (rows + more) + prompts_s) < drafting_s

    def _prompts_s(self) -> float:
        """Seconds that prompts take per token that is emitted, by what was served so far."""
        prefixes = self._batch.prefixes
        computed = self._stats.prompt_tokens - (prefixes.hit_tokens if prefixes is not None else 0)
        return self._chains.prompt_token_s * max(computed, 0) / max(self._stats.generation_tokens, 1)
