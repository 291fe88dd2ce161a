"""Reader and writer of dataclasses as JSON lines; errors name file, line and column.

A run may be killed while it writes, so that the last line of a file can be half a line. Nothing is appended to such a
line, and `read_good_rows` reads the lines before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from adaserve_jax.errors import ConfigError

Row = TypeVar("Row")


@cache
def _adapter(kind: type[Row]) -> TypeAdapter[Row]:
    return TypeAdapter(kind)


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
    """Read the rows of a file as `kind`; a column that has a default may be absent. Raises ConfigError: names file,
    line and column of what is wrong."""
    return [_parse(line, f"{path}:{number}", kind) for number, line in _lines(path)]


def read_good_rows(path: Path, kind: type[Row]) -> tuple[list[Row], str | None]:
    """Read rows like `read_rows`, but leave out a last line that was not written to its end; a sentence says so."""
    lines, note = _lines(path), None
    if lines and not lines[-1][1].endswith(b"\n") and not _is_object(lines[-1][1]):
        number, _ = lines.pop()
        note = f"{path}:{number}: left out: the line was not written to its end"
    return [_parse(line, f"{path}:{number}", kind) for number, line in lines], note


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """Return the lines that are not blank, with their numbers and line ends."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a JSON lines file") from error
    return [(number, line) for number, line in enumerate(raw.splitlines(keepends=True), 1) if line.strip()]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def end_last_line(path: Path) -> None:
    """Make a file end in a whole line: add a line end that is missing, or remove a half-written line."""
    with path.open("r+b") as file:
        if not file.seek(0, os.SEEK_END):
            return
        with mmap(file.fileno(), 0, access=ACCESS_READ) as whole:
            start = whole.rfind(b"\n") + 1
            last = whole[start:]
        if _is_object(last):
            file.write(b"\n")
        else:
            file.truncate(start)


def _parse(line: bytes, where: str, kind: type[Row]) -> Row:
    try:
        return _adapter(kind).validate_json(line, strict=True, extra="forbid")
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # A line of another version may lack columns too.
    problem = next((each for each in problems if each["loc"] == ("schema_version",)), problems[0])
    what = problem["msg"]
    if problem["loc"]:
        got = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
        what = f"column {problem['loc'][0]!r}: {what}{got}"
    raise ConfigError(f"{where}: expected one JSON object with the columns of a {kind.__name__}; {what}")
