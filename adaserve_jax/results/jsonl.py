"""Reads and writes dataclasses as JSON lines; a wrong line is named by file, line and column.

A run may be killed while it writes, so that the last line of a file can be half a line. Nothing is ever appended to
such a line, and `read_good_rows` reads what is before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.schema import READABLE, SCHEMA_VERSION

# What values the columns of a dataclass may have in a JSON line, from its type hints.

NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list",
         dict: "an object", NoneType: "null"}  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """names: all of them. required: those without a default. types: by column, what `type` its values may have; what
    lists and objects hold is not looked at."""

    names: frozenset[str]
    required: frozenset[str]
    types: Mapping[str, frozenset[type]]

    def first_wrong(self, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """A column whose value is of another type, and what it must be; None when all are right."""
        for name, value in values.items():
            if type(value) not in self.types[name]:
                return name, _named(self.types[name])
        return None


@cache
def columns_of(kind: type) -> Columns:
    """The columns of a dataclass of numbers, texts, None, tuples and dicts."""
    hints, own = get_type_hints(kind), fields(kind)
    return Columns(
        names=frozenset(f.name for f in own),
        required=frozenset(f.name for f in own if f.default is MISSING),
        types={f.name: frozenset(_types(hints[f.name])) for f in own},
    )


def _types(hint: Any) -> set[type]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return {kind for part in get_args(hint) for kind in _types(part)}
    if origin is Literal:
        return {type(value) for value in get_args(hint)}
    if hint is float:
        return {float, int}
    kind = origin or hint
    return {list if kind is tuple else kind}


def _named(types: frozenset[type]) -> str:
    told = types - {int} if float in types else types
    return " or ".join(text for kind, text in NAMES.items() if kind in told)


Row = TypeVar("Row")
TAIL_BYTES = 1 << 16


def make_folder(out: Path) -> None:
    """Create an output folder and those above it. Raises ConfigError when that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create output folder {out}: {error.strerror}; choose another --out") from error


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Append one line per row, and flush: rows written survive whatever happens later. Half a line at the end of the
    file, which nobody can read, is removed first."""
    text = "".join(as_line(row) for row in rows)
    if path.exists():
        end_last_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def as_line(row: Any) -> str:
    """The line of a dataclass whose fields are numbers, texts, None and tuples of such."""
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    return json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n"


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Rows of `path` as `kind`; a column that has a default may be absent. Raises ConfigError naming file, line and
    column."""
    return [_parse(line, f"{path}:{number}", kind) for number, line in _lines(path)]


def read_good_rows(path: Path, kind: type[Row]) -> tuple[list[Row], str | None]:
    """As `read_rows`, but a last line that was not written to its end is left out, and the second value says so, else
    it is None. Whatever else is wrong, in this line or another, raises ConfigError."""
    lines = _lines(path)
    if not lines or _is_whole(lines[-1][1]):
        return [_parse(line, f"{path}:{number}", kind) for number, line in lines], None
    rows = [_parse(line, f"{path}:{number}", kind) for number, line in lines[:-1]]
    return rows, f"{path}:{lines[-1][0]}: left out: the line was not written to its end"


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """Lines that are not blank, each with its number and its line end, which a half-written one has not."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a JSON lines file") from error
    return [(number, line) for number, line in enumerate(raw.splitlines(keepends=True), 1) if line.strip()]


def _is_whole(line: bytes) -> bool:
    """Whether a last line was written to its end, of which the line end is the least: an object that lost another part
    is no JSON."""
    return line.endswith(b"\n") or _is_object(line)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def end_last_line(path: Path) -> None:
    """Make a file end in a whole line: one that lacks only its end gets it, one that lacks more is removed."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) in (b"", b"\n"):
            return
        start, tail = size, b""
        while start and b"\n" not in tail:
            length = min(TAIL_BYTES, start)
            start -= length
            file.seek(start)
            tail = file.read(length) + tail
        last = tail.rpartition(b"\n")[2]
        if _is_object(last):
            file.seek(size)
            file.write(b"\n")
        else:
            file.truncate(size - len(last))


def _parse(line: bytes, where: str, kind: type[Row]) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "it is not UTF-8"
        raise ConfigError(f"{where}: expected one JSON object per line, got invalid JSON: {problem}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(values).__name__}")
    values = cast("dict[str, Any]", values)
    columns = columns_of(kind)
    version = values.get("schema_version", SCHEMA_VERSION)
    if version not in READABLE:
        known = " and ".join(str(each) for each in READABLE)
        raise ConfigError(f"{where}: schema_version is {version!r}, this version reads {known}")
    for problem, keys in (("unknown", values.keys() - columns.names), ("missing", columns.required - values.keys())):
        if keys:
            raise ConfigError(f"{where}: {problem} column {min(keys)!r} for a {kind.__name__}")
    wrong = columns.first_wrong(values)
    if wrong is not None:
        name, expected = wrong
        raise ConfigError(f"{where}: column {name!r} must be {expected}, got {values[name]!r}")
    return kind(**values)
