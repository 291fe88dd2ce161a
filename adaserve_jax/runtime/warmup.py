"""Warm-up: runs and times each compiled program through the code that serves. The cost table starts from these times.

Warm-up measures briefly, `adaserve profile` at length. Tokens are drawn from the vocabulary at random: which experts a
step reads depends on its tokens, and equal ones would choose the same few. Everything here runs on page 0 of an engine
that has not served yet, and page 0 loses what it held.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from adaserve_jax.pallas_kernels.paged_tree_attention.reference import CPU_BLOCKS, on_cpu
from adaserve_jax.results.profile import Timings
from adaserve_jax.runtime.compile import Bucket
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.elastic import Elastic
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.sizing import Resolved
from adaserve_jax.sampling import RowSampling
from adaserve_jax.types import DraftPlan, DraftTrees, Limits, Progress, StepOutcome, StepPlan

TYPICAL_CONTEXT = 256
"""Tokens of context at which the cost table anchors its lines, where max_context allows it."""
LONG_S = 0.1
"""A longer run is not repeated within a pass: disturbances add little to it."""
MAX_SWITCH_TOKENS = 16_384
"""Most tokens, of all rows together, that are fed to time a switch. Longer lags take as long in proportion."""


class MeasuredExecutor(Protocol):
    """The parts of a `ModelExecutor` that warm-up runs."""

    resolved: Resolved
    target: DeviceModel
    local_drafter: LocalDrafter | None

    @property
    def limits(self) -> Limits: ...

    @property
    def draft_resident(self) -> bool: ...

    def verify(self, plan: StepPlan, trees: DraftTrees) -> StepOutcome: ...


@dataclass(frozen=True)
class Effort:
    """Settings of a measurement.

    contexts: committed tokens in every row; the limits may cut them. passes: rounds over all programs. repeats: timed
    runs of a pass at the first context; before those of the first pass, one is not timed. repeats_beyond: timed runs at
    each other context. all_depths: time searches of every depth, not of the first and the last only.
    """

    contexts: tuple[int, ...]
    passes: int
    repeats: int
    repeats_beyond: int
    all_depths: bool


WARM_UP = Effort((64, 768), passes=2, repeats=2, repeats_beyond=1, all_depths=False)
"""Two contexts give a line: one of a few pages and one of many, since the first pages cost more than a line says."""
THOROUGH = Effort((0, 128, 512, 1024, 1792), passes=3, repeats=2, repeats_beyond=2, all_depths=True)


def measure(executor: MeasuredExecutor, effort: Effort = WARM_UP, progress: Progress | None = None) -> Timings:
    """Return the least time of every program.

    The least, because disturbances only add to a time, and the live cost table learns the common factor. In several
    passes over all programs, because a disturbance lasts for a while: a size that looked dear would never be used, and
    so never be corrected.
    """
    timings = Timings(_fit_context(executor.limits, TYPICAL_CONTEXT), context_rows(executor))
    _measure_all(list(_programs(executor, timings, effort.all_depths)), executor.limits, effort, progress)
    return timings


def measure_draft(
    limits: Limits, drafter: LocalDrafter, rows_together: int, effort: Effort = WARM_UP,
    progress: Progress | None = None,
) -> Timings:  # fmt: skip
    """Measure a draft that has no target beside it. rows_together: as `context_rows` returns it."""
    timings = Timings(_fit_context(limits, TYPICAL_CONTEXT), rows_together)
    jobs = list(_draft_programs(limits, drafter, drafter.model.config.vocab_size, timings, effort.all_depths))
    _measure_all(jobs, limits, effort, progress)
    return timings


def _measure_all(jobs: list[_Program], limits: Limits, effort: Effort, progress: Progress | None) -> None:
    contexts = tuple(dict.fromkeys(_fit_context(limits, context) for context in effort.contexts))
    for number in range(effort.passes):
        for done, job in enumerate(jobs, 1):
            for context in contexts:
                first = context == contexts[0]
                if first and not number:
                    job.run_at(context)()
                for _ in range(effort.repeats if first else effort.repeats_beyond):
                    if job.measure(context) > LONG_S:
                        break
            if progress is not None:
                progress("timing", number * len(jobs) + done, effort.passes * len(jobs))


def measure_switching(
    executor: MeasuredExecutor, passes: int, progress: Progress | None = None
) -> dict[tuple[int, int], float]:
    """Time how long drafts take to catch up when speculation is turned on again: C_switch of Nightjar, table 3.

    Returns seconds by (lag in tokens, rows), the least of `passes` times; empty without a draft. Tokens are fed in
    chunks of the largest catch-up program, as a switch feeds them.
    """
    limits, drafter = executor.limits, executor.local_drafter
    if drafter is None:
        return {}
    vocabulary = _common_vocabulary(executor.target, drafter)
    sizes = list(itertools.product(_powers_of_4(limits.max_context), _powers_of_4(limits.max_requests)))
    found: dict[tuple[int, int], float] = {}
    for done, (lag, rows) in enumerate(sizes, 1):
        fed = max(1, min(lag, MAX_SWITCH_TOKENS // rows))
        chunk = max(1, limits.max_tokens // rows)
        times = []
        for _ in range(passes):
            started = time.perf_counter()
            for context in range(0, fed, chunk):
                counts = np.full(rows, min(chunk, fed - context), np.int32)
                catch_up_once(limits, drafter, counts, context, vocabulary)
            times.append(time.perf_counter() - started)
        found[lag, rows] = min(times) * lag / fed
        if progress is not None:
            progress("timing switches", done, len(sizes))
    return found


def run_once(executor: MeasuredExecutor, progress: Progress | None = None) -> None:
    """Run every program once without timing it, for an engine whose times come from a profile."""
    jobs = list(_programs(executor, Timings(0, 1), False))
    for done, job in enumerate(jobs, 1):
        job.run_at(0)()
        if progress is not None:
            progress("running", done, len(jobs))


def rehearse_expansion(executor: MeasuredExecutor, elastic: Elastic, progress: Progress | None = None) -> None:
    """Extend the pools, run every verify program on them once, move a page, contract, and wait for the draft.

    Raises ElasticError: the device cannot do it now, so it could not while serving.
    """
    limits, buckets = executor.limits, executor.target.buckets.all()
    elastic.expand()
    for done, bucket in enumerate(buckets, 1):
        executor.verify(*_verify_step(executor, bucket, 0))
        if progress is not None:
            progress("running extended", done, len(buckets))
    elastic.move_pages(np.array([limits.num_pages]), np.array([0]))
    elastic.contract()
    elastic.wait()


def context_rows(executor: MeasuredExecutor) -> int:
    """Return how many rows read their contexts together, each waiting for the longest.

    With xla attention on a CPU, the rows of a block; on other devices, and in deterministic mode, all rows. A kernel
    reads every row by itself.
    """
    resolved = executor.resolved
    if resolved.config.deterministic:
        return resolved.limits.max_requests
    if resolved.attention != "xla":
        return 1
    return CPU_BLOCKS if on_cpu() else resolved.limits.max_requests


@dataclass(frozen=True)
class _Program:
    """A program to time. run_at(context): a call that runs it with so many committed tokens in every row; times, sizes:
    the table of its times, by sizes and context."""

    run_at: Callable[[int], Callable[[], object]]
    times: dict[Any, float]
    sizes: tuple[int, ...]

    def measure(self, context: int) -> float:
        """Run it once, keep the time if it is the least, and return it."""
        run, key = self.run_at(context), (*self.sizes, context)
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        self.times[key] = min(seconds, self.times.get(key, math.inf))
        return seconds


def _programs(executor: MeasuredExecutor, timings: Timings, all_depths: bool) -> Iterator[_Program]:
    limits, drafter = executor.limits, executor.local_drafter
    for bucket in executor.target.buckets.all():

        def verify(context: int, bucket: Bucket = bucket) -> Callable[[], object]:
            return partial(executor.verify, *_verify_step(executor, bucket, context))

        yield _Program(verify, timings.verify, (bucket.tokens, bucket.rows))
    if drafter is not None and executor.draft_resident:
        yield from _draft_programs(limits, drafter, _common_vocabulary(executor.target, drafter), timings, all_depths)


def _common_vocabulary(target: DeviceModel, drafter: LocalDrafter) -> int:
    """Return a number below which every token is one of both models."""
    return min(target.config.vocab_size, drafter.model.config.vocab_size)


def _draft_programs(
    limits: Limits, drafter: LocalDrafter, vocabulary: int, timings: Timings, all_depths: bool
) -> Iterator[_Program]:
    for bucket in drafter.model.buckets.all():
        counts = _split(bucket.tokens, min(bucket.rows, bucket.tokens))

        def catch_up(context: int, counts: np.ndarray = counts) -> Callable[[], object]:
            return partial(catch_up_once, limits, drafter, counts, context, vocabulary)

        yield _Program(catch_up, timings.catchup, (bucket.tokens, bucket.rows))
    depths = range(1, limits.max_depth + 1) if all_depths else sorted({1, limits.max_depth})
    for rows, width, depth in itertools.product(drafter.model.buckets.row_edges, drafter.widths, depths):

        def search(context: int, rows: int = rows, width: int = width, depth: int = depth) -> Callable[[], object]:
            draft = draft_plan(np.ones(rows, np.int32), context, depth, width, vocabulary)
            return partial(drafter.propose, decode_plan(limits, rows, context, draft))

        yield _Program(search, timings.search, (rows, width, depth))


def catch_up_once(limits: Limits, drafter: LocalDrafter, counts: np.ndarray, context: int, vocabulary: int) -> None:
    """Feed the draft counts[r] tokens below `vocabulary` of each row, i32[R], after `context` others; wait until it is
    done."""
    draft = draft_plan(counts, context, vocabulary=vocabulary)
    drafter.propose(decode_plan(limits, len(counts), context, draft))
    jax.block_until_ready(drafter.model.pools)


def _split(tokens: int, rows: int) -> np.ndarray:
    """Return counts i32[rows] that sum to `tokens`, as even as possible."""
    return np.diff(np.linspace(0, tokens, rows + 1).astype(np.int32))


def _fit_context(limits: Limits, context: int) -> int:
    """Cut a context so that a step's tokens fit behind it."""
    return max(0, min(context, limits.max_context - limits.max_tokens - limits.max_depth - 1))


def _draw(count: int, vocabulary: int) -> np.ndarray:
    """Return tokens i32[count] below `vocabulary`, the same ones in every run."""
    return np.random.default_rng(count).integers(0, vocabulary, count, np.int32)


def draft_plan(counts: np.ndarray, context: int, depth: int = 0, width: int = 1, vocabulary: int = 1) -> DraftPlan:
    """Return a plan that catches up counts[r] tokens of each row, i32[R], after `context` others, and then searches.

    vocabulary: tokens are drawn below it.
    """
    held = np.full(len(counts), context, np.int32)
    return DraftPlan(depth, width, _draw(counts.sum(), vocabulary), counts, held, np.ones(len(counts), bool))


def decode_plan(
    limits: Limits, rows: int, context: int, draft: DraftPlan | None = None, prefill: int = 0, vocabulary: int = 1
) -> StepPlan:
    """Return a step of `rows` sampling rows at `context` on page 0; if prefill > 0, the last row is such a chunk, of
    tokens drawn below `vocabulary`."""
    sampling = RowSampling.greedy(rows)
    sampling.seed[:], sampling.temperature[:] = np.arange(rows), 1.0
    chunks = 1 if prefill else 0
    return StepPlan(
        step=0, slots=np.arange(rows), num_decode=rows - chunks, root_token=np.zeros(rows - chunks, np.int32),
        ctx_len=np.full(rows, context, np.int32),
        page_table=np.zeros((rows, limits.max_pages_per_request), np.int32), sampling=sampling,
        prefill_tokens=_draw(prefill, vocabulary), prefill_counts=np.full(chunks, prefill, np.int32),
        prefill_final=np.ones(chunks, bool), draft=draft, tree_token_cap=limits.max_tree_tokens,
    )  # fmt: skip


def _verify_step(executor: MeasuredExecutor, bucket: Bucket, context: int) -> tuple[StepPlan, DraftTrees]:
    """Return a step that fills the bucket: as many tree tokens as the limits allow, then a prefill chunk. Tokens are
    drawn from the vocabulary, and rows take turns with all adapters that have room."""
    limits, vocabulary = executor.limits, executor.target.config.vocab_size
    rows = min(bucket.rows, bucket.tokens)
    adapters = np.arange(1, rows + 1, dtype=np.int32) % (executor.resolved.config.lora_slots + 1)
    if bucket.tokens <= limits.max_tree_tokens:
        plan = decode_plan(limits, rows, context)
        return replace(plan, adapters=adapters), _stars(_split(bucket.tokens, rows), vocabulary)
    nodes = limits.max_tree_tokens - 1 if rows > 1 else 0
    plan = decode_plan(limits, rows, context, prefill=bucket.tokens - nodes, vocabulary=vocabulary)
    trees = _stars(_split(nodes, rows - 1) if nodes else np.zeros(0, np.int32), vocabulary)
    return replace(plan, adapters=adapters), trees


def _stars(counts: np.ndarray, vocabulary: int) -> DraftTrees:
    """Return a tree for each row: a root with counts[r] - 1 children."""
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = (np.cumsum(counts) - counts).astype(np.int32)[row]
    depth = (np.arange(len(row)) != first).astype(np.int32)
    parent = np.where(depth == 0, -1, first).astype(np.int32)
    return DraftTrees(row, _draw(len(row), vocabulary), parent, depth, depth - 1, np.ones(len(row), np.float32))


def _powers_of_4(most: int) -> list[int]:
    """Return 1, 4, 16, ... below `most`, and `most`."""
    return [*(4**power for power in range(most.bit_length()) if 4**power < most), most]
