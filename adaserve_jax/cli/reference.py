"""Writes docs/cli.md from the commands themselves: `python -m adaserve_jax.cli.reference > docs/cli.md`."""

from __future__ import annotations

from typing import Any

import typer

from adaserve_jax.cli.app import app
from adaserve_jax.cli.options import ENV_PREFIX, OWN, argument_name, by_panel, usage_of

HEAD = f"""# Command line

Made by `python -m adaserve_jax.cli.reference`; a test fails when it differs from the commands.

Lists are written with commas, and `none` stands for no value. Options of the engine and the server are also read from
the environment, as `{ENV_PREFIX}` and the option's name in capitals: `{ENV_PREFIX}API_KEY` for `--api-key`. A wrong
value, a missing file or a refused request prints one line on stderr and ends with status 2.
"""


def render() -> str:
    """The reference of every command and option, as Markdown."""
    group: Any = typer.main.get_command(app)
    return "\n".join([HEAD, *_commands(group)])


def _commands(group: Any, before: str = "") -> list[str]:
    """Of a group, in its order, and of the groups in it."""
    texts: list[str] = []
    for name, command in group.commands.items():
        whole = f"{before}{name}"
        texts += _commands(command, f"{whole} ") if hasattr(command, "commands") else [_command(whole, command)]
    return texts


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    lines = [f"## `{usage_of(f'adaserve {name}', command.params)}`", "", command.help.strip(), ""]
    if arguments:
        lines += _table("argument", [(f"`{argument_name(p)}`", p) for p in arguments])
    for panel, listed in by_panel(command.name, options).items():
        if panel != OWN:
            lines += [f"**{panel}**", ""]
        lines += _table("option", [(_names(p), p) for p in listed])
    return "\n".join(lines)


def _table(kind: str, rows: list[tuple[str, Any]]) -> list[str]:
    head = [f"| {kind} | default | meaning |", "|---|---|---|"]
    return [*head, *(f"| {name} | {_default(p)} | {_text(p)} |" for name, p in rows), ""]


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.default, bool):
        return "on" if parameter.default else "off"
    return "" if parameter.default in (None, "") else f"`{parameter.default}`"


def _text(parameter: Any) -> str:
    return parameter.help.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(render(), end="")
