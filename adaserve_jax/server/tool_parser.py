"""Read tool calls back from an answer's text while it is written: text, then each call's name and its arguments.

The grammar of `constraints/tool_formats.py` held the text to its format, so the parser only follows the fixed texts. A
text that ends inside them, at max_tokens or a stop string, ends with what was read until then.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from adaserve_jax.constraints.tool_formats import ToolFormat

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
    JOINING = auto()


class ToolCallParser:
    """The text of one choice."""

    def __init__(self, form: ToolFormat):
        self._form = form
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
            before = len(self._unread)
            if self._at is _At.TEXT:
                content += self._read_text(last)
            elif self._at is _At.ARGUMENTS:
                deltas += self._read_arguments()
            elif self._at is _At.NAME:
                deltas += self._read_name()
            else:
                content += self._read_fixed()
            if len(self._unread) == before:
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
            self._unread, self._at = self._unread[len(fixed) :], _At.NAME
        elif self._at is _At.OPENING and not fixed.startswith(self._unread):
            text, self._unread, self._at = self._opened_by + self._unread[0], self._unread[1:], _At.TEXT
            return text
        return ""

    def _read_name(self) -> Iterator[ToolCallDelta]:
        name, found, rest = self._unread.partition(self._form.between)
        if found:
            self._unread, self._at = rest, _At.ARGUMENTS
            self._calls += 1
            yield ToolCallDelta(self._calls - 1, new_call_id(self._form), name)

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


def new_call_id(form: ToolFormat) -> str:
    """Return a fresh id of a call."""
    return uuid.uuid4().hex[: form.id_chars] if form.id_chars else f"call_{uuid.uuid4().hex[:24]}"


def _beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of the text with which the mark begins."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
