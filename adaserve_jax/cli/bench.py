"""`adaserve bench`: policies x rates over a workload, a table, and result rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.bench.runner import BenchPlan, run_bench
from adaserve_jax.bench.workload import load_workload
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.points import note_point, print_rows
from adaserve_jax.cli.terminal import notes, open_bench_engine
from adaserve_jax.config import FIELD_HELP, EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.policy_names import expand, policy_of

TRACE = "trace"


@takes("config", EngineConfig, FIELD_HELP, without=("policy", "seed"))
def bench(
    config: EngineConfig,
    policies: Annotated[
        str,
        typer.Option(
            help="policies to compare, separated by commas; ladder, orders or halves: all ablations of that name"
        ),
    ],
    rates: Annotated[str, typer.Option(help="requests per second, separated by commas; trace: the workload's times")],
    duration: Annotated[float, typer.Option(help="seconds in which requests arrive, for each policy and rate")],
    out: Annotated[Path, typer.Option(help="folder for results.jsonl and requests.jsonl, which are appended to")],
    workload: Annotated[Path | None, typer.Option(help="JSON lines file; without one, the packaged workload")] = None,
    seed: Annotated[int, typer.Option(help="seeds arrivals, the order of requests and their sampling")] = 0,
    drain: Annotated[float, typer.Option(help="most seconds to wait for requests after the last arrival")] = 30.0,
    max_late_ms: Annotated[
        float, typer.Option(help="a row is invalid when the client submits later than this, 99th percentile")
    ] = 50.0,
    warmup_requests: Annotated[int, typer.Option(help="requests before each point, left out of its result")] = 4,
    record: Annotated[
        bool, typer.Option(help="also write acceptance.jsonl, which `adaserve simulate --acceptance` reads")
    ] = False,
) -> None:
    """Measure SLO attainment, goodput and latencies under open-loop load. Columns: docs/metrics.md."""
    plan = BenchPlan(
        policies=expand(comma_list("policies", policies, str)),
        rates=comma_list("rates", rates, parse_rate),
        duration_s=duration,
        seed=seed,
        drain_s=drain,
        max_late_s=max_late_ms / 1e3,
        warmup_requests=warmup_requests,
        max_prefill_tokens=config.max_prefill_tokens,
        record=record,
    )
    loaded = load_workload(workload)
    # pools that extend are laid out at the start, or never: by a policy that wants them, if there is one
    named = [replace(config, policy=name) for name in plan.policies]
    first = next((each for each in named if policy_of(each).elastic), named[0])
    rows = run_bench(
        plan,
        loaded,
        lambda _: open_bench_engine(replace(first, seed=seed), record=record),
        out,
        note_point,
    )
    print_rows(rows)
    notes().print(f"{len(rows)} rows in {out / 'results.jsonl'}", style="dim", highlight=False, soft_wrap=True)


def parse_rate(text: str) -> float | None:
    """A rate in requests per second, or None for "trace"."""
    if text == TRACE:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rates must be numbers above 0 or 'trace', separated by commas, got {text!r}")
    return rate
