"""Tables of docs/results.md, and the chart of README, from a run of benchmarks/peers/compare.py; table of submissions
to the multi-SLO benchmark. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from adaserve_jax.report.document import Table
from adaserve_jax.report.multi_slo import multi_slo_page, targets_text
from adaserve_jax.results.submission import read_submission
from benchmarks.engine.throughput_rows import paired_ratio
from benchmarks.markdown import line, short_commit, table

OURS = "adaserve_jax"
FASTER = {"transformers": 1.8, "llama.cpp": 1.0, "vLLM": 1.3}
"""Least ratio of tokens/s of one request alone, to the best way of each peer."""
MORE = {"llama.cpp": 1.3, "vLLM": 1.2}
"""Least ratio of goodput of 16 requests at once."""
ATTAINED = 2.0
"""Least ratio of joint attainment at the highest rate, to the best of all peers."""
SERVERS = "| server | version | one request alone, ms per token | same greedy text |\n|---|---|---|---|"
LOADS = (
    "| load | server | tokens/s | goodput, tokens/s | TPOT met | TPOT and TTFT met | TPOT p50 / p99, ms "
    "| TTFT p50 / p99, ms | failed, in all rounds |\n|---|---|---|---|---|---|---|---|---|"
)
AIMS = "| load | figure | against | aim | found | |\n|---|---|---|---|---|---|"


def peer_tables(result: dict[str, Any]) -> str:
    """Return command, servers, loads and aims of one run."""
    rows = result["rows"]
    names = [server["name"] for server in result["servers"]]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    servers = [
        line(
            server["name"], server["version"], f"{result['alone_ms'][server['name']]:.1f}",
            "yes" if result["same_greedy_text"][server["name"]] else "no",
        )
        for server in result["servers"]
    ]  # fmt: skip
    figures = [_figures(load, name, _of(rows, load, name)) for load in loads for name in names]
    tight, relaxed = result["targets_ms"].values()
    about = (
        f"Target {result['target']}, temperature {result['temperature']:g}, {result['new_tokens'][0]} to "
        f"{result['new_tokens'][1]} new tokens; TPOT targets {tight:.1f} and {relaxed:.1f} ms in turns, TTFT target "
        f"{result['ttft_ms']:.0f} ms; capacity {result['capacity_rps']:.2f} requests/s; open loops of "
        f"{result['duration_s']:g} s and {result['drain_s']:g} s for the last; medians of {result['rounds']} rounds. "
        "p99 of a load of few requests is near its slowest. "
        f"{result['machine']}. Commit {short_commit(result['commit'])}."
    )
    return "\n\n".join([
        f"Measured with `{result['command']}`:", "\n".join([SERVERS, *servers]), "\n".join([LOADS, *figures]), about,
        "Aims and results:", "\n".join([AIMS, *_aims(rows, names, loads)]),
    ])  # fmt: skip


CHART_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
"""Okabe and Ito's, in the order of the engines."""
CHART_WIDTH, CHART_HEIGHT, CHART_LEFT, CHART_TOP, BAR_WIDTH = 760, 310, 46, 68, 22
CHART_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px }
.small { font-size: 11px; text-anchor: middle }
line { stroke: #8c959f; stroke-width: 0.5 }
.page { fill: #ffffff }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .page { fill: #0d1117 } }
</style>"""


def peer_chart(result: dict[str, Any]) -> str:
    """Return an SVG of the share of requests that meet both targets, by load and engine, each in its better way.

    Its colours follow the reader's choice of light or dark.
    """
    rows = result["rows"]
    names = [server["name"] for server in result["servers"]]
    engines = list(dict.fromkeys(name.partition(",")[0] for name in names))
    loads = list(dict.fromkeys(row["load"] for row in rows))
    bottom, group = CHART_HEIGHT - 44, (CHART_WIDTH - CHART_LEFT - 10) / len(loads)
    height = bottom - CHART_TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img">', CHART_STYLE,
        f'<rect class="page" width="{CHART_WIDTH}" height="{CHART_HEIGHT}"/>',
        f'<text class="title" x="{CHART_LEFT}" y="18">Requests that meet their TPOT and TTFT targets, %</text>',
    ]  # fmt: skip
    for index, engine in enumerate(engines):
        x = CHART_LEFT + 160 * index
        parts.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{CHART_COLOURS[index]}"/>')
        parts.append(f'<text x="{x + 18}" y="41">{engine}</text>')
    for percent in (0, 50, 100):
        y = bottom - height * percent / 100
        parts.append(f'<line x1="{CHART_LEFT}" x2="{CHART_WIDTH - 10}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text x="{CHART_LEFT - 8}" y="{y + 4:g}" text-anchor="end">{percent}</text>')
    for place, load in enumerate(loads):
        left = CHART_LEFT + group * place + (group - BAR_WIDTH * len(engines)) / 2
        for index, engine in enumerate(engines):
            ways = [_of(rows, load, name) for name in names if name.partition(",")[0] == engine]
            met = max(median(row["joint"] for row in way) for way in ways)
            x, top = left + BAR_WIDTH * index, bottom - height * met
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{BAR_WIDTH - 3}" height="{bottom - top:.1f}" '
                f'fill="{CHART_COLOURS[index]}"/>'
            )
            middle = x + (BAR_WIDTH - 3) / 2
            parts.append(f'<text class="small" x="{middle:.1f}" y="{top - 4:.1f}">{100 * met:.0f}</text>')
        kind, _, size = load.partition(" ")
        told = f"{size} at a time" if kind == "closed" else f"{size} x capacity"
        centre = CHART_LEFT + group * (place + 0.5)
        parts.append(f'<text x="{centre:.1f}" y="{bottom + 20}" text-anchor="middle">{told}</text>')
    machine = result["machine"].partition(", Linux")[0]
    about = f"{result['target']}; {machine}; each with or without its draft, whichever meets more"
    parts.append(f'<text x="{CHART_LEFT}" y="{CHART_HEIGHT - 6}">{about}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _of(rows: Sequence[dict[str, Any]], load: str, name: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["load"], row["server"]) == (load, name)]


def _figures(load: str, name: str, rounds: Sequence[dict[str, Any]]) -> str:
    def middle(field: str) -> float:
        return median(row[field] for row in rounds)

    def total(field: str) -> int:
        return sum(row[field] for row in rounds)

    return line(
        load, name, f"{middle('tokens_per_s'):.1f}", f"{middle('goodput'):.1f}", f"{middle('attained'):.2f}",
        f"{middle('joint'):.2f}", f"{middle('tpot_p50'):.1f} / {middle('tpot_p99'):.1f}",
        f"{middle('ttft_p50'):.0f} / {middle('ttft_p99'):.0f}", f"{total('failed')} of {total('requests')}",
    )  # fmt: skip


def _aims(rows: Sequence[dict[str, Any]], names: Sequence[str], loads: Sequence[str]) -> list[str]:
    """Return a line per aim: this package over the best way of a peer, round by round; of medians where it has none."""
    ours = next(name for name in names if name.startswith(OURS))
    peers = [name for name in names if name != ours]
    wanted = [
        ("closed 1", "tokens_per_s", FASTER.items()),
        ("closed 16", "goodput", MORE.items()),
        (loads[-1], "joint", [("", ATTAINED)]),
    ]
    lines: list[str] = []
    for load, field, aims in wanted:
        for peer, aim in aims:
            others = [name for name in peers if name.startswith(peer)]
            if not others:
                continue
            best = max(others, key=lambda name: median(row[field] for row in _of(rows, load, name)))
            own, other = ([row[field] for row in _of(rows, load, name)] for name in (ours, best))
            if min(other) > 0:
                ratio = paired_ratio(own, other)
                found, met = str(ratio), ratio.median >= aim
            else:
                found = f"the peer has none in {other.count(0)} of {len(other)} rounds"
                met = median(own) > 0 and median(own) >= aim * median(other)
                if median(other) > 0:
                    found = f"{median(own) / median(other):.2f} of the medians; {found}"
            what = {"tokens_per_s": "tokens/s", "joint": "TPOT and TTFT met"}.get(field, field)
            lines.append(line(load, what, best, f"{aim:g}", found, "met" if met else "**missed**"))
    return lines


def multi_slo_tables(folder: Path) -> list[str]:
    """Return the headline of the submissions in a folder, and what they were asked."""
    submissions = [read_submission(path) for path in sorted(folder.glob("*.json"))]
    if not submissions:
        return []
    headline = multi_slo_page(submissions).headline
    assert headline is not None
    (found,) = (item for item in headline.items if isinstance(item, Table))
    asked, system = submissions[0].definition, submissions[0].system
    commits = dict.fromkeys(short_commit(each.system.commit) for each in submissions)
    about = (
        f"Targets: {targets_text(asked.classes)}; one token alone takes {asked.baseline_ms:.3g} ms. Workload "
        f"{asked.workload}, at least {asked.duration_s:g} s for each load. {system.machine}. "
        f"Measured on commit {' and '.join(commits)}."
    )
    return [table(found.columns, found.rows), about]
