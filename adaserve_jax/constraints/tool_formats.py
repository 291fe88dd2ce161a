"""Formats in which models write tool calls, and the grammar that holds an answer to one of them.

A call is a JSON object between fixed texts, so a format is those texts. `server/tool_parser.py` reads the same texts
back. Formats are chosen by name or by the chat template that writes them (`detect`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaserve_jax.sampling import ToolCalls


@dataclass(frozen=True)
class ToolFormat:
    """Fixed texts of one format, in the order of an answer with two calls:

    opening NAME between ARGUMENTS joining NAME between ARGUMENTS closing

    marks: texts that a model may have as one token; the first opens a call wherever it stands in an answer.
    bare: an answer that begins with "{" is a call too, without the mark.
    spaced: a space may follow the mark.
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
        bodies = [f"{name}{self.between}{arguments}" for name, arguments in calls]
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
    bodies = (
        f"{fixed.term(name + form.between)} %json {schema}"
        for (name, _), schema in zip(calls.tools, schemas, strict=False)
    )
    more = f" ({fixed.term(form.joining)} body)*" if calls.parallel else ""
    lines = [f"body: {' | '.join(bodies)}", f"calls: body{more} {fixed.term(form.closing)}"]
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

    A mark that is a token ends a free text where it stands; one that is spelled does so by a lazy terminal, which
    matches as soon as the mark is complete, whatever the tokens that spell it. others: special tokens that free text
    may have.
    """
    other = f" | <[{others}]>" if others else ""
    lines = [_free(others)]
    if form.bare:
        lines.append(f"begun: (BEGUN{other}) free\nBEGUN: /[^{{](.|\\n)*/")
        starts = ["begun?", after_mark]
        return starts if mark_id is None else [*starts, f"begun? <[{mark_id}]> {after_mark}"], lines
    if mark_id is not None:
        return ["free", f"free <[{mark_id}]> {after_mark}"], lines
    lines.append(f"head[lazy]: ANY {_literal(form.mark)}\nANY: /(.|\\n)*/")
    if others:
        lines.append(f"before: (TEXT? <[{others}]>)*")
    return ["free", f"{'before ' if others else ''}head {after_mark}"], lines


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
