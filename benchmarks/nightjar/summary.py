"""The summary of benchmarks/nightjar/tables.py that is committed: how `nightjar` and `adaserve` stand, in figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.nightjar.points import CLASSES, MAIN, POISSON, V1
from benchmarks.nightjar.views import BUSY, LATENCY, OURS, PLAIN, THROUGHPUT, Line, Tables, View


def summary(tables: Tables) -> dict[str, Any]:
    """How `nightjar` and `adaserve` stand: by setup and load, against the fixed lengths, and with elastic memory."""
    loads = [
        _standing(setup, name, policy, view)
        for setup in tables.setups for name, at in CLASSES.items() for policy in (OURS, MAIN)
        if policy in (view := tables.view(setup, *at)) and PLAIN in view
    ]  # fmt: skip
    fixed = [
        {"setup": setup, **asdict(each)} for setup in tables.setups for each in tables.against_fixed(setup, POISSON)
    ]
    return {"loads": loads, "against_fixed": fixed, "offload": _offload(tables)}


def _standing(setup: str, load: str, policy: str, view: View) -> dict[str, Any]:
    others = [each for each in view.by_policy if each not in (OURS, MAIN, V1)]
    best = {figure: view.best(others, figure) for figure in (THROUGHPUT, LATENCY)}
    return {
        "setup": setup,
        "load": load,
        "policy": policy,
        "rate_rps": view.rate_rps,
        "throughput_tps": view.mean(policy, THROUGHPUT),
        "e2e_mean_s": view.mean(policy, LATENCY),
        "throughput_times_plain": view.times(policy, THROUGHPUT),
        "busy_throughput_times_plain": view.times(policy, BUSY),
        "e2e_times_plain": view.times(policy, LATENCY),
        "best_throughput": best[THROUGHPUT],
        "throughput_times_best": view.times(policy, THROUGHPUT, best[THROUGHPUT]),
        "best_latency": best[LATENCY],
        "e2e_times_best": view.times(policy, LATENCY, best[LATENCY]),
    }


def _offload(tables: Tables) -> list[dict[str, Any]]:
    found = []
    for setup in tables.setups:
        for share, policy, off, on in offload_pairs(tables, setup):
            both = View([*off, *on])
            swaps = [each.swaps or {} for each in on]
            found.append(
                {"setup": setup, "share": share, "policy": policy, "rate_rps": both.rate_rps}
                | {f"{name}_off": View(off).mean(policy, name) for name in (THROUGHPUT, LATENCY, "running_mean")}
                | {f"{name}_on": View(on).mean(policy, name) for name in (THROUGHPUT, LATENCY, "running_mean")}
                | {name: sum(each.get(name, 0) for each in swaps) / len(swaps) for name in ("expand", "contract")}
            )
    return found


def offload_pairs(tables: Tables, setup: str) -> list[tuple[float, str, list[Line], list[Line]]]:
    """(share, policy, lines with the draft staying, lines with elastic memory by the default rule)."""
    pools = tables.pools(setup)
    off = [each for each in pools if each.pool and each.pool["elastic"] == "off"]
    default = {(each.pool["tau_low"], each.pool["persist_steps"]) for each in off if each.pool}
    pairs = []
    for share, policy in dict.fromkeys((each.share, each.policy) for each in off):
        mine = [x for x in pools if (x.share, x.policy) == (share, policy) and x.pool]
        on = [
            x for x in mine
            if x.pool and x.pool["elastic"] == "on" and (x.pool["tau_low"], x.pool["persist_steps"]) in default
        ]  # fmt: skip
        stays = [x for x in mine if x.pool and x.pool["elastic"] == "off"]
        if on:
            pairs.append((share, policy, stays, on))
    return sorted(pairs, key=lambda pair: pair[:2])
