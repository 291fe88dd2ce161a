"""Reads and writes dataclasses as JSON lines; a wrong line is named by file, line and column."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.schema import READABLE, SCHEMA_VERSION

Row = TypeVar("Row")


def make_folder(out: Path) -> None:
    """Create an output folder and those above it. Raises ConfigError when that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create output folder {out}: {error.strerror}; choose another --out") from error


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Append one line per row, and flush: rows written survive whatever happens later."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(row), allow_nan=False, separators=(",", ":")) + "\n")


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Rows of `path` as `kind`; a column that has a default may be absent. Raises ConfigError naming file, line and
    column."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a JSON lines file") from error
    return [_parse(line, f"{path}:{number}", kind) for number, line in enumerate(lines, 1) if line.strip()]


def _parse(line: str, where: str, kind: type[Row]) -> Row:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: expected one JSON object per line, got invalid JSON: {error.msg}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(values).__name__}")
    columns = fields(kind)  # pyright: ignore[reportArgumentType]
    names, required = {f.name for f in columns}, {f.name for f in columns if f.default is MISSING}
    version = values.get("schema_version", SCHEMA_VERSION)
    if version not in READABLE:
        known = " and ".join(str(each) for each in READABLE)
        raise ConfigError(f"{where}: schema_version is {version!r}, this version reads {known}")
    for problem, keys in (("unknown", values.keys() - names), ("missing", required - values.keys())):
        if keys:
            raise ConfigError(f"{where}: {problem} column {min(keys)!r} for a {kind.__name__}")
    return kind(**values)
