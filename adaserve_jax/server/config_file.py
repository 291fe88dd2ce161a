"""The configuration file of `adaserve serve`: TOML, every key checked against the fields it sets.

Sections: [engine] (EngineConfig), [learn] (LearnOptions), [drafter] (DrafterOptions), [server] (ServerSettings),
[[classes]] (SloClass), [[keys]] (KeySettings). Imports nothing that only a running server needs, so that files can be
checked anywhere.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.server.settings import KeySettings, ServerSettings, SloClass
from adaserve_jax.settings import Settings, options_of

NONE = "none"
SECTIONS: dict[str, type[Settings]] = {
    "engine": EngineConfig, "learn": LearnOptions, "drafter": DrafterOptions, "server": ServerSettings,
}  # fmt: skip
TABLES: dict[str, type[Settings]] = {"classes": SloClass, "keys": KeySettings}
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
T = TypeVar("T", bound=Settings)


@dataclass(frozen=True)
class ConfigFile:
    """A file that was read. engine: with [learn] and [drafter] in it. values: those that its sections set, by name."""

    path: str
    engine: EngineConfig
    server: ServerSettings
    values: Mapping[str, Any]


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
        values[name] = _values(kind, cast("dict[str, Any]", table), f"{path}: [{name}]")
    classes = _tables(path, "classes", SloClass, document.get("classes", []))
    keys = _tables(path, "keys", KeySettings, document.get("keys", []))
    if classes and "slo_classes" not in values["server"]:
        values["server"]["slo_classes"] = ()
    learn = _build(LearnOptions, values["learn"], f"{path}: [learn]")
    drafter = _build(DrafterOptions, values["drafter"], f"{path}: [drafter]")
    beside = {"learning": learn.chosen(), "drafter": drafter.chosen()}
    engine = _build(EngineConfig, values["engine"] | beside, f"{path}: [engine]")
    server = _build(ServerSettings, values["server"] | {"classes": classes, "keys": keys}, f"{path}: [server]")
    built = {"engine": engine, "learn": learn, "drafter": drafter, "server": server}
    given = {key: getattr(built[name], key) for name, table in values.items() for key in table}
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
        built.append(_build(kind, _values(kind, table, where), where))
    return tuple(built)


def _build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error


def _values(kind: type[Settings], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a section with "none" as None where a field may be. Raises ConfigError for unknown keys."""
    known = options_of(kind)
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}{_elsewhere(key, kind) or _nearest(key, list(known))}")
        parts = cast("list[Any]", value) if isinstance(value, list) else []
        if any("," in str(part) for part in parts):  # as an option it would be split there
            raise ConfigError(f"{where} {key}: no value may have a comma, got {value!r}")
    return {key: None if known[key].optional and value == NONE else value for key, value in table.items()}


def _elsewhere(key: str, kind: type[Settings]) -> str:
    if key in TABLES:
        return f"; write [[{key}]], once for each of them"
    for name, other in SECTIONS.items():
        if other is not kind and key in options_of(other):
            return f"; it belongs to [{name}]"
    return ""


def _nearest(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def example() -> str:
    """Return a file with every key, its meaning and its default as comments; it parses and sets nothing."""
    parts = [_HEAD]
    for name, kind in SECTIONS.items():
        parts += ["", f"# {_ABOUT[name]}", f"[{name}]", *_keys(kind, {})]
    for name, kind in TABLES.items():
        parts += ["", f"# {_ABOUT[name]}", f"#[[{name}]]", *_keys(kind, _SAMPLES[name])]
    return "\n".join(parts) + "\n"


def toml_value(value: Any) -> str:
    """Return a value in TOML, which has no null: None becomes the text "none"."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value)


def _keys(kind: type[Settings], samples: Mapping[str, Any]) -> Iterator[str]:
    for name, each in options_of(kind).items():
        yield from textwrap.wrap(each.help, WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield f"#{name} = {toml_value(samples.get(name, each.default))}"
