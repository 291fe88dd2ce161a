"""Settings: frozen dataclasses whose fields declare type, default, bounds, help and panel once.

Command line options (`cli/options.py`), the configuration file (`server/config_file.py`) and the reference pages
(`scripts/reference_docs.py`) are derived from `settings_of`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from adaserve_jax.errors import ConfigError

T = TypeVar("T")
BOUNDS = ("ge", "gt", "le", "lt")
_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Dtype = Literal["auto", "f32", "bf16"]


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_TAKES_PATHS = BeforeValidator(_as_text)
PathText = Annotated[str, _TAKES_PATHS]
"""A path, kept as text; `pathlib.Path` is taken too."""


class Panel(StrEnum):
    """Headings of options in `--help` and docs/cli.md, in the order in which they are shown."""

    OWN = "Options"
    URL = "A server that runs already"
    MODELS = "Models"
    POLICY = "Policy and speculation"
    ADDRESS = "Address, keys and TLS"
    TARGETS = "Speed targets of requests"
    SIZE = "Size"
    LIMITS = "Limits of the server"
    MONITORING = "Monitoring"
    FAILURES = "Failures and shutdown"
    DEVICES = "Devices and compilation"
    DRAFTERS = "Draft services"
    LEARNING = "Learning"


def setting(
    default: Any, help: str, panel: Panel | None = None, *, expected: str = "", unit: str = "",
    secret: bool = False, ge: float | None = None, gt: float | None = None, le: float | None = None,
    lt: float | None = None,
) -> Any:  # fmt: skip
    """Declare a field of a class of settings; a tuple may be given as a list.

    Args:
        default: `...` for a field that must be given.
        help: the meaning, for `--help`, the example file and the reference pages.
        panel: heading in `--help`; left out: the class's `PANEL`.
        expected: the words after "must be" in an error; derived from type and bounds where left out.
        unit: plural noun of a number, for these words.
        secret: keep the value out of messages and of `repr`.
        ge, gt, le, lt: bounds of a number.
    """
    said = {"panel": panel, "expected": expected, "unit": unit, "secret": secret}
    return Field(
        default, description=help, repr=not secret, strict=False if isinstance(default, tuple) else None,
        json_schema_extra=cast("Any", said), ge=ge, gt=gt, le=le, lt=lt,
    )  # fmt: skip


@dataclass_transform(frozen_default=True)
def settings(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass that checks its fields by pydantic, strictly, and raises ConfigError.

    Rules over several fields belong into its `__post_init__`, which runs after the fields were checked.
    """
    built = cast("Any", pydantic.dataclasses.dataclass(frozen=True, config=_CONFIG)(kind))
    check = built.__init__

    @wraps(check)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        try:
            check(self, *args, **given)
        except ValidationError as error:
            names = [field.name for field in fields(built)]
            raise _config_error(built, error, dict(zip(names, args, strict=False)) | given) from None

    built.__init__ = __init__
    return built


class Settings:
    """Base of classes of settings. PANEL: heading of the fields that name none."""

    PANEL: ClassVar[Panel] = Panel.OWN

    def changed(self) -> list[str]:
        """Return the names of the fields that differ from their defaults."""
        return [each.name for each in settings_of(type(self)) if getattr(self, each.name) != each.default]

    def narrowed(self, kind: type[T]) -> T:
        """Return the settings of a base class of this one, with the values of its fields."""
        return kind(**{each.name: getattr(self, each.name) for each in fields(cast("Any", kind))})

    def _require(self, ok: bool, name: str, expected: str) -> None:
        """Raise ConfigError naming a field and its value unless `ok`."""
        if not ok:
            raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Setting:
    """One declared field of a class of settings.

    type: without `None`, which `optional` says. default: `...` for a field that must be given. expected: the words
    after "must be" in an error. tables: the class of settings that the field holds, one or several, else None; only
    a configuration file can give it, as tables.
    """

    name: str
    type: Any
    optional: bool
    default: Any
    help: str
    panel: Panel
    expected: str
    secret: bool
    tables: type[Settings] | None


@cache
def settings_of(kind: type[Settings]) -> tuple[Setting, ...]:
    """Return the declared fields of a class of settings, in order."""
    found: list[Setting] = []
    for name, info in cast("Any", kind).__pydantic_fields__.items():
        said: dict[str, Any] = info.json_schema_extra
        hint, optional = _without_none(info.annotation)
        path, hint = get_origin(hint) is Annotated or _TAKES_PATHS in info.metadata, _plain(hint)
        bounds = {each: getattr(one, each) for one in info.metadata for each in BOUNDS if hasattr(one, each)}
        found.append(
            Setting(
                name=name,
                type=hint,
                optional=optional,
                default=... if info.is_required() else info.default,
                help=info.description,
                panel=said["panel"] or kind.PANEL,
                expected=said["expected"] or ("a path" if path else _expected(hint, bounds, said["unit"])),
                secret=said["secret"],
                tables=next((each for each in (hint, *get_args(hint)) if _is_settings(each)), None),
            )
        )
    return tuple(found)


def options_of(kind: type[Settings]) -> dict[str, Setting]:
    """Return the fields that are no tables, by name: keys of a section, options of a command."""
    return {each.name: each for each in settings_of(kind) if each.tables is None}


def _is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return X, and whether None is allowed, of X or X | None."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (inner,) = (each for each in get_args(hint) if each is not NoneType)
    return inner, True


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _expected(hint: Any, bounds: Mapping[str, float], unit: str) -> str:
    """Return what a value must be, in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        return f"a list of {'integers' if get_args(hint)[0] is int else 'texts'}"
    if _is_settings(hint):
        return f"a {hint.__name__}"
    if hint in (bool, str):
        return "true or false" if hint is bool else "a text"
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    noun = "an integer" if hint is int else "a finite number" if high is None else "a number"
    noun += f" of {unit}" * bool(unit)
    if low is not None and high is not None and ("gt" in bounds) == ("lt" in bounds):
        return f"{noun} between {low:g} and {high:g}" if "gt" in bounds else f"{noun} from {low} to {high}"
    above = {"ge": ">= {:g}", "gt": "above {:g}", "le": "up to {:g}", "lt": "below {:g}"}
    return " ".join([noun, " and ".join(above[name].format(bound) for name, bound in bounds.items())]).strip()


def _config_error(kind: type, error: ValidationError, given: Mapping[str, Any]) -> ConfigError:
    """Return the first error that pydantic found, in our words."""
    by_name = {each.name: each for each in settings_of(kind)}
    unknown = sorted(set(given) - set(by_name))
    if unknown:
        near = get_close_matches(unknown[0], by_name, 1)
        meant = f", did you mean {near[0]}" if near else ""
        return ConfigError(f"unknown option {unknown[0]!r}{meant}; known options are {', '.join(sorted(by_name))}")
    place = error.errors(include_url=False)[0]["loc"][0]
    name = place if isinstance(place, str) else list(by_name)[place]
    if name not in given:
        return ConfigError(f"{name} must be given")
    shown = "" if by_name[name].secret else f", got {given[name]!r}"
    return ConfigError(f"{name} must be {by_name[name].expected}{shown}")


def check_tls(tls_cert: str | None, tls_key: str | None, tls_client_ca: str | None) -> None:
    """Raise ConfigError unless certificate and key come together, and an authority for clients only beside them."""
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("tls_cert and tls_key must be given together, got one of them")
    if tls_client_ca is not None and tls_cert is None:
        raise ConfigError("tls_client_ca needs tls_cert and tls_key, got neither")
