"""Schemas that cannot be enforced are refused, in time, and it is said why."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from adaserve_jax.constraints.grammar import (
    COMPILE_AT_ONCE,
    COMPILE_LIMIT_S,
    MAX_GRAMMARS,
    MAX_PREPARING,
    Grammars,
)
from adaserve_jax.constraints.grammar_source import MAX_JOINED, MAX_LEVELS, MAX_NESTING, MAX_RULES
from adaserve_jax.errors import CheckpointError, ConfigError, RequestError
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.sampling import (
    MAX_CHOICE_CHARS,
    MAX_CHOICE_TEXTS,
    MAX_GRAMMAR_CHARS,
    MAX_SCHEMA_CHARS,
    GrammarKind,
    GrammarSource,
    ToolCalls,
)
from tests.conftest import ROOT
from tests.constraints.grammar_texts import EOS, V, Writer, check_ends_in_time, fits
from tests.constraints.hostile_schemas import HOSTILE

pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")


# ---- what cannot be made ----


def test_engines_without_structured_output_say_why(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="end-of-text token"):
        Grammars(tokenizer.backend_json(), V, ())
    with pytest.raises(CheckpointError, match="cannot read the target's tokenizer with a vocabulary of 2048"):
        Grammars('{"version": "1.0"}', V, (EOS,))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'adaserve-jax\[server\]'"):
        Grammars(tokenizer.backend_json(), V, (EOS,))


def test_the_guide_names_the_limits():
    guide = (ROOT / "docs" / "structured-output.md").read_text()
    values = [int(value) for value in re.findall(r"^\| .* \| (\d+) \|$", guide, re.MULTILINE)]
    assert values == [
        MAX_SCHEMA_CHARS,
        MAX_GRAMMAR_CHARS,
        MAX_RULES,
        MAX_JOINED,
        MAX_CHOICE_TEXTS,
        MAX_CHOICE_CHARS,
        MAX_NESTING,
        MAX_LEVELS,
        COMPILE_LIMIT_S,
        COMPILE_AT_ONCE,
        MAX_PREPARING,
        MAX_GRAMMARS,
    ]


# ---- schemas that are refused ----


TOO_DEEP = '{"type":"object","properties":{"a":' * 40 + "{}" + "}}" * 40


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"minimum": NaN}', "not JSON: NaN"),
        ("[1]", "expected an object"),
        ("true", "expected an object"),
        ('"object"', "expected an object"),
        ("null", "expected an object"),
        ('{"type": "objekt"}', "objekt"),
        ('{"type": 7}', "type"),
        ('{"type": "object", "properties": 3}', "properties"),
        ('{"type": "object", "required": "a"}', "required"),
        ('{"type": "string", "pattern": "("}', "pattern|regex|unclosed"),
        ('{"type": "string", "pattern": "(?=a)b"}', "look"),
        ('{"type": "string", "format": "shape-of-a-cloud"}', "format"),
        ('{"type": "integer", "minimum": 5, "maximum": 4}', "minimum|Unsatisfiable|range"),
        ('{"enum": []}', "enum|Unsatisfiable|empty"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"$ref": "#/$defs/nowhere"}', "nowhere|ref"),
        ('{"$ref": "https://127.0.0.1:9/schema.json"}', "127.0.0.1|ref"),
        ('{"$ref": "file:///etc/passwd"}', "ref|file"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ('{"type": "object", "x-guidance": {"lenient": true}}', "x-guidance"),
        (
            '{"items": {"properties": {"a": {"x-guidance": {}}}}}',
            "'x-guidance' is no keyword of JSON Schema; leave it out",
        ),
        (TOO_DEEP, f"at most {MAX_NESTING} objects"),
        ("[" * 60_000, "far more|not JSON"),
        ('{"enum": ["' + "a" * 70_000 + '"]}', "at most 65536 characters"),
        (
            json.dumps({"$ref": "#/a"} | {"a": [{"items": {"$ref": f"#/{i}"}} for i in range(1100)]}),
            f"at most {MAX_LEVELS} levels",
        ),
        ('{"$ref": "#"}', "no JSON at all fits it"),
        ('{"const": "\\ud800"}', "its texts must be valid Unicode, got half of a surrogate pair"),
        ('{"const": "\ud800"}', "its texts must be valid Unicode"),
        ('{"properties": {"\\udfff": {}}}', "its texts must be valid Unicode"),
        (
            '{"prefixItems": [{"type": "integer"}], "additionalItems": false}',
            "prefixItems would be dropped beside additionalItems or a list of items; use items",
        ),
        ('{"items": [{"type": "null"}], "prefixItems": [{"type": "integer"}]}', "prefixItems would be dropped beside"),
        ('{"a/properties": {"const": {"const": 5}}, "$ref": "#/a%2Fproperties/const"}', "does not exist"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(grammars: Grammars, schema: str, says: str):
    with pytest.raises(RequestError, match=says) as caught:
        grammars.prepare(schema).result()
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_schema")
    assert len(str(caught.value)) < 700


def check_refused_everywhere(grammars: Grammars, schema: dict[str, Any], says: str) -> None:
    """Check that a schema is refused as a response's, in a grammar, and as that of an argument."""
    text = json.dumps(schema)
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    tool = json.dumps({"type": "object", "properties": {"a": schema}} | definitions)
    routes: list[tuple[GrammarKind, GrammarSource]] = [
        ("json_schema", text), ("grammar", f"start: %json {text}"), ("tool_calls", ToolCalls("glm45", (("f", tool),))),
    ]  # fmt: skip
    for kind, source in routes:
        with pytest.raises(RequestError, match=re.escape(says)):
            grammars.prepare(source, kind).result()


DEADLY = {"const": -(2**63)}
"""A value on which the process dies where it is taken for a schema."""
LOOSE = {"type": "string", "pattern": r"^[\x00-\x1f]$"}
"""A value that lets quotes through where it is taken for a schema."""


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/default", {"default": DEADLY}),
        ("#/examples/0", {"examples": [DEADLY]}),
        ("#/const/a", {"const": {"a": LOOSE}}),
        ("#/%65num/0", {"enum": [LOOSE]}),
        ("#/$defs/x/default", {"$defs": {"x": {"default": DEADLY}}}),
        ("#/properties/default/const", {"properties": {"default": {"const": LOOSE}}}),
        ("json-schema:///#/default", {"default": DEADLY}),
    ],
)
def test_a_reference_into_a_value_is_refused_wherever_a_schema_stands(
    grammars: Grammars, reference: str, more: dict[str, Any]
):
    says = f"$ref must lead to a schema and not into a value, got '{reference}'"
    check_refused_everywhere(grammars, {"items": {"$ref": reference}, **more}, says)


def test_a_reference_leads_to_definitions_of_any_name(grammars: Grammars, tokenizer: Tokenizer):
    named = {"const": {"const": 3}, "default": {"properties": {"enum": {"const": 4}}}}
    schema = {"anyOf": [{"$ref": "#/$defs/const"}, {"$ref": "#/$defs/default/properties/enum"}], "$defs": named}
    assert [fits(Writer(grammars, schema), tokenizer, text) for text in "345"] == [True, True, False]


# ---- patterns that one text must fit ----

CODES = [{"type": "string", "pattern": f"^a{{1,{n}}}$"} for n in range(1, 14)]
OBJECTS = [{"properties": {"x": code}} for code in CODES]
CHAIN = {str(n): {"$ref": f"#/$defs/{n + 1}"} | code for n, code in enumerate(CODES)} | {"13": {"type": "string"}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": CODES},
        {"allOf": OBJECTS},
        {"allOf": [{"items": code} for code in CODES]},
        {"allOf": [*OBJECTS[:6], *({"additionalProperties": code} for code in CODES[6:])]},
        {"allOf": [{"$ref": f"#/$defs/{n}"} for n in range(13)], "$defs": {str(n): c for n, c in enumerate(CODES)}},
        {"$ref": "#/$defs/0", "$defs": CHAIN},
    ],
)
def test_too_many_patterns_of_one_text_are_refused(grammars: Grammars, schema: dict[str, Any]):
    with pytest.raises(RequestError, match=r"at most 12 patterns that one text must fit, got up to 13"):
        grammars.prepare(json.dumps(schema)).result()


def test_patterns_of_many_texts_are_enforced(grammars: Grammars, tokenizer: Tokenizer):
    """As many as a schema has properties, definitions or alternatives, also beside what joins others."""
    properties = {f"p{n}": code for n, code in enumerate(CODES)}
    both = {"allOf": [{"type": "object", "properties": properties}, {"required": ["p1"]}]}
    assert fits(Writer(grammars, both), tokenizer, '{"p1": "aa"}')
    assert not fits(Writer(grammars, both), tokenizer, '{"p1": "aaa"}')
    assert fits(Writer(grammars, {"anyOf": CODES}), tokenizer, f'"{"a" * 13}"')
    twelve = Writer(grammars, {"allOf": CODES[1:]})
    assert fits(twelve, tokenizer, '"aa"')


# ---- numbers ----


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65537}]},
        {"type": "integer", "multipleOf": 65537, "anyOf": [{"multipleOf": 65539}, {"maximum": 5}]},
        {"allOf": [{"$ref": "#/$defs/m"}, {"$ref": "#/$defs/m"}], "$defs": {"m": {"multipleOf": 65537}}},
        {"allOf": [{"type": "number", "multipleOf": 1e-6}, {"multipleOf": 70000}]},
    ],
)
def test_steps_that_would_overflow_together_are_refused_wherever_a_schema_stands(
    grammars: Grammars, schema: dict[str, Any]
):
    says = "values of multipleOf that may hold together are too large; take smaller or fewer ones"
    check_refused_everywhere(grammars, schema, says)


LARGE = {"type": "integer", "multipleOf": 100_000}


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"allOf": [{"type": "integer", "multipleOf": 6}, {"multipleOf": 4}]}, 12, 6),
        ({"allOf": [{"type": "number", "multipleOf": 0.5}, {"multipleOf": 0.2}]}, 3, 0.5),
        ({"prefixItems": [LARGE, {"enum": [None]}, LARGE]}, [300_000, None, 200_000], [150_000]),
        ({"prefixItems": [{"$ref": "#/$defs/m"}] * 2, "$defs": {"m": LARGE}}, [300_000, 200_000], [1, 1]),
    ],
)
def test_steps_that_are_held_are_held(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], inside: Any, outside: Any
):
    assert fits(Writer(grammars, schema), tokenizer, json.dumps(inside))
    assert not fits(Writer(grammars, schema), tokenizer, json.dumps(outside))


INEXACT: list[tuple[dict[str, Any], int | float]] = [
    ({"enum": [5, 1152921504606846977]}, 1152921504606846977),
    ({"const": {"a": [2**53 + 1]}}, 2**53 + 1),
    ({"items": {"const": -(2**53) - 1}}, -(2**53) - 1),
    ({"const": 2**63}, 2**63),
    ({"type": "integer", "const": 1e20}, 1e20),
    ({"const": 10**400}, 10**400),
    ({"type": "integer", "minimum": 2**53 + 1}, 2**53 + 1),
    ({"type": "integer", "minimum": 2**64}, 2**64),
    ({"maximum": 2**53 + 3}, 2**53 + 3),
    ({"maximum": 10**400}, 10**400),
    ({"type": "integer", "exclusiveMinimum": 2**53}, 2**53),
    ({"type": "integer", "exclusiveMaximum": 2**60}, 2**60),
    ({"type": "integer", "maximum": 2**53 + 4, "exclusiveMaximum": True}, 2**53 + 4),
    ({"type": "integer", "minimum": -(2**53) - 4, "exclusiveMinimum": True}, -(2**53) - 4),
    # The process died of these.
    ({"const": -(2**63)}, -(2**63)),
    ({"type": "integer", "enum": [-1e19]}, -1e19),
    ({"type": "integer", "minimum": -1e19, "maximum": -(2**63) + 1}, -(2**63) + 1),
]


@pytest.mark.parametrize(("schema", "number"), INEXACT, ids=range(len(INEXACT)))
def test_numbers_that_would_be_rounded_are_refused_wherever_a_schema_stands(
    grammars: Grammars, schema: dict[str, Any], number: float
):
    says = f"{str(number)[:40]} cannot be enforced exactly; take a number nearer to 0, or a string"
    check_refused_everywhere(grammars, schema, says)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, 2**63 - 1, 2**63),
        ({"type": "integer", "maximum": 10**18}, 10**18, 10**18 + 1),
        ({"type": "integer", "exclusiveMaximum": 2**53}, 2**53 - 1, 2**53),
        ({"type": "integer", "maximum": 10, "exclusiveMaximum": True}, 9, 10),
        ({"type": "integer", "minimum": 5, "maximum": 10**20}, 5, 10**20 + 1),
        ({"enum": [2**53 + 2, -(2**62)]}, 2**53 + 2, 2**53),
        ({"type": "integer", "default": 2**53 + 1, "examples": [{"const": 2**53 + 1}]}, 7, "x"),
        ({"type": "object", "properties": {"const": {"enum": [3]}, "x-guidance": {}}}, {"const": 3}, {"const": 2}),
    ],
)
def test_numbers_that_are_held_exactly_are_held(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], inside: Any, outside: Any
):
    assert fits(Writer(grammars, schema), tokenizer, json.dumps(inside))
    assert not fits(Writer(grammars, schema), tokenizer, json.dumps(outside))


# ---- patterns ----


CHARACTERS = [*map(chr, range(32)), *'"\\/a-]^[ ~.0Z', "é", "€", "😀"]
CLASSES = [
    '[^"]', r"[^\\]",
    r'[^<>:"/\\|?*]', r'[^\x00-\x1f"]', r'[^\n"]', r'[^\s"\\]', '([^"]|a)', '[^]"]', '[^-"]', r'[^\]"-]',
    r'\[?[^"]', '[^^"]', "[^a]", r"\S", ".", r"[\x00-\x7e]", r"[\t -!#-~]", r'(?:[^\s"]|\s)', r"[\]^\-]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", CLASSES)
def test_a_pattern_lets_through_what_python_lets_through(grammars: Grammars, tokenizer: Tokenizer, pattern: str):
    expected = re.compile(pattern, re.ASCII)
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    for character in CHARACTERS:
        written = fits(Writer(grammars, schema), tokenizer, json.dumps(character, ensure_ascii=False))
        has_gap = character == "\x00" and "[^" in pattern
        assert written == (expected.fullmatch(character) is not None and not has_gap), (pattern, character)


@pytest.mark.parametrize("schema", [
    {"type": "string", "pattern": r"^[\x00-\x1f]$"}, {"items": {"pattern": r"^[\x00-\x21#-~]$"}},
    {"pattern": r"^a|\P{P}$"}, {"pattern": r"\p{Cc}"}, {"pattern": r"[a\pC]"},
    {"patternProperties": {'^[^"]+$': {"type": "null"}}}, {"patternProperties": {r"^[^\\]+$": {}, "^a$": {}}},
    {"patternProperties": {r"^[^\x{22}]$": {}}},
])  # fmt: skip
def test_a_pattern_whose_escapes_cannot_be_held_is_refused(grammars: Grammars, schema: dict[str, Any]):
    says = (
        r"would let quotes and backslashes through; leave control characters out of its classes, as \[\^\\x00-\\x1f\"\]"
    )
    with pytest.raises(RequestError, match=says):
        grammars.prepare(json.dumps(schema)).result()


def test_names_of_properties_keep_to_their_pattern(grammars: Grammars, tokenizer: Tokenizer):
    schema = {
        "type": "object",
        "patternProperties": {r'^[^\x00-\x1f"]$': {"type": "null"}},
        "additionalProperties": False,
    }
    assert fits(Writer(grammars, schema), tokenizer, '{"a":null}')
    assert not fits(Writer(grammars, schema), tokenizer, '{"\\"":null}')


SLOW = {"patterns at once", "many properties", "doubling objects"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in HOSTILE])
def test_hostile_schemas_end_in_time(grammars: Grammars, name: str):
    check_ends_in_time(grammars, "json_schema", json.dumps(HOSTILE[name]), "invalid_schema")
