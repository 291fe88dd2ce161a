"""Makes command line options from the fields of a frozen dataclass, so that each option has one source of truth."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from adaserve_jax.errors import ConfigError

NONE = "none"
ENV_PREFIX = "ADASERVE_"


def takes(
    parameter: str, kind: type, help_texts: Mapping[str, str], *, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of `kind`; the command gets the built `kind` as `parameter`.

    Tuples are written with commas; "none" stands for None. An option that is absent is read from the environment as
    ADASERVE_<FIELD>, so that a secret need not stand on the command line, then from the file of `config_option`.
    without: fields left at their defaults, as those are that only a file can give.
    """
    types_by_name = get_type_hints(kind)
    taken = [f for f in fields(kind) if f.name not in without and not f.metadata.get("file_only")]
    names = {f.name for f in taken}
    options = [_option(f.name, types_by_name[f.name], f.default, as_options(help_texts[f.name], names)) for f in taken]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in names & given.keys()}
            built = kind(**{name: _parse(name, types_by_name[name], value) for name, value in values.items()})
            command(**given, **{parameter: built})

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p for p in own if p.name != parameter]
        run.__signature__ = inspect.Signature([*kept, *options])  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {}
        return run

    return decorate


def as_options(text: str, names: Collection[str]) -> str:
    """A help text in which fields that are meant are spelled as the options that they are here."""
    return re.sub(r"\b[a-z]\w*_\w+", lambda m: _spelled(m[0]) if m[0] in names else m[0], text)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option_value(value: Any) -> Any:
    """A field's value as its option takes it: what `takes` reads back."""
    if value is None:
        return NONE
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else value


def _option(name: str, hint: Any, default: Any, help_text: str) -> inspect.Parameter:
    if default is MISSING:
        raise TypeError(f"field {name} has no default, so that it cannot become an option")
    annotation = str if _is_optional(hint) or get_origin(hint) is tuple else hint
    info = typer.Option(help=help_text, envvar=f"{ENV_PREFIX}{name.upper()}", show_envvar=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option_value(default), annotation=Annotated[annotation, info]
    )


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def _parse(name: str, hint: Any, value: Any) -> Any:
    if _is_optional(hint):
        return None if value == NONE else value
    if get_origin(hint) is tuple:
        return comma_list(name, value, get_args(hint)[0])
    return value


def comma_list(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Parts of a comma-separated text, each read by `kind`. Raises ConfigError naming the option and the part."""
    parsed = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            parsed.append(kind(part))
        except ValueError as error:
            raise ConfigError(
                f"{_spelled(name)} must be a comma-separated list of {kind.__name__} values, got {part!r}"
            ) from error
    return tuple(parsed)


def grouped(parameter: str, kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a frozen dataclass whose fields are annotated with them; the command gets the built
    `kind` as `parameter`."""
    hints = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            built = kind(**{option.name: given.pop(option.name) for option in options if option.name in given})
            command(**given, **{parameter: built})

        kept = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != parameter]
        run.__signature__ = inspect.Signature([*kept, *options])  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {}
        return run

    return decorate
