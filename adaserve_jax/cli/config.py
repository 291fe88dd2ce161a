"""`adaserve config`: checks a configuration file, or prints one with every key."""

from __future__ import annotations

from typing import Annotated

import typer

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.config_file import example, read_config


def config(
    check: Annotated[
        str | None, typer.Option(help="file to check; nothing is loaded and no secret is looked up")
    ] = None,
    show_example: Annotated[
        bool, typer.Option("--example", help="print a file with every key, its meaning and its default")
    ] = False,
) -> None:
    """Check a configuration file of `adaserve serve`, or print an example of one."""
    if (check is None) == (not show_example):
        raise ConfigError("one of --check FILE and --example must be given")
    if check is None:
        typer.echo(example(), nl=False)
        return
    file = read_config(check)
    server = file.server
    typer.echo(f"{check} is valid: {len(file.values)} settings, {len(server.classes)} classes, {len(server.keys)} keys")
