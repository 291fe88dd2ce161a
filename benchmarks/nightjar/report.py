"""tables.md of benchmarks/nightjar/tables.py: every table, from nightjar-lines.json alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaserve_jax.cli.terminal import notes
from benchmarks.markdown import short_commit, table
from benchmarks.nightjar.paper import LATENCY_MS, NAMES, THROUGHPUT_TPS, times_without
from benchmarks.nightjar.points import CLASSES, CONTEXTUAL, MAIN, METHODS, POISSON, THRESHOLD_SHARE
from benchmarks.nightjar.summary import offload_pairs, summary
from benchmarks.nightjar.views import BUSY, LATENCY, OURS, PLAIN, THROUGHPUT, Line, Tables, View, pages_of, ratio

SUMMARY = "nightjar-sim.json"
KEPT = ("kind", "commit", "machine", "segment", "setups")


def write_report(result: dict[str, Any], out: Path) -> None:
    """tables.md, nightjar-sim.json, which is the summary, and, where matplotlib is installed, the figures."""
    tables = Tables([Line(**values) for values in result["lines"]])
    (out / "tables.md").write_text(readme(result, tables))
    kept = {name: result[name] for name in KEPT} | summary(tables)
    (out / SUMMARY).write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n")
    try:
        from benchmarks.nightjar.figures import draw
    except ModuleNotFoundError:
        notes().print("no figures: install matplotlib and run the same command with --report-only")
    else:
        draw(tables, out)


def readme(result: dict[str, Any], tables: Tables) -> str:
    segment = result["segment"]
    commits = ", ".join(short_commit(commit) for commit in result["commit"].split(", "))
    counts = Counter((each.setup, each.load, each.share, each.policy, pages_of(each.pool)) for each in tables.lines)
    least, most = min(counts.values()), max(counts.values())
    seeds = f"{most}" if least == most else f"{least} to {most}"
    parts = [
        "# Nightjar's tables, simulated",
        f"`benchmarks/nightjar/tables.py` simulated these tables at commit {commits}: means over {seeds} independent "
        f"{'run' if most == 1 else 'runs'}, ratios within runs. The lengths and the shape of the dynamic load are "
        f"those of {segment['trace']}: {segment['requests']} requests, {segment['rate_rps']:.2f} a second. No request "
        "has a target.",
        "*Throughput* is all output tokens over the time of the run. Below saturation it equals the offered load under "
        "every policy. *While busy* is the same over the time in which a request is in the system. *Latency* is the "
        "mean time from arrival to the last token.",
        table(
            ("setup", "keeps one prompt token of", "mean prompt", "mean output", "capacity, requests/s", "depth",
             "running"),
            [
                (name, f"{about['prompt_parts']:g}", f"{about['mean_prompt_tokens']:.0f}",
                 f"{about['mean_output_tokens']:.0f}", f"{about['capacity_rps']:g}", str(about["max_depth"]),
                 str(about["max_requests"]))
                for name, about in result["setups"].items()
            ],
        ),
        "![fixed lengths and ours, by load](nightjar-lengths.png)",
        "![every method at a low, a high and a dynamic load](nightjar-methods.png)",
    ]  # fmt: skip
    for setup in tables.setups:
        for name, (load, share) in CLASSES.items():
            view = tables.view(setup, load, share)
            if PLAIN in view:
                parts += [f"## {setup}: {name} load, {view.rate_rps:.2f} requests/s", methods(view)]
    parts += ["## Beside the paper", paper(tables)]
    for setup in tables.setups:
        if tables.against_fixed(setup, POISSON):
            parts += [f"## {setup}: fixed lengths", lengths(tables, setup)]
            parts += [f"## {setup}: contextual bandits", contexts(tables, setup)]
        if tables.pools(setup):
            parts += [f"## {setup}: elastic memory", offload(tables, setup)]
            parts += [f"## {setup}: thresholds", thresholds(tables, setup)]
    return "\n\n".join(parts) + "\n"


def methods(view: View) -> str:
    """Every policy under one load, and how many times plain decoding it is."""
    rows = []
    for policy in (each for each in METHODS if each in view):
        times = ["-"] * 3 if policy == PLAIN else [f"{view.times(policy, f):.3f}" for f in (THROUGHPUT, BUSY, LATENCY)]
        rows.append(
            (f"`{policy}`", f"{view.mean(policy, THROUGHPUT):.0f}", times[0], f"{view.mean(policy, BUSY):.0f}",
             times[1], f"{view.mean(policy, LATENCY):.2f}", times[2])
        )  # fmt: skip
    header = ("policy", "tokens/s", f"times `{PLAIN}`", "while busy", f"times `{PLAIN}`", "latency, s")
    return table((*header, f"times `{PLAIN}`"), rows)


def paper(tables: Tables) -> str:
    """The paper's averages over its six cells, and ours over the loads of each setup."""
    views = {
        setup: [view for at in CLASSES.values() if PLAIN in (view := tables.view(setup, *at))]
        for setup in tables.setups
    }  # fmt: skip
    rows = []
    for policy, method in NAMES.items():
        row = [f"`{policy}`", method]
        row += [f"{times_without(each, method):.3f}" for each in (THROUGHPUT_TPS, LATENCY_MS)]
        for found in views.values():
            has = [view for view in found if policy in view]
            for figure in (THROUGHPUT, LATENCY):
                row.append(f"{sum(v.times(policy, figure) for v in has) / len(has):.3f}" if has else "-")
        rows.append(row)
    header = ["policy", "in the paper", "its throughput", "its latency"]
    for setup in views:
        header += [f"{setup}: throughput", "latency"]
    about = f"All figures are multiples of plain decoding. Ours are means over the loads {', '.join(CLASSES)}."
    return "\n\n".join([about, table(header, rows)])


def lengths(tables: Tables, setup: str) -> str:
    """Throughput and latency by fixed length, and ours beside the best of them."""
    parts = []
    shares = tables.shares(setup, POISSON)
    views = {share: tables.view(setup, POISSON, share) for share in shares}
    names = [*next(iter(views.values())).fixed, OURS, MAIN]
    for title, figure, form in (("Tokens/s", THROUGHPUT, "{:.0f}"), ("Mean latency, s", LATENCY, "{:.2f}")):
        rows = [
            [f"{share:g}", *(form.format(view.mean(p, figure)) if p in view else "" for p in names)]
            for share, view in views.items()
        ]  # fmt: skip
        parts += [f"{title}, by share of the capacity:", table(["load", *(f"`{name}`" for name in names)], rows)]
    rows = [
        (f"{each.share:g}", f"`{each.best_throughput}`", f"{each.throughput_times:.3f}", f"`{each.best_latency}`",
         f"{each.latency_times:.3f}")
        for each in tables.against_fixed(setup, POISSON)
    ]  # fmt: skip
    header = ("load", "best by throughput", f"`{OURS}`, times that", "best by latency", f"`{OURS}`, times that")
    return "\n\n".join([*parts, f"`{OURS}` over the best fixed length of each load:", table(header, rows)])


def contexts(tables: Tables, setup: str) -> str:
    """The bandits that know the batch and the one that does not: tokens/s, latency."""
    names = (*CONTEXTUAL, MAIN)
    rows = []
    for share in tables.shares(setup, POISSON):
        view = tables.view(setup, POISSON, share)
        cells = (f"{view.mean(p, THROUGHPUT):.0f}, {view.mean(p, LATENCY):.2f} s" if p in view else "" for p in names)
        rows.append([f"{share:g}", *cells])
    return table(["load", *(f"`{name}`" for name in names)], rows)


def offload(tables: Tables, setup: str) -> str:
    """The draft's memory staying, and becoming KV pages."""
    rows = []
    for share, policy, off, on in offload_pairs(tables, setup):
        before, after = View(off), View(on)
        swaps = [each.swaps or {} for each in on]
        rows.append(
            (f"{share:g}", f"`{policy}`", f"{before.mean(policy, 'running_mean'):.1f}",
             f"{after.mean(policy, 'running_mean'):.1f}", f"{before.mean(policy, THROUGHPUT):.1f}",
             f"{after.mean(policy, THROUGHPUT):.1f}", f"{ratio(on, off, THROUGHPUT):.3f}",
             f"{before.mean(policy, LATENCY):.2f}", f"{after.mean(policy, LATENCY):.2f}",
             f"{ratio(on, off, LATENCY):.3f}",
             ", ".join(f"{sum(s.get(k, 0) for s in swaps) / len(swaps):.0f}" for k in ("expand", "contract")))
        )  # fmt: skip
    header = (
        "load", "policy", "running, stays", "elastic", "tokens/s, stays", "elastic", "times", "latency, s, stays",
        "elastic", "times", "expansions, contractions a run",
    )  # fmt: skip
    pool = tables.pools(setup)[0].pool
    assert pool is not None
    about = f"{pool['num_pages']} pages, and {pool['extension_pages']} more after an expansion."
    return "\n\n".join([about, table(header, rows)])


def thresholds(tables: Tables, setup: str) -> str:
    """Tokens/s by tau_low and T_persist, at one load, and the swaps of a run."""
    swept: dict[tuple[float, int], list[Line]] = {}
    for each in tables.pools(setup):
        pool = each.pool
        if pool and pool["elastic"] == "on" and (each.policy, each.share) == (OURS, THRESHOLD_SHARE):
            swept.setdefault((pool["tau_low"], pool["persist_steps"]), []).append(each)
    taus, persists = sorted({tau for tau, _ in swept}), sorted({persist for _, persist in swept})
    rows = [
        [f"{tau:g}", *(_threshold_cell(swept.get((tau, persist), [])) for persist in persists)] for tau in taus
    ]  # fmt: skip
    header = ["tau_low", *(f"T_persist {persist}" for persist in persists)]
    about = f"`{OURS}` at {THRESHOLD_SHARE:g} of the capacity: tokens/s (latency, s; expansions a run)."
    return "\n\n".join([about, table(header, rows)])


def _threshold_cell(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    view = View(lines)
    swaps = sum((each.swaps or {}).get("expand", 0) for each in lines) / len(lines)
    return f"{view.mean(OURS, THROUGHPUT):.1f} ({view.mean(OURS, LATENCY):.2f}; {swaps:.0f})"
