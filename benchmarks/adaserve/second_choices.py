"""What is `adaserve` worth with a draft whose second choices are poorer than its first?

    python -m benchmarks.adaserve.second_choices --traces adaserve-traces --out second-choices.json [--jobs 2]

A packaged machine's draft is as often right with its second choice, where the first is wrong, as with its first. The
embedded draft is not (docs/simulate.md, recorded acceptance). With such a draft trees are worth less than the sweeps
show. Here each contender runs on AdaServe's traces with choices that decay. Points are kept in sweeps.jsonl beside the
file, and those that it has of this commit are not run again.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.bench.simulate import Grid
from adaserve_jax.cli.options import comma_list
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import make_folder
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.sim.machines import load_machine
from benchmarks import program
from benchmarks.adaserve.sweeps import Job, run_all
from benchmarks.adaserve.sweeps_points import contenders, named_contenders, points

MACHINE, DECAYS = "llama-70b", "1,0.7,0.5"
COMPARED = "adaserve,adaserve-paper,adaserve-code,jitserve,dspark:4,spec:4"
"""Ours, the authors', and the baselines that come near in the sweeps."""
SIMULATED = ("rate", "urgent", "scale")
"""Sweeps of AdaServe's evaluation on its published traces."""


def second_choices(
    traces: Annotated[Path, typer.Option(help="folder of AdaServe's traces")],
    out: Annotated[Path, typer.Option(help="JSON to write")],
    decays: Annotated[str, typer.Option(help="decays of the draft's choices, separated by commas")] = DECAYS,
    policies: Annotated[str, typer.Option(help="contenders of the sweeps, separated by commas")] = COMPARED,
    machine: Annotated[str, typer.Option(help="packaged machine, or a JSON file")] = MACHINE,
    requests: Annotated[int, typer.Option(help="first requests of each trace to take; 0: all")] = 0,
    jobs: Annotated[int, typer.Option(help="processes; 0: one per core")] = 0,
) -> None:
    """Simulate every contender at every decay and write its attainment at each point."""
    tried = comma_list("decays", decays, float)
    if not all(0 < decay <= 1 for decay in tried):
        raise ConfigError(f"--decays: expected numbers above 0 and at most 1, got {decays!r}")
    simulated, commit = load_machine(machine), source_commit()
    chosen = named_contenders("policies", policies, contenders())
    todo = [
        Job(commit, replace(simulated, choice_decay=decay), point, contender, 0, Grid())
        for decay in tried
        for point in points(traces, requests=requests, seed=0)
        if point.targets == "tpot" and point.sweep in SIMULATED
        for contender in chosen
    ]
    make_folder(out.parent)
    met: dict[tuple[float, str], dict[str, float]] = defaultdict(dict)
    for job, line in zip(todo, run_all(todo, out.parent, jobs or os.cpu_count() or 1), strict=True):
        place = f"{line.sweep}/{line.value:g}"
        met[job.machine.choice_decay, line.contender][place] = line.overall["attainment"]
    rows = [{"decay": decay, "policy": policy, "attainment": points_of} for (decay, policy), points_of in met.items()]
    command = program.with_options(
        f"python -m benchmarks.adaserve.second_choices --traces adaserve-traces --out {out.name}",
        ("decays", decays, DECAYS), ("machine", machine, MACHINE), ("policies", policies, COMPARED),
        ("requests", requests, 0),
    )  # fmt: skip
    about = {"commit": commit, "command": command, "simulated": simulated.name}
    out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    program.run(second_choices)
