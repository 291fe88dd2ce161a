"""Formats in which models write tool calls, and the grammar that holds an answer to one of them.

A call is a name and arguments between fixed texts, so a format is those texts. Arguments are one JSON object, or are
written one by one. `server/tool_parser.py` reads the same texts back. Formats are chosen by name or by the chat
template that writes them (`detect`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adaserve_jax.sampling import ToolCalls


@dataclass(frozen=True)
class ArgumentTexts:
    """Fixed texts of an argument: before KEY between VALUE after. A string stands there as it is (`is_plain_text`), any
    other value as JSON."""

    before: str
    between: str
    after: str

    def write(self, arguments: str) -> str:
        """Return the JSON of arguments as a model would write them; of no JSON, how one is written."""
        try:
            values: dict[str, Any] = json.loads(arguments)
        except ValueError:
            values = {"KEY": "VALUE"}
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in values.items()
        }
        return "".join(f"{self.before}{key}{self.between}{text}{self.after}" for key, text in texts.items())


def is_plain_text(schema: Any) -> bool:
    """Return whether a value of this schema is a string that is written as it is, one argument at a time: it has no
    keyword that only the grammar of JSON holds."""
    if not isinstance(schema, dict) or schema.keys() - _OF_PLAIN_TEXT:
        return False
    if "enum" in schema:
        values, alone = schema["enum"], not schema.keys() & {"minLength", "maxLength"}
        are_texts = isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
        return are_texts and alone and schema.get("type", "string") == "string"
    lengths = [schema[name] for name in ("minLength", "maxLength") if name in schema]
    return schema.get("type") == "string" and all(type(length) is int and length >= 0 for length in lengths)


SAID = {"type", "title", "description", "default", "examples"}
"""The type, and keywords that restrict nothing."""
_OF_PLAIN_TEXT = SAID | {"enum", "minLength", "maxLength"}
_ANY = "~/[a&&b]/"
"""Any text, in llguidance's syntax: what is not nothing. That its negation leaves nothing is known at once; that of
`/(.|\\n)*/` would be searched for that."""
DEFINITIONS = {"$defs", "definitions"}
OPTIONS_KEY = "x-guidance"
"""Key of a schema's options, by which llguidance enforces it."""
NOT_ONE_BY_ONE = {
    "$ref", "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "if",
    "maxProperties", "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "then",
    "unevaluatedProperties",
}  # fmt: skip
"""Keywords that join arguments, which a schema cannot have where they are written one by one."""


@dataclass(frozen=True)
class ToolFormat:
    """Fixed texts of one format, in the order of an answer with two calls:

    opening NAME between ARGUMENTS joining NAME between ARGUMENTS closing

    marks: texts that a model may have as one token; the first opens a call wherever it stands in an answer.
    bare: an answer that begins with "{" is a call too, without the mark.
    spaced: a space may follow the mark.
    arguments: how they are written one by one; None: as one JSON object.
    id_chars: length of a call's id where the chat template demands one; 0: any.
    """

    name: str
    marks: tuple[str, ...]
    opening: str
    between: str
    joining: str
    closing: str
    bare: bool = False
    spaced: bool = False
    arguments: ArgumentTexts | None = None
    id_chars: int = 0

    @property
    def mark(self) -> str:
        """The text that opens a call."""
        return self.marks[0]

    @property
    def bare_opening(self) -> str:
        """Opening without the mark."""
        return self.opening.removeprefix(self.mark)

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return calls, as pairs of a name and the JSON of its arguments, as a model would write them."""
        write = str if self.arguments is None else self.arguments.write
        bodies = [f"{name}{self.between}{write(arguments)}" for name, arguments in calls]
        return f"{self.opening}{self.joining.join(bodies)}{self.closing}"


_HERMES = '<tool_call>\n{"name": "'
FORMATS = {
    one.name: one
    for one in (
        ToolFormat(
            "hermes", ("<tool_call>", "</tool_call>"), _HERMES, '", "arguments": ', "}\n</tool_call>\n" + _HERMES,
            "}\n</tool_call>",
        ),
        ToolFormat(
            "llama3_json", ("<|python_tag|>",), '<|python_tag|>{"name": "', '", "parameters": ', '}; {"name": "', "}",
            bare=True,
        ),
        ToolFormat(
            "mistral", ("[TOOL_CALLS]",), '[TOOL_CALLS][{"name": "', '", "arguments": ', '}, {"name": "', "}]",
            spaced=True, id_chars=9,
        ),
        ToolFormat(
            "glm45", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "<tool_call>", "\n", "</tool_call>\n<tool_call>", "</tool_call>",
            arguments=ArgumentTexts("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        ToolFormat(
            "qwen3_coder", ("<tool_call>", "</tool_call>", "<function=", "<parameter="), "<tool_call>\n<function=",
            ">\n", "</function>\n</tool_call>\n<tool_call>\n<function=", "</function>\n</tool_call>",
            arguments=ArgumentTexts("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        ToolFormat(
            "minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name="),
            '<minimax:tool_call>\n<invoke name="', '">\n', '</invoke>\n<invoke name="',
            "</invoke>\n</minimax:tool_call>",
            arguments=ArgumentTexts('<parameter name="', '">', "</parameter>\n"),
        ),
        ToolFormat(
            "mistral_v11", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "", id_chars=9
        ),
    )
}  # fmt: skip
"""Every format by its name in `--tool-call-parser`."""
DEFAULT_FORMAT = "hermes"


def detect(chat_template: str) -> ToolFormat:
    """Return the format that a chat template writes, the default one where it writes none."""
    found = [one for one in FORMATS.values() if all(mark in chat_template for mark in one.marks)]
    if not found and '"parameters": ' in chat_template:
        return FORMATS["llama3_json"]
    return max(found, key=lambda one: len(one.marks), default=FORMATS[DEFAULT_FORMAT])


def lark(calls: ToolCalls, schemas: list[str], special: Mapping[str, int]) -> str:
    """Return the grammar of an answer, in llguidance's syntax.

    Args:
        calls: What may be called.
        schemas: JSON schema of each tool's arguments, with the options under which it is enforced, and then that of an
            answer, if there is one.
        special: Ids of the tokenizer's special tokens by their texts, without those that end a text.
    """
    form = FORMATS[calls.format]
    fixed, mark_id = _FixedTexts(form, special), special.get(form.mark)
    written = [
        (f"%json {schema}", []) if form.arguments is None
        else _one_by_one(form.arguments, fixed, json.loads(schema), place)
        for place, (_, schema) in enumerate(zip(calls.tools, schemas, strict=False))
    ]  # fmt: skip
    bodies = (
        f"{fixed.term(name + form.between)} {rule}" for (name, _), (rule, _) in zip(calls.tools, written, strict=True)
    )
    more = f" ({fixed.term(form.joining)} body)*" if calls.parallel else ""
    lines = [f"body: {' | '.join(bodies)}", f"calls: body{more} {fixed.term(form.closing)}"]
    lines += [line for _, rules in written for line in rules]
    after_mark = " ".join(['" "?'] * form.spaced + [fixed.term(form.bare_opening), "calls"])
    marked = f"{fixed.term(form.mark)} {after_mark}"
    if calls.required or calls.answer is not None:
        starts = [marked]
        if form.bare and calls.required:
            starts = [after_mark] if mark_id is None else [after_mark, marked]
        if calls.answer is not None and not calls.required:
            starts.append(f"%json {schemas[-1]}")
    else:
        starts, free = _free_text(form, mark_id, after_mark, _listed(special.values(), mark_id))
        lines += free
    return "\n".join(["%llguidance {}", f"start: {' | '.join(starts)}", *lines, ""])


def _one_by_one(texts: ArgumentTexts, fixed: _FixedTexts, schema: dict[str, Any], tool: int) -> tuple[str, list[str]]:
    """Return the rule of a tool's arguments, and the rules that it needs: each property that the schema declares, in
    its order. tool: its number, for the names of rules."""
    required = schema.get("required", ())
    shared = {name: schema[name] for name in schema.keys() & {*DEFINITIONS, OPTIONS_KEY}}
    parts, lines = [], []
    for place, (key, given) in enumerate(schema.get("properties", {}).items()):
        begin = fixed.term(f"{texts.before}{key}{texts.between}")
        name = f"{tool}_{place}"
        if is_plain_text(given):
            value, rules = _plain_text(texts.after, fixed, given, name)
            lines += rules
        else:
            held = {} if given is True else given
            if isinstance(held, dict):  # references lead from the root, so the definitions are the root's alone
                held = {key: value for key, value in held.items() if key not in DEFINITIONS} | shared
            value = f"%json {json.dumps(held)} {fixed.term(texts.after)}"
        lines.append(f"argument_{name}: {begin} {value}")
        parts.append(f"argument_{name}" + ("" if key in required else "?"))
    return " ".join(parts), lines


def _plain_text(after: str, fixed: _FixedTexts, schema: dict[str, Any], name: str) -> tuple[str, list[str]]:
    """Return the rule of a string up to where the text behind it first stands, and the rules that it needs."""
    end = fixed.term(after)
    if "enum" in schema:
        return f"({' | '.join(map(_literal, schema['enum']))}) {end}", []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    text, mark = f"/(.|\\n){{{least},{most}}}/", _literal(after)
    if end.startswith("<["):  # a token, which other tokens may spell
        return f"TEXT_{name} {end}", [f"TEXT_{name}: {text} & ~({_ANY} {mark} {_ANY})"]
    early = f" & ~(/(.|\\n){{0,{least - 1}}}/ {mark} {_ANY})" if least else ""
    return f"text_{name}", [f"TEXT_{name}: ({text} {mark}){early}", f"text_{name}[lazy]: TEXT_{name}"]


def free_text(special_ids: Iterable[int]) -> str:
    """Return the grammar of any text. special_ids: special tokens that it may have."""
    return f"%llguidance {{}}\nstart: free\n{_free(_listed(special_ids))}\n"


def _listed(special_ids: Iterable[int], without: int | None = None) -> str:
    """Return token ids, all but one, as llguidance's syntax lists them: `1,5,7`."""
    return ",".join(map(str, sorted({*special_ids} - {without})))


def _free(others: str) -> str:
    return f"free: (TEXT{f' | <[{others}]>' if others else ''})*\nTEXT: /(.|\\n)+/"


def _free_text(form: ToolFormat, mark_id: int | None, after_mark: str, others: str) -> tuple[list[str], list[str]]:
    """Return the alternatives of an answer that may call or not, and their rules.

    A mark that is a token ends a free text where it stands; one that is spelled, as it may be in any case, does so by a
    lazy terminal, which matches as soon as the mark is complete, whatever the tokens that spell it. others: special
    tokens that free text may have.
    """
    other, mark = f"<[{others}]>" if others else "", _literal(form.mark)
    lines = [_free(others), f"head[lazy]: ANY {mark}\nANY: /(.|\\n)*/"]
    text, heads = "free", ["head"]
    if other:
        lines.append(f"before: (TEXT? {other})*")
        heads = ["before head"]
    if form.bare:  # no other text may begin with a brace
        lines.append(f"begun: (BEGUN{f' | {other}' if other else ''}) free\nBEGUN: /[^{{](.|\\n)*/")
        lines.append(f"first[lazy]: FIRST {mark}\nFIRST: /([^{{](.|\\n)*)?/")
        text, heads = "begun?", ["first", *([f"BEGUN? {other} before head"] if other else [])]
    if mark_id is not None:
        heads.append(f"{text} <[{mark_id}]>")
    return [text, *([after_mark] if form.bare else []), *(f"{head} {after_mark}" for head in heads)], lines


class _FixedTexts:
    """Writes fixed texts as terms of a grammar: literals, and the tokens of marks."""

    def __init__(self, form: ToolFormat, special: Mapping[str, int]):
        self._ids = {mark: special[mark] for mark in form.marks if mark in special}
        self._split = re.compile("(" + "|".join(map(re.escape, self._ids)) + ")") if self._ids else None

    def term(self, text: str) -> str:
        parts = self._split.split(text) if self._split is not None else [text]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else _literal(part) for part in parts if part)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
