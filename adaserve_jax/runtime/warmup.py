"""Times each compiled program, through the same code that serves: what the cost table starts from.

Warm-up does it briefly, `adaserve profile` at length.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from adaserve_jax.pallas_kernels.paged_tree_attention.reference import CPU_BLOCKS, on_cpu
from adaserve_jax.results.profile import Timings
from adaserve_jax.runtime.compile import Bucket
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.types import DraftPlan, DraftTrees, Limits, Progress, RowSampling, StepPlan

if TYPE_CHECKING:
    from adaserve_jax.runtime.elastic import Elastic
    from adaserve_jax.runtime.executor import ModelExecutor

TYPICAL_CONTEXT = 256
"""Tokens: where lines in the context are anchored, where max_context allows it."""


@dataclass(frozen=True)
class Effort:
    """contexts: tokens in every row; those that max_context does not hold are cut. passes: over all programs. repeats:
    in each pass, with the first of the contexts, after a run that is not counted; repeats_beyond: with each of the
    others. all_depths: time searches of every depth, not of the first and the last only."""

    contexts: tuple[int, ...]
    passes: int
    repeats: int
    repeats_beyond: int
    all_depths: bool


WARM_UP = Effort((64, 768), passes=2, repeats=2, repeats_beyond=1, all_depths=False)
"""Two contexts give a line; a few pages and many, since the first pages cost more than a line through them says."""
THOROUGH = Effort((0, 128, 512, 1024, 1792), passes=3, repeats=2, repeats_beyond=2, all_depths=True)


def measure(executor: ModelExecutor, effort: Effort = WARM_UP, progress: Progress | None = None) -> Timings:
    """The least of some times of every program, on page 0, which no request holds yet: nothing of it stays visible.

    The least, because what disturbs a measurement only adds to it, and the live cost table learns the common factor. In
    several passes over all programs, because what disturbs goes on for a while: a size that looks dear is then not
    used, and never corrected.
    """
    timings = Timings(_held(executor.limits, TYPICAL_CONTEXT), context_rows(executor))
    _time(list(_jobs(executor, timings, effort.all_depths)), executor.limits, effort, progress)
    return timings


def measure_draft(
    limits: Limits,
    drafter: LocalDrafter,
    rows_together: int,
    effort: Effort = WARM_UP,
    progress: Progress | None = None,
) -> Timings:
    """The same for a draft that has no target beside it. rows_together: as `context_rows` says."""
    timings = Timings(_held(limits, TYPICAL_CONTEXT), rows_together)
    _time(list(_draft_jobs(limits, drafter, timings, effort.all_depths)), limits, effort, progress)
    return timings


def _time(jobs: list[_Job], limits: Limits, effort: Effort, progress: Progress | None) -> None:
    contexts = tuple(dict.fromkeys(_held(limits, context) for context in effort.contexts))
    for number in range(effort.passes):
        for done, job in enumerate(jobs, 1):
            for context in contexts:
                run, first = job.run_at(context), context == contexts[0]
                if first:
                    run()
                for _ in range(effort.repeats if first else effort.repeats_beyond):
                    job.note(context, _seconds(run))
            if progress is not None:
                progress("timing", number * len(jobs) + done, effort.passes * len(jobs))


def run_once(executor: ModelExecutor, progress: Progress | None = None) -> None:
    """Run every program once and measure nothing: for an engine that has its times from elsewhere."""
    jobs = list(_jobs(executor, Timings(0, 1), False))
    for done, job in enumerate(jobs, 1):
        job.run_at(0)()
        if progress is not None:
            progress("running", done, len(jobs))


def rehearse_expansion(executor: ModelExecutor, elastic: Elastic, progress: Progress | None = None) -> None:
    """Extend the pools, run every verify program on them once, move a page, contract, and wait for the draft.

    For an engine that has not served yet: page 0 loses what it held. Raises ElasticError: the device cannot do it now,
    so it could not later.
    """
    limits, buckets = executor.limits, executor.target.buckets.all()
    elastic.expand()
    for done, bucket in enumerate(buckets, 1):
        executor.verify(*_verify_step(limits, bucket, 0))
        if progress is not None:
            progress("running extended", done, len(buckets))
    elastic.move_pages(np.array([limits.num_pages]), np.array([0]))
    elastic.contract()
    elastic.wait()


def context_rows(executor: ModelExecutor) -> int:
    """Rows that read their contexts together, each waiting for the longest: those of a group on a CPU, all on other
    devices; a kernel reads every row by itself."""
    resolved = executor.resolved
    if resolved.config.deterministic:
        return resolved.limits.max_requests
    if resolved.attention != "xla":
        return 1
    return CPU_BLOCKS if on_cpu() else resolved.limits.max_requests


@dataclass(frozen=True)
class _Job:
    """A program to time. run_at: what runs it, every row having so many committed tokens; into, sizes: where its time
    goes, beside the context."""

    run_at: Callable[[int], Callable[[], object]]
    into: dict[tuple[int, ...], float]
    sizes: tuple[int, ...]

    def note(self, context: int, seconds: float) -> None:
        """Keep the least."""
        key = (*self.sizes, context)
        self.into[key] = min(seconds, self.into.get(key, seconds))


def _jobs(executor: ModelExecutor, timings: Timings, all_depths: bool) -> Iterator[_Job]:
    limits, drafter = executor.limits, executor.local_drafter
    into: Any = timings
    for bucket in executor.target.buckets.all():

        def verify(context: int, bucket: Bucket = bucket) -> Callable[[], object]:
            return partial(executor.verify, *_verify_step(limits, bucket, context))

        yield _Job(verify, into.verify, (bucket.tokens, bucket.rows))
    if drafter is None or (executor.elastic is not None and not executor.elastic.resident):
        return
    yield from _draft_jobs(limits, drafter, timings, all_depths)


def _draft_jobs(limits: Limits, drafter: LocalDrafter, timings: Timings, all_depths: bool) -> Iterator[_Job]:
    into: Any = timings
    for bucket in drafter.model.buckets.all():
        counts = _split(bucket.tokens, min(bucket.rows, bucket.tokens))

        def catch_up(context: int, counts: np.ndarray = counts) -> Callable[[], object]:
            return partial(catch_up_once, limits, drafter, counts, context)

        yield _Job(catch_up, into.catchup, (bucket.tokens, bucket.rows))
    depths = range(1, limits.max_depth + 1) if all_depths else sorted({1, limits.max_depth})
    for rows, width, depth in itertools.product(drafter.model.buckets.row_edges, drafter.widths, depths):

        def search(context: int, rows: int = rows, width: int = width, depth: int = depth) -> Callable[[], object]:
            draft = draft_plan(np.ones(rows, np.int32), context, depth, width)
            return partial(drafter.propose, decode_plan(limits, rows, context, draft))

        yield _Job(search, into.search, (rows, width, depth))


def catch_up_once(limits: Limits, drafter: LocalDrafter, counts: np.ndarray, context: int) -> None:
    """Feed the draft counts[r] tokens, i32[R], of each row behind `context` others, on page 0."""
    drafter.propose(decode_plan(limits, len(counts), context, draft_plan(counts, context)))
    jax.block_until_ready(drafter.model.pools)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _split(tokens: int, rows: int) -> np.ndarray:
    """`tokens` over `rows`, as even as can be. i32[rows]."""
    return np.diff(np.linspace(0, tokens, rows + 1).astype(np.int32))


def _held(limits: Limits, context: int) -> int:
    """No more than leaves room for a step's tokens."""
    return max(0, min(context, limits.max_context - limits.max_tokens - limits.max_depth - 1))


def draft_plan(counts: np.ndarray, context: int, depth: int = 0, width: int = 1) -> DraftPlan:
    held = np.full(len(counts), context, np.int32)
    return DraftPlan(depth, width, np.zeros(counts.sum(), np.int32), counts, held, np.ones(len(counts), bool))


def decode_plan(limits: Limits, rows: int, context: int, draft: DraftPlan | None = None, prefill: int = 0) -> StepPlan:
    """`rows` sampling requests with so much context, the last of them a prefill chunk where `prefill` > 0."""
    sampling = RowSampling(
        seed=np.arange(rows, dtype=np.uint64), choice=np.zeros(rows, np.int32), temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32), top_p=np.ones(rows, np.float32), min_p=np.zeros(rows, np.float32),
    )  # fmt: skip
    chunks = 1 if prefill else 0
    return StepPlan(
        step=0, slots=np.arange(rows), num_decode=rows - chunks, root_token=np.zeros(rows - chunks, np.int32),
        ctx_len=np.full(rows, context, np.int32),
        page_table=np.zeros((rows, limits.max_pages_per_request), np.int32), sampling=sampling,
        prefill_tokens=np.zeros(prefill, np.int32), prefill_counts=np.full(chunks, prefill, np.int32),
        prefill_final=np.ones(chunks, bool), draft=draft, tree_token_cap=limits.max_tree_tokens,
    )  # fmt: skip


def _verify_step(limits: Limits, bucket: Bucket, context: int) -> tuple[StepPlan, DraftTrees]:
    """A step that fills the bucket: as many tree tokens as may be sampled, a prefill chunk for the rest."""
    rows = min(bucket.rows, bucket.tokens)
    if bucket.tokens <= limits.max_tree_tokens:
        return decode_plan(limits, rows, context), _stars(_split(bucket.tokens, rows))
    nodes = limits.max_tree_tokens - 1 if rows > 1 else 0
    plan = decode_plan(limits, rows, context, prefill=bucket.tokens - nodes)
    return plan, _stars(_split(nodes, rows - 1) if nodes else np.zeros(0, np.int32))


def _stars(counts: np.ndarray) -> DraftTrees:
    """A root with counts[r] - 1 children for each row."""
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = (np.cumsum(counts) - counts).astype(np.int32)[row]
    index = np.arange(len(row), dtype=np.int32)
    depth = (index != first).astype(np.int32)
    parent = np.where(depth == 0, -1, first).astype(np.int32)
    return DraftTrees(row, index, parent, depth, depth - 1, np.ones(len(row), np.float32))


# Times how long the draft takes to catch up when speculation is turned on again: C_switch by lag and rows.
#
# `adaserve profile` does it; an engine that starts without one reckons with single catch-up programs. Source:
# Nightjar, table 3.

MOST_TOKENS = 16_384
"""Tokens of all rows together that are fed for one time; longer lags take as long in proportion."""


def measure_switching(
    executor: ModelExecutor, passes: int, progress: Progress | None = None
) -> dict[tuple[int, int], float]:
    """Seconds by (lag, rows), the least of `passes` times, in chunks of the largest catch-up program, as a switch feeds
    them; empty without a draft. Page 0 loses what it held."""
    limits, drafter = executor.limits, executor.local_drafter
    if drafter is None:
        return {}
    sizes = list(itertools.product(_spread(limits.max_context), _spread(limits.max_requests)))
    found: dict[tuple[int, int], float] = {}
    for done, (lag, rows) in enumerate(sizes, 1):
        fed = max(1, min(lag, MOST_TOKENS // rows))
        chunk = max(1, limits.max_tokens // rows)
        times = []
        for _ in range(passes):
            started = time.perf_counter()
            for context in range(0, fed, chunk):
                counts = np.full(rows, min(chunk, fed - context), np.int32)
                catch_up_once(limits, drafter, counts, context)
            times.append(time.perf_counter() - started)
        found[lag, rows] = min(times) * lag / fed
        if progress is not None:
            progress("timing switches", done, len(sizes))
    return found


def _spread(most: int) -> list[int]:
    """1, 4, 16, ... below `most`, and `most`."""
    return [*(4**power for power in range(most.bit_length()) if 4**power < most), most]
