"""Host time of a step: plan + select + commit around an executor that costs nothing; and of its parts alone.

    python -m benchmarks.engine.host_step [--out results.json]

Prints medians in milliseconds; `half-model` is `adaserve` without its bandit. Targets: 1 ms at 16 requests, 2.5 ms at
64; selector 0.15 ms at 64 x 24 candidates; candidates from text already seen 20 us a row, at 64 rows of 4,000 tokens of
Python with 200,000 tokens of ended texts, three new tokens a step. *Beside a device* are whole steps, text included, of
an engine whose device takes DEVICE_S for every verification and leaves the host free: what a step takes beyond that,
with text delivered at once, and delivered while the device runs the next step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from adaserve_jax.cli.terminal import table_console
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.scheduler import selection
from adaserve_jax.scheduler.controllers.base import Feedback, Load
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.executor import SimExecutor, VirtualClock
from adaserve_jax.suffix.source import SuffixSource, TextRows
from adaserve_jax.types import (
    SLO,
    CandidateTrees,
    CostSamples,
    DraftTrees,
    Limits,
    SamplingParams,
    Sequence,
    StepOutcome,
    StepPlan,
)

DEVICE_S = 0.01
SUFFIX_ROW = "text already seen, 64 x 4,000 tokens"
TARGET_MS = {"step, 16 requests": 1.0, "step, 64 requests": 2.5, "selector, 64 x 24": 0.15, SUFFIX_ROW: 64 * 0.02}


def limits_for(requests: int) -> Limits:
    edges = tuple(2**power for power in range(10))
    return Limits(requests, edges, 8 * requests, 2048, 64, 64 * requests, 6, 4)


def simulated_costs(limits: Limits) -> CostSamples:
    rows = sorted({1, 4, 16, limits.max_requests})
    knee = 3 * limits.max_requests
    verify = {(edge, r): 0.016 * (1 + max(0, edge - knee) / 96) for edge in limits.token_edges for r in rows}
    levels = {(r, width): 0.0005 + 2e-6 * r * width for r in rows for width in (1, 2, 4)}
    return CostSamples(verify, {size: 0.001 + 2e-6 * size for size in (16, 64, 256, 512)}, levels)


def steady_step_ms(policy: str, requests: int, steps: int) -> dict[str, float]:
    """Median milliseconds of plan, select, commit and their sum, all requests decoding, with mixed targets."""
    limits, clock = limits_for(requests), VirtualClock()
    costs = simulated_costs(limits)
    executor = SimExecutor(limits, costs, 0.75, clock)
    scheduler = Scheduler(EngineConfig(policy=policy), limits, costs)
    rng = np.random.default_rng(0)
    for index in range(requests):
        slo_s = (0.02, 0.04, 0.08, None)[index % 4]
        prompt = rng.integers(0, 1000, 40).astype(np.int32)
        params = SamplingParams(max_tokens=1900, temperature=0.8)
        scheduler.add(Sequence(f"r{index}", prompt, params, seed=index, arrival_s=0.0, tpot_slo_s=slo_s))
    times: list[tuple[float, float, float]] = []
    while len(times) < steps:
        begin = time.perf_counter()
        plan = scheduler.plan(clock.now())
        planned = time.perf_counter()
        if plan is None:
            raise RuntimeError("the requests ended before the steps were timed")
        candidates = CandidateTrees.empty(plan.num_decode)
        if plan.draft is not None:
            candidates = executor.speculate(plan)
        drafted = time.perf_counter()
        trees = scheduler.select(plan, candidates, clock.now())
        selected = time.perf_counter()
        outcome = executor.verify(plan, trees)
        verified = time.perf_counter()
        scheduler.commit(plan, trees, candidates, outcome, clock.now())
        committed = time.perf_counter()
        if plan.num_decode == requests:
            times.append((planned - begin, selected - drafted, committed - verified))
    phases = np.array(times) * 1e3
    names = ("plan_ms", "select_ms", "commit_ms")
    result = {name: float(np.median(phases[:, column])) for column, name in enumerate(names)}
    return {**result, "step_ms": float(np.median(phases.sum(axis=1)))}


class Device(SimExecutor):
    """An executor whose device takes DEVICE_S for a verification, by the wall clock."""

    def verify(self, plan: StepPlan, trees: DraftTrees, edits: Any = None, meanwhile: Any = None) -> StepOutcome:
        done_s = time.perf_counter() + DEVICE_S
        outcome = super().verify(plan, trees, edits, meanwhile)
        time.sleep(max(0.0, done_s - time.perf_counter()))
        return outcome


def beside_device_ms(policy: str, requests: int, steps: int, *, deliver_at_once: bool) -> float:
    """Median milliseconds of an engine's step beyond DEVICE_S, all requests decoding."""
    limits, clock = limits_for(requests), VirtualClock()
    costs = simulated_costs(limits)
    tokenizer = Tokenizer.from_folder(resolve_folder("demo", "target"))
    executor = Device(limits, costs, 0.75, clock, vocab_size=tokenizer.vocab_size)
    scheduler = Scheduler(EngineConfig(policy=policy), limits, costs)
    core = EngineCore(executor, scheduler, tokenizer, eos_ids=(), baseline_s=0.016, clock=clock.now)
    delivered: list[OutputChunk] = []
    if not deliver_at_once:
        core.deliver_beside_device(delivered.extend)
    for index in range(requests):
        sampling = SamplingParams(max_tokens=1900, ignore_eos=True, seed=index)
        core.add(GenerateRequest(f"r{index}", [5] * 40, sampling, SLO(tpot_ms=20 + 20 * (index % 4))), 0.0)
    times = []
    while len(times) < steps:
        begin = time.perf_counter()
        delivered.extend(core.step())
        times.append(time.perf_counter() - begin)
    return (float(np.median(times)) - DEVICE_S) * 1e3


def choice_ms(policy: str, requests: int, repeats: int) -> float:
    """Median milliseconds in which the controller decides and learns, all requests decoding with a target."""
    limits = limits_for(requests)
    scheduler = Scheduler(EngineConfig(policy=policy), limits, simulated_costs(limits))
    controller, lag = scheduler.controller, np.full(requests, 2)
    load = Load(np.full(requests, 40.0), lag, np.ones(requests, bool), 0, 0, 0.0, np.full(requests, 100))

    def once() -> None:
        decision = controller.decide(load)
        drafted, accepted = requests * decision.depth, requests if decision.depth else 0
        controller.learn(
            Feedback(
                accepted, drafted, accepted, 2 * accepted, decode_rows=requests, decoded=requests + accepted,
                step_s=0.02, predicted_s=0.02, expected=float(accepted),
            )
        )  # fmt: skip

    return median_ms(once, repeats)


def selector_ms(requests: int, depth: int, width: int, repeats: int) -> float:
    """Median milliseconds of ranking, Algorithm 2 and packing of requests x (depth * width) candidates."""
    rng = np.random.default_rng(0)
    size = depth * width
    level = np.repeat(np.arange(1, depth + 1), width).astype(np.int32)
    rank = np.tile(np.arange(width), depth)
    parent = np.where(level == 1, -1, (level - 2) * width + rank).astype(np.int32)
    step = np.log(rng.uniform(0.3, 1.0, (requests, depth, width)))
    candidates = CandidateTrees(
        rng.integers(0, 1000, (requests, size)).astype(np.int32),
        np.broadcast_to(parent, (requests, size)),
        np.cumsum(step, axis=1).reshape(requests, size).astype(np.float32),
        level,
    )
    root, need = np.zeros(requests, np.int32), rng.uniform(0.5, 4, requests)

    def once() -> None:
        ranked = selection.rank(candidates)
        selection.select_slo(candidates, root, ranked, need, budget=4 * requests)

    return median_ms(once, repeats)


def suffix_ms(requests: int, tokens: int, repeats: int) -> float:
    """Median milliseconds of a step's candidates from text already seen, indexing of the new tokens included."""
    encode = Tokenizer.from_folder(resolve_folder("demo", "target")).encode
    ids = np.array(encode("".join(text[:60_000] for text in held_out_code()))[: requests * tokens + 200_000], np.int32)
    source = SuffixSource(requests, EngineConfig.suffix_depth, EngineConfig.suffix_kept_tokens)
    for start in range(requests * tokens, len(ids), tokens):
        source.keep(ids[start : start + tokens], "")
    text = np.resize(ids, (requests, tokens + 8))
    slots, ones = np.arange(requests), np.ones(requests, np.int64)
    ends = iter(range(tokens - 3 * (repeats + 1), tokens, 3))

    def once() -> None:
        source.propose(
            TextRows(
                text, slots, slots, ones * next(ends), ones * EngineConfig.suffix_depth, slots.astype(np.uint64),
                np.zeros(requests, np.int32), np.full(requests, 0.8, np.float32), [""] * requests,
            ),
            source.prior,
        )  # fmt: skip

    once()
    return median_ms(once, repeats)


def median_ms(call: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--steps", type=int, default=150, help="steps timed for each row")
    args = parser.parse_args()

    rows: list[dict[str, str | float]] = []
    for policy in ("ar", "spec:4", "half-model", "adaserve"):
        for requests in (1, 16, 64):
            figures = steady_step_ms(policy, requests, args.steps)
            rows.append({"what": f"step, {requests} requests", "policy": policy, **figures})
    for policy in ("half-model", "adaserve"):
        choice = {"what": "choice alone, 64 requests", "policy": policy}
        rows.append({**choice, "step_ms": choice_ms(policy, 64, 10 * args.steps)})
    for policy in ("ar", "adaserve"):
        for requests in (16, 64):
            for at_once in (True, False):
                figure = beside_device_ms(policy, requests, args.steps, deliver_at_once=at_once)
                what = f"beside a device, {requests} requests, {'at once' if at_once else 'in the next step'}"
                rows.append({"what": what, "policy": policy, "step_ms": figure})
    alone = selector_ms(64, 6, 4, 4 * args.steps)
    rows.append({"what": "selector, 64 x 24", "policy": "adaserve", "step_ms": alone})

    rows.append({"what": SUFFIX_ROW, "policy": "adaserve", "step_ms": suffix_ms(64, 4000, args.steps)})

    table = Table(title="host time, median ms")
    for column in ("what", "policy", "plan", "select", "commit", "sum", "target"):
        table.add_column(column)
    for row in rows:
        phases = [f"{row[name]:.3f}" if name in row else "" for name in ("plan_ms", "select_ms", "commit_ms")]
        target = TARGET_MS.get(str(row["what"]))
        table.add_row(
            str(row["what"]),
            str(row["policy"]),
            *phases,
            f"{row['step_ms']:.3f}",
            "" if target is None else f"{target:g}",
        )
    table_console(table).print(table)
    if args.out:
        about = {"commit": source_commit(), "machine": machine_name(), "numpy": np.__version__}
        args.out.write_text(json.dumps({**about, "targets_ms": TARGET_MS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
