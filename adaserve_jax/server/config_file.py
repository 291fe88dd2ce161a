"""The configuration file of `adaserve serve`: TOML, every key checked against the fields it sets.

Sections: [engine] (EngineConfig), [learn] (LearnOptions), [drafter] (DrafterOptions), [server] (ServerSettings),
[[classes]] (SloClass), [[keys]] (KeySettings). Imports nothing that only a running server needs, so that files can be
checked anywhere.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from adaserve_jax.config import FIELD_HELP as ENGINE_HELP
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import FIELD_HELP as DRAFTER_HELP
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import OPTION_HELP as LEARN_HELP
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.server.settings import CLASS_HELP, KEY_HELP, KeySettings, ServerSettings, SloClass
from adaserve_jax.server.settings import FIELD_HELP as SERVER_HELP

NONE = "none"
SECTIONS = {"engine": EngineConfig, "learn": LearnOptions, "drafter": DrafterOptions, "server": ServerSettings}
TABLES = {"classes": SloClass, "keys": KeySettings}
SECRETS = ("api_key", "key")
"""Keys whose values are in no message."""
_WORDS: dict[type, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a text", list: "a list",
}  # fmt: skip
_PLURALS = {int: "integers", str: "texts"}
T = TypeVar("T")


@dataclass(frozen=True)
class ConfigFile:
    """What a file says. engine: with what [learn] and [drafter] say. values: those that it gives fields of its
    sections, by name."""

    path: str
    engine: EngineConfig
    server: ServerSettings
    values: Mapping[str, Any]


def fields_of(kind: type) -> list[str]:
    """The keys of a section: the fields of `kind` but those that are tables of their own."""
    return [f.name for f in fields(kind) if not f.metadata.get("file_only")]


def type_words(hint: Any) -> str:
    """What a value must be, in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return f'{type_words(_inner(hint))} or "{NONE}"'
    if get_origin(hint) is tuple:
        return f"a list of {_PLURALS[get_args(hint)[0]]}"
    return _WORDS[hint]


def read_config(path: str) -> ConfigFile:
    """Read and check a file; it must be valid by itself. Raises ConfigError naming file, section and key."""
    document = _parse(path)
    for name in document:
        if name not in SECTIONS and name not in TABLES:
            known = [*SECTIONS, *TABLES]
            *written, last = [*(f"[{one}]" for one in SECTIONS), *(f"[[{one}]]" for one in TABLES)]
            raise ConfigError(
                f"{path}: expected the sections {', '.join(written)} and {last}, got {name!r}{_nearest(name, known)}"
            )
    values: dict[str, dict[str, Any]] = {}
    for name, kind in SECTIONS.items():
        table: object = document.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: expected a section [{name}], got {name} = {table!r}")
        values[name] = _checked(kind, cast("dict[str, Any]", table), f"{path}: [{name}]")
    tables = {name: _tables(path, name, kind, document.get(name, [])) for name, kind in TABLES.items()}
    if tables["classes"] and "slo_classes" not in values["server"]:
        values["server"]["slo_classes"] = ()
    learn = _build(LearnOptions, values["learn"], f"{path}: [learn]")
    drafter = _build(DrafterOptions, values["drafter"], f"{path}: [drafter]")
    beside = {"learning": learn.chosen(), "drafter": drafter.chosen()}
    engine = _build(EngineConfig, values["engine"] | beside, f"{path}: [engine]")
    server = _build(ServerSettings, values["server"] | tables, f"{path}: [server]")
    given = values["engine"] | values["learn"] | values["drafter"] | values["server"]
    return ConfigFile(path, engine, server, given)


def _parse(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected TOML in UTF-8, got other bytes at {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: expected TOML, got: {error}") from error


def _tables(path: str, name: str, kind: type[T], tables: object) -> tuple[T, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in cast("list[Any]", tables)):
        raise ConfigError(f"{path}: expected [[{name}]], once for each of them, got something else of that name")
    built: list[T] = []
    for number, table in enumerate(cast("list[dict[str, Any]]", tables), 1):
        where = f"{path}: [[{name}]] number {number}"
        values = _checked(kind, table, where)
        if "name" not in values:
            raise ConfigError(f"{where} must have a name")
        built.append(_build(kind, values, where))
    return tuple(built)


def _build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error


def _checked(kind: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a section as the fields take them. Raises ConfigError for unknown keys and wrong types."""
    hints, known = get_type_hints(kind), fields_of(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}{_elsewhere(key, kind) or _nearest(key, known)}")
        try:
            values[key] = _value(hints[key], value)
        except TypeError:
            shown = "" if key in SECRETS else f" {value!r}"
            raise ConfigError(f"{where} {key} must be {type_words(hints[key])}, got{shown} ({_word(value)})") from None
    return values


def _value(hint: Any, value: object) -> Any:
    """`value` as a field of type `hint` takes it. Raises TypeError."""
    if get_origin(hint) in (Union, types.UnionType):
        return None if value == NONE else _value(_inner(hint), value)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise TypeError
        return tuple(_value(get_args(hint)[0], one) for one in cast("list[object]", value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise TypeError
    return value


def _inner(hint: Any) -> Any:
    """X of X | None."""
    return next(one for one in get_args(hint) if one is not type(None))


def _word(value: object) -> str:
    return _WORDS.get(type(value), "a table" if isinstance(value, dict) else f"a {type(value).__name__}")


def _elsewhere(key: str, kind: type) -> str:
    if key in TABLES:
        return f"; write [[{key}]], once for each of them"
    for name, other in SECTIONS.items():
        if other is not kind and key in fields_of(other):
            return f"; it belongs to [{name}]"
    return ""


def _nearest(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


# A configuration file with every key, made from the fields and their help texts. It parses, and sets nothing.

HELP: dict[str, Mapping[str, str]] = {
    "engine": ENGINE_HELP, "learn": LEARN_HELP, "drafter": DRAFTER_HELP, "server": SERVER_HELP,
    "classes": CLASS_HELP, "keys": KEY_HELP,
}  # fmt: skip
"""The meaning of every key, by section."""
WIDTH = 100
_HEAD = """\
# Configuration of adaserve, printed by `adaserve config --example`: every key with its meaning and its default.
# Take the '#' from a line to set it. `adaserve config --check FILE` checks a file, `adaserve serve --config FILE`
# takes it; options on the command line and variables in the environment go before what stands here.
"""
_ABOUT = {
    "engine": "What the engine is built from.",
    "learn": "Whether and how drafts learn from what is served.",
    "drafter": "Which draft services draft, instead of a draft of this engine.",
    "server": "How the HTTP server behaves.",
    "classes": "A class of targets, once for each; with any, the default of slo_classes is gone.",
    "keys": "An API key, once for each; one of key, key_env and key_sha256 must be given.",
}
_SAMPLES = {"classes": {"name": "interactive", "tpot_ms": 50.0}, "keys": {"name": "team-a", "key_env": "TEAM_A_KEY"}}


def example() -> str:
    """The file."""
    parts = [_HEAD]
    for name, kind in SECTIONS.items():
        parts += ["", f"# {_ABOUT[name]}", f"[{name}]", *_keys(kind, HELP[name], {})]
    for name, kind in TABLES.items():
        parts += ["", f"# {_ABOUT[name]}", f"#[[{name}]]", *_keys(kind, HELP[name], _SAMPLES[name])]
    return "\n".join(parts) + "\n"


def default_of(kind: type, name: str) -> Any:
    """A field's default; MISSING where it has none."""
    return next(f.default for f in fields(kind) if f.name == name)


def toml_value(value: Any) -> str:
    """A value in TOML, which has no null: none is a text."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value)


def _keys(kind: type, texts: Mapping[str, str], samples: Mapping[str, Any]) -> Iterator[str]:
    for name in fields_of(kind):
        value = samples.get(name, default_of(kind, name))
        assert value is not MISSING
        yield from textwrap.wrap(texts[name], WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield f"#{name} = {toml_value(value)}"
