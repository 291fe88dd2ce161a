"""StarSD's Table 1 by running it: one draft service and N = 1 .. 6 targets, one request each.

    python -m benchmarks.starsd.table1 --out benchmarks/results/starsd/table1-cpu.json [--verify-ms 15] [--rounds 3]

The service is `adaserve draft` with the 10M draft, once as it is and once with `--one-by-one`, as in the paper. Targets
are processes with a real remote drafter over gRPC each; only their verification is paced: it sleeps (targets.py),
along texts that the target wrote before (texts.py), since two cores bear no six targets. --verify-ms is half of
what a verification of the demo's target grown to 110M takes: N_full is then about 3, with numbers below and beyond it
up to 6, and batching has room for more than 1.5 times the throughput (at most N S / (Z + S)). So what is measured is
the draft, the protocol, and the queue between them.

In each round every number of targets is measured with both services in turns. What stands is the median over rounds.
S(n) is measured with one target of n requests that verifies in no time; b is the chance for which a chain of that
depth has as many accepted tokens as were found; t_c is what a round of one target takes beside S and t_v. With these
the closed form and the simulation are computed, up to 64 targets. `colocated`: the same draft within the process of one
target, as in the paper's first column. `spread`: the least and the most over rounds.

--engines 2 also measures one and two targets that are whole engines (engines.py), beside one with the draft and
one with the demo's EAGLE-3 head in its own process: no more than the cores bear, since all of them compute at once.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from adaserve_jax.bench.profile import chance_of_chains
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.star.service.admission import interpolated
from benchmarks import program
from benchmarks.grown import grown_draft, grown_head, grown_target
from benchmarks.starsd.closed_forms import full_targets
from benchmarks.starsd.colocated import Alone
from benchmarks.starsd.engines import EngineRuns
from benchmarks.starsd.paper import COLOCATED_TPS, paper_rows
from benchmarks.starsd.runs import MAX_CONTEXT, MAX_FEED, MAX_ROWS, Run, alone_in_turns, medians, spread, targets_at
from benchmarks.starsd.service import Service, service
from benchmarks.starsd.sim import StarPlan, StarRow, closed_row, simulated_row
from benchmarks.starsd.targets import PacedTarget, Shape, Tally, Text, remote_drafter, run_target

TARGETS = (1, 2, 3, 4, 5, 6)
COMPUTED = (*TARGETS, 8, 12, 16, 24, 32, 48, 64)
TEXTS, NEW_TOKENS, TEMPERATURE = 24, 192, 0.7
SIMULATED_DRAFTS, LEAST_ROUNDS = 2000, 60
MODES = {"one by one": True, "batched": False}


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
            rows += [closed_row(plan, interpolated(service_s)), simulated_row(plan, interpolated(service_s))]
    return rows


def star_table1(
    out: Annotated[Path, typer.Option(help="file to write; texts are kept beside it")],
    target: Annotated[str, typer.Option(help="whose texts")] = "demo",
    draft: Annotated[str, typer.Option(help="what the service drafts with; '': the demo's, grown to 10M")] = "",
    verify_ms: Annotated[float, typer.Option(help="t_v, what a verification takes")] = 15.0,
    depth: Annotated[int, typer.Option(help="levels of a chain")] = 4,
    rounds: Annotated[int, typer.Option(help="rounds; medians over them stand")] = 3,
    seconds: Annotated[float, typer.Option(help="of one measurement")] = 10.0,
    targets: Annotated[int, typer.Option(help="most targets")] = TARGETS[-1],
    engines: Annotated[int, typer.Option(help="most targets that are whole engines; 0: none")] = 0,
    engine_target: Annotated[str, typer.Option(help="their model; '': the demo's, grown to 110M")] = "",
) -> None:
    """Measure, compute, simulate."""
    from benchmarks.starsd.texts import texts_of  # it imports jax, which the targets' processes need not

    if min(verify_ms, seconds) <= 0 or min(depth, rounds, targets) < 1 or engines < 0:
        raise ConfigError(
            "--verify-ms and --seconds must be above 0, --depth, --rounds and --targets at least 1, --engines at least "
            f"0, got {verify_ms:g}, {seconds:g}, {depth}, {rounds}, {targets} and {engines}"
        )
    model = Path(draft) if draft else grown_draft()
    texts = texts_of(
        target, out.with_suffix(".texts"), count=TEXTS, new_tokens=NEW_TOKENS, temperature=TEMPERATURE,
        max_context=MAX_CONTEXT,
    )  # fmt: skip
    shape = Shape(depth, 1, verify_ms / 1e3)
    runs, alone, service_s, load_1m = [], [], [], os.getloadavg()[0]
    with ExitStack() as held:
        colocated = alone_in_turns(held, model, texts, shape)
        services = _services(held, model, depth)
        there = {
            mode: held.enter_context(targets_at(at, targets, run_target, texts, shape)) for mode, at in services.items()
        }
        real = None
        if engines:
            # They say what pays for them, so that services of their own admit no more; paced targets are never refused.
            by_batching = {not MODES[mode]: at for mode, at in _services(held, model, depth).items()}
            folder = resolve_folder(engine_target, "target") if engine_target else grown_target("110M")
            own = {"draft": resolve_folder(str(model), "draft")}
            if not engine_target:
                scratch = Path(held.enter_context(TemporaryDirectory(prefix="grown-head-")))
                own["EAGLE-3 head"] = grown_head(resolve_folder("demo-head", "draft"), "110M", scratch / "head")
            real = EngineRuns(held, by_batching, engines, texts, folder, own, depth)
        for number in range(rounds):
            colocated.send(seconds)
            alone.append(colocated.recv())
            service_s.append(service_times(services["batched"], texts, shape, seconds / MAX_ROWS))
            for n in range(1, targets + 1):
                for mode, at in services.items():
                    run = there[mode].run(at, n, seconds, batched=not MODES[mode], round=number)
                    runs.append(run)
                    typer.echo(f"round {number}, {mode}: {run.row()}")
            if real is not None:
                real.measure(seconds, number)
    result = report(runs, alone, service_s, shape) | ({} if real is None else {"engines": real.report()})
    about = {
        "commit": source_commit(), "machine": machine_name(), "load_1m": load_1m, "target": target,
        "draft": draft or model.name, "seconds": seconds, "rounds": rounds, "texts": len(texts),
        "new_tokens": NEW_TOKENS, "temperature": TEMPERATURE,
        "command": shlex.join(["python", "-m", "benchmarks.starsd.table1", *sys.argv[1:]]),
    }  # fmt: skip
    out.write_text(json.dumps(about | result, indent=1, allow_nan=False) + "\n")


def _services(held: ExitStack, model: Path, depth: int) -> dict[str, Service]:
    """Start one for each way of drafting."""
    return {
        mode: held.enter_context(
            service(
                model, one_by_one=one_by_one, depth=depth, max_batch=MAX_ROWS, max_feed=MAX_FEED,
                max_context=MAX_CONTEXT,
            )
        )
        for mode, one_by_one in MODES.items()
    }  # fmt: skip


def report(
    runs: Sequence[Run], alone: Sequence[Alone], service_s: Sequence[dict[int, float]], shape: Shape
) -> dict[str, Any]:
    """Return what follows from the runs."""
    sums = {name: sum(vars(run.tally)[name] for run in runs) for name in vars(Tally())}
    verify_s, chance = sums["slept_s"] / sums["steps"], chance_of_chains(sums["accepted"] / sums["rounds"], shape.depth)
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
        "rows": [row.as_dict() for row in rows], "spread": spread(runs),
        "paper": paper_rows(), "paper_colocated_tps": COLOCATED_TPS,
        "runs": [asdict(run) for run in runs],
    }  # fmt: skip


if __name__ == "__main__":
    program.run(star_table1)
