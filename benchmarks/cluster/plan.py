"""How many replicas a load takes, and which router: simulated clusters of 4 to 1,000 replicas, to a million requests.

    python -m benchmarks.cluster.plan --out cluster-plan [--jobs 2]
    python -m benchmarks.cluster.plan --quick --out cluster-plan

Loads are shares of the capacity of so many replicas under the same policy, which is what one of them finishes in a
second while requests always wait; so policies have different rates at one load. Requests are of AdaServe's mix of
classes and of one with as many of each; arrivals are Poisson, prompts and outputs log-normal. `fixed`: policies of
fixed chains with every router, size and load. `sampled`: the SLO-aware router with samples of more and fewer replicas,
beside all of them. `adaserve`: fewer requests. `million`: 1,000 replicas and 10^6 requests under three policies, each
on one core.

Points are written to points.jsonl as they end, each with its commit, and those that it has are not run again.
cpu_s: of the process that ran the point, with building its requests; peak_bytes: the most memory it had.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, overload

import numpy as np
import typer

from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.jsonl import append_rows, make_folder, read_rows
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from benchmarks import program

CLASSES = (("code", SLO(relative=1.2, ttft_ms=4000)), ("chat", SLO(tpot_ms=50, ttft_ms=4000)),
           ("summarization", SLO(tpot_ms=150, ttft_ms=4000)))  # fmt: skip
MIXES = {"adaserve": (0.6, 0.2, 0.2), "even": (1 / 3, 1 / 3, 1 / 3)}
MEDIAN_PROMPTS, PROMPT_LOG_SD, MOST_PROMPT = (118, 15, 705), 0.5, 2048
MEAN_OUTPUT, OUTPUT_LOG_SD, MOST_OUTPUT = 200, 0.7, 1024
MACHINE = "llama-70b"
ROUTERS = ("round-robin", "least-loaded", "slo-aware:4", "slo-aware")
EXACT_TO = 64
"""Replicas up to which the SLO-aware router looks at all."""
SIZES, LOADS = (4, 16, 64, 256, 1000), (0.7, 0.9, 1.0)
PER_REPLICA = 200
"""Requests of each replica at most points."""
SAMPLES = (1, 2, 4, 8, 16)
PROBE_REQUESTS = 3000


@dataclass(frozen=True)
class Point:
    """One simulation. part: why it is run; load: of the cluster's capacity; requests: of the whole cluster."""

    part: str
    replicas: int
    router: str
    policy: str
    load: float
    mix: str
    requests: int
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """What a point came to. capacity_rps: of one replica. summaries: as of `results.schema.Summary`, all classes first.
    simulated_s: of the virtual clock."""

    commit: str
    machine: str
    simulated: str
    point: dict[str, Any]
    capacity_rps: float
    rate_rps: float
    simulated_s: float
    cpu_s: float
    peak_bytes: int
    steps: int
    summaries: list[dict[str, Any]]


class RequestColumns(Sequence[TraceRequest]):
    """Requests of a trace from columns, 24 bytes each; of a million, only those that are read are made.

    due_s: f64[N], not decreasing. prompts, outputs: i32[N], tokens. kinds: i64[N], indices of CLASSES.
    """

    def __init__(self, due_s: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, kinds: np.ndarray):
        self._columns = due_s, prompts, outputs, kinds

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | list[TraceRequest]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        due_s, prompt, output, kind = (column[index].item() for column in self._columns)
        name, slo = CLASSES[kind]
        return TraceRequest(due_s, prompt, output, slo, name)


def requests_of(mix: str, count: int, rate_rps: float, seed: int) -> Trace:
    """Poisson arrivals of requests of a mix."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / rate_rps, count))
    kinds = rng.choice(len(CLASSES), count, p=MIXES[mix])
    prompts = np.array(MEDIAN_PROMPTS)[kinds] * np.exp(PROMPT_LOG_SD * rng.standard_normal(count))
    median = MEAN_OUTPUT * np.exp(-(OUTPUT_LOG_SD**2) / 2)
    outputs = np.clip(median * np.exp(OUTPUT_LOG_SD * rng.standard_normal(count)), 1, MOST_OUTPUT)
    lengths = (np.clip(prompts.round(), 1, MOST_PROMPT).astype(np.int32), outputs.round().astype(np.int32))
    return Trace(f"{mix} at {rate_rps:g}/s", "", RequestColumns(due_s, *lengths, kinds))


@cache
def capacity_rps(policy: str, mix: str) -> float:
    """Return the requests that one replica finishes in a second of those in which more wait than it serves at once."""
    machine = load_machine(MACHINE)
    trace = requests_of(mix, PROBE_REQUESTS, 1000.0, seed=1)
    columns = simulate(policy, SimulationPlan((), drain_s=1e9, keep_records=False), machine, trace).columns
    assert columns is not None
    ends_s = np.sort(columns.rows["due_s"] + columns.rows["ttft_s"]
                     + np.nan_to_num(columns.rows["tpot_s"]) * (columns.rows["output_tokens"] - 1))  # fmt: skip
    first, last = PROBE_REQUESTS // 10, PROBE_REQUESTS - 2 * machine.max_requests
    return (last - first) / float(ends_s[last] - ends_s[first])


def run(point: Point, commit: str, capacity: float) -> Measured:
    """Simulate one point."""
    started = time.process_time()
    machine = load_machine(MACHINE)
    rate_rps = point.load * capacity * point.replicas
    trace = requests_of(point.mix, point.requests, rate_rps, point.seed)
    plan = SimulationPlan((), point.seed, router=point.router, keep_records=False)
    found = simulate(point.policy, plan, machine, trace, replicas=point.replicas)
    assert found.columns is not None
    summaries = [asdict(each) for each in summarize(found.columns, wall_s=found.wall_s)]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measured(
        commit, machine_name(), machine.name, asdict(point), capacity, rate_rps, found.wall_s,
        time.process_time() - started, peak_bytes, sum(stats.steps for stats in found.stats), summaries,
    )  # fmt: skip


def points(parts: Sequence[str], *, quick: bool) -> list[Point]:
    """Return what is to be run: first those of the first mix at the middle load, short ones first, then the others."""
    sizes, loads, per_replica = ((2, 3), (0.9,), 5) if quick else (SIZES, LOADS, PER_REPLICA)
    made: list[Point] = []
    if "fixed" in parts:
        made += [
            Point("fixed", size, router, "spec:4", load, mix, size * per_replica)
            for size in sizes for mix in MIXES for load in loads for router in ROUTERS
            if (size <= EXACT_TO or router != "slo-aware") and (size <= EXACT_TO or (mix == "adaserve" and load == 0.9))
        ]  # fmt: skip
        made += [
            Point("fixed", size, router, "ar", 0.9, "adaserve", size * per_replica)
            for size in sizes if size <= EXACT_TO for router in ROUTERS
        ]  # fmt: skip
    if "sampled" in parts:
        size = sizes[-1] if quick else EXACT_TO
        made += [
            Point("sampled", size, f"slo-aware:{count}", "spec:4", 0.9, mix, size * per_replica)
            for mix in MIXES for count in SAMPLES if count != 4
        ]  # fmt: skip
    if "adaserve" in parts:
        of = [(size, per_replica if size <= 16 else per_replica // 4) for size in sizes if size <= EXACT_TO]
        made += [
            Point("adaserve", size, router, "adaserve", 0.9, "adaserve", size * count)
            for size, count in of for router in ROUTERS
        ]  # fmt: skip
    if "million" in parts:
        made += [
            Point("million", *((3, "least-loaded", policy, 0.9, "adaserve", 30) if quick else
                               (1000, "least-loaded", policy, 0.9, "adaserve", 10**6)))
            for policy in ("ar", "spec:4", "adaserve")
        ]  # fmt: skip
    return sorted(made, key=lambda point: (point.mix != "adaserve" or point.load != 0.9, point.requests))


PARTS = ("fixed", "sampled", "adaserve", "million")


def run_all(todo: Sequence[Point], out: Path, workers: int, commit: str) -> None:
    """Run every point that points.jsonl has not, each in a process of its own."""
    path = out / "points.jsonl"
    known = [Point(**line.point) for line in (read_rows(path, Measured) if path.exists() else [])]
    missing = [point for point in todo if point not in known]
    notes().print(f"{len(todo)} points, {len(todo) - len(missing)} of them in {path}", highlight=False)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(run, each, commit, capacity_rps(each.policy, each.mix)) for each in missing]
        for done, future in enumerate(as_completed(futures), 1):
            line = future.result()
            append_rows(path, [line])
            every, of = line.summaries[0], line.point
            notes().print(
                f"{done}/{len(missing)} {of['part']} {of['replicas']} x {of['policy']}, {of['mix']}, {of['router']} at "
                f"{of['load']:g}: {every['attainment']:.3f} met, {every['goodput_tps']:.0f} tokens/s; "
                f"{line.cpu_s:.0f} s of CPU, {line.peak_bytes / 1e6:.0f} MB",
                highlight=False, soft_wrap=True,
            )  # fmt: skip


def cluster_plan(
    out: Annotated[Path, typer.Option(help="folder for points.jsonl, which is added to")],
    parts: Annotated[str, typer.Option(help=f"some of {', '.join(PARTS)}, separated by commas; none: all")] = "",
    jobs: Annotated[int, typer.Option(help="processes at once")] = 1,
    quick: Annotated[bool, typer.Option(help="few replicas and requests, to see it work")] = False,
) -> None:
    """Simulate the points that are not there yet."""
    wanted = comma_list("parts", parts, str) or PARTS
    if jobs < 1 or set(wanted) - set(PARTS):
        raise ConfigError(f"--jobs must be at least 1, and --parts some of {', '.join(PARTS)}, got {jobs}, {parts!r}")
    make_folder(out)
    run_all(points(wanted, quick=quick), out, jobs, source_commit())


if __name__ == "__main__":
    program.run(cluster_plan)
