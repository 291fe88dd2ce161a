"""Makes command line options from settings, and prints `--help` with the options under their panels."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from adaserve_jax.errors import ConfigError
from adaserve_jax.settings import Panel, Setting, Settings, options_of
from adaserve_jax.workloads.readers import FORMATS
from adaserve_jax.workloads.workload import EXAMPLE

NONE = "none"
ENV_PREFIX = "ADASERVE_"
CONTEXT = {"max_content_width": 120}
"""Help fits the terminal, up to this many characters."""
FROM_ENVIRONMENT = (
    f"Options are also read from the environment, as {ENV_PREFIX} and the name in capitals: {ENV_PREFIX}POLICY for "
    "--policy. Lists are written with commas; none stands for no value."
)
TRACE = "trace"
FormatOption = Annotated[
    str, typer.Option(help=f"format of the files: {', '.join(FORMATS)}; auto: found out from what they hold")
]
ByClassOption = Annotated[
    bool, typer.Option("--by-class", help="show each SLO class in the table, which is then 110 columns wide")
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        help="shorten requests of traces without text: scale=0.05,output=64,context=512, what prompts are multiplied "
        "by, most output tokens, most of both"
    ),
]
SlosOption = Annotated[
    str | None,
    typer.Option(
        help=f"targets by class, ms: {EXAMPLE}; *: requests without a target whose class is not named; CLASS:none: no "
        "target. What --slo-classes of adaserve serve writes chat=50:500 is chat:tpot=50,ttft=500 here"
    ),
]


def takes(
    parameter: str, kind: type[Settings], *, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of `kind`; the command gets the built `kind` as `parameter`.

    Tuples are written with commas; "none" stands for None. An option that is absent is read from the environment as
    ADASERVE_<FIELD>, so that a secret need not stand on the command line, then from the file of `--config`.
    without: fields left at their defaults, like those that only a configuration file can give.
    """
    taken = {name: each for name, each in options_of(kind).items() if name not in without}
    options = [_option(each, taken) for each in taken.values()]
    return _adding(parameter, options, lambda given: kind(**{name: _parse(taken[name], given[name]) for name in given}))


def grouped(parameter: str, kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options with which the fields of a dataclass are annotated; it gets the built `kind`."""
    hints = get_type_hints(kind, include_extras=True)
    options = [_parameter(each.name, each.default, hints[each.name]) for each in fields(kind)]
    return _adding(parameter, options, lambda given: kind(**given))


def _adding(
    parameter: str, options: list[inspect.Parameter], build: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds options to a command and gives it what `build` makes of them as `parameter`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            values = {option.name: given.pop(option.name) for option in options if option.name in given}
            command(**given, **{parameter: build(values)})

        kept = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != parameter]
        run.__signature__ = inspect.Signature([*kept, *options])  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {}
        return run

    return decorate


LIST_METAVAR = "A,B,..."
"""Stands for the value of an option that is a list; such an option is given once."""
LONGEST_METAVAR = 50
"""Choices that take more characters stand in the help text, which is wrapped."""


def _option(setting: Setting, taken: Collection[str]) -> inspect.Parameter:
    if setting.default is ...:
        raise TypeError(f"field {setting.name} has no default, so that it cannot become an option")
    choices = get_args(setting.type) if get_origin(setting.type) is Literal else ()
    told, metavar = as_options(setting.help, taken), "|".join(map(str, choices)) or None
    if metavar is not None and len(metavar) > LONGEST_METAVAR:
        told, metavar = f"{told}; one of {', '.join(map(str, choices))}", "NAME"
    is_list = get_origin(setting.type) is tuple
    if is_list:
        metavar = LIST_METAVAR
    info = typer.Option(
        help=told, envvar=f"{ENV_PREFIX}{setting.name.upper()}", show_envvar=False, rich_help_panel=setting.panel,
        metavar=metavar,
    )  # fmt: skip
    kind = type(choices[0]) if choices else setting.type
    plain = str if setting.optional or is_list else kind
    return _parameter(setting.name, option_value(setting.default), Annotated[plain, info])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def as_options(text: str, names: Collection[str]) -> str:
    """Return a help text in which the fields among `names` are spelled as options."""
    return re.sub(r"\b[a-z]\w*_\w+", lambda m: _spelled(m[0]) if m[0] in names else m[0], text)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option_value(value: Any) -> Any:
    """Return a field's value as its option takes it, which is what `takes` reads back."""
    if value is None:
        return NONE
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else value


def _parse(setting: Setting, value: Any) -> Any:
    if setting.optional and value == NONE:
        return None
    if get_origin(setting.type) is tuple:
        return comma_list(setting.name, value, get_args(setting.type)[0])
    return value


def comma_list(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Return the parts of a comma-separated text, each read by `kind`. Raises ConfigError naming option and part."""
    parsed = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            parsed.append(kind(part))
        except ValueError as error:
            raise ConfigError(
                f"{_spelled(name)} must be a comma-separated list of {kind.__name__} values, got {part!r}"
            ) from error
    return tuple(parsed)


def numbers_above_0(name: str, text: str, *, or_trace: bool = False) -> tuple[Any, ...]:
    """Return the comma-separated numbers of an option, None for "trace" where that may be. Raises ConfigError."""

    def parse(part: str) -> float | None:
        if or_trace and part == TRACE:
            return None
        number = parse_number(part)
        if not 0 < number < math.inf:
            known = "numbers above 0 or 'trace'" if or_trace else "numbers above 0"
            raise ConfigError(f"{_spelled(name)} must be {known}, separated by commas, got {part!r}")
        return number

    return comma_list(name, text, parse)


def parse_number(text: str) -> float:
    """Return the number that a text spells; NaN, which no bound allows, for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_text(path: Path, what: str) -> str:
    """Return the text of a file that an option names. Raises ConfigError; what: the option's word for it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}; give the path of a file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} must be UTF-8, but byte {error.start} is not") from None


def by_panel(entries: Iterable[Any]) -> dict[str, list[Any]]:
    """Return options or commands by their `rich_help_panel`, each in the order given; options in that of `Panel`."""
    found: dict[str, list[Any]] = {}
    for entry in entries:
        found.setdefault(str(getattr(entry, "rich_help_panel", None) or Panel.OWN), []).append(entry)
    panels = [str(panel) for panel in Panel]
    return dict(sorted(found.items(), key=lambda item: panels.index(item[0]) if item[0] in panels else -1))


class Command(TyperCommand):
    """A command that shows its options under their panels.

    Typer's own page with panels gives names, negations and types a column each; at 80 characters it cuts long names
    in two and leaves 18 characters for the text. Its plain page has two columns, but no panels.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises ConfigError for a list that is given twice, of which the last would be kept."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for option, times in Counter(given).items():
            if times > 1 and option.metavar == LIST_METAVAR:
                raise ConfigError(f"{_spelled(option.name)} was given {times} times; give it once, with commas between")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options of each panel."""
        shown = [each for each in self.get_params(ctx) if each.get_help_record(ctx)]
        for panel, listed in by_panel(shown).items():
            with formatter.section(panel):
                formatter.write_dl([each.get_help_record(ctx) for each in listed])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Say where else options are read from."""
        if any(getattr(each, "envvar", None) for each in self.params):
            formatter.write_paragraph()
            formatter.write_text(FROM_ENVIRONMENT)


class Group(TyperGroup):
    """A group that shows its commands under their panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each panel."""
        for panel, listed in by_panel(self.commands.values()).items():
            with formatter.section(panel if panel != Panel.OWN else "Commands"):
                formatter.write_dl([(each.name, each.get_short_help_str(limit=400)) for each in listed])
