"""Tables of docs/cluster-plan.md: clusters and routers, targets per draft. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import short_commit, table

PLANNED = ("full", "full_simulated", "most", "most_simulated", "most_batched", "most_batched_simulated")
QUANTITIES = (("throughput_tps", "tokens/s", 1.0, 1), ("per_target_tps", "of a target", 1.0, 1),
              ("wait_s", "wait, ms", 1e3, 1), ("idle_s", "idle, ms", 1e3, 1), ("rounds_per_s", "rounds/s", 1.0, 1),
              ("load", "load, %", 100.0, 1))  # fmt: skip
"""Of Table 1: column, what it is called, factor and digits."""
ROUTERS = ("round-robin", "least-loaded", "slo-aware:4", "slo-aware")


def cluster_tables(folder: Path) -> list[str]:
    """Return the tables of the points that benchmarks/cluster/plan.py wrote to `folder`; nothing where it wrote
    none."""
    path = folder / "points.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_part: dict[str, list[dict[str, Any]]] = {}
    for each in lines:
        by_part.setdefault(each["point"]["part"], []).append(each)
    compared = [*by_part.get("fixed", []), *by_part.get("adaserve", [])]
    found = []
    if compared:
        found += [
            "Requests that met both targets, by router:", _by_router(compared, _met),
            "Goodput, tokens per second and replica:", _by_router(compared, _goodput),
            "99th percentile of the time to the first token, seconds:", _by_router(compared, _ttft),
            "Milliseconds of CPU that one request took to simulate:", _by_router(compared, _cpu),
        ]  # fmt: skip
    if "sampled" in by_part:
        found += [
            "Samples of the SLO-aware router, requests that met both targets:",
            _sampled(lines, by_part["sampled"]),
        ]
    if "million" in by_part:
        found += ["A million requests:", _million(by_part["million"])]
    return [*found, _about(lines)]


def star_tables(path: Path) -> list[str]:
    """Return the tables of what benchmarks/starsd/plan.py wrote; nothing where it did not."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    plans = table(
        ("Z / S", "b", "d", "tokens a round", "N_full", "simulated", "N_max", "simulated", "batched", "simulated"),
        (
            (
                f"{each['return_over_draft']:g}", f"{each['acceptance']:g}", str(each["depth"]),
                f"{each['tokens']:.2f}", *(_or_more(each[name]) for name in PLANNED),
            )
            for each in result["plans"]
        ),
    )  # fmt: skip
    pairs: dict[tuple[bool, int], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        pairs.setdefault((row["batched"], row["n"]), {})[row["kind"]] = row
    kinds = ("closed", "simulated")
    shown = [
        (
            str(n), "batched" if batched else "one by one",
            *(f"{row[kind][of] * factor:z.{digits}f}" for of, _, factor, digits in QUANTITIES for kind in kinds),
        )
        for (batched, n), row in pairs.items()
    ]  # fmt: skip
    head = ("N", "drafts", *(f"{name}, {kind}" for _, name, *_ in QUANTITIES for kind in kinds))
    at = result["shown"]
    return [
        f"S = {result['service_s'] * 1e3:g} ms, batched S(n) = S (1 + {result['growth']:g} (n - 1)), at most "
        f"{result['max_rows']} in a batch; plain decoding takes Z a token; N_max is simulated with verification times "
        f"that spread by {result['spread']:.0%}; N_full is where the simulated load reaches {result['full']:.0%}.",
        plans,
        f"Table 1's quantities at t_v = {at['verify_s'] * 1e3:g} ms, t_c = {at['network_s'] * 1e3:g} ms, "
        f"b = {at['acceptance']:g}, d = {at['depth']}:",
        table(head, shown),
        f"{result['rounds']} rounds of each target, in the second table at least {result['drafts']} drafts of all. "
        f"{result['machine']}. Commit {short_commit(result['commit'])}.",
    ]


def _or_more(value: int | None) -> str:
    return "more than 127" if value is None else str(value)


def _by_router(lines: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    groups: dict[tuple[Any, ...], dict[str, str]] = {}
    for each in lines:
        of = each["point"]
        key = (of["policy"], of["mix"], of["load"], of["replicas"])
        groups.setdefault(key, {})[of["router"]] = cell(each)
    rows = [
        (f"`{policy}`", mix, f"{load:.0%}", f"{replicas:,}", *(cells.get(router, "") for router in ROUTERS))
        for (policy, mix, load, replicas), cells in sorted(groups.items())
    ]
    return table(("policy", "mix", "load", "replicas", *(f"`{router}`" for router in ROUTERS)), rows)


def _met(line: dict[str, Any]) -> str:
    return f"{line['summaries'][0]['attainment']:.1%}"


def _goodput(line: dict[str, Any]) -> str:
    return f"{line['summaries'][0]['goodput_tps'] / line['point']['replicas']:.0f}"


def _ttft(line: dict[str, Any]) -> str:
    return f"{line['summaries'][0]['ttft_p99_s']:.2f}"


def _cpu(line: dict[str, Any]) -> str:
    return f"{1e3 * line['cpu_s'] / line['point']['requests']:.2f}"


def _sampled(lines: Sequence[dict[str, Any]], sampled: Sequence[dict[str, Any]]) -> str:
    """Return the results with the sample of 4 and with all, which are among the other points."""
    names = ("replicas", "policy", "load", "requests", "seed")
    settings = {tuple(each["point"][name] for name in names) for each in sampled}
    groups: dict[str, dict[str, str]] = {}
    for each in lines:
        of = each["point"]
        if tuple(of[name] for name in names) in settings and of["router"].startswith("slo-aware"):
            groups.setdefault(of["mix"], {})[of["router"].partition(":")[2] or "all"] = _met(each)
    counts = sorted(
        {count for cells in groups.values() for count in cells}, key=lambda count: (count == "all", len(count), count)
    )
    rows = [(mix, *(cells.get(count, "") for count in counts)) for mix, cells in sorted(groups.items())]
    of = sampled[0]["point"]
    head = (f"mix, of {of['replicas']} replicas at {of['load']:.0%}", *(f"d = {count}" for count in counts))
    return table(head, rows)


def _million(lines: Sequence[dict[str, Any]]) -> str:
    head = (
        "requests", "replicas", "policy", "router", "load", "met", "CPU, minutes", "requests a minute",
        "most memory, MB", "steps",
    )  # fmt: skip
    rows = [
        (
            f"{line['point']['requests']:,}", f"{line['point']['replicas']:,}", f"`{line['point']['policy']}`",
            f"`{line['point']['router']}`", f"{line['point']['load']:.0%}", _met(line), f"{line['cpu_s'] / 60:.1f}",
            f"{60 * line['point']['requests'] / line['cpu_s']:,.0f}", f"{line['peak_bytes'] / 1e6:,.0f}",
            f"{line['steps']:,}",
        )
        for line in lines
    ]  # fmt: skip
    return table(head, rows)


def _about(lines: Sequence[dict[str, Any]]) -> str:
    capacities = {(each["point"]["policy"], each["point"]["mix"]): each["capacity_rps"] for each in lines}
    said = ", ".join(f"`{policy}` on {mix} {rate:.2f}" for (policy, mix), rate in sorted(capacities.items()))
    commits = ", ".join(sorted({short_commit(each["commit"]) for each in lines}))
    machines = ", ".join(sorted({each["machine"] for each in lines}))
    simulated = ", ".join(sorted({each["simulated"] for each in lines}))
    return (
        f"Simulated: {simulated}. Capacity of a replica, requests per second: {said}. One seed. Simulated on "
        f"{machines}. Commit {commits}."
    )
