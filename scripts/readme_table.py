"""Writes the measured table of README.md, between its bench markers, from committed results; no number is typed.

Each folder benchmarks/results/bench-* is that of one run of `adaserve bench`, whose report is in docs/results. Of its
rates every other one is shown, and it says so. Imports no jax.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from adaserve_jax.results.jsonl import read_rows
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow

ROOT = Path(__file__).resolve().parent.parent
GROWN = "grown-"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
HEADER = (
    "| policy | requests/s | attainment (TPOT and TTFT) | TPOT only | goodput, tokens/s | throughput, tokens/s "
    "| accepted per verification | TPOT p50 / p99, ms |\n|---|---|---|---|---|---|---|---|"
)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def number(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def grown(rows: list[ResultRow]) -> str:
    """The shell command that makes their target, where it is called as one that was grown; else nothing."""
    target = rows[0].target
    size = target.removeprefix(GROWN)
    return "" if size == target else f"`{shlex.join(['adaserve', 'grow', target, '--params', size])}` and "


def command(rows: list[ResultRow]) -> str:
    """The shell command whose rows these are."""
    first = rows[0]
    words = ["adaserve", "bench"]
    words += ["--policies", ",".join(dict.fromkeys(row.policy for row in rows))]
    words += ["--rates", ",".join(dict.fromkeys(f"{row.rate_rps:g}" for row in rows))]
    for option, folder in (("--target", first.target), ("--draft", first.draft)):
        words += [] if folder == "demo" else [option, folder or "none"]
    words += ["--duration", f"{first.duration_s:g}", "--seed", str(first.seed), "--out", "results"]
    return shlex.join(words)


def conditions(row: ResultRow) -> str:
    """What was measured where, in one sentence."""
    sizes = [
        f"{name} ({count / 1e6:.1f}M parameters)" if count else name
        for name, count in ((row.target, row.target_params), (row.draft or "none", row.draft_params))
    ]
    return (
        f"Target {sizes[0]}, draft {sizes[1]}, workload {row.workload}, {row.arrival_process} arrivals for "
        f"{row.duration_s:g} s per row, jax {row.jax_version} on {row.device}: {row.machine}. One token alone takes "
        f"{row.baseline_s * 1e3:.1f} ms. Commit {row.commit[:12]}."
    )


def table(name: str, rows: list[ResultRow]) -> str:
    """Commands, conditions and one line per policy and every other rate, by rate and in the order of the command's
    policies; rows of single SLO classes are left out. name: of the folder, and of its report.

    Raises ValueError for a row in which the client, not the engine, was measured.
    """
    rows = [row for row in rows if row.slo_class == ALL_CLASSES]
    for row in rows:
        if not row.valid:
            raise ValueError(f"{row.policy} at {row.rate_rps:g}/s is invalid ({row.invalid_reason}); measure again")
    rates = sorted({row.rate_rps for row in rows})
    shown = rates[::2]
    policies = list(dict.fromkeys(row.policy for row in rows))
    lines = [
        f"| `{row.policy}` | {row.rate_rps:g} | {percent(row.attainment)} | {percent(row.attainment_tpot)} "
        f"| {number(row.goodput_tps)} | {number(row.throughput_tps)} | {number(row.mean_accepted, 2)} "
        f"| {number(row.tpot_p50_s, scale=1e3)} / {number(row.tpot_p99_s, scale=1e3)} |"
        for row in sorted(rows, key=lambda row: (row.rate_rps, policies.index(row.policy)))
        if row.rate_rps in shown
    ]
    which = "" if len(shown) == len(rates) else "Every second rate is shown; "
    report = f"[{'all of it' if which else 'All of it'}](docs/results/{name}.md), with intervals and by class."
    head = f"Measured with {grown(rows)}`{command(rows)}`:"
    return "\n".join([head, "", HEADER, *lines, "", f"{which}{report} {conditions(rows[0])}"])


def with_tables(readme: str, results: dict[str, list[ResultRow]]) -> str:
    """`readme` with what stands between the markers replaced. results: rows by the folder's name.

    Raises ValueError when a marker is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must hold {BEGIN} and {END}, in this order")
    return "\n".join([f"{before}{BEGIN}", *(table(name, rows) for name, rows in results.items()), f"{END}{after}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when README.md is out of date")
    arguments = parser.parse_args()
    path = ROOT / "README.md"
    files = sorted((ROOT / "benchmarks" / "results").glob("bench-*/results.jsonl"))
    old = path.read_text()
    new = with_tables(old, {file.parent.name: read_rows(file, ResultRow) for file in files})
    if arguments.check:
        if new != old:
            print("README.md does not show benchmarks/results; run `make docs`", file=sys.stderr)
        return int(new != old)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
