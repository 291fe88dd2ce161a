"""What each constant of `adaserve` is worth, in simulation: attainment with other values of it, one at a time.

    python -m benchmarks.adaserve.constants --traces adaserve-traces --out constants.json [--only DUE_SHARE,emit]

Every value of KNOBS runs at every point of POINTS, points of benchmarks/adaserve/sweeps.py, on one machine. Beside the
attainments stands the range of each constant: the values tried, the chosen one among them, whose attainment is nowhere
more than SAFE_POINTS below the chosen one's. Simulated results are the same on every host. With `--only` and a file
that is there, the constants' rows are replaced in it, or added, if nothing else has changed since: the attainments as
chosen must be the same.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from benchmarks import program
from benchmarks.adaserve.sweeps_points import OURS, Point, points

MACHINE = "llama-70b"
POINTS = (
    "joint/rate/3.611", "joint/rate/4.722", "joint/mix/0.1", "joint/mix/0.5", "joint/scale/0.8", "joint/fluctuating/3",
    "tpot/rate/4.722", "tpot/fluctuating/3",
)  # fmt: skip
"""targets/sweep/value: light and heavy load, few and many urgent requests, tight targets, bursts, no TTFT target."""
SAFE_POINTS = 0.5


@dataclass(frozen=True)
class Knob:
    """One constant. module: below adaserve_jax.scheduler, where it is read. values: tried beside the chosen one, from
    the lowest. field: whether `name` is a field of Objective instead."""

    module: str
    name: str
    values: tuple[Any, ...]
    field: bool = False

    @property
    def chosen(self) -> Any:
        return getattr(Objective(), self.name) if self.field else getattr(self._module, self.name)

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"adaserve_jax.scheduler.{self.module}")

    @contextmanager
    def at(self, value: Any) -> Iterator[None]:
        """Set the constant to `value` within the context."""
        attribute, put = ("Objective", partial(Objective, **{self.name: value})) if self.field else (self.name, value)
        before = getattr(self._module, attribute)
        setattr(self._module, attribute, put)
        try:
            yield
        finally:
            setattr(self._module, attribute, before)


KNOBS = (
    Knob("scheduler", "emit", (0.25, 0.5, 2.0), field=True),
    Knob("scheduler", "prefill", (0.1, 0.2, 0.8), field=True),
    Knob("scheduler", "prefill_wait", (0.0, 1.0), field=True),
    Knob("scheduler", "horizon", (8, 16, 64), field=True),
    Knob("planner", "DUE_SHARE", (0.3, 0.45, 0.75, 0.9)),
    Knob("planner", "LATE_SHARE", (0.1, 0.4, 0.6)),
    Knob("planner", "PROMPT_STEPS", (1.5, 2.0, 3.0, 4.0)),
    Knob("planner", "MOST_PATIENT_S", (30.0, 60.0, 300.0)),
    Knob("planner", "PROMPT_SHARE", (0.7, 0.8, 1.0)),
    Knob("planner", "PROMPTS_AHEAD", (8, 256)),
    Knob("planner", "PREFILL_RATE", (0.01, 0.05)),
    Knob("slack", "PACE_RATE", (0.05, 0.2)),
    Knob("slo", "DEMANDING_SHARE", (0.6, 0.9)),
    Knob("slo", "RESERVE", (0.0, 0.02, 0.04)),
    Knob("queue", "LATE_PROMPTS", (1.0, 3.0, 12.0)),
    Knob("queue", "LEAST_LATE_SHARE", (0.0, 0.75)),
    Knob("queue", "PATIENCE_S", (5.0, 20.0)),
    Knob("queue", "AGEING_S", (10.0, 100.0)),
    Knob("queue", "PROMOTION_PERIOD", (32, 512)),
    Knob("controllers.joint", "COARSE_EDGES", (6, 24)),
    Knob("controllers.joint", "FINE_SHAPES", (1, 8)),
    Knob("controllers.joint", "REACH_STEPS", (1, 16)),
    Knob("controllers.joint", "GRID", (8, 32)),
    Knob("controllers.corrected", "MIN_DWELL", (1, 32)),
    Knob("controllers.corrected", "HALF_LIFE", (64, 1024)),
    Knob("acceptance", "MEAN_RATE", (0.05, 0.2)),
    Knob("acceptance", "PSEUDO_OUTCOMES", (4.0, 36.0)),
)


def attainments(todo: tuple[Knob, Any] | None, at: Sequence[Point], seed: int) -> list[float]:
    """Return the attainment at every point. todo: constant and its value; None: all as chosen."""
    if todo is not None:
        with todo[0].at(todo[1]):
            return attainments(None, at, seed)
    plan = SimulationPlan((), seed, keep_token_times=False)
    found = []
    for point in at:
        records = simulate(OURS, plan, load_machine(MACHINE), point.trace).records
        found.append(sum(record.slo_met is True for record in records) / len(records))
    return found


def safe_range(tried: dict[Any, float], chosen: Any) -> tuple[Any, Any]:
    """Return the ends of the values around the chosen one of which none loses more than SAFE_POINTS at any point.

    tried: by value, the lowest difference to the chosen one over the points.
    """
    values = sorted([*tried, chosen])
    safe = [value == chosen or tried[value] >= -SAFE_POINTS / 100 for value in values]
    low = high = values.index(chosen)
    while low and safe[low - 1]:
        low -= 1
    while high + 1 < len(values) and safe[high + 1]:
        high += 1
    return values[low], values[high]


def measure(traces: Path, knobs: Sequence[Knob], jobs: int, seed: int, told: Callable[[str], None]) -> dict[str, Any]:
    """Simulate every value of `knobs` at every point; returns what is written as JSON."""
    at = [p for p in points(traces, requests=0, seed=seed) if f"{p.targets}/{p.sweep}/{p.value:g}" in POINTS]
    if len(at) != len(POINTS):
        raise ConfigError(f"{traces} lacks traces of some of {', '.join(POINTS)}")
    names = [f"{p.targets}/{p.sweep}/{p.value:g}" for p in at]
    todo = [None, *((knob, value) for knob in knobs for value in knob.values)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        found = []
        for each, met in zip(todo, pool.map(partial(attainments, at=at, seed=seed), todo), strict=True):
            found.append(met)
            told(f"{len(found)}/{len(todo)} {'as chosen' if each is None else f'{each[0].name} = {each[1]}'}")
    chosen, rows = found[0], []
    for knob in knobs:
        met = {each[1]: found[i] for i, each in enumerate(todo) if each is not None and each[0] == knob}
        change = {value: [a - b for a, b in zip(each, chosen, strict=True)] for value, each in met.items()}
        low, high = safe_range({value: min(each) for value, each in change.items()}, knob.chosen)
        rows.append({
            "module": knob.module, "name": knob.name, "field": knob.field, "chosen": knob.chosen, "safe": [low, high],
            "tried": [{"value": value, "attainment": dict(zip(names, each, strict=True)),
                       "least_change": min(change[value]), "most_change": max(change[value])}
                      for value, each in met.items()],
        })  # fmt: skip
    return {"machine": MACHINE, "seed": seed, "as_chosen": dict(zip(names, chosen, strict=True)), "constants": rows}


def merged(found: dict[str, Any], held: dict[str, Any]) -> dict[str, Any]:
    """Return what is held with the rows that were found. Raises ConfigError: attainments as chosen have changed."""
    for name in ("machine", "seed", "as_chosen"):
        if found[name] != held[name]:
            raise ConfigError(
                f"--out has another {name}, {held[name]}, than found now, {found[name]}; run all constants"
            )
    new = [row | {"commit": found["commit"]} for row in found["constants"]]
    rows = {(row["module"], row["name"]): row for row in [*held["constants"], *new]}
    return held | {"constants": list(rows.values())}


def main(
    traces: Annotated[Path, typer.Option(help="folder of AdaServe's traces")],
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    only: Annotated[str, typer.Option(help="constants, separated by commas; none: all")] = "",
    jobs: Annotated[int, typer.Option(help="processes")] = 1,
    seed: Annotated[int, typer.Option(help="seeds what the draft gets right, and fluctuating traces")] = 0,
) -> None:
    """Measure what the constants are worth."""
    wanted = comma_list("only", only, str)
    unknown = sorted(set(wanted) - {knob.name for knob in KNOBS})
    if unknown:
        raise ConfigError(f"--only: no constant {unknown[0]!r}; there are {', '.join(knob.name for knob in KNOBS)}")
    knobs = [knob for knob in KNOBS if not wanted or knob.name in wanted]
    measured = measure(traces, knobs, jobs, seed, lambda text: notes().print(text, highlight=False))
    found = {"commit": source_commit(), **measured}
    if wanted and out.exists():
        found = merged(found, json.loads(out.read_text()))
    out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    program.run(main)
