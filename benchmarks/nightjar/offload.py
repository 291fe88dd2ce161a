"""Elastic memory on the real engine: the draft's memory staying, and becoming KV pages, when pages are few.

    python -m benchmarks.nightjar.offload --azure AzureLLMInferenceTrace_conv.csv.gz --out nightjar-offload --minutes 40
    python -m benchmarks.nightjar.offload --quick --out nightjar-offload

The draft is grown to about a tenth of the target, so that what its weights and its KV give back is, as in the paper, a
good part of the pool. Two engines that differ in `--elastic` alone serve the same requests in turns, at loads of more
than the capacity that plain decoding has with so few pages. Printed and written to nightjar-offload.json: requests that
run at once, throughput and latency, with the draft staying and elastic, and the swaps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from adaserve_jax.bench.local_client import LocalBenchEngine
from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes, open_bench_engine, table_console
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES
from adaserve_jax.results.jsonl import make_folder
from benchmarks import program
from benchmarks.grown import grown_draft, grown_target
from benchmarks.nightjar.judged import over, spread
from benchmarks.nightjar.points import OURS, PLAIN, POISSON
from benchmarks.nightjar.requests import MAX_CONTEXT, QUICK, Requests, Sizes
from benchmarks.nightjar.rounds import Rounds
from benchmarks.nightjar.views import LATENCY, THROUGHPUT

RESULT = "nightjar-offload.json"
RUNNING = "running_mean"
SHOWN = (RUNNING, THROUGHPUT, LATENCY)
SIDES = ("off", "on")


def measure(
    engines: dict[str, LocalBenchEngine], requests: Requests, rounds: Rounds, *, policies: Sequence[str],
    shares: Sequence[float], most_rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """Rounds until all are done or the time is over; the result that is written."""
    still = engines[SIDES[0]]
    capacity = rounds.capacity_rps(PLAIN, requests.saturating, still)
    runs = most_rounds * len(shares) * len(policies) * len(SIDES)
    longest_s = rounds.sizes.span_s + rounds.sizes.drain_s
    notes().print(
        f"capacity {capacity:g} requests/s; {runs} runs of at most {longest_s:.0f} s: {runs * longest_s / 60:.0f} min "
        f"at most, and no more than {rounds.minutes:g}",
        highlight=False,
    )
    for number in range(most_rounds):
        for share in shares:
            for policy in policies:
                for side in SIDES[:: -1 if number % 2 else 1]:
                    rounds.measure(
                        number, _load(share), f"{policy} {side}", policy,
                        lambda share=share, number=number: requests.at_share(POISSON, share, capacity, number),
                        engines[side],
                    )  # fmt: skip
    limits = engines[SIDES[1]].client.executor.limits
    return {
        "kind": "offload",
        **rounds.conditions(still),
        "num_pages": limits.num_pages,
        "extension_pages": limits.extension_pages,
        "page_size": limits.page_size,
        "capacity_rps": capacity,
        "points": [point for share in shares for point in _points(rounds, share, policies, most_rounds)],
    }


def _load(share: float) -> str:
    return f"{share:g} of the capacity"


def _points(rounds: Rounds, share: float, policies: Sequence[str], most_rounds: int) -> list[dict[str, Any]]:
    """One entry per policy, of the rounds in which both sides were measured."""
    found = []
    for policy in policies:
        names = [f"{policy} {side}" for side in SIDES]
        whole = rounds.whole_rounds(_load(share), names, most_rounds)
        if whole:
            off, on = (rounds.figures(_load(share), name, whole) for name in names)
            found.append(
                {
                    "share": share,
                    "rate_rps": rounds.rate_rps(_load(share), names[0], whole),
                    "policy": policy,
                    "rounds": {"off": off, "on": on},
                    "swaps": [rounds.swaps[r, _load(share), names[1]] for r in whole],
                    "off": {figure: spread(off, figure) for figure in SHOWN},
                    "on": {figure: spread(on, figure) for figure in SHOWN},
                    "times": {figure: over(on, off, figure) for figure in SHOWN},
                }
            )
    return found


def show(points: Sequence[dict[str, Any]]) -> None:
    """The table, to stdout."""
    table = Table(title="the draft staying / elastic, medians over rounds", title_justify="left")
    for header in ("load", "policy", "running", "tokens/s", "times", "latency, s", "times"):
        table.add_column(header, justify="right")
    for point in points:
        pair = {each: " / ".join(f"{point[side][each]['median']:.1f}" for side in SIDES) for each in SHOWN}
        times = {each: f"{point['times'][each]['median']:.3f}" for each in SHOWN}
        table.add_row(
            f"{point['share']:g}", point["policy"], pair[RUNNING], pair[THROUGHPUT], times[THROUGHPUT], pair[LATENCY],
            times[LATENCY],
        )  # fmt: skip
    table_console(table).print(table)


def nightjar_offload(
    out: Annotated[Path, typer.Option(help="folder for runs and nightjar-offload.json")],
    azure: Annotated[Path | None, typer.Option(help="AzureLLMInferenceTrace_conv.csv, .gz or not")] = None,
    params: Annotated[str, typer.Option(help=f"size to grow the target to: {', '.join(SHAPES)}")] = "110M",
    num_pages: Annotated[int, typer.Option(help="KV pages of the pool, so few that they run out")] = 64,
    policies: Annotated[str, typer.Option(help="policies that give the draft's memory away")] = OURS,
    shares: Annotated[str, typer.Option(help="loads, in shares of the capacity with so few pages")] = "1.5",
    rounds: Annotated[int, typer.Option(help="rounds, if there is time")] = 4,
    span: Annotated[float, typer.Option(help="seconds in which the requests of a run arrive")] = Sizes.span_s,
    minutes: Annotated[float, typer.Option(help="most minutes that all runs may take")] = 40.0,
    quick: Annotated[bool, typer.Option(help="the demo pair, a made trace and seconds, to see it work")] = False,
) -> None:
    """Measure both engines under the loads and print the comparison."""
    loads = comma_list("shares", shares, float)
    if not loads or min(*loads, span, minutes, num_pages, rounds) <= 0:
        raise ConfigError("--shares, --span, --minutes, --num-pages and --rounds must be above 0")
    if not quick and azure is None:
        raise ConfigError("--azure: give Azure's conversation trace, or --quick for a made one")
    make_folder(out)
    sizes = QUICK if quick else Sizes(span_s=span)
    config = EngineConfig(max_requests=4, max_context=256, num_pages=8) if quick else _config(params, num_pages)
    engines: dict[str, LocalBenchEngine] = {}
    try:
        for side in SIDES:
            engines[side] = open_bench_engine(replace(config, elastic=side))
        requests = Requests(azure, resolve_folder(config.target, "target"), sizes)
        kept = Rounds(out, minutes, sizes, {"engine": repr(config), "trace": requests.segment.sha256})
        result = measure(
            engines, requests, kept, policies=comma_list("policies", policies, str), shares=loads, most_rounds=rounds
        )
    finally:
        for engine in engines.values():
            engine.client.close()
    (out / RESULT).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    show(result["points"])


def _config(params: str, num_pages: int) -> EngineConfig:
    return EngineConfig(
        target=str(grown_target(params)), draft=str(grown_draft()), max_context=MAX_CONTEXT, num_pages=num_pages
    )


if __name__ == "__main__":
    program.run(nightjar_offload)
