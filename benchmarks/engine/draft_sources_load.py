"""TPOT attainment of mixed tasks under load by what drafts: text already seen, the draft model, or both.

    python -m benchmarks.engine.draft_sources_load --out draft-sources-load.json [--data FOLDER]

The tasks of `draft_sources`, replayed as there, arrive as a Poisson process at each rate; every policy serves the same
requests at the same times with the same targets, which are drawn from TARGETS. Which policy goes first changes with the
rate.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.bench.engine import AtPoint, Due, drive
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.types import SLO
from benchmarks import program
from benchmarks.engine.draft_sources import Reference, Replay, encoded, tasks
from benchmarks.grown import grown_target

POLICIES = "adaserve@model,adaserve@suffix,adaserve@suffix+model"
TARGETS = (1.5, 3.0, 8.0)
"""TPOT targets, in one-token steps of one request alone, that requests have with equal chances."""
MOST_PROMPT, MOST_NEW, OPEN_NEW, DRAIN_S = 500, 200, 150, 120.0


@dataclass(frozen=True)
class LoadRow:
    """One policy at one rate, over the requests after the warm-up.

    attainment: share of requests that finished and met their target; by_target: of those with each target. goodput_tps:
    output tokens per second of requests that met theirs. tokens_per_step: of a request in a step that verified it, the
    first token, which no step verifies, among them.
    """

    policy: str
    rate_rps: float
    requests: int
    attainment: float
    by_target: dict[str, float]
    goodput_tps: float
    tokens_per_step: float


def make_requests(
    engine: LocalEngine, replay: Replay, data: Path | None, count: int, seed: int
) -> list[GenerateRequest]:
    """Return `count` requests of all tasks in turn, and have their references replayed."""
    rng, encode = np.random.default_rng(seed), LLM.over(engine).tokenizer.encode
    by_task = list(tasks(data, count, seed).values())
    in_turn = (task[turn] for turn in range(count) for task in by_task if turn < len(task))
    found: list[GenerateRequest] = []
    for item in in_turn:
        prompt, text = encoded(item, encode, MOST_PROMPT, MOST_NEW)
        if item.reference and len(text) < MOST_NEW // 4:
            continue
        index, relative = len(found), float(rng.choice(TARGETS))
        if text:
            replay.references[index] = Reference(len(prompt), np.array(text, np.int32))
        sampling = SamplingParams(max_tokens=len(text) or OPEN_NEW, temperature=0.0, seed=index, ignore_eos=True)
        slo = SLO(relative=relative)
        found.append(GenerateRequest(f"r{index}", prompt, sampling, slo=slo, slo_class=f"{relative:g}"))
        if len(found) == count:
            break
    return found


def measure(
    engine: LocalEngine, requests: list[GenerateRequest], policy: str, rate_rps: float, seed: int
) -> LoadRow:  # fmt: skip
    """Serve the requests by a policy from a fresh start; the first quarter warms up and is not counted."""
    engine.set_policy(policy)
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_rps, len(requests)))
    due = [Due(float(at), request) for at, request in zip(times, requests, strict=True)]
    loop = drive(engine, due, drain_s=DRAIN_S)
    at = AtPoint("", "", policy, rate_rps, loop.start_s, engine.info.baseline_s)
    warm_up = len(requests) // 4
    records = [probe.record(at) for probe in loop.probes][warm_up:]
    met = np.array([record.slo_met is True for record in records])
    targets = np.array([float(record.slo_class) for record in records])
    tokens = np.array([record.output_tokens for record in records])
    return LoadRow(
        policy, rate_rps, len(records), float(met.mean()),
        {f"{target:g}": float(met[targets == target].mean()) for target in np.unique(targets)},
        float(tokens[met].sum() / (loop.wall_s - times[warm_up])),
        float(tokens.sum() / max(sum(record.verify_steps for record in records), 1)),
    )  # fmt: skip


def show(rows: list[LoadRow], console: Console) -> None:
    """Print attainment and goodput by rate and policy."""
    table = Table("requests/s", "policy", "attainment", *(f"target {t:g}" for t in TARGETS), "goodput", "tokens a step")
    for row in rows:
        by_target = (f"{100 * row.by_target.get(f'{target:g}', 0.0):.0f}" for target in TARGETS)
        table.add_row(
            f"{row.rate_rps:g}", row.policy, f"{100 * row.attainment:.1f}", *by_target, f"{row.goodput_tps:.1f}",
            f"{row.tokens_per_step:.2f}",
        )  # fmt: skip
    console.print(table)


@takes("config", EngineConfig, without=("policy", "target"))
def draft_sources_load(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    data: Annotated[Path | None, typer.Option(help="folder with spec-bench/, human-eval/ and gsm8k/")] = None,
    policies: Annotated[str, typer.Option(help="policies, separated by commas")] = POLICIES,
    params: Annotated[str, typer.Option(help="size to grow the demo target to; none: the demo target itself")] = "110M",
    rates: Annotated[str, typer.Option(help="requests per second, separated by commas")] = "0.25,0.5,0.75",
    count: Annotated[int, typer.Option(help="requests of each point, a quarter of them to warm up")] = 64,
) -> None:
    """Measure attainment under load by draft source."""
    names, console, replay = comma_list("policies", policies, str), Console(width=160), Replay()
    if params != "none":
        config = replace(config, target=str(grown_target(params)))
    with progress_bar() as progress:
        engine = LocalEngine(config, progress, replay.observe)
        engine.start()
    rows: list[LoadRow] = []
    try:
        requests = make_requests(engine, replay, data, count, config.seed)
        for number, rate in enumerate(comma_list("rates", rates, float)):
            first = number % len(names)
            for policy in names[first:] + names[:first]:
                rows.append(measure(engine, requests, policy, rate, config.seed))
                show(rows[-1:], console)
        info, compiles = engine.info, engine.stats().compiles_after_ready
    finally:
        engine.close()
    show(rows, console)
    result = {
        "command": f"python -m benchmarks.engine.draft_sources_load --out {out.name} --data FOLDER "
        f"--policies {policies} --params {params} --rates {rates} --count {count} --max-requests {info.max_requests}",
        "commit": source_commit(), "machine": machine_name(), "target": f"demo grown to {params}",
        "draft": config.draft, "baseline_s": info.baseline_s, "max_requests": info.max_requests,
        "compiles_after_ready": compiles, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    program.run(draft_sources_load)
