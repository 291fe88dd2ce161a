"""Sources of grammars: checks a request's JSON schema, regex, choice, grammar or tools; translates for llguidance."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

from adaserve_jax.constraints.tool_formats import DEFINITIONS, FORMATS, NOT_ONE_BY_ONE, OPTIONS_KEY, SAID, lark
from adaserve_jax.errors import RequestError
from adaserve_jax.sampling import (
    MAX_SCHEMA_CHARS,
    GrammarKind,
    GrammarSource,
    ToolCalls,
    is_finite,
    is_number,
    is_unicode,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import ASTNode

MAX_NESTING = 64
"""Most levels of objects and arrays in a schema's own text."""
MAX_LEVELS = 4096
"""Most levels if every referenced definition stood inside the one before; llguidance recurses that deep."""
MAX_RULES = 256
"""Most rules of an EBNF grammar, and most terminals of a Lark grammar: translating 3000 rules takes 20 s, compiling
3000 nested terminals takes minutes, and nothing can interrupt either."""
MAX_JOINED = 12
"""Most patterns that one text may have to fit, and most `&` and `~` of a Lark grammar. A step of n joined patterns can
take time and memory of 2^n, which no limit of llguidance's bounds: dozens take all memory."""
MAX_MESSAGE_CHARS = 500
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
"""Format of the JSON: at most one space, and only after a comma or colon. Else a model could write white space for
ever."""
_EXPECTED: dict[GrammarKind, tuple[str, str]] = {
    "json_schema": ("response_format", "hold a JSON schema"),
    "regex": ("regex", "be a regular expression"),
    "choice": ("choice", "be a list of texts"),
    "grammar": ("grammar", "be a grammar in Lark or EBNF"),
    "tool_calls": ("tools", "hold parameters"),
}
"""Request field and what it must hold, by kind."""
_NAMED_SCHEMAS = {"properties", "patternProperties", *DEFINITIONS}
"""Keywords that hold schemas by name."""
_VALUES = {"const", "enum", "default", "examples"}
"""Keywords that hold values, not schemas."""
_JOINING = {"anyOf", "const", "enum", "oneOf", "$ref"}
"""Keywords that hold together with what stands beside them. `allOf` does by itself."""
_NOT_JOINED = SAID | DEFINITIONS | {"$schema", "$id", "$comment"}
"""Keywords that may stand beside those and add nothing to them, but for types."""
_OF_THE_SAME_VALUE = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
"""Keywords whose schemas are of the value that the schema itself is of."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_LEAST, _MOST = -(2**63), 2**63 - 1
"""Integers between which llguidance holds bounds of integers; beyond them it takes the nearest."""
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)
"""An escape or a class of a regular expression. A class matches at any `[`: one that failed would be tried at each."""
_NOT_PYTHON = re.compile(r"\[|--|&&|~~|\|\|")
"""Syntax that Python's classes lack and Rust's have."""
_NEGATION = re.compile(r"(\\.)|\[\^(-+|\]?)", re.DOTALL)
"""An escape, or the beginning of a negated class with what must be escaped behind other characters."""
_CONTROLS_BY_NAME = re.compile(r"\\p(?:C|\{(?i:C|Cc|Other|Control|Cntrl)\})|\\P(?:P|\{(?i:P|Po|Punct(?:uation)?)\})")
"""Unicode classes of all control characters without quote and backslash."""
_IS_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|[?!]?start(?:\.\d+)?\s*:(?!:=))", re.MULTILINE)
"""Tells Lark from EBNF. llguidance's `is_lark_syntax` looks through all empty lines from each of them, misses `?start`
and takes an EBNF rule `start` for Lark."""
_TERMINAL = re.compile(r"[A-Z][A-Z0-9_-]*\s*(:?)")
"""Name of a terminal, and what begins its definition. That need not stand at the beginning of a line. A name matches
without it too: one that failed would be tried at each letter."""
_LARK_JOINING = re.compile(r"&|~(?!\s*[0-9])")
"""An operator by which one text must fit several patterns; `~ 3` repeats."""
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U00(0[0-9a-fA-F]{5}|10[0-9a-fA-F]{4})|.)", re.DOTALL)
"""An escape of a GBNF grammar, with the code of a character if it has one."""
_GBNF_RANGE = re.compile(r"(\\(?:x..|u....|.)|.)(?:-(\\(?:x..|u....|.)|.))?", re.DOTALL)
"""A character of a class, or the first and the last of a range."""
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/?|<[^<>\s]+>|%json\s*')
"""A string, comment, regex or special token as llguidance reads them, or the beginning of a schema. A string or regex
without an end, which llguidance refuses, matches too: one that failed would be tried at each quote or slash."""


def field_of(kind: GrammarKind) -> str:
    """Return the request field of a kind of grammar."""
    return _EXPECTED[kind][0]


def refuse(why: str, kind: GrammarKind = "json_schema", tool: str = "") -> NoReturn:
    """Raise RequestError: the grammar cannot be enforced. tool: the one whose schema is at fault."""
    why = why.removesuffix("<non-verbose/>").strip()
    if found := re.search("^error: (.+)", why, re.MULTILINE):  # the parser also draws where
        why = found[1]
    if tool:
        why = f"{tool}: {why}"
    shown = why if len(why) <= MAX_MESSAGE_CHARS else why[:MAX_MESSAGE_CHARS] + "..."
    field, must = _EXPECTED[kind]
    raise RequestError(
        f"{field} must {must} that can be enforced: {shown}",
        param=field,
        code="invalid_schema" if kind in ("json_schema", "tool_calls") else "invalid_grammar",
    )


def translate(
    kind: GrammarKind, source: GrammarSource, matcher: type[LLMatcher], special: Mapping[str, int],
    relaxed: Collection[str] = (),
) -> str:  # fmt: skip
    """Return llguidance's form of a grammar. Takes deep recursion. Raises RequestError: it cannot be enforced.

    special: ids of the tokenizer's special tokens by their texts, without those that end a text. relaxed: names of
    tools whose schemas are relaxed (`read_schema`).
    """
    if isinstance(source, ToolCalls):
        return matcher.grammar_from_lark(lark(source, _schemas_of(source, relaxed), special))
    if isinstance(source, tuple):
        return matcher.grammar_from_regex("|".join(map(_literally, source)))
    if kind == "regex":
        return matcher.grammar_from_regex(source)
    if kind == "grammar":
        return matcher.grammar_from_lark(_with_json_options(_as_lark(source)))
    try:
        # As text, since the library refuses a dict with integers of more than 64 bits.
        return matcher.grammar_from_json_schema(json.dumps(read_schema(source)))
    except ValueError as error:
        refuse(str(error))


def _schemas_of(calls: ToolCalls, relaxed: Collection[str]) -> list[str]:
    """Return the checked schemas of tools, and then that of an answer, if there is one. Raises RequestError."""
    texts = [*calls.tools, *([("response_format", calls.answer)] if calls.answer is not None else [])]
    schemas = [read_schema(text, "tool_calls", name, relaxed=name in relaxed) for name, text in texts]
    if FORMATS[calls.format].arguments is not None:
        for (name, _), schema in zip(calls.tools, schemas, strict=False):
            _check_one_by_one(schema, name)
    return [json.dumps(schema) for schema in schemas]


def _check_one_by_one(schema: dict[str, Any], tool: str) -> None:
    """Raise RequestError unless arguments of this schema can be written one by one."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if joining := sorted(schema.keys() & NOT_ONE_BY_ONE):
        refuse(f"{joining[0]!r} does not hold where arguments are written one by one", "tool_calls", tool)
    for part in _schemas(schema):
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
            why = f"$ref must begin with #/$defs/ or #/definitions/ in this format, got {reference!r:.80}"
            refuse(why, "tool_calls", tool)
    are_names = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not isinstance(properties, dict) or not are_names or set(required) - properties.keys():
        refuse("properties must declare what is required", "tool_calls", tool)


def read_schema(
    text: str, kind: GrammarKind = "json_schema", tool: str = "", *, relaxed: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Parse a schema, that of a tool's arguments if there is one, and add the options under which it is enforced.

    relaxed: let any text fit the patterns, and leave out keywords and formats that llguidance does not know.

    Raises RequestError: the text is too long, no JSON, no object, nested too deeply, sets options itself, or has a
    number, pattern or text that cannot be enforced.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        refuse(f"at most {MAX_SCHEMA_CHARS} characters, got {len(text)}", kind, tool)
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        refuse(f"at most {MAX_NESTING} objects and arrays inside each other, got far more", kind, tool)
    except ValueError as error:
        refuse(f"it is not JSON: {error}", kind, tool)
    if relaxed:
        for part in _schemas(schema):
            if "pattern" in part:
                part["pattern"] = ""  # any text, which is written as JSON all the same
    return _checked(schema, kind, tool) | ({OPTIONS_KEY: {**OPTIONS, "lenient": True}} if relaxed else {})


def _checked(schema: Any, kind: GrammarKind, tool: str = "") -> dict[str, Any]:
    """Return a schema with the options under which it is enforced. Raises RequestError."""
    if not isinstance(schema, dict):
        refuse(f'expected an object such as {{"type": "object"}}, got {json.dumps(schema)[:40]}', kind, tool)
    if (depth := sum(1 for _ in _levels(schema))) > MAX_NESTING:
        refuse(f"at most {MAX_NESTING} objects and arrays inside each other, got {depth}", kind, tool)
    references = _references(schema)
    if (levels := depth * (1 + len(references))) > MAX_LEVELS:
        refuse(
            f"at most {MAX_LEVELS} levels, of nesting times definitions referred to, got {levels}: "
            f"{len(references)} different $ref in {depth} levels",
            kind,
            tool,
        )
    if not is_unicode(json.dumps(schema, ensure_ascii=False)):
        refuse("its texts must be valid Unicode, got half of a surrogate pair", kind, tool)
    parts = list(_schemas(schema))
    for part in parts:
        if OPTIONS_KEY in part:
            refuse(f"{OPTIONS_KEY!r} is no keyword of JSON Schema; leave it out", kind, tool)
        if isinstance(reference := part.get("$ref"), str) and _leads_into_a_value(reference):
            refuse(f"$ref must lead to a schema and not into a value, got {reference!r:.80}", kind, tool)
        if "prefixItems" in part and ("additionalItems" in part or isinstance(part.get("items"), list)):
            refuse("prefixItems would be dropped beside additionalItems or a list of items; use items", kind, tool)
        for number in _rounded(part):
            shown = str(number)[:40]
            refuse(f"{shown} cannot be enforced exactly; take a number nearer to 0, or a string", kind, tool)
        for pattern in _unenforced(part):
            refuse(
                f"pattern {pattern!r:.80} would let quotes and backslashes through; leave control characters out of "
                'its classes, as [^\\x00-\\x1f"] does',
                kind,
                tool,
            )
        if isinstance(part.get("pattern"), str):
            part["pattern"] = _without_nul(part["pattern"])
    if any(map(_joins, parts)) and (patterns := _joined_patterns(schema, references)) > MAX_JOINED:
        refuse(f"at most {MAX_JOINED} patterns that one text must fit, got up to {patterns}", kind, tool)
    if _steps_overflow(parts):
        refuse("values of multipleOf that may hold together are too large; take smaller or fewer ones", kind, tool)
    return {**schema, OPTIONS_KEY: OPTIONS}


def _schemas(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and every schema in it. What is no schema, such as a value or a table of names, is left out."""
    inner: Iterable[Any] = part if isinstance(part, list) else ()
    if isinstance(part, dict):
        yield part
        named = [held for key in _NAMED_SCHEMAS & part.keys() if isinstance(held := part[key], dict)]
        others = [held for key, held in part.items() if key not in _VALUES and not any(held is one for one in named)]
        inner = [*others, *(held for one in named for held in one.values())]
    for one in inner:
        yield from _schemas(one)


def _leads_into_a_value(reference: str) -> bool:
    """Return whether a reference leads by a keyword of values, in which `_schemas` finds no schemas."""
    is_name = False
    for key in unquote(reference.partition("#")[2]).split("/")[1:]:
        if key in _VALUES and not is_name:
            return True
        is_name = key in _NAMED_SCHEMAS and not is_name
    return False


def _joins(part: dict[str, Any]) -> bool:
    """Return whether a value must fit several schemas by a schema's own keywords."""
    return "allOf" in part or bool(_JOINING & part.keys() and len(part.keys() - _NOT_JOINED) > 1)


def _joined_patterns(schema: dict[str, Any], references: set[str]) -> int:
    """Return an upper bound of the different patterns that one text must fit.

    They are those of the properties of one name, wherever these stand, and those outside of named properties.
    """
    of_names: dict[str | None, set[str]] = {}
    may_rename = any(not re.fullmatch(rf"#/({'|'.join(DEFINITIONS)})/[^/]*", reference) for reference in references)
    for name, pattern in _patterns(schema, None):
        of_names.setdefault(None if may_rename else name, set()).add(pattern)
    of_any = of_names.pop(None, set())
    return len(of_any) + max((len(patterns - of_any) for patterns in of_names.values()), default=0)


def _patterns(part: Any, name: str | None) -> Iterator[tuple[str | None, str]]:
    """Yield each pattern of a schema with the name of the property that it is of; None: it may be of any.

    name: of the property that the schema is of.
    """
    if isinstance(part, list):
        for one in part:
            yield from _patterns(one, name)
    if not isinstance(part, dict):
        return
    if isinstance(part.get("pattern"), str):
        yield name, part["pattern"]
    for key, held in part.items():
        if key in _NAMED_SCHEMAS and isinstance(held, dict):
            for each, one in held.items():
                yield from _patterns(one, each if key == "properties" else None)
        elif key not in _VALUES:
            yield from _patterns(held, name if key in _OF_THE_SAME_VALUE else None)


def _steps_overflow(parts: list[dict[str, Any]]) -> bool:
    """Return whether several `multipleOf` may hold for one number and exceed 32 bits.

    llguidance then multiplies two, in steps of the smallest decimal, and lets any number through where that overflows.
    """
    found = [part["multipleOf"] for part in parts if is_finite(part.get("multipleOf"))]
    steps = [Fraction(str(abs(step))) for step in found if step]
    if not steps or (len(steps) == 1 and not any("$ref" in part for part in parts)):  # by $ref, one may meet itself
        return False
    if not any(map(_joins, parts)):
        return False
    denominator = math.lcm(*(step.denominator for step in steps))
    scale = next(scale for scale in (10**digits for digits in itertools.count()) if scale % denominator == 0)
    return math.lcm(*(int(step * scale) for step in steps)) ** 2 >= 2**32


def _rounded(part: dict[str, Any]) -> Iterator[float]:
    """Yield the numbers of a schema's own keywords for which llguidance, which holds floats, would let others through.

    It refuses every `multipleOf` that large by itself.
    """
    for holders in _levels([part.get("const"), part.get("enum")]):
        for holder in holders:
            values = holder.values() if isinstance(holder, dict) else holder
            # Of type integer, it takes the nearest of 64 bits; at -2**63 it recurses until the process dies.
            yield from (one for one in values if is_number(one) and not (abs(one) < -_LEAST and float(one) == one))
    for name in _BOUNDS & part.keys():
        bound = part[name]
        if bound is True:  # as in draft 4: the bound beside it is exclusive
            bound = part.get(name.replace("exclusiveM", "m"), True)
        if is_number(bound) and _is_loosened(name, bound, part.get("type") != "number"):
            yield bound


def _is_loosened(name: str, bound: float, of_integers: bool) -> bool:
    """Return whether llguidance would let through numbers beyond a bound, which it takes for a float."""
    is_upper = name in ("maximum", "exclusiveMaximum")
    step = (1 if is_upper else -1) if name.startswith("exclusive") and of_integers else 0
    try:
        held = float(bound) - step
    except OverflowError:
        return True
    if of_integers:
        held = min(max(held, _LEAST), _MOST)
    if is_upper:
        return held > bound - step or held <= _LEAST  # between two bounds of -2**63 it recurses until the process dies
    return held < bound - step


def _unenforced(part: dict[str, Any]) -> Iterator[str]:
    """Yield the patterns of a schema's own keywords that `_without_nul` cannot fix.

    In names of properties it can fix none: what is taken from a pattern would go to the additional properties.
    """
    if isinstance(pattern := part.get("pattern"), str) and _lets_escapes_through(pattern, negated=False):
        yield pattern
    if isinstance(names := part.get("patternProperties"), dict):
        yield from (name for name in names if _lets_escapes_through(name, negated=True))


def _lets_escapes_through(pattern: str, negated: bool) -> bool:
    """Return whether a pattern has a class of all control characters without quote or backslash.

    negated: look at negated classes too; one that Python cannot read is taken for such.
    """
    looked_at = _PATTERN_PART.sub(
        lambda part: "" if part[0] == r"\\" or (part[0].startswith("[^") and not negated) else part[0], pattern
    )
    if _CONTROLS_BY_NAME.search(looked_at):
        return True
    for part in _PATTERN_PART.findall(pattern):
        is_negated = part.startswith("[^")
        if part[0] != "[" or (is_negated and not negated):
            continue
        has = _membership(part)
        if has is None:
            if is_negated:
                return True
            continue
        controls = (chr(code) for code in range(32) if code != 10)  # with or without the line feed
        if all(map(has, controls)) and not (has('"') and has("\\")):
            return True
    return False


def _membership(part: str) -> Callable[[str], object] | None:
    """Return a function that tells whether a character is in a class; None where Python cannot read the class."""
    if _NOT_PYTHON.search(re.sub(r"\\.", "", part[1:])):
        return None
    try:
        return re.compile(part, re.ASCII).match
    except re.error:  # \p{L}, \x{22}
        return None


def _without_nul(pattern: str) -> str:
    """Return a pattern whose negated classes exclude U+0000 too.

    llguidance 1.9.1 takes a class of all control characters for one that has every escape, `\\"` and `\\\\` among them.
    """

    def excluding(found: re.Match[str]) -> str:
        return found[1] or "[^\\x00" + "".join(f"\\{first}" for first in found[2])

    return _NEGATION.sub(excluding, pattern)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _levels(schema: Any) -> Iterator[list[dict[str, Any] | list[Any]]]:
    """Yield the objects and arrays of a schema, level by level."""
    level = [schema]
    while holders := [part for part in level if isinstance(part, (dict, list))]:
        yield holders
        level = [child for part in holders for child in (part.values() if isinstance(part, dict) else part)]


def _references(schema: dict[str, Any]) -> set[str]:
    found = (part.get("$ref") for level in _levels(schema) for part in level if isinstance(part, dict))
    return {reference for reference in found if isinstance(reference, str)}


def _literally(text: str) -> str:
    """Return a regex of this text alone."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _as_lark(text: str) -> str:
    """Return a grammar in Lark, translated if it is EBNF, as llama.cpp (GBNF), vLLM and SGLang take it."""
    is_lark = _IS_LARK.search(text) is not None
    bare = _LARK_TOKEN.sub(" ", text)
    if is_lark and (joined := len(_LARK_JOINING.findall(bare))) > MAX_JOINED:
        refuse(f"at most {MAX_JOINED} operators & and ~, got {joined}", "grammar")
    rules = sum(map(bool, _TERMINAL.findall(bare))) if is_lark else text.count("::=")
    if rules > MAX_RULES:
        refuse(f"at most {MAX_RULES} {'terminals' if is_lark else 'rules'}, got {rules}", "grammar")
    try:
        return text if is_lark else _from_gbnf(text)
    except RecursionError:
        refuse("it is nested too deeply", "grammar")
    except Exception as error:  # the library raises plain Exception too
        refuse(f"it is neither Lark, which has a rule `start: ...`, nor EBNF: {error}", "grammar")


def _from_gbnf(text: str) -> str:
    """Return a GBNF grammar in Lark, as llguidance's `gbnf_to_lark` does, but for what that writes wrongly: a count of
    counts, `-`, `&` and `~` in a class, and a rule `start` beside the root. Raises what its parser raises."""
    from llguidance.gbnf_to_lark import GrammarParser, RegexNode, RepetitionNode, RuleRefNode, SequenceNode, resolve

    rules = GrammarParser().parse(_GBNF_ESCAPE.sub(_as_character, text))
    if "root" in rules and (other := rules.pop("start", None)) is not None:
        other.name = next(name for name in map("start-{}".format, itertools.count()) if name not in rules)
        rules[other.name] = other
        for node in _nodes(rules.values()):
            if isinstance(node, RuleRefNode) and node.name == "start":
                node.name = other.name
    resolve(rules)
    for node in _nodes(rules.values()):
        if isinstance(node, RegexNode) and node.rx.startswith("["):
            node.rx = _class_in_rust(node.rx)
        elif isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
            node.node = SequenceNode([node.node])  # which has parentheses
    return "\n".join(["%llguidance {}", *map(str, sorted(rules.values(), key=lambda rule: rule.order))])


def _nodes(nodes: Iterable[ASTNode]) -> Iterator[ASTNode]:
    """Yield nodes of a parsed GBNF grammar and all below them."""
    for node in nodes:
        yield node
        yield from _nodes(node.children())


def _class_in_rust(text: str) -> str:
    """Return a class of a GBNF grammar in Rust's syntax, in which `--`, `&&` and `~~` are operators."""
    opening = "[^" if text.startswith("[^") else "["
    inner = _GBNF_RANGE.sub(
        lambda part: "-".join("\\" + end if end in "-&~" else end for end in part.groups() if end),
        text[len(opening) : -1],
    )
    return f"{opening}{inner}]"


def _as_character(escape: re.Match[str]) -> str:
    """Return the character of a code of four or eight digits, whose zeros `gbnf_to_lark` drops.

    ASCII becomes a code of two, which never ends a literal or a class. Any other escape stays.
    """
    code = escape[1] or escape[2]
    if code is None or not is_unicode(character := chr(int(code, 16))):
        return escape[0]
    return f"\\x{ord(character):02x}" if character.isascii() else character


def _with_json_options(lark: str) -> str:
    """Put OPTIONS into every `%json {...}`, checked like any schema."""
    parts, end = [], 0
    for token in _LARK_TOKEN.finditer(lark):
        if token[0].startswith("%json") and token.start() >= end:
            try:
                schema, after = json.JSONDecoder(parse_constant=_no_number).raw_decode(lark, token.end())
            except (ValueError, RecursionError) as error:
                refuse(f"%json must be followed by a JSON schema: {error}", "grammar")
            parts += [lark[end : token.end()], json.dumps(_checked(schema, "grammar"))]
            end = after
    return "".join([*parts, lark[end:]])
