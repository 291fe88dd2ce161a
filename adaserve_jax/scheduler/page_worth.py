"""Whether KV pages in the draft's place would bring more tokens per second than the draft does, by the tables of cost
and acceptance. Knows no residency and swaps nothing.
"""

from __future__ import annotations

from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts

WORTH_MARGIN = 1.1
"""Times as much as the draft that pages must bring: trees bring more than the chains that it is judged by."""
SLACK = 2.0
"""Plain steps that a TPOT target must leave time for: prompts are computed beside them."""


class PageWorth:
    """Judges the running batch, while requests wait for pages."""

    def __init__(self, batch: Batch, chains: ChainCosts):
        self._batch = batch
        self._chains = chains

    def pages_pay(self) -> bool:
        """Rows in proportion to pages, as far as requests wait, without a draft, against the rows that run, with the
        best chain, none included. Never while a running request pursues a pace that plain steps would hardly keep."""
        batch, limits = self._batch, self._batch.limits
        rows = len(batch.running)
        if not rows:
            return False
        more = min(rows * limits.extension_pages // limits.num_pages, len(batch.queue), limits.max_requests - rows)
        seconds, tokens = self._chains.predicted(rows)
        plain_s = float(self._chains.predicted(rows + more)[0][0])
        if bool((batch.table.tpot_slo_s[batch.slots] < SLACK * plain_s).any()):
            return False
        return (rows + more) / plain_s > WORTH_MARGIN * rows * float((tokens / seconds).max())
