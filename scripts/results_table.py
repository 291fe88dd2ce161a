"""Writes the measured tables of docs/results.md, between its markers, from committed results; no number is typed.

benchmarks/results/throughput-*.json: each one run of benchmarks/throughput.py. Imports no jax.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from adaserve_jax.results.throughput import REFERENCE, ThroughputRow, aims, read_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- throughput -->", "<!-- /throughput -->"
FIGURES = (
    f"| requests at once | temperature | system | decode, tokens/s | times `{REFERENCE}` | whole call, tokens/s "
    f"| times `{REFERENCE}` | tokens per step | draft nodes accepted | texts that differ |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
STEPS = (
    "| requests at once | temperature | policy | share of steps that draft | depth | width | tree tokens per row "
    "| ms per step | draft | verify | decide |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
AIMS = "| requests at once | temperature | adaserve against | by | aim | found | |\n|---|---|---|---|---|---|---|"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def point(row: ThroughputRow) -> tuple[str, str, str]:
    return str(row.requests), f"{row.temperature:g}", f"`{row.system}`"


def figures_line(row: ThroughputRow, reference: ThroughputRow | None) -> str:
    decode, whole = ("-" if ratio is None else str(ratio) for ratio in row.times(reference))
    return line(
        *point(row),
        number(None if row.decode_tps is None else median(row.decode_tps), 1),
        decode,
        number(median(row.whole_tps), 1),
        whole,
        number(row.tokens_per_step),
        number(row.acceptance_rate),
        f"{row.differing} of {row.sequences}" if row.sequences else "-",
    )


def steps_line(row: ThroughputRow) -> str:
    shape = (row.drafting_share, row.depth, row.width, row.tree_tokens)
    times = (row.step_ms, row.draft_ms, row.verify_ms, row.deciding_ms)
    return line(*point(row), *(number(value) for value in (*shape, *times)))


def command(rows: Sequence[ThroughputRow]) -> str:
    """The shell command whose rows these are."""
    first = rows[0]
    systems = dict.fromkeys(row.system for row in rows)
    words = ["python", "benchmarks/throughput.py", "--out", "throughput.json"]
    words += ["--requests", ",".join(dict.fromkeys(str(row.requests) for row in rows))]
    words += ["--temperatures", ",".join(dict.fromkeys(f"{row.temperature:g}" for row in rows))]
    words += ["--policies", ",".join(name for name in systems if not name.startswith("transformers"))]
    words += ["--repeats", str(first.repeats), "--new-tokens", str(first.new_tokens)]
    words += ["--settle-tokens", str(first.settle_tokens), "--seed", str(first.seed)]
    words += [] if first.slo_scale is None else ["--slo-scale", f"{first.slo_scale:g}"]
    words += [] if any(name.startswith("transformers") for name in systems) else ["--skip-transformers"]
    return shlex.join(words)


def conditions(row: ThroughputRow) -> str:
    """What was measured where."""
    sizes = [
        f"{name} ({count / 1e6:.1f}M parameters)" if count else name
        for name, count in ((row.target, row.target_params), (row.draft, row.draft_params))
    ]
    slo = "no target" if row.slo_scale is None else f"a TPOT target of {row.slo_scale:g} times the baseline"
    return (
        f"Target {sizes[0]}, draft {sizes[1]}, {row.dtype}; prompts of {row.min_prompt_tokens} to "
        f"{row.max_prompt_tokens} tokens of {row.prompts}, {row.new_tokens} new tokens each, {slo}; medians of "
        f"{row.repeats} rounds, in brackets the 95 % bootstrap interval. jax {row.jax_version} on {row.device}, torch "
        f"{row.torch_version}, transformers {row.transformers_version}, {row.threads} threads: {row.machine}. "
        f"Commit {row.commit[:12]}."
    )


def tables(rows: Sequence[ThroughputRow]) -> str:
    """Command, conditions, figures, aims and steps of one run."""
    references = {(row.requests, row.temperature): row for row in rows if row.system == REFERENCE}
    figures = [figures_line(row, references.get((row.requests, row.temperature))) for row in rows]
    judged = [
        line(
            str(aim.requests), f"{aim.temperature:g}", f"`{aim.against}`", f"{aim.measure} tokens/s",
            f"{aim.wanted:g}", str(aim.found), "met" if aim.met else "**missed**",
        )
        for aim in aims(rows)
    ]  # fmt: skip
    steps = [steps_line(row) for row in rows if row.steps]
    parts = [f"Measured with `{command(rows)}`:", "\n".join([FIGURES, *figures]), conditions(rows[0])]
    parts += ["Aims, and what was found:", "\n".join([AIMS, *judged])] if judged else []
    parts += ["What the engine's steps were:", "\n".join([STEPS, *steps])]
    return "\n\n".join(parts)


def with_tables(page: str, results: Sequence[Sequence[ThroughputRow]]) -> str:
    """`page` with what stands between the markers replaced. Raises ValueError when a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} must hold {BEGIN} and {END}, in this order")
    shown = [tables(rows) for rows in results] or ["No run is committed."]
    return "\n\n".join([f"{before}{BEGIN}", *shown, f"{END}{after}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    arguments = parser.parse_args()
    files = sorted((ROOT / "benchmarks" / "results").glob("throughput-*.json"))
    old = PAGE.read_text()
    new = with_tables(old, [read_rows(file) for file in files])
    if arguments.check:
        if new != old:
            print(f"{PAGE.name} does not show benchmarks/results; run `make docs`", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
