"""Schemas that are made to take long, or much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Definitions of which each is `link` of a reference to the next, begun at the first."""
    parts = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": {"type": "object", "properties": {"x": {}}}}}


def nested(depth: int, schema: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        schema = {"items": schema}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "nested": nested(60, {"type": "integer"}),
    "many words": {"enum": [f"w{i * 7919}" for i in range(5000)]},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
    "its own reference": {"$ref": "#"},
    "both its own": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "either its own": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "in circles": chain(2, lambda ref: {"$ref": ref})
    | {"$defs": {"d0": {"$ref": "#/$defs/d1"}, "d1": {"$ref": "#/$defs/d0"}}},
    "long chain": chain(1400, lambda ref: {"$ref": ref}),
    "long chain of both": chain(400, lambda ref: {"$ref": ref, "type": "object", "properties": {"y": {}}}),
    "deep definitions": chain(100, lambda ref: nested(55, {"$ref": ref})),
    "definitions deep enough to read": chain(40, lambda ref: nested(25, {"$ref": ref})),
    "doubling all": chain(40, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]}),
    "doubling any": chain(40, lambda ref: {"anyOf": [{"$ref": ref}, {"$ref": ref}]}),
    "doubling objects": chain(
        40, lambda ref: {"properties": {"a": {"$ref": ref}, "b": {"$ref": ref}}, "type": "object"}
    ),
    "alternatives of alternatives": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(8)]} for i in range(8)]
    },
    "many items": {"type": "array", "items": {"type": "object"}, "minItems": 10**9},
    "long string": {"type": "string", "minLength": 10**9},
    "most of a string": {"type": "string", "maxLength": 10**9},
    "pattern that looks back": {"type": "string", "pattern": "^.*a.{60}$"},
    "pattern of ambiguity": {"type": "string", "pattern": "^(((a*)*)*)*(a|a|aa)*b$"},
    "pattern of choices": {"type": "string", "pattern": "^(a?){200}a{200}$"},
    "pattern of counts": {"type": "string", "pattern": "^((a{1,1000}){1,1000}b){1,1000}$"},
    "pattern of words": {"type": "string", "pattern": "^(" + "|".join(f"[a-z]*x{i}[0-9]*" for i in range(600)) + ")*$"},
    "patterns at once": {"allOf": [{"type": "string", "pattern": f"a.*{chr(98 + i)}.{{{i}}}"} for i in range(20)]},
    "patterns that join": {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]},
    "patterns of one name": {
        "allOf": [{"properties": {"x": {"type": "string", "pattern": f"a.{{{i}}}b"}}} for i in range(30)]
    },
    "patterns by references": {
        "$ref": "#/$defs/0",
        "$defs": {"30": {"type": "string"}}
        | {str(i): {"$ref": f"#/$defs/{i + 1}", "pattern": f"a.{{{i}}}b"} for i in range(30)},
    },
    "patterns of many names by references": {
        "allOf": [{"$ref": f"#/properties/x{i}"} for i in range(30)],
        "properties": {f"x{i}": {"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)},
    },
    "patterns of items": {
        "type": "array",
        "allOf": [{"items": {"type": "string", "pattern": f"a.{{{i}}}b"}} for i in range(30)],
    },
    "pattern of classes without an end": {"type": "string", "pattern": "[" * 60_000 + "\\"},
    "fine steps": {"type": "number", "multipleOf": 1e-30, "minimum": 0.1, "maximum": 1e30},
    "coarse steps": {"type": "integer", "multipleOf": 99999999999999989},
    "steps at once": {"allOf": [{"type": "integer", "multipleOf": p} for p in (997, 991, 983, 977, 971, 967)]},
    "huge number": {"const": 10**4000},
    "a hundred choices": {"type": "array", "prefixItems": [{"anyOf": [{"type": "string"}, {"type": "array"}]}] * 900},
}
