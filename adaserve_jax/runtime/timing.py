"""Times each compiled program once at warm-up, through the same code that serves: the cost table's first entries."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np

from adaserve_jax.runtime.buckets import Bucket
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.types import CostSamples, DraftPlan, DraftTrees, Limits, Progress, RowSampling, StepPlan

if TYPE_CHECKING:
    from adaserve_jax.runtime.executor import ModelExecutor

TYPICAL_CONTEXT = 256  # tokens; the context at which programs are timed, where max_context allows it
REPEATS = 5


def measure(executor: ModelExecutor, progress: Progress | None = None) -> CostSamples:
    """The least of a few times of every program, on page 0, which no request holds yet: nothing of it stays visible.

    The least, because what disturbs a measurement only adds to it, and the live cost table learns the common factor.
    """
    limits, drafter = executor.limits, executor.local_drafter
    jobs: list[Callable[[], None]] = []
    samples = CostSamples({}, {}, {})
    for bucket in executor.target.buckets.all():
        plan, trees = _verify_step(limits, bucket)
        jobs.append(partial(_time_verify, samples, executor, bucket, plan, trees))
    if drafter is not None:
        for bucket in drafter.model.buckets.all():
            counts = _split(bucket.tokens, min(bucket.rows, bucket.tokens))
            plan = _decode_plan(limits, len(counts), _draft_plan(limits, counts))
            jobs.append(partial(_time_catchup, samples, drafter, bucket, plan))
        jobs += [
            partial(_time_levels, samples, limits, drafter, rows, width)
            for rows, width in itertools.product(drafter.model.buckets.row_edges, drafter.widths)
        ]
    for done, job in enumerate(jobs, 1):
        job()
        if progress is not None:
            progress("timing", done, len(jobs))
    return samples


def _least_s(run: Callable[..., object], *arguments: object) -> float:
    run(*arguments)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run(*arguments)
        times.append(time.perf_counter() - started)
    return min(times)


def _time_verify(
    samples: CostSamples, executor: ModelExecutor, bucket: Bucket, plan: StepPlan, trees: DraftTrees
) -> None:
    samples.verify_s[bucket.tokens, bucket.rows] = _least_s(executor.verify, plan, trees)


def _time_catchup(samples: CostSamples, drafter: LocalDrafter, bucket: Bucket, plan: StepPlan) -> None:
    """Several row buckets share a number of tokens; the table keeps the dearest."""

    def run() -> None:
        drafter.propose(plan)
        jax.block_until_ready(drafter.model.pools)

    samples.catchup_s[bucket.tokens] = max(_least_s(run), samples.catchup_s.get(bucket.tokens, 0.0))


def _time_levels(samples: CostSamples, limits: Limits, drafter: LocalDrafter, rows: int, width: int) -> None:
    """Seconds per level beyond the first, whose cost is the catch-up's."""
    counts = np.ones(rows, np.int32)
    shallow, deep = (
        _least_s(drafter.propose, _decode_plan(limits, rows, _draft_plan(limits, counts, depth, width)))
        for depth in (1, limits.max_depth)
    )
    levels = max(1, limits.max_depth - 1)
    # With one level only, the whole call is the best that is known of a level.
    samples.draft_level_s[rows, width] = max(1e-6, (deep - shallow) / levels) if limits.max_depth > 1 else deep


def _split(tokens: int, rows: int) -> np.ndarray:
    """`tokens` over `rows`, as even as can be. i32[rows]."""
    return np.diff(np.linspace(0, tokens, rows + 1).astype(np.int32))


def _context(limits: Limits) -> int:
    return max(0, min(TYPICAL_CONTEXT, limits.max_context - limits.max_tokens - limits.max_depth - 1))


def _draft_plan(limits: Limits, counts: np.ndarray, depth: int = 0, width: int = 1) -> DraftPlan:
    context = np.full(len(counts), _context(limits), np.int32)
    return DraftPlan(depth, width, np.zeros(counts.sum(), np.int32), counts, context, np.ones(len(counts), bool))


def _decode_plan(limits: Limits, rows: int, draft: DraftPlan | None = None, prefill: int = 0) -> StepPlan:
    """`rows` sampling requests at a typical context, the last of them a prefill chunk where `prefill` > 0."""
    sampling = RowSampling(
        seed=np.arange(rows, dtype=np.uint64), choice=np.zeros(rows, np.int32), temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32), top_p=np.ones(rows, np.float32), min_p=np.zeros(rows, np.float32),
    )  # fmt: skip
    chunks = 1 if prefill else 0
    return StepPlan(
        step=0, slots=np.arange(rows), num_decode=rows - chunks, root_token=np.zeros(rows - chunks, np.int32),
        ctx_len=np.full(rows, _context(limits), np.int32),
        page_table=np.zeros((rows, limits.max_pages_per_request), np.int32), sampling=sampling,
        prefill_tokens=np.zeros(prefill, np.int32), prefill_counts=np.full(chunks, prefill, np.int32),
        prefill_final=np.ones(chunks, bool), draft=draft, budget=limits.max_tree_tokens,
    )  # fmt: skip


def _verify_step(limits: Limits, bucket: Bucket) -> tuple[StepPlan, DraftTrees]:
    """A step that fills the bucket: as many tree tokens as may be sampled, a prefill chunk for the rest."""
    rows = min(bucket.rows, bucket.tokens)
    if bucket.tokens <= limits.max_tree_tokens:
        return _decode_plan(limits, rows), _stars(_split(bucket.tokens, rows))
    nodes = limits.max_tree_tokens - 1 if rows > 1 else 0
    plan = _decode_plan(limits, rows, prefill=bucket.tokens - nodes)
    return plan, _stars(_split(nodes, rows - 1) if nodes else np.zeros(0, np.int32))


def _stars(counts: np.ndarray) -> DraftTrees:
    """A root with counts[r] - 1 children for each row."""
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = (np.cumsum(counts) - counts).astype(np.int32)[row]
    index = np.arange(len(row), dtype=np.int32)
    depth = (index != first).astype(np.int32)
    parent = np.where(depth == 0, -1, first).astype(np.int32)
    return DraftTrees(row, index, parent, depth, depth - 1, np.ones(len(row), np.float32))
