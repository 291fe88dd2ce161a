"""How result rows reach the terminal: a note as each point ends, and the table of all."""

from __future__ import annotations

from rich.console import Console

from adaserve_jax.bench.console import result_table
from adaserve_jax.cli.terminal import notes
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow

TABLE_COLUMNS = 140


def print_rows(rows: list[ResultRow]) -> None:
    """To stdout; a pipe or a file gets the table's full width whatever the terminal."""
    console, table = Console(), result_table(rows)
    if not console.is_terminal:
        console = Console(width=max(console.width, TABLE_COLUMNS, console.measure(table).maximum))
    console.print(table)


def note_point(done: int, total: int, rows: list[ResultRow]) -> None:
    """One line to stderr about the point that just ended."""
    row = next(row for row in rows if row.slo_class == ALL_CLASSES)
    met = "no targets" if row.attainment is None else f"{row.attainment:.1%} met"
    invalid = "" if row.valid else f", INVALID: {row.invalid_reason}"
    notes().print(
        f"{done}/{total} {row.policy}{_setting(row)} at {row.rate_rps:.3g}/s: {row.requests} requests, {met}, "
        f"goodput {row.goodput_tps:.1f} of {row.throughput_tps:.1f} tokens/s{invalid}",
        highlight=False,
        soft_wrap=True,
    )


def _setting(row: ResultRow) -> str:
    """What is not the same for all rows of a run, where it is not the usual."""
    parts = [] if row.label is None else [f"{row.label}: {row.max_prefill_tokens} prefill, {row.max_requests} running"]
    parts += [] if row.replicas == 1 else [f"{row.replicas} replicas"]
    return f" ({', '.join(parts)})" if parts else ""
