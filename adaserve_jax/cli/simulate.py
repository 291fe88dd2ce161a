"""`adaserve simulate`: policies over traces, on a simulated machine; the rows are those of `adaserve bench`."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.bench.machines import load_machine, packaged_machines
from adaserve_jax.bench.simulation import Simulated, SimulationPlan, simulate_all
from adaserve_jax.bench.traces import load_trace
from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.points import note_point, print_rows
from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows, make_folder
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.scheduler.policies import find_policy


def simulate(
    traces: Annotated[list[Path], typer.Argument(help="files in AdaServe's trace format, plain or .gz")],
    policies: Annotated[str, typer.Option(help="policies to compare, separated by commas")],
    out: Annotated[Path, typer.Option(help="folder for results.jsonl and requests.jsonl, which are appended to")],
    machine: Annotated[
        str, typer.Option(help=f"machine to simulate: {', '.join(packaged_machines())}, or a JSON file, a profile too")
    ] = "llama-70b",
    ttft_slo: Annotated[float, typer.Option(help="TTFT target of every request, seconds; 0: none")] = 4.0,
    time_scale: Annotated[float, typer.Option(help="what the times of the traces are multiplied by")] = 1.0,
    max_requests: Annotated[int, typer.Option(help="most requests that run at once; 0: the machine's own")] = 0,
    max_prefill_tokens: Annotated[
        int, typer.Option(help="most prompt tokens that one step computes; 0: what the policy finds room for")
    ] = 0,
    drain: Annotated[float, typer.Option(help="most seconds to serve requests after the last arrival")] = 600.0,
    seed: Annotated[int, typer.Option(help="seeds what the draft gets right")] = 0,
) -> None:
    """Compare policies on a trace in minutes, with the scheduler that serves. Columns: docs/metrics.md."""
    names = comma_list("policies", policies, str)
    simulated = load_machine(machine)
    if min(ttft_slo, max_requests, max_prefill_tokens) < 0 or min(time_scale, drain) <= 0:
        raise ConfigError("--ttft-slo, --max-requests and --max-prefill-tokens must not be below 0, the others above")
    for name in names:
        find_policy(name, simulated.max_depth)
    loaded = [load_trace(path, ttft_slo_s=ttft_slo or None, time_scale=time_scale) for path in traces]
    plan = SimulationPlan(names, seed, max_requests, max_prefill_tokens, drain)
    make_folder(out)
    total, done = len(names) * len(loaded), count(1)

    def on_point(point: Simulated, rows: list[ResultRow]) -> None:
        append_rows(out / "results.jsonl", rows)
        append_rows(out / "requests.jsonl", point.records)
        note_point(next(done), total, rows)

    print_rows(simulate_all(plan, simulated, loaded, on_point))
    notes().print(f"rows in {out / 'results.jsonl'}", style="dim", highlight=False, soft_wrap=True)
