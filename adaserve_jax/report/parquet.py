"""Rows, requests and samples of run folders as Parquet files, with the types of their columns. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import make_folder
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import RunFolder, point_of
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ResultRow

if TYPE_CHECKING:
    import pyarrow

FOLDER = "folder"
"""The one column that is not of the JSON lines: the path of the folder that a line was read from."""


def write_parquet(folders: Sequence[RunFolder], out: Path) -> tuple[Path, ...]:
    """Write results.parquet, requests.parquet and samples.parquet to `out`, each if there is a line of it; returns
    their paths. Columns are those of docs/metrics.md; `point` is filled in for files from before it existed.

    Raises ConfigError: pyarrow is not installed, or a file cannot be written.
    """
    pyarrow, parquet = _library()
    make_folder(out)
    tables = (
        ("results", ResultRow, ((folder, row) for folder in folders for row in folder.rows)),
        ("requests", RequestRecord, _lines(folders, "records")),
        ("samples", Sample, _lines(folders, "samples")),
    )
    written = []
    for name, kind, lines in tables:
        held = list(lines)
        if held:
            path = out / f"{name}.parquet"
            schema = schema_of(kind, pyarrow)
            try:
                parquet.write_table(pyarrow.Table.from_pylist([_plain(*each) for each in held], schema), path)
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror or error}; choose another folder") from error
            written.append(path)
    return tuple(written)


def schema_of(kind: type, pyarrow: Any) -> pyarrow.Schema:
    """The columns of a kind of line, by its type hints; only those that may be None are nullable."""
    hints = get_type_hints(kind)
    columns = [pyarrow.field(FOLDER, pyarrow.string(), nullable=False)]
    for field in fields(kind):
        inner, nullable = _without_none(hints[field.name])
        columns.append(pyarrow.field(field.name, _type(inner, pyarrow), nullable=nullable))
    return pyarrow.schema(columns)


def _library() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet files need pyarrow: pip install 'adaserve-jax[report]'") from error
    return pyarrow, pyarrow.parquet


def _lines(folders: Sequence[RunFolder], name: str) -> Iterable[tuple[RunFolder, Any]]:
    return ((folder, line) for folder in folders for lines in getattr(folder, name).values() for line in lines)


def _plain(folder: RunFolder, line: ResultRow | RequestRecord | Sample) -> dict[str, Any]:
    values = {field.name: getattr(line, field.name) for field in fields(line)}
    return values | {FOLDER: str(folder.path), "point": point_of(line)}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The hint without None, and whether None was in it."""
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (part for part in get_args(hint) if part is not NoneType)
        return inner, True
    return hint, False


def _type(hint: Any, pyarrow: Any) -> Any:
    if get_origin(hint) is tuple:
        return pyarrow.list_(_type(get_args(hint)[0], pyarrow))
    if get_origin(hint) is Literal:
        return pyarrow.string()
    return {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}[hint]
