"""Schemas, texts under them, and masks as sets of ids, for tests of grammars."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import numpy as np
import pytest

from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.errors import RequestError
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.sampling import GrammarKind, ToolCalls

V, EOS = 2048, 0
OBJECT = {"type": "object"}
FINITE: dict[str, dict[str, Any]] = {
    "constant": {"const": {"name": ["Ada", 1.5, None, True], "über": "€😀 \\"}},
    "words": {"enum": ["yes", "no", "not yet", "nothing", ""]},
    "range": {"type": "integer", "minimum": -12, "maximum": 123},
    "object": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Romeo", "Oslo"]},
            "ok": {"type": "boolean"},
            "level": {"type": "integer", "minimum": 8, "maximum": 11},
        },
        "required": ["city", "ok"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": [0, 10, "a", None]}, "minItems": 1, "maxItems": 3},
    "either": {
        "anyOf": [
            {"type": "null"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            {"type": "object", "properties": {"x": {"const": 1}}, "additionalProperties": False},
        ]
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]},
    },
    "required": ["name", "age", "score", "code", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "tag": {"enum": ["red", "green"]},
        "link": {
            "type": "object",
            "properties": {"deep": {"anyOf": [{"$ref": "#/$defs/link"}, {"const": 7}]}},
            "required": ["deep"],
            "additionalProperties": False,
        },
    },
}


class Writer:
    """One text under a grammar, its masks as sets of ids."""

    def __init__(
        self, grammars: Grammars, schema: dict[str, Any] | ToolCalls, *, name: str = "writer", vocab_size: int = V
    ):
        self.grammars, self.name = grammars, name
        self.vocab_size = vocab_size
        self.why: str | None = None
        tools = isinstance(schema, ToolCalls)
        prepared = grammars.prepare(schema, "tool_calls") if tools else grammars.prepare(json.dumps(schema))
        grammars.add(name, prepared.result())

    def masks(self, tokens: list[int], parents: list[int]) -> np.ndarray:
        masks = np.full((len(tokens), -(-self.vocab_size // 32)), 0xAAAAAAAA, np.uint32)
        self.why = self.grammars.fill(self.name, np.asarray(tokens, np.int32), np.asarray(parents, np.int32), masks)
        return masks

    def allowed(self) -> set[int]:
        return ids_of(self.masks([5], [-1])[0])


def ids_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def write(writer: Writer, tokenizer: Tokenizer, rng: np.random.Generator, most: int = 600) -> str:
    """A text of random allowed tokens; half of the time one that closes something, where there is one."""
    closers = {i for i, token in tokenizer.token_of().items() if token[0] in '"}]'} | {EOS}
    ids: list[int] = []
    for _ in range(most):
        allowed = writer.allowed()
        closing = allowed & closers
        token = int(rng.choice(sorted(closing if closing and rng.random() < 0.5 else allowed)))
        writer.grammars.advance(writer.name, [token])
        if token == EOS:
            return tokenizer.decode(ids)
        ids.append(token)
    pytest.fail(f"no end after {most} tokens: {tokenizer.decode(ids)}")


def fits(writer: Writer, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the whole text may be written, by whatever tokens."""
    left = text.encode()
    while left:
        spelled = {token: tokenizer.spelled(token) for token in writer.allowed() if tokenizer.has_text(token)}
        fitting = [token for token, piece in spelled.items() if left.startswith(piece)]
        if not fitting:
            return False
        token = max(fitting, key=lambda one: len(spelled[one]))
        writer.grammars.advance(writer.name, [token])
        left = left[len(spelled[token]) :]
    return EOS in writer.allowed()


def assert_person(value: Any) -> None:
    assert list(value) == ["name", "age", "score", "code", "tags", "next"]
    assert isinstance(value["name"], str) and 1 <= len(value["name"]) <= 12
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    assert isinstance(value["score"], (int, float)) and 0 <= value["score"] <= 1
    assert re.fullmatch(r"[A-Z]{2}-[0-9]{3}", value["code"])
    assert set(value["tags"]) <= {"red", "green"} and len(value["tags"]) <= 3
    link = value["next"]
    while isinstance(link, dict):
        assert list(link) == ["deep"]
        link = link["deep"]
    assert link in (7, None)


def mask(grammars: Grammars, name: str) -> set[int]:
    masks = np.zeros((1, 64), np.uint32)
    grammars.fill(name, np.zeros(1, np.int32), np.full(1, -1, np.int32), masks)
    return ids_of(masks[0])


def check_ends_in_time(grammars: Grammars, kind: GrammarKind, source: str, code: str) -> None:
    """Check that a grammar is refused, or followed: then each mask is bounded as well, and a text at its limit is left
    with nothing."""
    began = time.process_time()  # of all threads, whatever else the machine does
    try:
        start = grammars.prepare(source, kind).result()
    except RequestError as error:
        assert error.code == code
    else:
        grammars.add("hostile", start)
        rng = np.random.default_rng(2)
        for _ in range(30):
            allowed = mask(grammars, "hostile")
            if not allowed or grammars.advance("hostile", [int(rng.choice(sorted(allowed)))]):
                break
        grammars.discard("hostile")
    assert time.process_time() - began < 20
