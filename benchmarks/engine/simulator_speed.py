"""How many requests of a trace the simulator gets through in a minute on one core, and where a step's time goes.

    python -m benchmarks.engine.simulator_speed [--out simulator_speed.json]

Each run is a whole simulation of `--requests` requests of 200 output tokens, which come a little faster than the
machine serves them, so that most of its places are taken; minutes are CPU time, since other work on the machine is not
the simulator's. The phases are medians of wall time over steps of one engine that is kept full.
Targets, requests per minute: 20,000 with `adaserve`, 100,000 with every other policy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from rich.table import Table

from adaserve_jax.cli.terminal import table_console
from adaserve_jax.config import EngineConfig
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.executor import SimExecutor, VirtualClock
from adaserve_jax.sim.machines import Machine, load_machine
from adaserve_jax.sim.simulation import ALWAYS_WAITS, SimulationPlan, simulate
from adaserve_jax.types import SLO, CandidateTrees, SamplingParams, Sequence
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace

POLICIES = ("spec:4", "ar", "adaserve", "adaserve-paper")
MOST_RUNNING_AND_RATE = ((64, 6.0), (256, 9.0))
"""Requests that run at once at most, and those that come in a second."""
OUTPUT_TOKENS = 200
TARGETS = {"adaserve": 20_000, "others": 100_000}
CLASSES = (("code", SLO(relative=1.2, ttft_ms=4000)), ("chat", SLO(tpot_ms=50, ttft_ms=4000)),
           ("summarization", SLO(tpot_ms=150, ttft_ms=4000)))  # fmt: skip
CLASS_SHARES, MEAN_PROMPTS = (0.6, 0.2, 0.2), (120, 90, 500)


def trace_of(requests: int, rate_rps: float, seed: int = 0) -> Trace:
    """Poisson arrivals in the mix of AdaServe's traces."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / rate_rps, requests))
    kinds = rng.choice(len(CLASSES), requests, p=CLASS_SHARES)
    prompts = 1 + rng.poisson(np.array(MEAN_PROMPTS)[kinds])
    made = tuple(
        TraceRequest(float(due), int(prompt), OUTPUT_TOKENS, CLASSES[kind][1], CLASSES[kind][0])
        for due, kind, prompt in zip(due_s, kinds, prompts, strict=True)
    )
    return Trace("generated", "", made)


def requests_per_minute(machine: Machine, policy: str, most_running: int, trace: Trace, repeats: int) -> list[float]:
    """Of each repetition, by CPU time."""
    plan = SimulationPlan((policy,), max_requests=most_running)
    rates = []
    for _ in range(repeats):
        started = time.process_time()
        simulated = simulate(policy, plan, machine, trace)
        rates.append(60 * len(simulated.records) / (time.process_time() - started))
    return rates


def phases_us(machine: Machine, policy: str, most_running: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part of a step, all places taken and someone waiting."""
    limits, clock = machine.limits(most_running), VirtualClock()
    samples = machine.samples(limits)
    executor = SimExecutor(limits, samples, 0.7, clock)
    scheduler = Scheduler(EngineConfig(policy=policy, max_waiting=ALWAYS_WAITS, prefix_cache=False), limits, samples)
    added, times = 0, []
    while len(times) < steps + most_running:
        while scheduler.stats.waiting < 2:
            name, slo = CLASSES[added % len(CLASSES)]
            params = SamplingParams(max_tokens=OUTPUT_TOKENS + added % 40, ignore_eos=True)
            prompt = np.zeros(MEAN_PROMPTS[added % len(CLASSES)], np.int32)
            target_s = slo.tpot_s(machine.baseline_s)
            scheduler.add(Sequence(f"{added}", prompt, params, added, clock.now(), tpot_slo_s=target_s, slo_class=name))
            added += 1
        begin = time.perf_counter()
        plan = scheduler.plan(clock.now())
        assert plan is not None
        planned = time.perf_counter()
        candidates = CandidateTrees.empty(plan.num_decode) if plan.draft is None else executor.speculate(plan)
        drafted = time.perf_counter()
        trees = scheduler.select(plan, candidates, clock.now())
        selected = time.perf_counter()
        outcome = executor.verify(plan, trees)
        verified = time.perf_counter()
        scheduler.commit(plan, trees, candidates, outcome, clock.now())
        committed = time.perf_counter()
        executor_s = drafted - planned + verified - selected
        times.append((planned - begin, selected - drafted, executor_s, committed - verified))
    medians = np.median(np.array(times[most_running:]) * 1e6, axis=0)
    return dict(zip(("plan", "select", "executor", "commit"), medians.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="llama-70b", help="packaged machine, or a JSON file")
    parser.add_argument("--requests", type=int, default=2000, help="requests of each simulation")
    parser.add_argument("--repeats", type=int, default=3, help="simulations, of which the median counts")
    parser.add_argument("--steps", type=int, default=500, help="steps whose phases are timed")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()

    machine, rows = load_machine(options.machine), []
    for most_running, rate_rps in MOST_RUNNING_AND_RATE:
        trace = trace_of(options.requests, rate_rps)
        for policy in options.policies.split(","):
            rates = requests_per_minute(machine, policy, most_running, trace, options.repeats)
            phases = phases_us(machine, policy, most_running, options.steps)
            rows.append(
                {
                    "policy": policy,
                    "most_running": most_running,
                    "rate_rps": rate_rps,
                    "requests_per_minute": float(np.median(rates)),
                    "all_requests_per_minute": rates,
                    "target": TARGETS.get(policy, TARGETS["others"]),
                    "phases_us": phases,
                }
            )

    table = Table(title=f"{options.requests} requests of {OUTPUT_TOKENS} tokens, median of {options.repeats}")
    for column in (
        "policy",
        "most running",
        "requests/min",
        "target",
        "plan us",
        "select us",
        "executor us",
        "commit us",
    ):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["policy"], str(row["most_running"]), f"{row['requests_per_minute']:,.0f}", f"{row['target']:,}",
            *(f"{value:.0f}" for value in row["phases_us"].values()),
        )  # fmt: skip
    table_console(table).print(table)
    if options.out:
        settings = {"requests": options.requests, "repeats": options.repeats, "output_tokens": OUTPUT_TOKENS}
        report = {"commit": source_commit(), "machine": machine_name(), "simulated": machine.name, **settings}
        options.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
