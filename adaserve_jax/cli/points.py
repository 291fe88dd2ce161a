"""How result rows reach the terminal: a note as each point ends, the table of all, and what is not in it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from adaserve_jax.bench.console import refused, result_table
from adaserve_jax.cli.terminal import notes
from adaserve_jax.results.run_folder import point_of
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow

TABLE_COLUMNS = 140


def print_rows(rows: Sequence[ResultRow]) -> None:
    """Valid rows to stdout; a pipe or a file gets the table's full width whatever the terminal. Points that are not
    valid are named on stderr."""
    console, table = Console(), result_table(rows)
    if not console.is_terminal:
        console = Console(width=max(console.width, TABLE_COLUMNS, console.measure(table).maximum))
    console.print(table)
    reasons = refused(rows)
    if reasons:
        points = len({(row.run_id, point_of(row)) for row in rows})
        told = f"not reported, because they were not measured as they must be: {len(reasons)} of {points} points"
        say(told, style="bold red")
        for reason in reasons:
            say(f"  {reason}", style="red")


def note_point(done: int, total: int, rows: Sequence[ResultRow]) -> None:
    """One line to stderr about the point that just ended."""
    say(point_line(done, total, rows))


def point_line(done: int, total: int, rows: Sequence[ResultRow]) -> str:
    """What came of a point."""
    row = next(row for row in rows if row.slo_class == ALL_CLASSES)
    if not row.valid:
        return f"{done}/{total} {point_of(row)}{_setting(row)}: INVALID: {row.invalid_reason}"
    met = "no targets" if row.attainment is None else f"{row.attainment:.1%} met"
    return (
        f"{done}/{total} {point_of(row)}{_setting(row)}: {row.requests} requests, {met}, "
        f"goodput {row.goodput_tps:.1f} of {row.throughput_tps:.1f} tokens/s"
    )


def say(text: str, style: str | None = None) -> None:
    """One line to stderr."""
    notes().print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def say_what_is_next(out: Path) -> None:
    """Where the rows are, and what makes a report of them."""
    folder = shlex.quote(str(out))
    say(f"rows, requests and samples in {out}; for a report: adaserve report {folder} -o report.html", style="dim")


def _setting(row: ResultRow) -> str:
    """What was chosen for this point."""
    if row.label is None:
        return ""
    return f" ({row.label}: {row.max_prefill_tokens} prefill, {row.max_requests} running)"
