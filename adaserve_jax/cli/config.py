"""`adaserve config`: checks a configuration file, or prints one with every key."""

from __future__ import annotations

from typing import Annotated

import typer

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.policies import names_a_file, policy_of
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
    engine, server = file.engine, file.server
    if not names_a_file(engine.policy):
        try:
            policy_of(engine)
        except ConfigError as error:
            raise ConfigError(f"{check}: [engine] {error}") from error
    # with classes the default of slo_classes is gone, which the file does not write
    settings = sum(1 for name, value in file.values.items() if (name, value) != ("slo_classes", ()))
    counts = ((settings, "setting", "s"), (len(server.classes), "class", "es"), (len(server.keys), "key", "s"))
    named = ", ".join(f"{count} {noun}{'' if count == 1 else plural}" for count, noun, plural in counts)
    typer.echo(f"{check} is valid: {named}")
