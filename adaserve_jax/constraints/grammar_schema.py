"""JSON schemas of requests: read, bounded and refused by name. Knows neither tokens nor matchers. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from adaserve_jax.errors import RequestError
from adaserve_jax.sampling import MAX_SCHEMA_CHARS

MAX_NESTING = 64
"""Objects and arrays inside each other in a schema's own text."""
MAX_LEVELS = 4096
"""Such levels if every definition that is referred to stood inside the one before: what is read in one descent."""
MAX_MESSAGE_CHARS = 500
OPTIONS_KEY = "x-guidance"
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
"""How llguidance writes JSON. At most one space, and only after a comma or colon: a model that likes white space could
otherwise go on with it for ever."""


def refuse(why: str) -> NoReturn:
    """Raise RequestError: the schema cannot be used, and why."""
    why = why.removesuffix("<non-verbose/>").strip()
    shown = why if len(why) <= MAX_MESSAGE_CHARS else why[:MAX_MESSAGE_CHARS] + "..."
    raise RequestError(
        f"response_format must hold a JSON schema that can be enforced: {shown}",
        param="response_format",
        code="invalid_schema",
    )


def read_schema(text: str) -> dict[str, Any]:
    """The schema of a text, with the options under which it is enforced.

    Raises RequestError: the text is too long, no JSON, no object, nested too deeply, or sets options itself.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        refuse(f"at most {MAX_SCHEMA_CHARS} characters, got {len(text)}")
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        refuse(f"at most {MAX_NESTING} objects and arrays inside each other, got far more")
    except ValueError as error:
        refuse(f"it is not JSON: {error}")
    if not isinstance(schema, dict):
        refuse(f'expected an object such as {{"type": "object"}}, got {text[:40]}')
    if OPTIONS_KEY in schema:
        refuse(f"{OPTIONS_KEY!r} is no keyword of JSON Schema; leave it out")
    if (depth := sum(1 for _ in _levels(schema))) > MAX_NESTING:
        refuse(f"at most {MAX_NESTING} objects and arrays inside each other, got {depth}")
    references = _references(schema)
    if (levels := depth * (1 + len(references))) > MAX_LEVELS:
        refuse(
            f"at most {MAX_LEVELS} levels, of nesting times definitions referred to, got {levels}: "
            f"{len(references)} different $ref in {depth} levels"
        )
    return {**schema, OPTIONS_KEY: OPTIONS}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _levels(schema: Any) -> Iterator[list[dict[str, Any] | list[Any]]]:
    """The objects and arrays of a schema, level by level."""
    level = [schema]
    while holders := [part for part in level if isinstance(part, (dict, list))]:
        yield holders
        level = [child for part in holders for child in (part.values() if isinstance(part, dict) else part)]


def _references(schema: dict[str, Any]) -> set[str]:
    found = (part.get("$ref") for level in _levels(schema) for part in level if isinstance(part, dict))
    return {reference for reference in found if isinstance(reference, str)}
