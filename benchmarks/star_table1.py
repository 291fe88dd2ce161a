"""StarSD's Table 1 by running it: one draft service and N = 1 .. 6 targets, one request each.

    python benchmarks/star_table1.py --out benchmarks/results/starsd/table1-cpu.json [--verify-ms 31] [--rounds 3]

The service is `adaserve draft` with the 10M draft, once as it is and once with `--one-by-one`, as in the paper. Targets
are processes with a real remote drafter over gRPC each; only their verification is paced: it sleeps (star_targets.py),
along texts that the target wrote before (star_texts.py), since two cores bear no six targets. --verify-ms is half of
what a verification of the demo's target grown to 110M takes: N_full is then about 3, with numbers below and beyond it
up to 6, and batching has room for more than 1.5 times the throughput (at most N S / (Z + S)). So what is measured is
the draft, the protocol, and the queue between them.

In each round every number of targets is measured with both services in turns. What stands is the median over rounds.
S(n) is measured with one target of n requests that verifies in no time; b is the chance for which a chain of that
depth has as many accepted tokens as were found; t_c is what a round of one target takes beside S and t_v. With these
the closed form and the simulation are computed, up to 64 targets. `colocated`: the same draft within the process of one
target, as in the paper's first column.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from cpu_time import Watch
from star_colocated import Alone, run_alone
from star_paper import COLOCATED_TPS, paper_rows
from star_service import Counts, Service, service
from star_targets import PacedTarget, Shape, Tally, Text, remote_drafter, run_target

from adaserve_jax.bench.star_sim import StarPlan, StarRow, closed_row, simulated_row
from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.star.formulas import accepted, full_targets, measured

TARGETS = (1, 2, 3, 4, 5, 6)
COMPUTED = (*TARGETS, 8, 12, 16, 24, 32, 48, 64)
MAX_ROWS, MAX_FEED = 6, 32
"""Requests of a batch and tokens that are fed at once: sizes between compiled ones are padded, so as few as do."""
SETTLE_S = 2.0
"""From when targets begin until it counts."""
TEXTS, NEW_TOKENS, TEMPERATURE, MAX_CONTEXT = 24, 192, 0.7, 512
SIMULATED_DRAFTS, LEAST_ROUNDS = 2000, 60
MODES = {"one by one": True, "batched": False}


@dataclass(frozen=True)
class Run:
    """One number of targets at one service for some seconds. others_share: of the cores' time, taken by others."""

    n: int
    batched: bool
    round: int
    seconds: float
    counts: Counts
    tally: Tally
    others_share: float | None

    @property
    def service_s(self) -> float:
        """S as it was: seconds of a batch."""
        return self.counts.search_s / self.counts.searches

    @property
    def back_s(self) -> float:
        """Seconds of a round that a request neither waits in the queue nor is drafted: Z, with the way there and back
        and whatever else a target does."""
        loop_s = self.n * self.counts.loop_s / self.counts.rounds
        return loop_s - self.counts.queue_s / self.counts.trees - self.service_s

    def row(self) -> StarRow:
        counts, tps = self.counts, self.tally.tokens / self.seconds
        return StarRow(
            self.n, "measured", self.batched, tps, tps / self.n, counts.queue_s / counts.trees,
            counts.idle_s / counts.searches, counts.rounds / counts.loop_s, counts.service_s / counts.loop_s,
        )  # fmt: skip


class Targets:
    """Processes of paced targets at one service."""

    def __init__(self, ports: Sequence[Connection]) -> None:
        self._ports = ports

    def run(self, at: Service, count: int, seconds: float, **of: Any) -> Run:
        """The first `count` of them for so long."""
        ports = self._ports[:count]
        for port in ports:
            port.send("run")
        time.sleep(SETTLE_S)
        watch = Watch(at.pid, *(child.pid or 0 for child in multiprocessing.active_children()))
        counts, before = at.counts(), self._tally(ports)
        time.sleep(seconds)
        gone, after = at.counts() - counts, self._tally(ports)
        _, others = watch.read()
        for port in ports:
            port.send("pause")
        time.sleep(0.5)
        changes = [(now - then, end - start) for (then, start), (now, end) in zip(before, after, strict=True)]
        tally = Tally(**{name: sum(vars(each)[name] for each, _ in changes) for name in vars(Tally())})
        span_s = statistics.mean(lasted for _, lasted in changes)
        return Run(n=count, seconds=span_s, counts=gone, tally=tally, others_share=others, **of)

    @staticmethod
    def _tally(ports: Sequence[Connection]) -> list[tuple[Tally, float]]:
        for port in ports:
            port.send("tally")
        return [port.recv() for port in ports]


@contextmanager
def targets_at(at: Service, count: int, texts: Sequence[Text], shape: Shape) -> Iterator[Targets]:
    """So many processes, connected."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as held:
        ports = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_target, args=(theirs, at.port, number, texts, shape))
            process.start()
            held.callback(process.join, 30)
            held.callback(ours.send, "end")
            ports.append(ours)
        for port in ports:
            assert port.recv() == "ready"
        yield Targets(ports)


def service_times(at: Service, texts: Sequence[Text], shape: Shape, seconds: float) -> dict[int, float]:
    """S(n): of batches of n requests that come back at once."""
    found = {}
    for rows in range(1, MAX_ROWS + 1):
        drafter = remote_drafter(at.port, f"times-{rows}", rows)
        try:
            target = PacedTarget(drafter, texts, Shape(shape.depth, shape.width, 0.0), rows=rows)
            target.step()
            time.sleep(0.3)  # until the service has counted what was fed
            before, until = at.counts(), time.monotonic() + seconds
            while time.monotonic() < until:
                target.step()
            time.sleep(0.3)
            spent = at.counts() - before
            found[rows] = spent.search_s / spent.searches
            target.end()
        finally:
            drafter.close()
    return found


def chance_of(mean_accepted: float, depth: int) -> float:
    """b: the chance of each level for which a chain of that depth has so many accepted tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle, depth) < mean_accepted else (low, middle)
    return (low + high) / 2


def medians(runs: Sequence[Run]) -> list[StarRow]:
    """One row for each number of targets and service: of every quantity the median over rounds."""
    found = []
    for key in dict.fromkeys((run.batched, run.n) for run in runs):
        rows = [vars(run.row()) for run in runs if (run.batched, run.n) == key]
        numbers = {name for name, value in rows[0].items() if isinstance(value, float)}
        found.append(
            StarRow(**{n: statistics.median(r[n] for r in rows) if n in numbers else v for n, v in rows[0].items()})
        )
    return found


def computed(
    service_s: dict[int, float], shape: Shape, verify_s: float, network_s: float, chance: float
) -> list[StarRow]:
    """Closed form and simulation with what was measured, one by one and batched."""
    rows = []
    for most in (1, MAX_ROWS):
        for n in COMPUTED:
            plan = StarPlan(
                n, verify_s, network_s, chance, shape.depth, max_rows=most,
                rounds=max(LEAST_ROUNDS, SIMULATED_DRAFTS // n),
            )  # fmt: skip
            rows += [closed_row(plan, measured(service_s)), simulated_row(plan, measured(service_s))]
    return rows


def alone_in_turns(held: ExitStack, model: Path, texts: Sequence[Text], shape: Shape) -> Connection:
    """A target with the draft in its own process, ready."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_alone, args=(theirs, model, texts, shape, MAX_CONTEXT, MAX_FEED))
    process.start()
    held.callback(process.join, 30)
    held.callback(ours.send, 0)
    assert ours.recv() == "ready"
    return ours


def star_table1(
    out: Annotated[Path, typer.Option(help="file to write; texts are kept beside it")],
    target: Annotated[str, typer.Option(help="whose texts")] = "demo",
    draft: Annotated[str, typer.Option(help="what the service drafts with; '': the demo's, grown to 10M")] = "",
    verify_ms: Annotated[float, typer.Option(help="t_v, what a verification takes")] = 15.0,
    depth: Annotated[int, typer.Option(help="levels of a chain")] = 4,
    rounds: Annotated[int, typer.Option(help="rounds; medians over them stand")] = 3,
    seconds: Annotated[float, typer.Option(help="of one measurement")] = 10.0,
    targets: Annotated[int, typer.Option(help="most targets")] = TARGETS[-1],
) -> None:
    """Measure, compute, simulate."""
    from nightjar_offload import grown_draft  # these import jax, which the targets' processes need not
    from star_texts import texts_of
    from throughput import grown_target

    if min(verify_ms, seconds) <= 0 or min(depth, rounds, targets) < 1:
        raise ConfigError("--verify-ms and --seconds must be above 0, --depth, --rounds and --targets at least 1")
    model = Path(draft) if draft else grown_draft(grown_target("110M"))
    texts = texts_of(
        target, out.with_suffix(".texts"), count=TEXTS, new_tokens=NEW_TOKENS, temperature=TEMPERATURE,
        max_context=MAX_CONTEXT,
    )  # fmt: skip
    shape = Shape(depth, 1, verify_ms / 1e3)
    runs, alone, service_s, load_1m = [], [], [], os.getloadavg()[0]
    with ExitStack() as held:
        colocated = alone_in_turns(held, model, texts, shape)
        services = {
            mode: held.enter_context(
                service(
                    model,
                    one_by_one=one_by_one,
                    depth=depth,
                    max_batch=MAX_ROWS,
                    max_feed=MAX_FEED,
                    max_context=MAX_CONTEXT,
                )
            )
            for mode, one_by_one in MODES.items()
        }
        there = {mode: held.enter_context(targets_at(at, targets, texts, shape)) for mode, at in services.items()}
        for number in range(rounds):
            colocated.send(seconds)
            alone.append(colocated.recv())
            service_s.append(service_times(services["batched"], texts, shape, seconds / MAX_ROWS))
            for n in range(1, targets + 1):
                for mode, at in services.items():
                    run = there[mode].run(at, n, seconds, batched=not MODES[mode], round=number)
                    runs.append(run)
                    typer.echo(f"round {number}, {mode}: {run.row()}")
    result = report(runs, alone, service_s, shape)
    about = {
        "commit": source_commit(), "machine": machine_name(), "load_1m": load_1m, "target": target,
        "draft": draft or model.name, "seconds": seconds, "rounds": rounds, "texts": len(texts),
        "new_tokens": NEW_TOKENS, "temperature": TEMPERATURE,
        "command": shlex.join(["python", "benchmarks/star_table1.py", *sys.argv[1:]]),
    }  # fmt: skip
    out.write_text(json.dumps(about | result, indent=1, allow_nan=False) + "\n")


def report(
    runs: Sequence[Run], alone: Sequence[Alone], service_s: Sequence[dict[int, float]], shape: Shape
) -> dict[str, Any]:
    """What follows from the runs."""
    sums = {name: sum(vars(run.tally)[name] for run in runs) for name in vars(Tally())}
    verify_s, chance = sums["slept_s"] / sums["steps"], chance_of(sums["accepted"] / sums["rounds"], shape.depth)
    times = {n: statistics.median(each[n] for each in service_s) for n in service_s[0]}
    back_s = statistics.median(run.back_s for run in runs if run.n == 1)
    rows = [*medians(runs), *computed(times, shape, verify_s, max(back_s - verify_s, 0.0), chance)]
    named = {(row.kind, row.batched, row.n): row.throughput_tps for row in rows}
    most = max(run.n for run in runs)
    return {
        "shape": asdict(shape), "verify_s": verify_s, "network_s": max(back_s - verify_s, 0.0), "acceptance": chance,
        "tokens_per_round": sums["accepted"] / sums["rounds"] + 1, "service_s": times, "max_rows": MAX_ROWS,
        "full": full_targets(times[1], back_s),
        "batched_over_one_by_one": {
            kind: named[kind, True, most] / named[kind, False, most] for kind in ("measured", "simulated", "closed")
        },
        "colocated": {
            name: statistics.median(vars(each)[name] for each in alone) for name in vars(alone[0])
        },
        "as_it_was_s": [
            {"n": n, "batched": batched,
             "service_s": statistics.median(r.service_s for r in runs if (r.n, r.batched) == (n, batched))}
            for n, batched in dict.fromkeys((run.n, run.batched) for run in runs)
        ],
        "rows": [row.as_dict() for row in rows],
        "paper": paper_rows(), "paper_colocated_tps": COLOCATED_TPS,
        "runs": [asdict(run) for run in runs],
    }  # fmt: skip


if __name__ == "__main__":
    try:
        typer.run(star_table1)
    except AdaServeError as error:
        sys.exit(f"error: {error}")
