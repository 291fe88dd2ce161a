"""Measure what learning costs those who are served: the same requests, at the same times, with it and without.

    python -m benchmarks.osd.cost --out benchmarks/results/learning-cost-110m-cpu.json

Two engines stand side by side, alike but for learning, on the embedded pair grown to 110M and 10M parameters. At each
load both serve the same requests in turns, who begins alternating, one while the other rests: what is left to be
learned is learned before the other's turn. Loads are shares of a rate that you give by --capacity. Attainment is over
all requests with a target; training is that in which requests ran or waited, and while nothing ran, apart.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.bench.engine import Ask, AtPoint, Due
from adaserve_jax.bench.local_client import LocalBenchEngine
from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes, progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.workloads.arrivals import make_schedule, parse_arrivals
from adaserve_jax.workloads.items import Workload
from adaserve_jax.workloads.workload import load_workload
from benchmarks import program
from benchmarks.grown import grown_draft, grown_target
from benchmarks.osd.runs import wait_until_learned

DRAIN_S = 60.0
PLAIN, LEARNING = "plain", "learning"


@dataclass(frozen=True)
class Turn:
    """One engine's run. delayed_s, idle_s: seconds of training while requests ran, and afterwards."""

    load: float
    repeat: int
    engine: str
    requests: int
    attainment: float
    tpot_p50_s: float | None
    throughput_tps: float
    wall_s: float
    delayed_s: float = 0.0
    idle_s: float = 0.0
    micro_steps: int = 0
    versions: int = 0


class Side:
    """One of the engines."""

    def __init__(self, name: str, engine: LocalBenchEngine):
        self.name, self.engine = name, engine

    def learning(self) -> dict[str, Any]:
        return asdict(self.engine.client.stats().learning)

    def rest(self) -> None:
        wait_until_learned(self.engine.client)

    def turn(self, due: list[Due], load: float, repeat: int) -> Turn:
        before = self.learning()
        loop = self.engine.drive(due, drain_s=DRAIN_S)
        during = self.learning()
        self.rest()
        after = self.learning()
        at = AtPoint("run", "point", self.name, load, loop.start_s, baseline_s=1.0)
        summary = summarize([p.record(at) for p in loop.probes], wall_s=loop.wall_s)[0]
        return Turn(
            load, repeat, self.name, summary.requests, summary.attainment or 0.0, summary.tpot_p50_s,
            summary.throughput_tps, loop.wall_s,
            delayed_s=during["delay_s"] - before["delay_s"],
            idle_s=after["train_s"] - before["train_s"] - (during["delay_s"] - before["delay_s"]),
            micro_steps=after["micro_steps"] - before["micro_steps"],
            versions=sum(after["updates"].values()) - sum(before["updates"].values()),
        )  # fmt: skip


def schedule(workload: Workload, side: Side, rate: float, duration_s: float, seed: int) -> list[Due]:
    """Poisson arrivals of the workload's requests, the same for the same seed."""
    arrivals = make_schedule(
        workload, parse_arrivals("poisson"), rate_rps=rate, duration_s=duration_s, seed=seed
    ).arrivals
    due = []
    for number, arrival in enumerate(arrivals):
        item = arrival.item
        ask = Ask(f"{side.name}-{seed}-{number}", item, arrival.seed, item.slo, f"{seed}", item.max_tokens)
        due.append(Due(arrival.due_s, side.engine.prepare(ask)))
    return due


app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="file of results")],
    capacity: Annotated[float, typer.Option(help="requests/s of a load of 1")] = 2.5,
    loads: Annotated[str, typer.Option(help="shares of that")] = "0.5,1.2",
    repeats: Annotated[int, typer.Option(help="pairs of turns at each load")] = 4,
    duration: Annotated[float, typer.Option(help="seconds in which requests of a turn come")] = 30.0,
    delay_ms: Annotated[float, typer.Option(help="learn_delay_ms")] = 50.0,
    learn_every: Annotated[int, typer.Option(help="learn_every")] = 8,
    learn_steps: Annotated[int, typer.Option(help="learn_steps")] = 4,
    learn_rate: Annotated[float, typer.Option(help="learn_rate")] = 1e-4,
    seed: int = 0,
) -> None:
    """Measure and write."""
    workload = load_workload()
    target, draft = str(grown_target("110M")), str(grown_draft())
    config = EngineConfig(target=target, draft=draft, policy="adaserve", max_requests=16)
    learn = LearnConfig(
        learn_rate=learn_rate, learn_delay_ms=delay_ms, learn_every=learn_every, learn_steps=learn_steps
    )
    with progress_bar() as progress:
        sides = [Side(PLAIN, LocalBenchEngine(config, progress))]
        sides.append(Side(LEARNING, LocalBenchEngine(replace(config, learning=learn), progress)))
    turns: list[Turn] = []
    for repeat in range(repeats):
        for load in comma_list("loads", loads, float):
            for side in sides if repeat % 2 else sides[::-1]:
                due = schedule(workload, side, load * capacity, duration, seed + repeat)
                turns.append(side.turn(due, load, repeat))
                notes().print(f"{turns[-1]}", highlight=False, markup=False)
                write(out, turns, config, learn, capacity, sides)
    for side in sides:
        side.engine.close()


def write(
    out: Path, turns: list[Turn], config: EngineConfig, learn: LearnConfig, capacity: float, sides: list[Side]
) -> None:  # fmt: skip
    result = {
        "commit": source_commit(), "machine": machine_name(), "policy": config.policy, "capacity_rps": capacity,
        "learn": asdict(learn), "loads": [of_load(turns, load) for load in sorted({turn.load for turn in turns})],
        "delay_max_s": max(side.learning()["delay_max_s"] for side in sides),
        "compiles_after_ready": sum(side.engine.compiles_after_ready() for side in sides),
        "turns": [asdict(turn) for turn in turns],
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def of_load(turns: list[Turn], load: float) -> dict[str, Any]:
    """Return means over the turns of a load; the cost of attainment, by pairs."""
    by = {
        name: [turn for turn in turns if turn.load == load and turn.engine == name] for name in (PLAIN, LEARNING)
    }  # fmt: skip
    pairs = list(zip(by[PLAIN], by[LEARNING], strict=False))
    costs = [plain.attainment - learning.attainment for plain, learning in pairs]
    found: dict[str, Any] = {"load": load, "pairs": len(pairs)}
    if pairs:
        found |= {
            "attainment": {name: statistics.fmean(turn.attainment for turn in each) for name, each in by.items()},
            "attainment_cost": statistics.fmean(costs),
            "throughput_tps": {
                name: statistics.fmean(turn.throughput_tps for turn in each) for name, each in by.items()
            },
            "delayed_s": sum(turn.delayed_s for turn in by[LEARNING]),
            "idle_s": sum(turn.idle_s for turn in by[LEARNING]),
            "versions": sum(turn.versions for turn in by[LEARNING]),
        }
    return found


if __name__ == "__main__":
    program.run(app)
