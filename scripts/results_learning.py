"""Tables of docs/results.md about drafts that learn: acceptance by requests, time per token, what learning costs.

Reads results of benchmarks/osd/online_learning.py, latency.py and cost.py. Imports no jax.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.markdown import line, short_commit
from benchmarks.osd.views import (
    EQUAL_STEPS,
    OFFLINE,
    ONE,
    SHIPPED,
    START,
    TAG,
    TOPIC,
    last,
    once_served,
    phases,
    runs_by_way,
)

SERVED = (500, 1000, 2000)
NARROW = (
    f"| traffic | way to learn | at the start | {' | '.join(f'after {count} requests' for count in SERVED)} | gain "
    "| distilled offline, same prompts | share of that | the embedded draft | updates | training, s | serving, s |\n"
    f"|{'---|' * (10 + len(SERVED))}"
)
HEAD_SERVED = (64, 192, 384)
HEAD = (
    f"| traffic | at the start | {' | '.join(f'after {count} requests' for count in HEAD_SERVED)} "
    "| distilled offline, same prompts, two epochs | share of that | in about as many steps as online | share of that "
    "| the embedded head | updates | training, s | serving, s |\n"
    f"|{'---|' * (10 + len(HEAD_SERVED))}"
)
SHIFT = (
    "| traffic | requests | when it begins | when it ends | gain | after all traffic | at the start "
    "| the embedded draft |\n|---|---|---|---|---|---|---|---|"
)
MIXED = (
    "| traffic | at the start | one draft | one for each kind, by tag | above one draft | by topic | above one draft "
    "|\n|---|---|---|---|---|---|---|"
)
LATENCY = (
    "| draft | policy | accepted per verification | chance that a token is kept | draft step over target step "
    "| ms per token | times `ar` | by the closed form | times the first draft | by the closed form |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
COST = (
    "| load | pairs of turns | attainment without learning | with | cost, points | tokens/s without | with "
    "| training while requests ran, s | while idle, s | versions |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def online_tables(folder: Path) -> list[str]:
    """Return the tables of what online_learning.py has written to a folder so far."""
    narrow = {path.stem.removeprefix("narrow-"): _read(path) for path in sorted(folder.glob("narrow-*.json"))}
    parts = [_narrow(narrow)] if narrow else []
    for name, table_of in (("shift", _shift), ("mixed", _mixed)):
        path = folder / f"{name}.json"
        if path.exists():
            parts.append(table_of(_read(path)))
    return parts


def online_head_table(folder: Path) -> list[str]:
    """Return the table of what `online_learning.py head` has written to a folder; empty before it has."""
    results = {path.stem.removeprefix("head-"): _read(path) for path in sorted(folder.glob("head-*.json"))}
    if not results:
        return []
    rows = []
    for domain, result in results.items():
        (run,) = result["runs"]
        start, *offline, shipped = (
            result["acceptance"][name][domain] for name in (START, OFFLINE, EQUAL_STEPS, SHIPPED)
        )
        updates = sum(run["learning"]["updates"].values())
        rows.append(line(
            domain, _share(start), *(_share(once_served(run, domain, count)) for count in HEAD_SERVED),
            *(cell for each in offline for cell in (_share(each), f"{last(run, domain) / each:.0%}")),
            _share(shipped), str(updates), f"{run['train_s']:.0f}", f"{run['serve_s']:.0f}",
        ))  # fmt: skip
    about = (
        f"The embedded head with random weights in its layer, {_settings(next(iter(results.values())))}. Measured with "
        "`python -m benchmarks.osd.online_learning head`; acceptance is the mean over the five levels that a head is "
        "trained for:"
    )
    return [about, "\n".join([HEAD, *rows]), *dict.fromkeys(_where(result) for result in results.values())]


def latency_table(result: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks/osd/latency.py."""
    first = {each["policy"]: each for each in reversed(result["rows"])}
    rows = [
        line(
            each["draft"], f"`{each['policy']}`", f"{each['kept']:.2f}", f"{each['acceptance']:.3f}",
            f"{each['draft_share']:.3f}", f"{each['tpot_ms']:.1f}",
            f"{each['times']:.2f} ({each['times_low']:.2f} to {each['times_high']:.2f})",
            f"{each['formula_times']:.2f}",
            *(f"{each[name] / first[each['policy']][name]:.2f}" for name in ("times", "formula_times")),
        )
        for each in result["rows"]
    ]  # fmt: skip
    about = (
        f"Target of {result['target']}, one request at a time, {result['prompts']} prompts of {result['domain']}; "
        f"`ar`: {result['plain_tpot_ms']:.1f} ms per token. Medians over prompts, 95 % bootstrap intervals in "
        f"brackets; programs compiled after the start: {result['compiles_after_ready']}."
    )
    return "\n\n".join([about, "\n".join([LATENCY, *rows]), _where(result)])


def cost_table(result: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks/osd/cost.py. A load of which no pair of turns has ended is left out."""
    rows = []
    for each in result["loads"]:
        if each["pairs"]:
            attainment, rates = each["attainment"], each["throughput_tps"]
            rows.append(line(
                f"{each['load']:g}", str(each["pairs"]), f"{attainment['plain']:.1%}", f"{attainment['learning']:.1%}",
                f"{100 * each['attainment_cost']:.1f}", f"{rates['plain']:.1f}", f"{rates['learning']:.1f}",
                f"{each['delayed_s']:.2f}", f"{each['idle_s']:.1f}", str(each["versions"]),
            ))  # fmt: skip
    about = (
        f"Policy `{result['policy']}`; loads are shares of {result['capacity_rps']:g} requests/s; pieces of training "
        f"of at most {result['learn']['learn_delay_ms']:g} ms, the longest that requests waited for "
        f"{1e3 * result['delay_max_s']:.0f} ms; programs compiled after the start: {result['compiles_after_ready']}."
    )
    return "\n\n".join([about, "\n".join([COST, *rows]), _where(result)])


def _narrow(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for domain, result in results.items():
        start, offline, shipped = (result["acceptance"][name][domain] for name in (START, OFFLINE, SHIPPED))
        for way, run in runs_by_way(result).items():
            end = last(run, domain)
            served = (once_served(run, domain, count) for count in SERVED)
            rows.append(line(
                domain, way, _share(start), *map(_share, served), f"{end - start:+.3f}", _share(offline),
                f"{end / offline:.0%}", _share(shipped), str(sum(run["learning"]["updates"].values())),
                f"{run['train_s']:.0f}", f"{run['serve_s']:.0f}",
            ))  # fmt: skip
    commits = dict.fromkeys(_where(result) for result in results.values())
    parts = [f"One kind of traffic, {_settings(next(iter(results.values())))}:", "\n".join([NARROW, *rows]), *commits]
    return "\n\n".join(parts)


def _shift(result: dict[str, Any]) -> str:
    rows = [
        line(
            each.domain, f"{each.first + 1} to {each.stop}", _share(each.before), _share(each.after),
            f"{each.gain:+.3f}", _share(each.last),
            *(_share(result["acceptance"][name][each.domain]) for name in (START, SHIPPED)),
        )
        for each in phases(result)
    ]  # fmt: skip
    about = f"One kind of traffic after another, {_settings(result)}; acceptance is that on the kind being served:"
    return "\n\n".join([about, "\n".join([SHIFT, *rows]), _where(result)])


def _mixed(result: dict[str, Any]) -> str:
    runs = runs_by_way(result)
    rows = []
    for domain in dict.fromkeys(sorted(result["order"])):
        one = last(runs[ONE], domain)
        cells = [_share(result["acceptance"][START][domain]), _share(one)]
        for way in (TAG, TOPIC):
            accepted = last(runs[way], domain) if way in runs else None
            cells += [_share(accepted), "-" if accepted is None else f"{accepted - one:+.3f}"]
        rows.append(line(domain, *cells))
    about = (
        f"All kinds at once, {len(result['order'])} requests, {_settings(result)}; acceptance is that after the last "
        "request:"
    )
    return "\n\n".join([about, "\n".join([MIXED, *rows]), _where(result)])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _settings(result: dict[str, Any]) -> str:
    return f"policy `{result['policy']}`, {result['max_tokens']} tokens at temperature {result['temperature']:g}"


def _where(result: dict[str, Any]) -> str:
    return f"{result['machine']}. Commit {short_commit(result['commit'])}."
