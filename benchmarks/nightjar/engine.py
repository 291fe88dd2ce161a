"""Nightjar's comparison in miniature on the real engine: a low, a high and a dynamic load, policies in rounds.

    python -m benchmarks.nightjar.engine --azure AzureLLMInferenceTrace_conv.csv.gz --out nightjar-engine --minutes 120
    python -m benchmarks.nightjar.engine --quick --out nightjar-engine

The target is the demo's, grown. First the capacity is measured: requests per second that plain decoding completes of
those that come all at once. Loads are shares of it. In a round every policy serves the same requests under every load,
one after the other on one engine, the first one rotating; each round has prompts of its own, and of a Poisson load also
times and lengths. A policy starts anew in each run and first serves some requests that are not counted.

Runs are kept under --out, and those that it has of the same commit and settings are not measured again. No run is begun
that would end after --minutes if it took as long as the longest so far. Printed and written to nightjar-engine.json:
throughput, throughput while busy and mean end-to-end latency, medians over rounds with intervals, and ratios within
rounds to `ar` and to the best fixed length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.bench.engine import BenchEngine
from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes, open_bench_engine
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES
from adaserve_jax.results.jsonl import make_folder
from benchmarks import program
from benchmarks.grown import grown_target
from benchmarks.nightjar.judged import points_of, show
from benchmarks.nightjar.points import PLAIN
from benchmarks.nightjar.requests import LOADS, MAX_CONTEXT, QUICK, Requests, Sizes
from benchmarks.nightjar.rounds import Rounds

POLICIES = "ar,spec:1,spec:2,spec:3,spec:4,dsd,tetris:3,nightjar,adaserve"
RESULT = "nightjar-engine.json"


def measure(
    engine: BenchEngine, requests: Requests, rounds: Rounds, *, policies: Sequence[str], loads: Sequence[str],
    most_rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """Rounds until all are done or the time is over; the result that is written."""
    capacity = rounds.capacity_rps(PLAIN, requests.saturating, engine)
    longest_s = rounds.sizes.span_s + rounds.sizes.drain_s
    runs = most_rounds * len(loads) * len(policies)
    notes().print(
        f"capacity {capacity:g} requests/s; {runs} runs of {rounds.sizes.span_s:.0f} s and what is left then, of at "
        f"most {longest_s:.0f} s: {runs * longest_s / 60:.0f} min at most, and no more than {rounds.minutes:g}",
        highlight=False,
    )
    for number in range(most_rounds):
        for load in loads:
            shift = number % len(policies)
            for policy in (*policies[shift:], *policies[:shift]):
                rounds.measure(
                    number, load, policy, policy,
                    lambda load=load, number=number: requests.workload(load, capacity, number), engine,
                )  # fmt: skip
    return {
        "kind": "engine",
        **rounds.conditions(engine),
        "trace": requests.segment.name,
        "capacity_rps": capacity,
        "points": points_of(rounds, loads, policies, most_rounds),
    }


def nightjar_engine(
    out: Annotated[Path, typer.Option(help="folder for runs and nightjar-engine.json")],
    azure: Annotated[Path | None, typer.Option(help="AzureLLMInferenceTrace_conv.csv, .gz or not")] = None,
    params: Annotated[str, typer.Option(help=f"size to grow the target to: {', '.join(SHAPES)}")] = "110M",
    policies: Annotated[str, typer.Option(help="policies, separated by commas; `ar` must be among them")] = POLICIES,
    loads: Annotated[str, typer.Option(help=f"of {', '.join(LOADS)}")] = ",".join(LOADS),
    rounds: Annotated[int, typer.Option(help="rounds, if there is time")] = 4,
    span: Annotated[float, typer.Option(help="seconds in which the requests of a run arrive")] = Sizes.span_s,
    minutes: Annotated[float, typer.Option(help="most minutes that all runs may take")] = 120.0,
    quick: Annotated[bool, typer.Option(help="the demo target, a made trace and seconds, to see it work")] = False,
) -> None:
    """Measure policies under the loads and print the comparison."""
    names, wanted = comma_list("policies", policies, str), comma_list("loads", loads, str)
    if PLAIN not in names:
        raise ConfigError(f"--policies must have {PLAIN}, which the others are compared with, got {policies}")
    if unknown := sorted(set(wanted) - set(LOADS)):
        raise ConfigError(f"--loads must be of {', '.join(LOADS)}, got {unknown[0]!r}")
    if not wanted or rounds < 1 or min(span, minutes) <= 0:
        raise ConfigError("--loads must name one, --rounds must be at least 1, --span and --minutes above 0")
    if not quick and azure is None:
        raise ConfigError("--azure: give Azure's conversation trace, or --quick for a made one")
    make_folder(out)
    sizes = QUICK if quick else Sizes(span_s=span)
    target = "demo" if quick else str(grown_target(params))
    config = EngineConfig(target=target, max_context=MAX_CONTEXT, max_requests=4 if quick else 0)
    engine = open_bench_engine(config)
    try:
        requests = Requests(azure, resolve_folder(config.target, "target"), sizes)
        kept = Rounds(out, minutes, sizes, {"engine": repr(config), "trace": requests.segment.sha256})
        result = measure(engine, requests, kept, policies=names, loads=wanted, most_rounds=rounds)
    finally:
        engine.client.close()
    result["target"] = "demo" if quick else f"demo grown to {params}"
    (out / RESULT).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    show(result["points"])


if __name__ == "__main__":
    program.run(nightjar_engine)
