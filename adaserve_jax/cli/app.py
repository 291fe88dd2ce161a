"""The commands, and how errors reach the terminal: one line on stderr and exit status 2, no traceback."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import typer

import adaserve_jax
from adaserve_jax.cli.bench import bench
from adaserve_jax.cli.convert import convert
from adaserve_jax.cli.generate import generate
from adaserve_jax.cli.grow import grow
from adaserve_jax.cli.serve import serve
from adaserve_jax.errors import AdaServeError

ERROR_STATUS = 2

app = typer.Typer(
    name="adaserve",
    help="An LLM serving engine on JAX in which every request carries its own speed target.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def show_version() -> None:
    """Say the versions of this package, Python and jax."""
    typer.echo(f"adaserve-jax {adaserve_jax.__version__}, Python {platform.python_version()}, jax {_jax_version()}")


def _jax_version() -> str:
    try:
        return version("jax")
    except PackageNotFoundError:
        return "not installed"


app.command()(serve)
app.command()(generate)
app.command()(bench)
app.command()(grow)
app.command()(convert)
app.command("version")(show_version)


def main() -> None:
    """Run the command line; exits the process."""
    try:
        app()
    except AdaServeError as error:
        print(f"adaserve: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(ERROR_STATUS)
