"""Writes the tables of docs/results.md, reproduce.md, cluster-plan.md, learning.md, howto/gpu-and-tpu.md, sweeps/ and
architecture/device.md and scheduler.md, between their markers, from what lies under benchmarks/results.

Of benchmarks/results it reads, each written by the file of benchmarks/ beside it:

* throughput-*.json, halves-*.json: engine/throughput.py; load-*: engine/load_time.py; off-path-*: engine/off_path.py;
  acceptance-rules-*, draft-vocabulary-*: the files of engine/ with these names; draft-sources-*, draft-heads-*:
  engine/draft_sources.py and draft_sources_load.py
* device-*: device.py; absent-devices: kernels/absent_devices.py; tile-sizes: kernels/tile_sizes.py
* validation-*, second-choices-*, calibration-*, constants-*, fluctuating-*, fair-tenants: the files of adaserve/ with
  these names; sweeps-*, contenders-*: adaserve/sweeps.py (its verdict.json and contenders.json)
* nightjar-*: nightjar/tables.py, engine.py and offload.py
* online-learning/*, learning-latency-*, learning-cost-*: osd/online_learning.py, latency.py and cost.py
* starsd/*, star-heads, star-plan: starsd/; cluster-plan/points.jsonl: cluster/plan.py
* client-accuracy-*, restart-*: server/; peers-*: peers/compare.py; reproduce: papers/reproduce.py
* multi-slo/*: `adaserve bench --suite multi-slo`

No number is typed. Imports no jax.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import markdown
from benchmarks.adaserve.sweeps_tables import tables as sweep_tables
from benchmarks.engine.throughput_rows import REFERENCE, ThroughputRow, aims, interval_of, paired_ratio, read_rows
from benchmarks.markdown import head, line, short_commit
from scripts.results_absent import absent_table
from scripts.results_client import client_table
from scripts.results_cluster import cluster_tables, star_tables
from scripts.results_learning import cost_table, latency_table, online_head_table, online_tables
from scripts.results_nightjar import nightjar_tables
from scripts.results_peers import multi_slo_tables, peer_chart, peer_tables
from scripts.results_policies import (
    calibration_table,
    constants_table,
    fair_tenants_table,
    fluctuating_table,
    second_choices_table,
    sweeps_table,
    validation_tables,
)
from scripts.results_reproduce import claim_tables, stand_tables
from scripts.results_sources import head_tables, sources_load_table, sources_table
from scripts.results_star import heads_table, overhead_tables, table1_tables
from scripts.results_tiles import tile_tables

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
FIGURES_PAGE = ROOT / "docs" / "reproduce.md"
CLUSTER_PAGE = ROOT / "docs" / "cluster-plan.md"
LEARNING_PAGE = ROOT / "docs" / "learning.md"
ACCELERATOR_PAGE = ROOT / "docs" / "howto" / "gpu-and-tpu.md"
SCHEDULER_PAGE = ROOT / "docs" / "architecture" / "scheduler.md"
DEVICE_PAGE = ROOT / "docs" / "architecture" / "device.md"
SWEEPS_PAGE = ROOT / "docs" / "sweeps" / "README.md"
PEERS_CHART = ROOT / "docs" / "figures" / "peers.svg"
FIGURES = (
    f"| requests at once | temperature | policy | tokens/s | times `{REFERENCE}` | tokens per step "
    "| draft nodes accepted | texts that differ |\n|---|---|---|---|---|---|---|---|"
)
TABLES_ALONE = "half-model"
HALVES = (
    "| requests at once | temperature | policy | tokens/s | share of steps that draft "
    f"| times `{TABLES_ALONE}` |\n|---|---|---|---|---|---|"
)
STEPS = (
    "| requests at once | temperature | policy | share of steps that draft | depth | width | tree tokens per row "
    "| ms per step | draft | verify | decide |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
LAYOUTS = ("safetensors", "converted")
LOADS = (
    "| layout | loaded as | load, s | import, s | weights, MiB | largest weight, MiB | peak beside the weights, MiB |\n"
    "|---|---|---|---|---|---|---|"
)
KERNELS = "| kernel | shape | implementation | us | us at the ceilings | times that |\n|---|---|---|---|---|---|"
PROGRAMS = "| packed tokens | requests | ms | times the step of one token | ms at the ceilings |\n|---|---|---|---|---|"
OLD_CONTEXT = 256
"""Of the programs of a result that does not say it."""
COMPUTED_PROGRAMS = (
    "| packed tokens | requests | ms | times the step of one token | ms at the ceilings "
    "| ms computed from the data sheet |\n|---|---|---|---|---|---|"
)
PARTS = (
    "| rows | tokens | context | step, ms | products | attention | head | sampling | host | rest "
    "| attention of the step | step over its products |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
SERVED = (
    "| policy | requests/s | requests | every target met | goodput, tokens/s "
    "| TTFT p50 / p99, ms | TPOT p50 / p99, ms |\n"
    "|---|---|---|---|---|---|---|"
)
PICKS = "| vocabulary | argmax, us | top_k, us |\n|---|---|---|"
OFF = (
    "| requests at once | pairs | with the draft loaded, tokens/s | without one | times | times, decoding only |\n"
    "|---|---|---|---|---|---|"
)
VOCABULARIES = (
    "| draft | mapping | tokens of the target covered | of what it writes | accepted, temperature 0 "
    "| accepted, temperature 0.8 | texts that differ |\n|---|---|---|---|---|---|---|"
)
AIMS = "| requests at once | temperature | policy | against | aim | found | |\n|---|---|---|---|---|---|---|"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def point(row: ThroughputRow) -> tuple[str, str, str]:
    return str(row.requests), f"{row.temperature:g}", f"`{row.system}`"


def figures_line(row: ThroughputRow, reference: ThroughputRow | None) -> str:
    return line(
        *point(row),
        number(median(row.tps), 1),
        "-" if reference is None or reference is row else str(paired_ratio(row.tps, reference.tps)),
        number(row.tokens_per_step),
        number(row.acceptance_rate),
        f"{row.differing} of {row.texts_compared}" if row.texts_compared else "-",
    )


def steps_line(row: ThroughputRow) -> str:
    shape = (row.drafting_share, row.depth, row.width, row.tree_tokens)
    times = (row.step_ms, row.draft_ms, row.verify_ms, row.deciding_ms)
    return line(*point(row), *(number(value) for value in (*shape, *times)))


def command(rows: Sequence[ThroughputRow]) -> str:
    """Return the shell command whose rows these are."""
    first = rows[0]
    words = ["python", "-m", "benchmarks.engine.throughput", "--out", "throughput.json"]
    words += ["--requests", ",".join(dict.fromkeys(str(row.requests) for row in rows))]
    words += ["--temperatures", ",".join(dict.fromkeys(f"{row.temperature:g}" for row in rows))]
    words += ["--policies", ",".join(dict.fromkeys(row.system for row in rows))]
    words += ["--repeats", str(first.repeats), "--new-tokens", str((first.min_new_tokens + first.max_new_tokens) // 2)]
    words += ["--texts", str(first.texts), "--seed", str(first.seed)]
    words += [] if first.slo_scale is None else ["--slo-scale", f"{first.slo_scale:g}"]
    return shlex.join(words)


def conditions(rows: Sequence[ThroughputRow]) -> str:
    """Return what was measured where."""
    row = rows[0]
    others = max((each.others_share for each in rows if each.others_share is not None), default=None)
    shared = "" if others is None else f" Other processes took up to {others:.0%} of the cores' time in a call."
    sizes = [
        f"{name} ({count / 1e6:.1f}M parameters)" if count else name
        for name, count in ((row.target, row.target_params), (row.draft, row.draft_params))
    ]
    slo = "no target" if row.slo_scale is None else f"a TPOT target of {row.slo_scale:g} times the baseline"
    return (
        f"Target {sizes[0]}, draft {sizes[1]}, {row.dtype}; prompts of {row.min_prompt_tokens} to "
        f"{row.max_prompt_tokens} tokens of {row.prompts}, {row.min_new_tokens} to {row.max_new_tokens} new tokens, "
        f"{slo}; medians of {row.repeats} rounds, {interval_of(row.repeats)}. jax {row.jax_version} on "
        f"{row.device}, {row.threads} threads: {row.machine}. "
        f"Commit {short_commit(row.commit)}.{shared}"
    )


def tables(rows: Sequence[ThroughputRow]) -> str:
    """Command, conditions, figures, aims and steps of one run."""
    references = {row.point: row for row in rows if row.system == REFERENCE}
    figures = [figures_line(row, references.get(row.point)) for row in rows]
    judged = [
        line(
            str(aim.requests), f"{aim.temperature:g}", f"`{aim.system}`", f"`{aim.against}`",
            f"{aim.wanted:g}", str(aim.found), "met" if aim.met else "**missed**",
        )
        for aim in aims(rows)
    ]  # fmt: skip
    steps = [steps_line(row) for row in rows]
    parts = [f"Measured with `{command(rows)}`:", "\n".join([FIGURES, *figures]), conditions(rows)]
    parts += ["Aims and results:", "\n".join([AIMS, *judged])] if judged else []
    parts += ["The engine's steps:", "\n".join([STEPS, *steps])]
    return "\n\n".join(parts)


def halves_table(rows: Sequence[ThroughputRow]) -> str:
    """Return how `adaserve` stands beside its two halves, from a run of these policies."""
    against = {row.point: row for row in rows if row.system == TABLES_ALONE}
    measured = [
        line(
            *point(row), number(median(row.tps), 1), number(row.drafting_share),
            "-" if row.system == TABLES_ALONE else str(paired_ratio(row.tps, against[row.point].tps)),
        )
        for row in rows
    ]  # fmt: skip
    return "\n\n".join([f"Measured with `{command(rows)}`:", "\n".join([HALVES, *measured]), conditions(rows)])


def load_table(result: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks/engine/load_time.py: medians of times, the largest of peaks."""
    loads = result["loads"]
    rows = []
    for layout in dict.fromkeys(load["layout"] for load in loads):
        runs = [load for load in loads if load["layout"] == layout]
        times = [f"{median(run[name] for run in runs):.2f}" for name in ("load_s", "import_s")]
        peak = max(run["peak_bytes"] - run["weight_bytes"] for run in runs)
        sizes = [f"{size / 2**20:.0f}" for size in (runs[0]["weight_bytes"], runs[0]["largest_bytes"], peak)]
        rows.append(line(layout, runs[0]["dtype"], *times, *sizes))
    times_of = {layout: [run["load_s"] for run in loads if run["layout"] == layout] for layout in LAYOUTS}
    ratio = median(a / b for a, b in zip(*(times_of[layout] for layout in LAYOUTS), strict=True))
    about = (
        f"{result['checkpoint']}, weights {result['quantize']}; {len(times_of['converted'])} loads of each layout in "
        f"turns: medians of times, and the largest peak. Files were in the page cache. Without the import, the "
        f"converted layout loads {ratio:.2f} times as fast. {result['machine']}. "
        f"Commit {short_commit(result['commit'])}."
    )
    return "\n\n".join([f"Measured with `{result['command']}`:", "\n".join([LOADS, *rows]), about])


def _served_line(row: dict[str, Any]) -> str:
    """Return the line of a point of a bench; of one that is not valid, the reason in place of its figures."""
    where = f"`{row['policy']}`", f"{row['rate_rps']:g}", str(row["requests"])
    if not row["valid"]:
        return line(*where, f"not valid: {row['invalid_reason']}", "-", "-", "-")
    ttft, tpot = (
        f"{number(row[f'{name}_p50_s'] * 1e3, 1)} / {number(row[f'{name}_p99_s'] * 1e3, 1)}"
        for name in ("ttft", "tpot")
    )
    return line(*where, f"{row['attainment']:.1%}", number(row["goodput_tps"], 0), ttft, tpot)


def device_tables(result: dict[str, Any]) -> str:
    """Return the tables of a run of benchmarks/device.py, whatever parts of it were run."""
    ceilings = result["ceilings"]
    parts = [f"Measured with `{result['command']}`:"]
    kernels = result.get("kernels", {})
    if "conformance" in kernels:
        wrong = [f"{each['implementation']} {each['spec']}" for each in kernels["conformance"] if not each["ok"]]
        checked = f"{len(kernels['conformance'])} kernels and shapes were checked against the oracle"
        parts.append(f"{checked}; {'wrong: ' + ', '.join(wrong) if wrong else 'all were correct'}.")
    if "times" in kernels:
        times = [
            line(
                each["kernel"], each["spec"], f"`{each['implementation']}`", number(each["seconds"] * 1e6, 1),
                number(each["floor_s"] * 1e6, 1), number(each["seconds"] / each["floor_s"]),
            )
            for each in kernels["times"]
        ]  # fmt: skip
        parts.append("\n".join([KERNELS, *times]))
    if "picks" in kernels:
        picks = [
            line(str(each["vocabulary"]), number(each["argmax_s"] * 1e6, 0), number(each["top_k_s"] * 1e6, 0))
            for each in kernels["picks"]
        ]
        parts += ["Finding the largest scores of 64 rows:", "\n".join([PICKS, *picks])]
    if "programs" in result:
        verify = result["programs"]["verify"]
        one = min(verify, key=lambda step: (step["tokens"], step["rows"]))["seconds"]
        computed = any(step.get("computed_s") is not None for step in verify)
        steps = [
            line(
                str(step["tokens"]), str(step["rows"]), number(step["seconds"] * 1e3), number(step["seconds"] / one),
                number(step["bound_s"] * 1e3), *([number(step["computed_s"] * 1e3)] if computed else []),
            )
            for step in verify
        ]  # fmt: skip
        target = result.get("settings", {}).get("programs", result.get("config"))["target"]
        context = result["programs"].get("context", OLD_CONTEXT)
        about = f"Verify programs of {target} at context {context}, timed from host to host:"
        parts += [about, "\n".join([COMPUTED_PROGRAMS if computed else PROGRAMS, *steps])]
    if shares := [_parts_line(step) for step in result.get("parts", [])]:
        parts += ["Where the time of a step goes, in ms:", "\n".join([PARTS, *shares])]
    if served := [row for row in result.get("bench", []) if row["slo_class"] == "all"]:
        about = f"{served[0]['duration_s']:g} s of arrivals for each policy and rate"
        targets = f"targets are multiples of {number(served[0]['baseline_s'] * 1e3)} ms, the time of a token alone"
        parts += [f"{about}; {targets}:", "\n".join([SERVED, *(_served_line(row) for row in served)])]
    missing = [f"`{name}` failed: {error}" for name, error in result.get("errors", {}).items()]
    missing += [f"`{name}` was not begun in time" for name in result.get("not_begun", [])]
    if missing:
        parts.append("\n".join(f"* {each}" for each in missing))
    rates = (
        f"copy {ceilings['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"matmul {ceilings['matmul_flops_per_s'] / 1e12:.3f} TFLOP/s"
    )
    where = f"{result['machine']}; {result['device']}; {ceilings['dtype']}: {rates}"
    parts.append(f"{where}; jax {result['jax_version']}. Commit {short_commit(result['commit'])}.")
    return "\n\n".join(parts)


def _parts_line(step: dict[str, Any]) -> str:
    names = ("step", "products", "attention", "head", "sampling", "host", "rest")
    return line(
        str(step["rows"]), str(step["tokens"]), str(step["context"]),
        *(number(1e3 * step[f"{name}_s"]) for name in names),
        f"{step['attention_s'] / step['step_s']:.0%}", number(step["step_s"] / step["products_s"]),
    )  # fmt: skip


def off_path_table(result: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks/engine/off_path.py."""
    plan, config = result["plan"], result["config"]
    words = ["python", "-m", "benchmarks.engine.off_path", "--out", "off_path.json"]
    words += ["--requests", ",".join(map(str, plan["requests"])), "--new-tokens", str(plan["new_tokens"])]
    words += ["--precision", f"{plan['precision']:g}", "--minutes", f"{plan['seconds'] / 60:g}"]
    rows = []
    for point in result["points"]:
        rates = [number(median(point[side]), 1) for side in ("with_draft_tps", "without_tps")]
        ratios = [
            f"{each['median']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
            for each in (point["ratio"], point["decode_ratio"])
        ]
        rows.append(line(str(point["requests"]), str(point["pairs"]), *rates, *ratios))
    others = max((each["others_share"] for each in result["points"] if each["others_share"] is not None), default=None)
    shared = "" if others is None else f" Other processes took up to {others:.0%} of the cores' time in a call."
    sizes = [
        f"{result[name]} ({result[f'{name}_params'] / 1e6:.1f}M parameters)"
        if result[f"{name}_params"]
        else result[name]
        for name in ("target", "draft")
    ]
    low, high = result["prompt_tokens"]
    about = (
        f"Target {sizes[0]}, draft {sizes[1]}, {config['dtype']}; policy `{config['policy']}` in both engines, prompts "
        f"of {low} to {high} tokens, {plan['new_tokens']} new tokens each, at most {config['max_requests']} requests "
        f"at once; medians over pairs, 95 % bootstrap intervals in brackets. jax {result['jax_version']} on "
        f"{result['device']}: {result['machine']}. Commit {short_commit(result['commit'])}.{shared}"
    )
    return "\n\n".join([f"Measured with `{shlex.join(words)}`:", "\n".join([OFF, *rows]), about])


def start_table(result: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks/server/restart.py."""
    rows = ["| start | ready after, s | of the engine's CPU, s | aim, s | |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        aim = result["aims_s"][row["start"]]
        met = "met" if row["ready_s"] <= aim else "**missed**"
        rows.append(line(row["start"], f"{row['ready_s']:.1f}", f"{row['cpu_s']:.1f}", f"{aim:g}", met))
    about = f"Measured with `{result['command']}`. {result['machine']}. Commit {short_commit(result['commit'])}."
    return "\n\n".join(["\n".join(rows), about])


def vocabulary_table(result: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks/engine/draft_vocabulary.py."""
    rows = []
    for point in result["points"]:
        removed = point["removed"]
        permuted = "ids permuted" if not removed else f"{removed:.0%} of its merged tokens away, ids permuted"
        rows.append(
            line(
                "as it is" if removed is None else permuted, point["mapping"],
                *(f"{point[name]:.1%}" for name in ("covered", "covered_text")),
                *(f"{point['accepted'][temperature]:.3f}" for temperature in ("0.0", "0.8")), str(point["differing"]),
            )
        )  # fmt: skip
    about = (
        f"Policy `spec:4`, one candidate per level, deterministic mode; {result['texts']} texts of {result['tokens']} "
        f"tokens. *Accepted* is the share of drafted tokens. {result['machine']}. "
        f"Commit {short_commit(result['commit'])}."
    )
    return "\n\n".join([f"Measured with `{result['command']}`:", "\n".join([VOCABULARIES, *rows]), about])


def rules_table(result: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks/engine/acceptance_rules.py."""
    found = {(each["rule"], each["temperature"], each["children"]): each for each in result["points"]}
    counts = sorted({children for _, _, children in found})
    rules = list(dict.fromkeys(rule for rule, _, _ in found))
    rows = [head("temperature", "children", *(f"`{rule}`" for rule in rules))]
    for temperature in sorted({temperature for _, temperature, _ in found}):
        for count in counts:
            points = [found[rule, temperature, count] for rule in rules]
            each = [f"{point['acceptance']:.3f} ({point['low']:.3f} to {point['high']:.3f})" for point in points]
            rows.append(line(f"{temperature:g}", str(count), *each))
    about = (
        f"{result['texts']} files of {result['tokens']} positions, {result['draws']} draws of noise each; "
        f"95 % intervals over files. {result['machine']}. Commit {short_commit(result['commit'])}."
    )
    return "\n\n".join([f"Measured with `{result['command']}`:", "\n".join(rows), about])


POLICY_PARTS = {
    "validation": validation_tables, "second-choices": second_choices_table, "sweeps": sweeps_table,
    "nightjar": nightjar_tables, "calibration": calibration_table, "off-path": off_path_table,
    "client-accuracy": client_table,
    "learning-latency": latency_table, "learning-cost": cost_table,
    "peers": peer_tables, "restart": start_table, "draft-vocabulary": vocabulary_table,
    "acceptance-rules": rules_table,
}  # fmt: skip


def blocks(results: Path) -> dict[Path, dict[str, Sequence[str]]]:
    """Return what the pages have between their markers, by page and marker. results: folder of committed results."""
    status = json.loads((results / "reproduce.json").read_text())
    measured = {
        "throughput": [tables(read_rows(file)) for file in sorted(results.glob("throughput-*.json"))],
        "load": _tables(load_table, results, "load"),
        "device": _tables(device_tables, results, "device"),
        **{name: _tables(tables_of, results, name) for name, tables_of in POLICY_PARTS.items()},
        "draft-sources": _tables(sources_table, results, "draft-sources-[0-9]"),
        "draft-heads": _tables(head_tables, results, "draft-heads")[::-1],
        "draft-sources-load": _tables(sources_load_table, results, "draft-sources-load"),
        "online-learning": online_tables(results / "online-learning"),
        "multi-slo": multi_slo_tables(results / "multi-slo"),
        "starsd": table1_tables(results / "starsd"),
        "starsd-overhead": overhead_tables(results / "starsd"),
        "starsd-heads": heads_table(results / "star-heads.json"),
        "reproduce": [stand_tables(status)],
    }
    return {
        PAGE: measured,
        FIGURES_PAGE: {"figures": [claim_tables(status)]},
        CLUSTER_PAGE: {
            "cluster-plan": cluster_tables(results / "cluster-plan"),
            "star-plan": star_tables(results / "star-plan.json"),
        },
        LEARNING_PAGE: {"online-head": online_head_table(results / "online-learning")},
        SCHEDULER_PAGE: {
            "halves": [halves_table(read_rows(file)) for file in sorted(results.glob("halves-*.json"))],
            "constants": _tables(constants_table, results, "constants"),
            "fluctuating": _tables(fluctuating_table, results, "fluctuating"),
            "fair-tenants": _tables(fair_tenants_table, results, "fair-tenants"),
        },
        ACCELERATOR_PAGE: {"absent": _tables(absent_table, results, "absent-devices")},
        SWEEPS_PAGE: {"contenders": _tables(sweep_tables, results, "contenders")},
        DEVICE_PAGE: {"tiles": _tables(tile_tables, results, "tile-sizes")},
    }


def updated() -> dict[Path, str]:
    """Return the text of every page and chart, made anew from the committed results."""
    results = ROOT / "benchmarks" / "results"
    written = {PEERS_CHART: peer_chart(json.loads((results / "peers-110m-cpu.json").read_text()))}
    for path, parts in blocks(results).items():
        page = path.read_text()
        for marker, found in parts.items():
            content = "\n\n".join(["", *(found or ["No run is committed."]), ""])
            page = markdown.between(page, marker, content, path.name)
        written[path] = page
    return written


def main() -> None:
    for path, text in updated().items():
        path.write_text(text)


def _tables(table_of: Callable[[dict[str, Any]], str], results: Path, name: str) -> list[str]:
    """Return the table of each result file whose name begins so."""
    return [table_of(json.loads(file.read_text())) for file in sorted(results.glob(f"{name}*.json"))]


if __name__ == "__main__":
    main()
