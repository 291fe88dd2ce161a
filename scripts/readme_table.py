"""Writes the measured table of README.md, between its bench markers, from committed results; no number is typed.

Each folder benchmarks/results/bench-* is that of one run of `adaserve bench`, whose report is in docs/results. Of its
rates every other one is shown, and it says so. Imports no jax.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from adaserve_jax.report.estimates import Estimates, cell, heading, percent
from adaserve_jax.report.measures import ATTAINMENT, GOODPUT, TPOT_P50, TTFT_P50, TTFT_P99
from adaserve_jax.report.points import Measured, PointGroup, measured
from adaserve_jax.results.bootstrap import ENOUGH_REPEATS
from adaserve_jax.results.run_folder import RunResults
from adaserve_jax.results.schema import ResultRow
from benchmarks.markdown import between, head, line, short_commit

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "README.md"
GROWN = "grown-"
SHOWN = (ATTAINMENT, GOODPUT, TTFT_P50, TTFT_P99, TPOT_P50)
PLAIN, OURS = "ar", "adaserve"


def grown(rows: list[ResultRow]) -> str:
    """Return the shell command that makes their target, if its name is that of a grown one; else nothing."""
    target = rows[0].target
    size = target.removeprefix(GROWN)
    return "" if size == target else f"`{shlex.join(['adaserve', 'grow', target, '--params', size])}` and "


def command(rows: list[ResultRow]) -> str:
    """Return the shell command whose rows these are."""
    first = rows[0]
    words = ["adaserve", "bench"]
    words += ["--policies", ",".join(dict.fromkeys(row.policy for row in rows))]
    words += ["--rates", ",".join(dict.fromkeys(f"{row.rate_rps:g}" for row in rows))]
    for option, folder in (("--target", first.target), ("--draft", first.draft)):
        words += [] if folder == "demo" else [option, folder or "none"]
    repeats = len({row.repeat for row in rows})
    words += ["--repeats", str(repeats)] if repeats > 1 else []
    words += ["--duration", f"{first.duration_s:g}", "--seed", str(first.seed), "--out", "results"]
    return shlex.join(words)


def conditions(rows: list[ResultRow]) -> str:
    """Return what was measured where, and what the intervals hold."""
    row = rows[0]
    repeats = len({each.repeat for each in rows})
    sizes = [
        f"{name} ({count / 1e6:.1f}M parameters)" if count else name
        for name, count in ((row.target, row.target_params), (row.draft or "none", row.draft_params))
    ]
    over = "requests" if repeats < ENOUGH_REPEATS else "whole repeats"
    return (
        f"Target {sizes[0]}, draft {sizes[1]}, workload {row.workload}, {row.arrival_process} arrivals for "
        f"{row.duration_s:g} s per row, jax {row.jax_version} on {row.device}: {row.machine}. One token alone takes "
        f"{row.baseline_s * 1e3:.1f} ms. 95% intervals in parentheses, over {over}"
        f" ({repeats} {'seed' if repeats == 1 else 'seeds'}). Commit {short_commit(row.commit)}."
    )


def table(name: str, found: Measured) -> str:
    """Return commands, conditions and one line per policy and rate (every other of many), in the order of policies.

    name: of the folder, and of its report.

    Raises ValueError for a point in which the client, not the engine, was measured.
    """
    rows = [point.row for point in found.points]
    for row in rows:
        if not row.valid:
            raise ValueError(f"{row.policy} at {row.rate_rps:g}/s is invalid ({row.invalid_reason}); measure again")
    shown = found.settings if len(found.settings) <= 3 else found.settings[::2]
    estimates = Estimates()
    lines = [head("policy", "requests/s", "requests", *map(heading, SHOWN))]
    for group in (group for setting in shown for group in found.groups_at(setting)):
        figures = [cell(measure, estimates.of(group, measure)) for measure in SHOWN]
        rate, size = f"{group.setting.rate_rps:g}", str(sum(group.columns.sizes))
        lines.append(line(f"`{group.policy}`", rate, size, *figures))
    which = "" if len(shown) == len(found.settings) else "Every second rate is shown; "
    report = f"[{'all of it' if which else 'All of it'}](docs/results/{name}.md), by class too."
    measured_with = f"Measured with {grown(rows)}`{command(rows)}`:"
    last = found.groups_at(found.settings[-1])
    return "\n".join(
        [measured_with, "", *lines, "", overload(last, estimates), "", f"{which}{report} {conditions(rows)}"]
    )


def overload(groups: list[PointGroup], estimates: Estimates) -> str:
    """Return what the highest rate costs whom, beside plain decoding."""
    plain, ours = (next(group for group in groups if group.policy == name) for name in (PLAIN, OURS))

    def seconds(group: PointGroup) -> str:
        half, late = (estimates.value(group, measure) or 0.0 for measure in (TTFT_P50, TTFT_P99))
        return f"{half:.1f} s at the median and {late:.1f} s at p99"

    met, plainly_met = (percent(estimates.value(group, ATTAINMENT)) for group in (ours, plain))
    return (
        f"**Overload costs those who wait.** At {ours.setting.rate_rps:g} requests/s no policy meets all targets of "
        f"all requests. `{OURS}` meets {met} where `{PLAIN}` meets {plainly_met}. It does so by letting other requests "
        f"wait: the first token takes {seconds(ours)}, against {seconds(plain)}. The bench lets requests wait without "
        "limit; a server refuses them after `--max-queue-wait`."
    )


def updated(page: str) -> str:
    """Return README.md with its tables made anew, one for each folder of results."""
    files = sorted((ROOT / "benchmarks" / "results").glob("bench-*/results.jsonl"))
    tables = [table(file.parent.name, measured([RunResults.load(file.parent)])) for file in files]
    return between(page, "bench", "\n".join(["", *tables, ""]), PAGE.name)


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    main()
