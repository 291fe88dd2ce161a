"""An oracle for schemas with finitely many texts: all of them, spelled out. Shares no code with the engine.

The rule of white space: none, but for at most one space after a comma or colon.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

SEPARATORS = {",": (",", ", "), ":": (":", ": ")}


def all_texts(schema: dict[str, Any]) -> set[str]:
    """Every text that is JSON of the schema. Knows const, enum, anyOf, booleans, null, bounded integers, arrays and
    objects of such; properties come in their schema's order."""
    if "const" in schema:
        return spellings(schema["const"])
    if "enum" in schema:
        return set().union(*(spellings(value) for value in schema["enum"]))
    if "anyOf" in schema:
        return set().union(*(all_texts(option) for option in schema["anyOf"]))
    match schema["type"]:
        case "boolean":
            return {"true", "false"}
        case "null":
            return {"null"}
        case "integer":
            low, high = schema["minimum"], schema["maximum"]
            return {str(value) for value in range(low, high + 1)} | ({"-0"} if low < 0 <= high else set())
        case "array":
            items = all_texts(schema["items"])
            counts = range(schema.get("minItems", 0), schema["maxItems"] + 1)
            return set().union(*(joined("[", "]", parts) for n in counts for parts in product(items, repeat=n)))
        case "object":
            members = [
                [*pairs(name, part), *([] if name in schema.get("required", []) else [None])]
                for name, part in schema["properties"].items()
            ]
            return set().union(
                *(joined("{", "}", [pair for pair in chosen if pair is not None]) for chosen in product(*members))
            )
    raise ValueError(f"the oracle does not know {schema}")


def spellings(value: Any) -> set[str]:
    """Every text of one JSON value."""
    if isinstance(value, list):
        return set().union(*(joined("[", "]", parts) for parts in product(*map(spellings, value))))
    if isinstance(value, dict):
        members = [[f"{quoted(k)}{c}{v}" for c in SEPARATORS[":"] for v in spellings(p)] for k, p in value.items()]
        return set().union(*(joined("{", "}", parts) for parts in product(*members)))
    return {quoted(value)}


def quoted(value: Any) -> str:
    assert not any(ord(char) < 32 for char in str(value)), "control characters have several spellings"
    return json.dumps(value, ensure_ascii=False)


def pairs(name: str, schema: dict[str, Any]) -> list[str]:
    return [f"{quoted(name)}{colon}{text}" for colon in SEPARATORS[":"] for text in all_texts(schema)]


def joined(left: str, right: str, parts: Any) -> set[str]:
    """The parts between brackets, with every choice of separators."""
    parts = list(parts)
    if not parts:
        return {left + right}
    choices = product(SEPARATORS[","], repeat=len(parts) - 1)
    return {left + parts[0] + "".join(s + p for s, p in zip(c, parts[1:], strict=True)) + right for c in choices}
