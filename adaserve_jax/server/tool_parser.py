"""Read tool calls back from an answer's text while it is written: text, then each call's name and its arguments.

The grammar of `constraints/tool_formats.py` held the text to its format, so the parser only follows the fixed texts. A
text that ends inside them, at max_tokens or a stop string, ends with what was read until then. Arguments that are
written one by one become one JSON object.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from adaserve_jax.constraints.tool_formats import FORMATS, ArgumentTexts, ToolFormat, is_plain_text
from adaserve_jax.sampling import ToolCalls

_STRUCTURE = re.compile(r'\\.|[\\"{}]', re.DOTALL)


@dataclass(frozen=True)
class ToolCallDelta:
    """Beginning of a call, with id and name, or the next part of the JSON of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    @staticmethod
    def join(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
        """Concatenate deltas of the same calls, in order: one of each call is left."""
        calls: dict[int, ToolCallDelta] = {}
        for delta in deltas:
            known = calls.get(delta.index)
            calls[delta.index] = delta if known is None else replace(known, arguments=known.arguments + delta.arguments)
        return tuple(calls.values())


class _At(Enum):
    """Part of the text that comes next."""

    TEXT = auto()
    OPENING = auto()
    NAME = auto()
    ARGUMENTS = auto()
    KEY = auto()
    TEXT_VALUE = auto()
    JSON_VALUE = auto()
    JOINING = auto()


class ToolCallParser:
    """The text of one choice."""

    def __init__(self, calls: ToolCalls):
        """Begin with an empty text. calls: what it may call."""
        self._form = form = FORMATS[calls.format]
        self._plain: dict[str, set[str]] = {}
        """By tool, the arguments that are written as they are, if they are written one by one."""
        if form.arguments is not None:
            for name, schema in calls.tools:
                properties = json.loads(schema).get("properties", {})
                self._plain[name] = {key for key, given in properties.items() if is_plain_text(given)}
        self._names = tuple(name for name, _ in calls.tools)
        self._name = ""
        self._values = 0
        self._passed = ""
        self._at = _At.TEXT
        self._unread = ""
        self._begun = False
        self._opened_by = ""
        self._calls = 0
        self._depth = 0
        self._in_string = False

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Add text. Return the text before the calls that is certain now, and what is new of the calls."""
        self._unread += text
        content, deltas = "", []
        while self._unread:
            before = len(self._unread), self._at
            if self._at is _At.TEXT:
                content += self._read_text(last)
            elif self._at is _At.ARGUMENTS:
                deltas += self._read_arguments()
            elif self._at is _At.NAME:
                shown, begun = self._read_name()
                content += shown
                deltas += begun
            elif self._at in (_At.KEY, _At.TEXT_VALUE, _At.JSON_VALUE):
                assert self._form.arguments is not None
                arguments = "".join(self._read_one_by_one(self._form.arguments))
                deltas += [ToolCallDelta(self._calls - 1, arguments=arguments)] if arguments else []
            else:
                content += self._read_fixed()
            if (len(self._unread), self._at) == before:
                break
        return content, deltas

    @property
    def complete(self) -> bool:
        """Return whether the text so far is calls up to an end."""
        return self._at is _At.JOINING and self._unread == self._form.closing

    def _read_text(self, last: bool) -> str:
        form = self._form
        if form.bare and not self._begun and self._unread[0] == "{":
            self._begun, self._at, self._opened_by = True, _At.OPENING, ""
            return ""
        mark = self._unread.find(form.mark)
        end = mark if mark >= 0 else len(self._unread) - (0 if last else _beginning(self._unread, form.mark))
        shown = self._unread[:end]
        self._begun = self._begun or end > 0
        if mark >= 0:
            end, self._at, self._opened_by = end + len(form.mark), _At.OPENING, form.mark
        self._unread = self._unread[end:]
        return shown

    def _read_fixed(self) -> str:
        """Pass over the text before a call's name once it is there in full; return it if it is no such text after all,
        as after a token that no tokenizer spells."""
        fixed = self._form.joining if self._at is _At.JOINING else self._form.bare_opening
        if self._at is _At.OPENING and self._form.spaced and self._unread.startswith(" "):
            fixed = " " + fixed
        if self._unread.startswith(fixed):
            self._passed = fixed if self._at is _At.JOINING else self._opened_by + fixed
            self._unread, self._at = self._unread[len(fixed) :], _At.NAME
        elif self._at is _At.OPENING and not fixed.startswith(self._unread):
            text, self._unread, self._at = self._opened_by + self._unread[0], self._unread[1:], _At.TEXT
            return text
        return ""

    def _read_name(self) -> tuple[str, list[ToolCallDelta]]:
        """Begin a call once its name is there in full. Return text instead where no tool's name can come any more: the
        grammar saw no mark, as where a token without text stands inside it."""
        between, may_come = self._form.between, False
        for name in self._names:
            if self._unread.startswith(name + between):
                self._unread = self._unread[len(name + between) :]
                self._at = _At.ARGUMENTS if self._form.arguments is None else _At.KEY
                self._calls += 1
                self._name, self._values = name, 0
                begun = "" if self._form.arguments is None else "{"
                return "", [ToolCallDelta(self._calls - 1, new_call_id(self._form), name, begun)]
            may_come = may_come or (name + between).startswith(self._unread)
        if may_come:
            return "", []
        text, self._unread, self._at = self._passed + self._unread[0], self._unread[1:], _At.TEXT
        return text, []

    def _read_arguments(self) -> Iterator[ToolCallDelta]:
        """Take the arguments, a JSON object, up to its last brace or the last whole character of what is there."""
        end = len(self._unread)
        for found in _STRUCTURE.finditer(self._unread):
            if found[0] == "\\":  # what it escapes has not come yet
                end = found.start()
            elif found[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if found[0] == "{" else -1
                if not self._depth:
                    end, self._at = found.end(), _At.JOINING
                    break
        shown, self._unread = self._unread[:end], self._unread[end:]
        if shown:
            yield ToolCallDelta(self._calls - 1, arguments=shown)

    def _read_one_by_one(self, texts: ArgumentTexts) -> Iterator[str]:
        """Take the next argument's name, or what is there of its value, and yield their JSON; or the end of all."""
        if self._at is _At.KEY:
            if not self._unread.startswith(texts.before):
                if not texts.before.startswith(self._unread):
                    self._at = _At.JOINING
                    yield "}"
                return
            key, found, rest = self._unread.removeprefix(texts.before).partition(texts.between)
            if found:
                is_plain = key in self._plain.get(self._name, ())
                self._unread, self._at = rest, _At.TEXT_VALUE if is_plain else _At.JSON_VALUE
                yield f"{', ' if self._values else ''}{json.dumps(key, ensure_ascii=False)}: " + '"' * is_plain
                self._values += 1
            return
        value, found, rest = self._unread.partition(texts.after)
        if not found:
            held = _beginning(value, texts.after)
            value, rest = value[: len(value) - held], value[len(value) - held :]
        self._unread = rest
        is_plain = self._at is _At.TEXT_VALUE
        yield json.dumps(value, ensure_ascii=False)[1:-1] if is_plain else value
        if found:
            self._at = _At.KEY
            yield '"' * is_plain


def new_call_id(form: ToolFormat) -> str:
    """Return a fresh id of a call."""
    return uuid.uuid4().hex[: form.id_chars] if form.id_chars else f"call_{uuid.uuid4().hex[:24]}"


def _beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of the text with which the mark begins."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
