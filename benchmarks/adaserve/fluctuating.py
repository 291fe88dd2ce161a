"""Is `adaserve` behind the best baseline where arrivals fluctuate and targets are of TPOT alone? Several traces a rate.

    python -m benchmarks.adaserve.fluctuating --traces adaserve-traces --out fluctuating.json [--seeds 4] [--jobs 2]

One trace at each rate, as benchmarks/adaserve/sweeps.py has it, tells little where nearly all targets are met: policies
change places from one to the next. Here every contender runs on the same `--seeds` traces of each rate. Points
are kept in sweeps.jsonl beside the file, and those that it has of this commit are not run again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.bench.simulate import Grid
from adaserve_jax.results.jsonl import make_folder
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.sim.machines import load_machine
from benchmarks import program
from benchmarks.adaserve.sweeps import Job, run_all
from benchmarks.adaserve.sweeps_points import contenders, named_contenders, points
from benchmarks.adaserve.sweeps_tables import Line

MACHINE = "llama-70b"
COMPARED = "adaserve,jitserve,dspark:4,spec:4,tetris:4"
"""`adaserve` and the baselines that come near it in the sweeps."""


def fluctuating(
    traces: Annotated[Path, typer.Option(help="folder of AdaServe's traces")],
    out: Annotated[Path, typer.Option(help="JSON to write")],
    seeds: Annotated[int, typer.Option(help="traces of each rate")] = 4,
    policies: Annotated[str, typer.Option(help="contenders of the sweeps, separated by commas")] = COMPARED,
    machine: Annotated[str, typer.Option(help="packaged machine, or a JSON file")] = MACHINE,
    requests: Annotated[int, typer.Option(help="first requests of each trace to take; 0: all")] = 0,
    jobs: Annotated[int, typer.Option(help="processes; 0: one per core")] = 0,
) -> None:
    """Simulate every contender on every trace and write its attainment."""
    simulated, commit = load_machine(machine), source_commit()
    chosen = named_contenders("policies", policies, contenders())
    todo = [
        Job(commit, simulated, point, contender, seed, Grid())
        for seed in range(seeds)
        for point in points(traces, requests=requests, seed=seed)
        if (point.sweep, point.targets) == ("fluctuating", "tpot")
        for contender in chosen
    ]
    make_folder(out.parent)
    lines = run_all(todo, out.parent, jobs or os.cpu_count() or 1)
    rows = [_row(job, line) for job, line in zip(todo, lines, strict=True)]
    command = program.with_options(
        f"python -m benchmarks.adaserve.fluctuating --traces adaserve-traces --seeds {seeds} --out {out.name}",
        ("machine", machine, MACHINE), ("policies", policies, COMPARED), ("requests", requests, 0),
    )  # fmt: skip
    about = {"commit": commit, "command": command, "simulated": simulated.name, "seeds": seeds}
    out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def _row(job: Job, line: Line) -> dict[str, object]:
    attainment = line.overall["attainment"]
    return {"policy": line.contender, "rate_rps": line.value, "seed": job.seed, "attainment": attainment}


if __name__ == "__main__":
    program.run(fluctuating)
