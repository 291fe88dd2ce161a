"""Terminal output of the commands: results go to stdout; notes, bars and summaries go to stderr."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from adaserve_jax.bench.console import refused, result_table
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import SAMPLES, point_of
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.types import Progress as ProgressCall

if TYPE_CHECKING:
    from adaserve_jax.bench.local_client import LocalBenchEngine
    from adaserve_jax.engine.llm import LLM

INTERRUPTED_STATUS = 130
"""Exit status of a run that Ctrl-C ended."""
MOST_COLUMNS = 1000
SERVER_PACKAGES: dict[str, str] = dict.fromkeys(
    ("fastapi", "starlette", "uvicorn", "msgspec", "zmq", "prometheus_client"), "server"
)
"""Packages of the extra `server`, for `needs`."""


def notes() -> Console:
    """Return the console of stderr."""
    return Console(stderr=True)


def say(text: str, style: str | None = None) -> None:
    """Print one line to stderr."""
    notes().print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def number_table(headers: Sequence[str], *, texts: int = 1, title: str | None = None) -> Table:
    """Return a table whose first columns hold so many texts; the others, of numbers, are right-aligned."""
    table = Table(title=title, title_justify="left")
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < texts else "right")
    return table


def table_console(*tables: Table) -> Console:
    """Return the console of stdout; into a pipe or file it is as wide as the widest of `tables`."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    unbounded = console.options.update(max_width=MOST_COLUMNS)
    needed = max((console.measure(table, options=unbounded).maximum for table in tables), default=0)
    return Console(width=max(console.width, needed), highlight=False)


def with_options(config: EngineConfig, learn: LearnOptions, drafter: DrafterOptions) -> EngineConfig:
    """Return `config` with the options of learning and of draft services; note on stderr an option without effect.

    Raises ConfigError where nothing can learn, or there can be no draft services.
    """
    for switch, options in (("learn", learn), ("drafter", drafter)):
        for name in options.unused()[:1]:
            say(f"--{name.replace('_', '-')} has no effect without --{switch}", style="dim")
    return replace(config, learning=learn.chosen(), drafter=drafter.chosen())


@contextmanager
def needs(what: str, extras: Mapping[str, str]) -> Iterator[None]:
    """Raise ConfigError with what to install where the body imports a package that is missing.

    extras: this package's extra by the package that it brings; another missing package is a bug, raised as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extras.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise ConfigError(
            f"{what} needs the package {error.name!r}, which is not installed; run: pip install 'adaserve-jax[{extra}]'"
        ) from error


def resume_command(given: Sequence[str]) -> str:
    """Return the command line that goes on with a run; given: the arguments of the one that began it."""
    return shlex.join(["adaserve", *(text for text in given if text != "--resume"), "--resume"])


def check_writable(path: Path | None, option: str) -> None:
    """Raise ConfigError before hours of work if their result cannot be written to the file of an option."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"cannot write {path}: expected a file in a folder that is there; choose another {option}")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result of a command to a file, and say so."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    say(f"result in {path}", style="dim")


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


def print_rows(
    rows: Sequence[ResultRow], *, by_class: bool = False, records: Sequence[RequestRecord] = ()
) -> None:  # fmt: skip
    """Print valid rows to stdout, into a pipe at full width whatever the terminal; name invalid points on stderr.
    records: as for `result_table`."""
    table = result_table(rows, by_class=by_class, records=records)
    table_console(table).print(table)
    reasons = refused(rows)
    if reasons:
        points = len({(row.run_id, point_of(row)) for row in rows})
        told = f"not reported, because they were not measured as they must be: {len(reasons)} of {points} points"
        say(told, style="bold red")
        for reason in reasons:
            say(f"  {reason}", style="red")


def point_line(done: int, total: int, rows: Sequence[ResultRow]) -> str:
    """Return one line with the result of a point, and with the settings that were chosen for it."""
    row = next(row for row in rows if row.slo_class == ALL_CLASSES)
    tuned = f"{row.label}: {row.max_prefill_tokens} prefill tokens, {row.max_requests} requests a step"
    head = f"{done}/{total} {point_of(row)}{f' ({tuned})' if row.label else ''}"
    if not row.valid:
        return f"{head}: INVALID: {row.invalid_reason}"
    met = "no targets" if row.attainment is None else f"{row.attainment:.1%} met"
    goodput = f"goodput {row.goodput_tps:.1f} of {row.throughput_tps:.1f} tokens/s"
    return f"{head}: {row.requests} requests, {met}, {goodput}"


def say_next_step(out: Path) -> None:
    """Name what the folder holds and the command that makes a report of it."""
    folder = shlex.quote(str(out))
    held = "rows, requests and samples" if (out / SAMPLES).exists() else "rows and requests"
    say(f"{held} in {out}; for a report: adaserve report {folder} -o report.html", style="dim")
