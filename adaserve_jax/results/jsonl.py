"""Reader and writer of dataclasses as JSON lines; errors name file, line and column.

A run may be killed while it writes, so that the last line of a file can be half a line. Nothing is appended to such a
line, and `read_good_rows` reads the lines before it.
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

NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list",
         dict: "an object", NoneType: "null"}  # fmt: skip
TAIL_BYTES = 1 << 16
Row = TypeVar("Row")


@dataclass(frozen=True)
class RowSchema:
    """Columns of a dataclass in a JSON line.

    required: names without a default. types: Python types of a column's values; elements of lists and objects are not
    checked.
    """

    names: frozenset[str]
    required: frozenset[str]
    types: Mapping[str, frozenset[type]]


@cache
def schema_of(kind: type) -> RowSchema:
    """Return the columns of a dataclass of numbers, texts, None, tuples and dicts."""
    hints, own = get_type_hints(kind), fields(kind)
    return RowSchema(
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
    shown = types - {int} if float in types else types
    return " or ".join(text for kind, text in NAMES.items() if kind in shown)


def make_folder(out: Path) -> None:
    """Create an output folder and its parents. Raises ConfigError if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create output folder {out}: {error.strerror}; choose another --out") from error


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Append one line per row, and close the file, so that the rows survive the process.

    Half a line at the end of the file is removed first: no reader could parse it.
    """
    text = "".join(as_line(row) for row in rows)
    if path.exists():
        end_last_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def as_line(row: Any) -> str:
    """Return the line of a dataclass whose fields are numbers, texts, None and tuples of these."""
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    return json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n"


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Read the rows of a file as `kind`; a column that has a default may be absent.

    Raises:
        ConfigError: names file, line and column of what is wrong.
    """
    return [_parse(line, f"{path}:{number}", kind) for number, line in _lines(path)]


def read_good_rows(path: Path, kind: type[Row]) -> tuple[list[Row], str | None]:
    """Read rows like `read_rows`, but leave out a last line that was not written to its end.

    Returns:
        The rows, and a sentence about the line that was left out, or None.

    Raises:
        ConfigError: anything else is wrong, in this line or another.
    """
    lines = _lines(path)
    if not lines or _is_whole(lines[-1][1]):
        return [_parse(line, f"{path}:{number}", kind) for number, line in lines], None
    rows = [_parse(line, f"{path}:{number}", kind) for number, line in lines[:-1]]
    return rows, f"{path}:{lines[-1][0]}: left out: the line was not written to its end"


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """Return the lines that are not blank, with their numbers and line ends."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a JSON lines file") from error
    return [(number, line) for number, line in enumerate(raw.splitlines(keepends=True), 1) if line.strip()]


def _is_whole(line: bytes) -> bool:
    """Return whether a last line was written to its end: an object that lacks more than the line end is no JSON."""
    return line.endswith(b"\n") or _is_object(line)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def end_last_line(path: Path) -> None:
    """Make a file end in a whole line: add a line end that is missing, or remove a half-written line."""
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
    schema = schema_of(kind)
    version = values.get("schema_version", SCHEMA_VERSION)
    if version not in READABLE:
        known = " and ".join(str(each) for each in READABLE)
        raise ConfigError(f"{where}: schema_version is {version!r}, this version reads {known}")
    for problem, keys in (("unknown", values.keys() - schema.names), ("missing", schema.required - values.keys())):
        if keys:
            raise ConfigError(f"{where}: {problem} column {min(keys)!r} for a {kind.__name__}")
    for name, value in values.items():
        if type(value) not in schema.types[name]:
            raise ConfigError(f"{where}: column {name!r} must be {_named(schema.types[name])}, got {value!r}")
    return kind(**values)
