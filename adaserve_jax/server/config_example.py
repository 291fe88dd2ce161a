"""A configuration file with every key, made from the fields and their help texts. It parses, and sets nothing."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from adaserve_jax.config import FIELD_HELP as ENGINE_HELP
from adaserve_jax.drafter_config import FIELD_HELP as DRAFTER_HELP
from adaserve_jax.learn_config import OPTION_HELP as LEARN_HELP
from adaserve_jax.server.classes import CLASS_HELP
from adaserve_jax.server.config_file import NONE, SECTIONS, TABLES, fields_of
from adaserve_jax.server.keys import KEY_HELP
from adaserve_jax.server.settings import FIELD_HELP as SERVER_HELP

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
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _keys(kind: type, texts: Mapping[str, str], samples: Mapping[str, Any]) -> Iterator[str]:
    for name in fields_of(kind):
        value = samples.get(name, default_of(kind, name))
        assert value is not MISSING
        yield from textwrap.wrap(texts[name], WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield f"#{name} = {toml_value(value)}"
