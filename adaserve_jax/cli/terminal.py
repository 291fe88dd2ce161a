"""Opens the engine of this machine under a progress bar. Results go to stdout, everything else to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.types import Progress as ProgressCall

if TYPE_CHECKING:
    from adaserve_jax.bench.local_client import LocalBenchEngine
    from adaserve_jax.engine.llm import LLM


def notes() -> Console:
    """Where notes, bars and summaries go."""
    return Console(stderr=True)


def with_learning(config: EngineConfig, options: LearnOptions) -> EngineConfig:
    """`config` with what the options say of learning; says on stderr when they say something that has no effect.
    Raises ConfigError where nothing can learn."""
    _say_unused(options, "learn")
    return replace(config, learning=options.chosen())


def with_drafter(config: EngineConfig, options: DrafterOptions) -> EngineConfig:
    """`config` with what the options say of draft services; says on stderr when they say something that has no effect.
    Raises ConfigError where there can be none."""
    _say_unused(options, "drafter")
    return replace(config, drafter=options.chosen())


def _say_unused(options: LearnOptions | DrafterOptions, switch: str) -> None:
    for name in options.unused()[:1]:
        notes().print(f"--{name.replace('_', '-')} has no effect without --{switch}", style="dim", highlight=False)


def open_llm(config: EngineConfig) -> LLM:
    """A ready engine with the Python API; loading and compiling are shown. Imports jax."""
    with progress_bar() as progress:
        progress("loading", 0, 1)
        from adaserve_jax.engine.llm import LLM

        return LLM(**{field.name: getattr(config, field.name) for field in fields(config)}, progress=progress)


def open_bench_engine(config: EngineConfig, *, record: bool = False) -> LocalBenchEngine:
    """A ready engine to measure; loading and compiling are shown. record: whether it notes acceptance. Imports jax."""
    with progress_bar() as progress:
        progress("loading", 0, 1)
        from adaserve_jax.bench.local_client import LocalBenchEngine

        return LocalBenchEngine(config, progress, record=record)


@contextmanager
def progress_bar() -> Iterator[ProgressCall]:
    """Gives progress(what, done, total): one line per `what`, removed at the end; nothing unless on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = notes()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show
