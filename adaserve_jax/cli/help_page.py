"""What `--help` prints: two columns under headings, narrow enough for 80 characters, and the same for any typer.

Typer's own page gives names, negations and types a column each, which leaves 20 of 80 characters to the meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from adaserve_jax.cli.options import ENV_PREFIX
from adaserve_jax.cli.panels import COMMANDS, by_panel

NAMES_WIDTH = 32
MOST_WIDTH = 120
WORDS = {"text": "TEXT", "integer": "N", "float": "X", "path": "PATH", "str": "TEXT", "int": "N"}
FROM_ENVIRONMENT = (
    f"Options are also read from the environment, as {ENV_PREFIX} and the name in capitals: {ENV_PREFIX}POLICY for "
    "--policy. Lists are written with commas; none stands for no value."
)


class Command(TyperCommand):
    """A command whose help is such a page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page; the formatter stays empty."""
        shown: list[Any] = self.params
        arguments = [p for p in shown if p.param_type_name == "argument"]
        options = [p for p in self.get_params(ctx) if p.param_type_name == "option"]
        console = _console()
        _head(console, usage_of(ctx.command_path, shown), self.help)
        _rows(console, "Arguments", ((argument_name(p), help_of(p)) for p in arguments))
        for panel, listed in by_panel(self.name or "", options).items():
            _rows(console, panel, ((option_name(p), help_of(p)) for p in listed))
        if any(getattr(p, "envvar", None) for p in options):
            console.print(FROM_ENVIRONMENT, style="dim")


class Group(TyperGroup):
    """A group whose help is such a page, with the first sentence of each command's."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page; the formatter stays empty."""
        console = _console()
        _head(console, f"{ctx.command_path} COMMAND [OPTIONS]", self.help)
        left = dict(self.commands)
        for panel, names in COMMANDS.items():
            _rows(console, panel, ((name, _first_sentence(left.pop(name))) for name in names if name in left))
        _rows(console, "Commands", ((name, _first_sentence(command)) for name, command in left.items()))
        console.print(f"Options of a command: {ctx.command_path} COMMAND --help", style="dim")


def usage_of(path: str, params: Iterable[Any]) -> str:
    """How a command is written: `adaserve generate PROMPT [OPTIONS]`."""
    listed = list(params)
    names = [argument_name(p) for p in listed if p.param_type_name == "argument"]
    needed = [f"{p.opts[0]} {_kind(p)}" for p in listed if p.param_type_name == "option" and p.required]
    return " ".join([path, *names, *needed, "[OPTIONS]"])


def argument_name(argument: Any) -> str:
    """PROMPT, or [TRACES]... where it may be left out and come several times."""
    name = argument.name.upper()
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def option_name(option: Any) -> str:
    """--port N, --[no-]calibrate, -o, --out PATH."""
    names = sorted(option.opts, key=len)
    if option.is_flag:
        negated = f"--no-{names[-1].removeprefix('--')}"
        return ", ".join([*names[:-1], f"--[no-]{names[-1][2:]}" if negated in option.secondary_opts else names[-1]])
    return f"{', '.join(names)} {_kind(option)}{'...' if option.multiple else ''}"


def help_of(parameter: Any) -> str:
    """Its meaning, then its default, or that it must be given."""
    default = parameter.default
    if parameter.required:
        return f"{parameter.help} [required]"
    if isinstance(default, bool):
        return f"{parameter.help} [default: on]" if default else parameter.help
    return parameter.help if default in (None, "", "none", ()) else f"{parameter.help} [default: {default}]"


def _kind(option: Any) -> str:
    """What an option takes; typer describes types itself since it has no click, and by click's before."""
    described: Any = getattr(option, "type_descriptor", None)
    kind = option.type if described is None else described
    if getattr(kind, "choices", None):
        return "|".join(str(getattr(choice, "value", choice)) for choice in kind.choices)
    name = str(kind.name if described is None else option.bare_type()).removeprefix("list[").rstrip("]")
    return WORDS.get(name.lower(), name.upper())


def _first_sentence(command: Any) -> str:
    text = " ".join((command.help or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _console() -> Console:
    console = Console(highlight=False)
    console.width = min(console.width, MOST_WIDTH)
    return console


def _head(console: Console, usage: str, text: str | None) -> None:
    console.print(Text.assemble(("Usage: ", "bold"), usage))
    paragraphs = [" ".join(each.split()) for each in (text or "").strip().split("\n\n")]
    for paragraph in paragraphs:
        console.print(Padding(Text(paragraph), (1, 2, 0, 2)))
    console.print()


def _rows(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    listed = list(rows)
    if not listed:
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    table.add_column(width=min(NAMES_WIDTH, max(len(name) for name, _ in listed)), overflow="fold")
    table.add_column(ratio=1)
    for name, text in listed:
        table.add_row(Text(name, style="cyan"), Text(text))
    console.print(Text(title, style="bold"))
    console.print(Padding(table, (0, 0, 1, 2)))
