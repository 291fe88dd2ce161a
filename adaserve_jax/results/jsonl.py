"""Reads and writes dataclasses as JSON lines; a wrong line is named by file, line and column.

A run may be killed while it writes, so that the last line of a file can be half a line. Nothing is ever appended to
such a line, and `read_good_rows` reads what is before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.columns import columns_of
from adaserve_jax.results.schema import READABLE, SCHEMA_VERSION

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
