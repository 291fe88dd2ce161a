"""Times each compiled program at warm-up, through the same code that serves: the cost table's first entries."""

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
PASSES, REPEATS = 2, 3


def measure(executor: ModelExecutor, progress: Progress | None = None) -> CostSamples:
    """The least of some times of every program, on page 0, which no request holds yet: nothing of it stays visible.

    The least, because what disturbs a measurement only adds to it, and the live cost table learns the common factor. In
    two passes over all programs, because what disturbs goes on for a while: a size that looks dear is then not used,
    and never corrected.
    """
    jobs = _jobs(executor)
    least_s = dict.fromkeys(jobs, float("inf"))
    for number in range(PASSES):
        for done, (job, run) in enumerate(jobs.items(), 1):
            least_s[job] = min(least_s[job], _least_s(run))
            if progress is not None:
                progress("timing", number * len(jobs) + done, PASSES * len(jobs))
    return _samples(least_s, executor.limits)


Job = tuple[str, tuple[int, ...]]
"""What is timed: ("verify", (tokens, rows)), ("catchup", (tokens, rows)) or ("search", (rows, width, depth))."""


def _jobs(executor: ModelExecutor) -> dict[Job, Callable[[], object]]:
    limits, drafter = executor.limits, executor.local_drafter
    jobs: dict[Job, Callable[[], object]] = {}
    for bucket in executor.target.buckets.all():
        jobs["verify", (bucket.tokens, bucket.rows)] = partial(executor.verify, *_verify_step(limits, bucket))
    if drafter is None:
        return jobs
    for bucket in drafter.model.buckets.all():
        counts = _split(bucket.tokens, min(bucket.rows, bucket.tokens))
        plan = _decode_plan(limits, len(counts), _draft_plan(limits, counts))
        jobs["catchup", (bucket.tokens, bucket.rows)] = partial(_catch_up, drafter, plan)
    for rows, width in itertools.product(drafter.model.buckets.row_edges, drafter.widths):
        for depth in sorted({1, limits.max_depth}):
            draft = _draft_plan(limits, np.ones(rows, np.int32), depth, width)
            jobs["search", (rows, width, depth)] = partial(drafter.propose, _decode_plan(limits, rows, draft))
    return jobs


def _catch_up(drafter: LocalDrafter, plan: StepPlan) -> None:
    drafter.propose(plan)
    jax.block_until_ready(drafter.model.pools)


def _samples(least_s: dict[Job, float], limits: Limits) -> CostSamples:
    """Catch-up of several row sizes: the dearest. A level: what one more costs, the first being the catch-up's."""
    samples = CostSamples({}, {}, {})
    deepest = limits.max_depth
    for (kind, sizes), seconds in least_s.items():
        if kind == "verify":
            tokens, rows = sizes
            samples.verify_s[tokens, rows] = seconds
        elif kind == "catchup":
            tokens, _ = sizes
            samples.catchup_s[tokens] = max(seconds, samples.catchup_s.get(tokens, 0.0))
        elif sizes[2] == deepest:
            rows, width, _ = sizes
            # With one level only, the whole call is the best that is known of a level.
            above_s = seconds - least_s["search", (rows, width, 1)] if deepest > 1 else seconds
            samples.draft_level_s[rows, width] = max(1e-6, above_s / max(1, deepest - 1))
    return samples


def _least_s(run: Callable[[], object]) -> float:
    """The first run is left out."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


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
