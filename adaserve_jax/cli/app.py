"""The commands, and how errors reach the terminal: one line on stderr and exit status 2, no traceback."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

import adaserve_jax
from adaserve_jax.cli.bench import bench
from adaserve_jax.cli.cluster import cluster
from adaserve_jax.cli.config import config
from adaserve_jax.cli.convert import convert
from adaserve_jax.cli.distill import distill
from adaserve_jax.cli.draft import draft
from adaserve_jax.cli.follow import follow
from adaserve_jax.cli.generate import generate
from adaserve_jax.cli.grow import grow
from adaserve_jax.cli.options import CONTEXT, Command, Group
from adaserve_jax.cli.perplexity import perplexity
from adaserve_jax.cli.profile import profile
from adaserve_jax.cli.report import report
from adaserve_jax.cli.serve import serve
from adaserve_jax.cli.simulate import simulate
from adaserve_jax.errors import ERROR_PREFIX, AdaServeError
from adaserve_jax.logs import log_to_stderr

ERROR_STATUS = 2
UsageError: Any = typer.BadParameter.__base__  # typer has a click of its own or imports the package, by its version

app = typer.Typer(
    name="adaserve",
    cls=Group,
    help="An LLM serving engine on JAX in which every request carries its own speed target.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,  # Python's own traceback names the failing line last, in a tenth of the lines
)


def show_version() -> None:
    """Print the versions of this package, Python and jax."""
    try:
        jax = version("jax")
    except PackageNotFoundError:
        jax = "not installed"
    typer.echo(f"adaserve-jax {adaserve_jax.__version__}, Python {platform.python_version()}, jax {jax}")


def _exit_with_version(wanted: bool) -> None:
    if wanted:
        show_version()
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="print the versions and exit", is_eager=True, callback=_exit_with_version)
]


@app.callback()
def _options(version: VersionOption = False) -> None:
    """Take the options that stand before a command."""


COMMANDS = {
    "Serve": (serve, generate, config),
    "Measure": (bench, report, simulate, profile, perplexity),
    "Make models": (distill, convert, grow),
    "Several processes": (draft, follow),
}
for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        app.command(cls=Command, rich_help_panel=_panel, context_settings=CONTEXT)(_command)
app.add_typer(cluster, rich_help_panel="Several processes")
app.command("version", cls=Command, rich_help_panel="Other")(show_version)


def main() -> None:
    """Run the command line; exits the process."""
    log_to_stderr()
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="adaserve", standalone_mode=False)
    except AdaServeError as error:
        status = _fail(str(error))
    except UsageError as error:
        path = error.ctx.command_path if error.ctx else "adaserve"
        status = _fail(f"{_variable_of(error)}{error.format_message().rstrip('.')}; see '{path} --help'")
    sys.exit(status)


def _variable_of(error: Any) -> str:
    """Return the environment variable that a wrong value came from, as the beginning of a message, or ""."""
    option = getattr(error, "param", None)
    if option is None or error.ctx is None:
        return ""
    source = error.ctx.get_parameter_source(option.name)
    return f"{option.envvar} in the environment: " if source is not None and source.name == "ENVIRONMENT" else ""


def _fail(message: str) -> int:
    print(f"{ERROR_PREFIX}{' '.join(message.split())}", file=sys.stderr)
    return ERROR_STATUS
