"""How the benchmarks run as programs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from adaserve_jax.errors import AdaServeError
from adaserve_jax.results.provenance import source_commit


def is_clean(commit: str) -> bool:
    """Return whether a commit names its source: any two edits of one have the same name, so no result is kept of it."""
    return not commit.endswith("-dirty")


def run(main: Callable[..., Any]) -> None:
    """Run a function by its annotated options, or an app of several; end with status 1 and an error's one line."""
    source_commit()  # remembered: of the source that runs, not of what is checked out when the results are written
    try:
        main() if isinstance(main, typer.Typer) else typer.run(main)
    except AdaServeError as error:
        sys.exit(f"error: {error}")


def with_options(command: str, *options: tuple[str, object, object]) -> str:
    """Return the command with the options (name, value, default) whose value is not the default."""
    return " ".join([command, *(f"--{name} {value}" for name, value, default in options if value != default)])
