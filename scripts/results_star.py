"""Draft services, in docs/results.md: Table 1 of StarSD and the paper's, and what the protocol costs; and in
docs/results.md where a head should draft. Imports no jax.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import short_commit, table
from scripts.results_cluster import QUANTITIES

MODES = {False: "one by one", True: "batched"}
KINDS = ("measured", "simulated", "closed")
OVERHEADS = ("p50_ms", "p90_ms", "p99_ms", "bare_grpc_p50_ms", "drafter_p50_ms")


def table1_tables(folder: Path) -> list[str]:
    """Return the tables of every run in `folder`, [] where there is none."""
    return [part for path in sorted(folder.glob("table1-*.json")) for part in _of(json.loads(path.read_text()))]


def overhead_tables(folder: Path) -> list[str]:
    """Return the tables of what benchmarks/starsd/overhead.py wrote."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("overhead-*.json"))]
    rows = [
        (str(each["rows"]), str(each["nodes"]), *(f"{each[name]:.2f}" if name in each else "" for name in OVERHEADS),
         f"{each['load_1m']:.1f}", each["machine"], short_commit(each["commit"]))
        for each in found
    ]  # fmt: skip
    head = ("requests", "candidates of each", "p50, ms", "p90", "p99", "bare gRPC, p50", "a target's drafter, p50",
            "processes that ran", "machine", "commit")  # fmt: skip
    return [table(head, rows)] if rows else []


def heads_table(path: Path) -> list[str]:
    """Return the table of what benchmarks/starsd/heads.py wrote: few and many targets of a service, the slower link."""
    result = json.loads(path.read_text())
    slower = min(each["link_gbit"] for each in result["places"] if each["link_gbit"] is not None)
    shown = [each for each in result["places"] if each["targets"] in (1, 16) and each["link_gbit"] in (None, slower)]
    rows = [
        (each["pair"], each["draft"], each["place"], each["features"],
         "" if each["link_gbit"] is None else f"{each['link_gbit']:.0f}", str(each["targets"]),
         f"{each['round_bytes'] / 1e3:.1f}", f"{each['prompt_s'] * 1e3:.1f}", f"{each['round_s'] * 1e3:.1f}",
         f"{each['target_tps']:,.0f}", "" if each["load"] is None else f"{each['load']:.0%}")
        for each in shown
    ]  # fmt: skip
    head = ("target", "drafts", "where", "features", "link, Gbit/s", "targets", "wire, kB a round",
            "wire, ms a prompt", "round, ms", "tokens/s of a target", "load of the service")  # fmt: skip
    saved = "; ".join(
        f"{each['pair']} {each['head_bytes'] / 1e9:.2f} GB ({each['share_of_target']:.1%} of its weights, the KV of "
        f"{each['tokens_of_kv']:,} tokens)"
        for each in result["sizes"]
    )
    about = (
        f"Computed from the data sheet of {result['device']}, and simulated: {result['rows']} requests of a target, "
        f"depth {result['depth']}, acceptance {result['acceptance']}, contexts and prompts of {result['context']:,} "
        f"tokens, a way there and back of {result['round_trip_s'] * 1e3:.1f} ms. "
        f"Commit {short_commit(result['commit'])}."
    )
    return [table(head, rows), f"A target without its head saves: {saved}.", about]


def _of(result: dict[str, Any]) -> list[str]:
    shown = sorted({row["n"] for row in result["rows"] if row["kind"] == "measured"})
    rows = {(row["kind"], row["batched"], row["n"]): row for row in result["rows"]}
    paper = {row["n"]: row for row in result["paper"]}
    lines: list[Sequence[str]] = []
    for name, title, factor, digits in QUANTITIES:
        for batched, mode in MODES.items():
            lines += [
                (title, mode, kind, *(f"{rows[kind, batched, n][name] * factor:z.{digits}f}" for n in shown))
                for kind in KINDS
            ]
        printed = (f"{paper[n][name] * factor:.{digits}f}" if n in paper else "" for n in shown)
        lines.append((title, "paper", "measured there", *printed))
    times = {(each["n"], each["batched"]): each["service_s"] for each in result["as_it_was_s"]}
    lines += [
        ("a draft, S, ms", mode, "measured", *(f"{times[n, batched] * 1e3:.1f}" for n in shown))
        for batched, mode in MODES.items()
    ]
    return [
        f"Measured with `{result['command']}`:", table(("", "", "", *(f"N = {n}" for n in shown)), lines),
        _alone(result, rows), _judged(result, rows, max(shown)), *_spread(result), *_engines(result), _about(result),
    ]  # fmt: skip


def _spread(result: dict[str, Any]) -> list[str]:
    """Return the spread of tokens/s over rounds, where there were several."""
    found = [(each["least"], each["most"]) for each in result.get("spread", ())]
    if result["rounds"] < 2 or not found:
        return []
    said = [
        f"{mode} " + ", ".join(
            f"{least['throughput_tps']:.1f} to {most['throughput_tps']:.1f}"
            for least, most in found if least["batched"] == batched
        )
        for batched, mode in MODES.items()
    ]  # fmt: skip
    return [f"Lowest and highest tokens/s of the rounds, by N: {'; '.join(said)}."]


def _engines(result: dict[str, Any]) -> list[str]:
    """Return the table of targets that are whole engines, where there were any."""
    real = result.get("engines")
    if real is None:
        return []
    head = ("engines", "", *(title for _, title, *_ in QUANTITIES))
    lines = [
        (f"N = {row['n']}", MODES[row["batched"]],
         *(f"{row[name] * factor:z.{digits}f}" for name, _, factor, digits in QUANTITIES))
        for row in real["rows"]
    ]  # fmt: skip
    own = {name: statistics.median(each["throughput_tps"] for each in of) for name, of in real["colocated"].items()}
    return [
        f"With whole engines as targets ({real['target']}, {real['verify_s'] * 1e3:.1f} ms a verification, all on the "
        f"same cores):",
        table(head, lines),
        f"{real['same_texts']} of {real['texts']} texts are those that the target writes alone. One engine without the "
        f"service: {', '.join(f'{name} in its process {tps:.1f} tokens/s' for name, tps in own.items())}.",
    ]


def _alone(result: dict[str, Any], rows: dict[tuple[str, bool, int], dict[str, Any]]) -> str:
    alone, one = result["colocated"], rows["measured", False, 1]
    return (
        f"The same draft inside the target's process: {alone['throughput_tps']:.1f} tokens/s, S "
        f"{alone['service_s'] * 1e3:.1f} ms, against {one['throughput_tps']:.1f} tokens/s of one target at the service "
        f"(the paper: {result['paper_colocated_tps']} against {result['paper'][0]['throughput_tps']})."
    )


def _judged(result: dict[str, Any], rows: dict[tuple[str, bool, int], dict[str, Any]], most: int) -> str:
    """Return how the two aims were met."""
    full, ratio = result["full"], result["batched_over_one_by_one"]
    beyond = [rows["measured", False, n]["load"] for n in range(full + 1, most + 1)]
    load = f"at least {min(beyond):.1%}" if beyond else "not measured"
    met = "met" if beyond and min(beyond) >= 0.95 else "**missed**"
    better = "met" if ratio["measured"] >= 1.5 else "**missed**"
    return (
        f"N_full = {full}. Load of the draft with more targets than that, one by one: {load} (aim 95%: {met}). "
        f"Batched over one by one at N = {most}: {ratio['measured']:.2f} times the tokens/s (aim 1.5: {better}); "
        f"{ratio['simulated']:.2f} in simulation, {ratio['closed']:.2f} by closed form."
    )


def _about(result: dict[str, Any]) -> str:
    times = ", ".join(f"{seconds * 1e3:.1f}" for seconds in result["service_s"].values())
    others = [run["others_share"] for run in result["runs"] if run["others_share"] is not None]
    shared = f" Other processes took {min(others):.0%} to {max(others):.0%} of the cores' time." if others else ""
    return (
        f"t_v = {result['verify_s'] * 1e3:.1f} ms as measured (a sleep), t_c = {result['network_s'] * 1e3:.1f} ms, "
        f"d = {result['shape']['depth']}, b = {result['acceptance']:.3f} ({result['tokens_per_round']:.2f} tokens a "
        f"round), S(n) for n = 1 to {len(result['service_s'])}: {times} ms. Draft {result['draft']}, texts of "
        f"{result['target']} ({result['texts']} of {result['new_tokens']} tokens, temperature "
        f"{result['temperature']:g}), {result['rounds']} rounds of {result['seconds']:g} s each. "
        f"{result['machine']}.{shared} Commit {short_commit(result['commit'])}."
    )
