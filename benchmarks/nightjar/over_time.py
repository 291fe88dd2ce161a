"""Nightjar's dynamic load over time, simulated: requests and tokens per second by half minute, policy by policy.

    python -m benchmarks.nightjar.over_time --azure AzureLLMInferenceTrace_conv.csv.gz --out over-time.json
    python -m benchmarks.nightjar.over_time --quick --out over-time.json

The load is that of tables.py. Latency is by the interval in which a request arrived, throughput
by the one in which a token came. Written once all policies are through.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.sim.simulation import simulate
from adaserve_jax.workloads.traces import Trace
from benchmarks import program
from benchmarks.nightjar.points import (
    DYNAMIC,
    DYNAMIC_SHARE,
    OURS,
    PLAIN,
    QUICK,
    Point,
    Scale,
    Workloads,
    find_setups,
    made_segment,
    segment_of,
)
from benchmarks.nightjar.segments import minute_counts

INTERVAL_S = 30.0
POLICIES = f"{PLAIN},spec:3,dsd,{OURS}"


def by_interval(records: Sequence[RequestRecord], intervals: int, interval_s: float) -> dict[str, list[float | None]]:
    """tokens_per_s: of the tokens that came in each interval. latency_s: mean, from arrival to the last token, of the
    requests that arrived in it; None where none did that finished. What came after the last interval is left out."""
    tokens = [0] * intervals
    latencies: list[list[float]] = [[] for _ in range(intervals)]
    for record in records:
        if record.ttft_s is None:
            continue
        for offset_s in record.token_offsets_s:
            at = math.floor((record.due_s + record.ttft_s + offset_s) / interval_s)
            if at < intervals:
                tokens[at] += 1
        if record.status == "finished":
            arrived = min(math.floor(record.due_s / interval_s), intervals - 1)
            latencies[arrived].append(record.ttft_s + record.token_offsets_s[-1])
    return {
        "tokens_per_s": [count / interval_s for count in tokens],
        "latency_s": [fmean(each) if each else None for each in latencies],
    }


def arrivals(trace: Trace, intervals: int, interval_s: float) -> list[float]:
    """Requests per second of each interval."""
    counts = [0] * intervals
    for request in trace.requests:
        counts[min(math.floor(request.due_s / interval_s), intervals - 1)] += 1
    return [count / interval_s for count in counts]


def measure(segment: Trace, setup: str, policies: Sequence[str], scale: Scale, interval_s: float) -> dict[str, Any]:
    """Every policy over the dynamic load of a setup."""
    (chosen,) = find_setups([setup])
    loads = Workloads(chosen, segment, scale)
    point = Point(chosen, DYNAMIC, DYNAMIC_SHARE, PLAIN, 0)
    trace = loads.trace(point)
    intervals = math.ceil(trace.duration_s / interval_s) or 1
    found = {}
    for policy in policies:
        done = simulate(policy, replace(point.plan, keep_token_times=True), loads.machine, trace)
        found[policy] = by_interval(done.records, intervals, interval_s)
        notes().print(f"{policy}: {done.wall_s:.0f} s simulated", highlight=False)
    return {
        "commit": source_commit(),
        "machine": machine_name(),
        "setup": setup,
        "workload": trace.name,
        "workload_hash": trace.sha256,
        "capacity_rps": loads.capacity_rps,
        "segment_minutes_rps": [count / 60 for count in minute_counts(segment).tolist()],
        "interval_s": interval_s,
        "arrivals_rps": arrivals(trace, intervals, interval_s),
        "policies": found,
    }


def nightjar_over_time(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    azure: Annotated[Path | None, typer.Option(help="AzureLLMInferenceTrace_conv.csv, .gz or not")] = None,
    setup: Annotated[str, typer.Option(help="a setup of benchmarks.nightjar.tables")] = "grown-110M",
    policies: Annotated[str, typer.Option(help="policies, separated by commas")] = POLICIES,
    quick: Annotated[bool, typer.Option(help="a short made trace and few policies, to see it work")] = False,
) -> None:
    """Simulate the dynamic load and write its course."""
    if not quick and azure is None:
        raise ConfigError("--azure: give Azure's conversation trace, or --quick for a made one")
    segment = made_segment() if azure is None else segment_of(azure)
    names = (PLAIN, OURS) if quick else comma_list("policies", policies, str)
    result = measure(segment, setup, names, QUICK if quick else Scale(), INTERVAL_S)
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    program.run(nightjar_over_time)
