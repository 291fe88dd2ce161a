"""Everything that users name stays: commands, options, configuration keys, routes, metrics, policies, request fields.

`python -m tests.test_public_surface` prints the names of today, to add new ones to public_surface.json.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from adaserve_jax.cli.app import app
from adaserve_jax.config import EngineConfig
from adaserve_jax.scheduler.policies import ABLATIONS, POLICIES
from adaserve_jax.server.app import create_app
from adaserve_jax.server.config_file import SECTIONS, TABLES
from adaserve_jax.server.responses_schema import ResponsesBody
from adaserve_jax.server.schema import ChatBody, CompletionBody
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.settings import options_of
from tests.conftest import ROOT
from tests.documents import names
from tests.server.scripted import ScriptedEngine

COMMITTED: dict[str, list[str]] = json.loads(Path(__file__).with_name("public_surface.json").read_text())
DOCUMENTS = ("http.md", "prometheus.md", "cluster.md")
"""Every metric has a row in one of these; tests of the server, the router and the draft service hold them to that."""


def options(group: Any, path: str = "adaserve") -> Iterator[str]:
    """Yield each command, each of its arguments, and each option with its default and environment variable."""
    for name, command in group.commands.items():
        yield f"{path} {name}"
        if hasattr(command, "commands"):
            yield from options(command, f"{path} {name}")
            continue
        for each in command.params:
            if each.param_type_name == "argument":
                yield f"{path} {name} {each.name.upper()}"
            for spelling in (*each.opts, *each.secondary_opts) if each.param_type_name == "option" else ():
                variable = "" if each.envvar is None else f" ({each.envvar})"
                yield f"{path} {name} {spelling} = {each.default!s}{variable}"


def routes(each: Iterable[Any]) -> Iterator[str]:
    """Yield "METHOD /path" of every route, also those that the OpenAPI document leaves out."""
    for route in each:
        inner = getattr(route, "original_router", route)  # FastAPI's wrapper of an included router
        if hasattr(inner, "routes"):
            yield from routes(inner.routes)
        else:
            yield from (f"{method} {route.path}" for method in route.methods or ())


@functools.cache
def public_surface() -> dict[str, list[str]]:
    """Return the sorted names of today by kind."""
    server = create_app(ScriptedEngine(EngineConfig()), None, ServerSettings(dashboard=True))
    kinds = SECTIONS | TABLES
    texts = {name: (ROOT / "docs" / name).read_text() for name in DOCUMENTS}
    found: dict[str, Iterable[str]] = {
        "commands and options": options(typer.main.get_command(app)),
        "configuration keys": (f"{name}.{key}" for name, kind in kinds.items() for key in options_of(kind)),
        "routes": [*routes(server.routes), *re.findall(r"`((?:GET |POST )?/cluster[/a-z]*)", texts["cluster.md"])],
        "metrics": (name for text in texts.values() for name in names(text) if name.startswith("adaserve_")),
        "policies": (*POLICIES, *ABLATIONS),
        "request fields": (*CompletionBody.model_fields, *ChatBody.model_fields, *ResponsesBody.model_fields),
    }
    return {kind: sorted(set(listed)) for kind, listed in found.items()}


@pytest.mark.parametrize("kind", COMMITTED)
def test_no_public_name_disappears(kind: str):
    assert sorted(set(COMMITTED[kind]) - set(public_surface()[kind])) == []


if __name__ == "__main__":
    print(json.dumps(public_surface(), indent=1))
