"""Tables of docs/results.md about Nightjar's evaluation: simulated, in miniature on the engine, and elastic memory.

Of results that benchmarks/nightjar/tables.py, engine.py and offload.py wrote. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.engine.throughput_rows import interval_of
from benchmarks.markdown import line, short_commit
from benchmarks.nightjar.views import BUSY, LATENCY, THROUGHPUT

SIMULATED = (
    "| setup | load | requests/s | of the capacity | policy | tokens/s | times `ar` | while busy | latency, s "
    "| times `ar` | best baseline, tokens/s | times it | best baseline, latency | times it |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
FIXED = (
    "| setup | share of the capacity asked for | best fixed length by tokens/s | `nightjar`, times it | by latency "
    "| `nightjar`, times it |\n|---|---|---|---|---|---|"
)
OFFLOAD = (
    "| setup | share of the capacity | policy | running, draft stays | elastic | tokens/s, draft stays | elastic "
    "| latency, s, draft stays | elastic | expansions a run |\n|---|---|---|---|---|---|---|---|---|---|"
)
ENGINE = (
    "| load | requests/s | of the capacity | policy | tokens/s | times `ar` | while busy, times `ar` | latency, s "
    "| times `ar` | times the best fixed length, tokens/s | latency |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
PRESSED = (
    "| requests/s | of the capacity | policy | running, draft stays | elastic | tokens/s, draft stays | elastic "
    "| times | latency, s, draft stays | elastic | times | expansions of each round |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
RUNNING = "running_mean"


def nightjar_tables(result: dict[str, Any]) -> str:
    """Return the tables of one result, whichever of the three it is."""
    kinds: dict[str, Callable[[dict[str, Any]], list[str]]] = {
        "simulated": _simulated, "engine": _engine, "offload": _pressed
    }  # fmt: skip
    commits = ", ".join(short_commit(commit) for commit in result["commit"].split(", "))
    return "\n\n".join([*kinds[result["kind"]](result), f"Commit {commits}."])


def _simulated(result: dict[str, Any]) -> list[str]:
    capacities = {setup: about["capacity_rps"] for setup, about in result["setups"].items()}
    loads = [
        line(
            each["setup"], each["load"], *_rate(each, capacities[each["setup"]]), f"`{each['policy']}`",
            f"{each[THROUGHPUT]:.0f}", f"{each['throughput_times_plain']:.3f}",
            f"{each['busy_throughput_times_plain']:.3f}", f"{each[LATENCY]:.2f}", f"{each['e2e_times_plain']:.3f}",
            f"`{each['best_throughput']}`", f"{each['throughput_times_best']:.3f}", f"`{each['best_latency']}`",
            f"{each['e2e_times_best']:.3f}",
        )
        for each in result["loads"]
    ]  # fmt: skip
    fixed = [
        line(
            each["setup"], f"{each['share']:g}", f"`{each['best_throughput']}`", f"{each['throughput_times']:.3f}",
            f"`{each['best_latency']}`", f"{each['latency_times']:.3f}",
        )
        for each in result["against_fixed"]
    ]  # fmt: skip
    offload = [
        line(
            each["setup"], _rate(each, capacities[each["setup"]])[1], f"`{each['policy']}`",
            *(f"{each[f'{name}_{side}']:.1f}" for name in (RUNNING, THROUGHPUT, LATENCY) for side in ("off", "on")),
            f"{each['expand']:.1f}",
        )
        for each in result["offload"]
    ]  # fmt: skip
    segment = result["segment"]
    parts = [
        f"Simulated, with the lengths and the varying rate of {segment['trace']} ({segment['requests']} requests, "
        f"{segment['rate_rps']:.2f} a second):",
        "\n".join([SIMULATED, *loads]),
    ]
    if fixed:
        about = "`nightjar` against the best fixed length, including no speculation"
        parts += [f"{about}:", "\n".join([FIXED, *fixed])]
    if offload:
        parts += ["Elastic memory on a machine with few KV pages:", "\n".join([OFFLOAD, *offload])]
    return parts


def _engine(result: dict[str, Any]) -> list[str]:
    rows = [
        line(
            each["load"], *_rate(each, result["capacity_rps"]), f"`{each['policy']}`",
            f"{each[THROUGHPUT]['median']:.1f}", *(_ratio(each["times_plain"][name]) for name in (THROUGHPUT, BUSY)),
            f"{each[LATENCY]['median']:.2f}", _ratio(each["times_plain"][LATENCY]),
            *(f"{_ratio(each['times_best_fixed'][name])}, `{each['best_fixed'][name]}`"
              for name in (THROUGHPUT, LATENCY)),
        )
        for each in result["points"]
    ]  # fmt: skip
    counts = {each["load"]: len(each["rounds"]) for each in result["points"]}
    if len(set(counts.values())) == 1:
        rounds = _rounds(next(iter(counts.values())))
    else:
        rounds = "; ".join(f"{load} load, {_rounds(count)}" for load, count in counts.items())
    about = (
        f"The real engine, {_pair(result)}; {result['span_s']:g} s of arrivals a round; {rounds}; capacity "
        f"{result['capacity_rps']:g} requests/s:"
    )
    return [about, "\n".join([ENGINE, *rows]), _where(result)]


def _pressed(result: dict[str, Any]) -> list[str]:
    rows = []
    for each in result["points"]:
        cells = [*_rate(each, result["capacity_rps"]), f"`{each['policy']}`"]
        for name in (RUNNING, THROUGHPUT, LATENCY):
            cells += [f"{each[side][name]['median']:.1f}" for side in ("off", "on")]
            if name != RUNNING:
                cells.append(_ratio(each["times"][name]))
        rows.append(line(*cells, ", ".join(str(swaps.get("expand", 0)) for swaps in each["swaps"])))
    rounds = _rounds(min((len(each["swaps"]) for each in result["points"]), default=0))
    about = (
        f"The real engine with {result['num_pages']} KV pages of {result['page_size']} tokens, and "
        f"{result['extension_pages']} more after an expansion; {_pair(result)}; {rounds}:"
    )
    return [about, "\n".join([PRESSED, *rows]), _where(result)]


def _rate(point: dict[str, Any], capacity_rps: float) -> tuple[str, str]:
    """Return the rate at which requests came, and its share of the capacity."""
    return f"{point['rate_rps']:.2f}", f"{point['rate_rps'] / capacity_rps:.2f}"


def _rounds(count: int) -> str:
    return "one round, so no interval" if count == 1 else f"medians of {count} rounds, {interval_of(count)}"


def _pair(result: dict[str, Any]) -> str:
    sizes = [f"{n / 1e6:.1f}M" if n else "unknown" for n in (result["target_params"], result["draft_params"])]
    return f"target of {sizes[0]} parameters, draft of {sizes[1]}, at most {result['max_requests']} requests at once"


def _where(result: dict[str, Any]) -> str:
    return f"{result['machine']}; {result['device']}; jax {result['jax_version']}."


def _ratio(value: dict[str, float]) -> str:
    """Return a ratio with its interval, where there is one: a single round has none."""
    interval = f" ({value['low']:.2f} to {value['high']:.2f})" if value["low"] < value["high"] else ""
    return f"{value['median']:.2f}{interval}"
