"""Terminal output of the commands: results go to stdout; notes, bars and summaries go to stderr."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from adaserve_jax.bench.console import refused, result_table
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.results.run_folder import point_of
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.types import Progress as ProgressCall

if TYPE_CHECKING:
    from adaserve_jax.bench.local_client import LocalBenchEngine
    from adaserve_jax.engine.llm import LLM

TABLE_COLUMNS = 140


def notes() -> Console:
    """Return the console of stderr."""
    return Console(stderr=True)


def say(text: str, style: str | None = None) -> None:
    """Print one line to stderr."""
    notes().print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def table_console(least_width: int) -> Console:
    """Return the console of stdout; into a pipe or file it has at least `least_width` columns, so tables stay whole."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, least_width))


def with_learning(config: EngineConfig, options: LearnOptions) -> EngineConfig:
    """Return `config` with the options of learning; note on stderr an option without effect.

    Raises ConfigError where nothing can learn.
    """
    _say_unused(options, "learn")
    return replace(config, learning=options.chosen())


def with_drafter(config: EngineConfig, options: DrafterOptions) -> EngineConfig:
    """Return `config` with the options of draft services; note on stderr an option without effect.

    Raises ConfigError where there can be none.
    """
    _say_unused(options, "drafter")
    return replace(config, drafter=options.chosen())


def _say_unused(options: LearnOptions | DrafterOptions, switch: str) -> None:
    for name in options.unused()[:1]:
        say(f"--{name.replace('_', '-')} has no effect without --{switch}", style="dim")


def open_llm(config: EngineConfig) -> LLM:
    """Return a ready engine with the Python API; show loading and compiling. Imports jax."""
    with progress_bar() as progress:
        progress("loading", 0, 1)
        from adaserve_jax.engine.llm import LLM

        return LLM(**{field.name: getattr(config, field.name) for field in fields(config)}, progress=progress)


def open_bench_engine(config: EngineConfig, *, record: bool = False) -> LocalBenchEngine:
    """Return a ready engine to measure; show loading and compiling. record: keep acceptance. Imports jax."""
    with progress_bar() as progress:
        progress("loading", 0, 1)
        from adaserve_jax.bench.local_client import LocalBenchEngine

        return LocalBenchEngine(config, progress, record=record)


@contextmanager
def progress_bar() -> Iterator[ProgressCall]:
    """Give progress(what, done, total): one line per `what`, removed at the end; nothing unless on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = notes()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show


def print_rows(rows: Sequence[ResultRow]) -> None:
    """Print valid rows to stdout, into a pipe at full width whatever the terminal; name invalid points on stderr."""
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


def point_line(done: int, total: int, rows: Sequence[ResultRow]) -> str:
    """Return one line with the result of a point."""
    row = next(row for row in rows if row.slo_class == ALL_CLASSES)
    if not row.valid:
        return f"{done}/{total} {point_of(row)}{_tuned(row)}: INVALID: {row.invalid_reason}"
    met = "no targets" if row.attainment is None else f"{row.attainment:.1%} met"
    return (
        f"{done}/{total} {point_of(row)}{_tuned(row)}: {row.requests} requests, {met}, "
        f"goodput {row.goodput_tps:.1f} of {row.throughput_tps:.1f} tokens/s"
    )


def say_next_step(out: Path) -> None:
    """Name the folder of the rows and the command that makes a report of them."""
    folder = shlex.quote(str(out))
    say(f"rows, requests and samples in {out}; for a report: adaserve report {folder} -o report.html", style="dim")


def _tuned(row: ResultRow) -> str:
    """Return the settings that were chosen for this point, "" for none."""
    if row.label is None:
        return ""
    return f" ({row.label}: {row.max_prefill_tokens} prefill, {row.max_requests} running)"
