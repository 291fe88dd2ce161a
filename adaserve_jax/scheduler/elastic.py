"""Elastic memory: expand the KV pool into the draft's memory, contract it again, and load the draft back.

`memory/residency.py` decides when one of these is due. This file asks it, carries the decision out on host and device,
and leaves a consistent state when the device refuses. Everything here runs between steps.
"""

from __future__ import annotations

from collections.abc import Callable

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ElasticError, IntegrityError
from adaserve_jax.memory.residency import ElasticRule, PagePressure, Residency, Transition
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.stats import StepStats
from adaserve_jax.types import Executor, Limits

FAILED = "failed"
"""Kind under which the statistics count transitions that raised ElasticError."""
WORTH_MARGIN = 1.1
"""Factor by which pages must beat the draft: trees emit more than the chains by which the draft is judged."""
SLACK = 2.0
"""Plain steps for which a TPOT target must leave time, because prompts are computed beside the decode rows."""


def may_expand(elastic_policy: bool, limits: Limits, config: EngineConfig) -> bool:
    """Return whether the draft's memory may ever become KV pages; elastic_policy is `Policy.elastic`."""
    return elastic_policy and config.elastic != "off" and limits.max_depth > 0 and limits.extension_pages > 0


class PageWorth:
    """Comparison of the draft with the KV pages that would fit in its place, by the tables of cost and acceptance."""

    def __init__(self, batch: Batch, chains: ChainCosts, stats: StepStats):
        self._batch = batch
        self._chains = chains
        self._stats = stats

    def pages_pay(self) -> bool:
        """Return whether KV pages in the draft's memory would bring more tokens per second than the draft does.

        Compares the running rows with the best chain against more rows without a draft: as many more as the pages
        would hold and as wait. Every emitted token also pays for its share of prompt tokens, with a draft or without.
        False while a running sequence has a TPOT target that plain steps would hardly meet.
        """
        batch, limits = self._batch, self._batch.limits
        rows = len(batch.running)
        if not rows:
            return False
        more = min(rows * limits.extension_pages // limits.num_pages, len(batch.queue), limits.max_requests - rows)
        seconds, tokens = self._chains.predicted(rows)
        plain_s = float(self._chains.predicted(rows + more)[0][0])
        if bool((batch.table.tpot_slo_s[batch.slots] < SLACK * plain_s).any()):
            return False
        prompts_s = self._prompt_s_per_output_token()
        drafting_s = float((seconds / tokens).min()) / rows + prompts_s
        return WORTH_MARGIN * (plain_s / (rows + more) + prompts_s) < drafting_s

    def _prompt_s_per_output_token(self) -> float:
        prefixes = self._batch.prefixes
        computed = self._stats.prompt_tokens - (prefixes.hit_tokens if prefixes is not None else 0)
        return self._chains.prompt_token_s * max(computed, 0) / max(self._stats.generation_tokens, 1)


class ElasticMemory:
    """Expansions and contractions of one scheduler: the residency of its draft, and their counts and seconds."""

    def __init__(self, batch: Batch, rule: ElasticRule, stats: StepStats, worth: PageWorth | None = None):
        """Start with the draft resident.

        stats: totals of the scheduler, which count transitions and their seconds by kind. worth: judges whether the
        draft gives way; None: it does while speculation is off.
        """
        limits = batch.limits
        self.batch = batch
        self.residency = Residency(rule, limits.num_pages, limits.extension_pages)
        self.step_in_flight = False
        self.speculates: bool | None = None
        """True if speculation was on in the last step; None if that step had no decode rows."""
        self._stats = stats
        self._pages_pay = None if worth is None else worth.pages_pay

    def due(self) -> Transition | None:
        """Return the transition to make now. Each call counts as a step."""
        batch = self.batch
        running = len(batch.running)
        pressure = PagePressure(batch.pool.num_free - running, batch.blocked_on_pages, len(batch.queue), running)
        return self.residency.due(pressure, self.speculates, self._pages_pay)

    def perform(self, transition: Transition, executor: Executor, clock: Callable[[], float]) -> None:
        """Make a transition. One that fails is counted, leaves texts and pages as they were, and is tried later."""
        began = clock()
        done = True
        try:
            if transition == "expand":
                expand(self.batch, executor)
            elif transition == "contract":
                contract(self.batch, executor)
            else:
                done = executor.draft_ready()
        except ElasticError:
            self.residency.failed()
            self._count(FAILED, 1, clock() - began)
            return
        if done:
            self.residency.succeeded(transition)
        self._count(transition, int(done), clock() - began)

    def _count(self, kind: str, moves: int, seconds: float) -> None:
        stats = self._stats
        if moves:
            stats.elastic_moves[kind] = stats.elastic_moves.get(kind, 0) + moves
        stats.elastic_s[kind] = stats.elastic_s.get(kind, 0.0) + seconds


def expand_or_contract(memory: ElasticMemory | None, executor: Executor, clock: Callable[[], float]) -> bool:
    """Make the transition that is due, and return whether any was. Call once after each step's commit, and now and then
    while there are no requests; each call counts as a step.

    memory: `Scheduler.elastic_memory`. Raises IntegrityError if a transition is due while a step is in flight.
    """
    due = None if memory is None else memory.due()
    if memory is None or due is None:
        return False
    if memory.step_in_flight:
        raise IntegrityError(f"elastic memory must {due} while a step is in flight; commit the step first")
    memory.perform(due, executor, clock)
    return True


def bring_back_draft(
    memory: ElasticMemory | None, executor: Executor, clock: Callable[[], float], wait: Callable[[], None]
) -> None:
    """Make the draft resident, whatever transition was under way. Only without requests.

    memory: `Scheduler.elastic_memory`. wait: called between two questions whether the draft is loaded. Raises
    ElasticError if the draft cannot be brought back now.
    """
    if memory is None:
        return
    residency = memory.residency
    if residency.state == "expanded":
        memory.perform("contract", executor, clock)
        if residency.state == "expanded":
            raise ElasticError("the KV pages in the draft's memory could not be given up; try again later")
    while not residency.draft_is_here:
        failures = residency.failures
        memory.perform("reload", executor, clock)
        if residency.failures > failures:
            raise ElasticError("the draft could not be loaded again; try again later")
        if not residency.draft_is_here:
            wait()


def expand(batch: Batch, executor: Executor) -> None:
    """Free the draft and add the extension's pages to the pool."""
    try:
        executor.expand()
    finally:
        batch.forget_draft()  # where it failed the draft is there, but its KV is not
    batch.pool.extend()


def contract(batch: Batch, executor: Executor) -> None:
    """Move pages in use out of the extension, publish their new ids, then free the slab and begin to load the draft."""
    pool = batch.pool
    migration = pool.plan_contraction()
    if migration is None:
        raise ElasticError("too few base pages are free to take in those of the extension")
    if len(migration.from_pages):
        try:
            executor.move_pages(migration.from_pages, migration.to_pages)
        except ElasticError:
            pool.abandon(migration)
            raise
    batch.remap(pool.publish(migration))
    executor.contract()
    pool.trim()
