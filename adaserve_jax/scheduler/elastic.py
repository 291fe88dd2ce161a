"""How a swap of the draft and KV pages goes: its parts in order, on host and device, and what a failure leaves.

When one is due says memory/residency.py. Everything here runs between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ElasticError, IntegrityError
from adaserve_jax.memory.residency import ElasticRule, Pressure, Residency, Transition
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.stats import StepStats
from adaserve_jax.types import Executor, Limits

if TYPE_CHECKING:
    from adaserve_jax.scheduler.scheduler import Scheduler

# Whether KV pages in the draft's place would bring more tokens per second than the draft does, by the tables of
# cost and acceptance. Knows no residency and swaps nothing.

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


FAILED = "failed"
"""Kind of a swap that raised ElasticError, in the statistics."""


def may_expand(elastic_policy: bool, limits: Limits, config: EngineConfig) -> bool:
    """Whether the draft's memory may ever become pages. elastic_policy: whether the policy's memory rule says so."""
    return elastic_policy and config.elastic != "off" and limits.max_depth > 0 and limits.extension_pages > 0


class ElasticMemory:
    """The swaps of one scheduler: what its residency is asked, and the totals."""

    def __init__(self, batch: Batch, rule: ElasticRule, stats: StepStats, worth: PageWorth | None = None):
        """worth: says whether the draft gives way; None: it does while speculation is off."""
        limits = batch.limits
        self.batch = batch
        self.residency = Residency(rule, limits.num_pages, limits.extension_pages)
        self.speculates: bool | None = None
        """Whether speculation was on in the last step; None: it had no decode rows."""
        self._stats = stats
        self._pages_pay = None if worth is None else worth.pages_pay

    def due(self) -> Transition | None:
        """Once after each step."""
        batch = self.batch
        running = len(batch.running)
        pressure = Pressure(batch.pool.num_free - running, batch.turned_away, len(batch.queue), running)
        return self.residency.due(pressure, self.speculates, self._pages_pay)

    def count(self, kind: str, seconds: float) -> None:
        """One more swap of that kind, which took the step loop so long."""
        self._stats.elastic_moves[kind] = self._stats.elastic_moves.get(kind, 0) + 1
        self.took(kind, seconds)

    def took(self, kind: str, seconds: float) -> None:
        self._stats.elastic_s[kind] = self._stats.elastic_s.get(kind, 0.0) + seconds


def expand_or_contract(scheduler: Scheduler, executor: Executor, clock: Callable[[], float]) -> None:
    """Let the draft and KV pages change places where that is due; call it once after each step's commit.

    A swap that fails is counted, leaves requests, texts and pages as they were, and is tried again later.
    Raises IntegrityError: a step is in flight.
    """
    memory = scheduler.elastic_memory
    if memory is None:
        return
    due = memory.due()
    if due is None:
        return
    if scheduler.is_stepping:
        raise IntegrityError(f"a swap ({due}) is due while a step is in flight; commit the step first")
    _perform(memory, due, executor, clock)


def bring_back_draft(
    scheduler: Scheduler, executor: Executor, clock: Callable[[], float], wait: Callable[[], None]
) -> None:
    """Leave the draft resident, whatever swap was under way; only without requests. wait: between two questions.

    Raises ElasticError: it cannot be brought back now.
    """
    memory = scheduler.elastic_memory
    if memory is None:
        return
    state = memory.residency.state
    if state == "expanded":
        _perform(memory, "contract", executor, clock)
        if memory.residency.state == "expanded":
            raise ElasticError("the KV pages in the draft's memory could not be given up; try again later")
    while not memory.residency.draft_is_here:
        failures = memory.residency.failures
        _perform(memory, "reload", executor, clock)
        if memory.residency.failures > failures:
            raise ElasticError("the draft could not be loaded again; try again later")
        if not memory.residency.draft_is_here:
            wait()


def _perform(memory: ElasticMemory, due: Transition, executor: Executor, clock: Callable[[], float]) -> None:
    began = clock()
    do = {"expand": _expand, "contract": _contract, "reload": _reload}[due]
    try:
        done = do(memory.batch, executor)
    except ElasticError:
        memory.residency.failed()
        memory.count(FAILED, clock() - began)
        return
    if done:
        memory.residency.succeeded(due)
        memory.count(due, clock() - began)
    else:
        memory.took(due, clock() - began)


def _expand(batch: Batch, executor: Executor) -> bool:
    try:
        executor.expand()
    finally:
        batch.forget_draft()  # where it failed the draft is there, but its KV is not
    batch.pool.extend()
    return True


def _contract(batch: Batch, executor: Executor) -> bool:
    """Move what lives in the extension below it, publish, and only then free the slab and send for the draft."""
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
    return True


def _reload(batch: Batch, executor: Executor) -> bool:
    return executor.draft_ready()
