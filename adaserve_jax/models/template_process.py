"""Renders one chat template from standard input under limits; a program of its own, run by `chat_prompt`.

Imports nothing of the package, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import sys
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """Renders what stands between the tags `generation` and `endgeneration`, by which trainers find answers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # as in transformers, what is set inside does not leave it


def confine(cpu_s: int, memory_bytes: int) -> None:
    """Limit this process for good: processor seconds, memory, and no file to write or open."""
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3),
    ):  # fmt: skip
        resource.setrlimit(what, (limit, limit))


def environment() -> ImmutableSandboxedEnvironment:
    """Return jinja's sandbox with the names, tags and white space that transformers gives templates.

    One template has run in it and failed: python and jinja import parts of themselves only then, which takes files.
    """
    extensions = [Generation, loopcontrols]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.filters["tojson"] = _to_json
    sandbox.globals.update(raise_exception=_fail, strftime_now=_now)
    with contextlib.suppress(TemplateError):
        sandbox.from_string("{{ lipsum(1) }}{{ strftime_now('%c') }}{{ raise_exception('a') }}").render()
    return sandbox


def render(sandbox: ImmutableSandboxedEnvironment, template: str, variables: dict[str, Any], most_chars: int) -> str:
    """Return the rendered text. Raises TemplateError: it is wrong or too long, and what else a template raises."""
    pieces, size = [], 0
    for piece in sandbox.from_string(template).generate(variables):
        size += len(piece)
        if size > most_chars:
            _fail(f"its text is longer than {most_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _fail(message: str) -> NoReturn:
    raise TemplateError(message)


def main() -> None:
    """Answer {"text"} or {"error"} on standard output."""
    task = json.load(sys.stdin)
    limits = task["limits"]
    sandbox = environment()
    confine(limits["cpu_s"], limits["memory_bytes"])
    try:
        answer = {"text": render(sandbox, task["template"], task["variables"], limits["chars"])}
    except Exception as error:
        answer = {"error": f"{error}"[:1000] or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
