"""The SQLite file of a server's records: a writer that keeps it within age and size, and a reader.

docs/records.md documents the tables. The file can be read while a server writes it.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.records import ServedRecord, ServerRun
from adaserve_jax.results.whole_file import PRIVATE

APPLICATION_ID = 0x41645356
"""Marks the file as ours, in SQLite's header."""
SCHEMA_VERSION = 4
"""Stored in SQLite's user_version; rises with any change of the tables."""
WRITER_BUSY_S, READER_BUSY_S = 1.0, 10.0
"""Longest wait for a lock that another process holds."""
PRUNE_ROWS = 5000
"""Most rows that one call of `prune` removes."""
PRUNE_MARGIN = 0.02
"""Share of the allowed bytes that is freed beyond need, so that the next rows fit."""
WAL_BYTES = 16 * 2**20
"""Size to which the write-ahead log shrinks after it was larger."""
MAX_RECORDS = 2_000_000
"""Most records that are read at once; a million of them takes a gigabyte of memory."""

RUN_COLUMNS = tuple(f.name for f in fields(ServerRun))
RECORD_COLUMNS = (
    "request_id", "slo_class", "status", "error_code", "prompt_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s",
    "tpot_paper_s", "tpot_slo_s", "ttft_slo_s", "tpot_met", "ttft_met", "slo_met", "slo_feasible", "tpot_paper_met",
    "verify_steps", "drafted_tokens", "accepted_tokens", "preemptions", "choice", "key", "ending", "cause",
    "cached_tokens", "arrival_unix_s", "ended_unix_s", "prompt", "output", "thinking_tpot_s", "answer_tpot_s",
    "thinking_tpot_slo_s", "e2e_slo_s", "e2e_met", "model",
)  # fmt: skip
"""Columns of a `ServedRecord` in the table; the rest is in `runs`, or always the same at a server."""
TEXT_COLUMNS = ("prompt", "output")
"""Columns that the reader leaves in the file."""
READ_COLUMNS = tuple(name for name in RECORD_COLUMNS if name not in TEXT_COLUMNS)
_HINTS = get_type_hints(ServedRecord) | {"arrival_unix_s": float}
_BOOLS = tuple(name for name in RECORD_COLUMNS if bool in get_args(_HINTS[name]))
_SQL_TYPES = {int: "INTEGER", bool: "INTEGER", float: "REAL"}


def schema() -> dict[str, dict[str, str]]:
    """Return the SQL type of every column, by table.

    `runs` has one row per start of an engine, `requests` one per choice.
    """
    runs = get_type_hints(ServerRun)
    return {
        "runs": {"id": "INTEGER PRIMARY KEY"} | {name: _sql_type(runs[name]) for name in RUN_COLUMNS},
        "requests": {"id": "INTEGER PRIMARY KEY", "run": "INTEGER NOT NULL REFERENCES runs(id)"}
        | {name: _sql_type(_HINTS[name]) for name in RECORD_COLUMNS},
    }


def _sql_type(hint: Any) -> str:
    optional = isinstance(hint, UnionType) and NoneType in get_args(hint)
    kind: Any = get_args(hint)[0] if optional else hint
    return _SQL_TYPES.get(kind, "TEXT") + ("" if optional else " NOT NULL")


class RecordStore:
    """Writer of one file, for one thread at a time; other processes may read the file meanwhile.

    Committed rows survive any end of this process; a power failure may take the last commits.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection):
        self.path = path
        self._connection = connection
        self._run_ids: dict[ServerRun, int] = {}
        columns = ("run", *RECORD_COLUMNS)
        self._insert = f"INSERT INTO requests ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        self._insert_run = f"INSERT INTO runs ({', '.join(RUN_COLUMNS)}) VALUES ({', '.join('?' * len(RUN_COLUMNS))})"

    @classmethod
    def open(cls, path: Path) -> RecordStore:
        """Open the file, or create it readable by its owner only. Raises ConfigError: it cannot be written, or it is
        another program's."""
        try:
            with suppress(FileExistsError):  # SQLite gives the log beside it the same mode
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, PRIVATE))
            connection = sqlite3.connect(path, timeout=WRITER_BUSY_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise _cannot(path, error) from error
        try:
            _prepare(path, connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error):
                raise _cannot(path, error) from error
            raise
        return cls(path, connection)

    def add(self, records: Sequence[ServedRecord]) -> None:
        """Write all records, or none. Raises sqlite3.Error: the disk is full, or another process holds the file."""
        made: dict[ServerRun, int] = {}
        with self._connection:  # commits or rolls back
            self._connection.execute("BEGIN IMMEDIATE")
            for run in dict.fromkeys(record.run for record in records):
                if run not in self._run_ids:
                    made[run] = self._connection.execute(self._insert_run, astuple(run)).lastrowid or 0
            ids = self._run_ids | made
            rows = ((ids[each.run], *(getattr(each, name) for name in RECORD_COLUMNS)) for each in records)
            self._connection.executemany(self._insert, rows)
        self._run_ids = ids

    def prune(self, *, before_unix_s: float, max_bytes: int) -> bool:
        """Remove some records that ended before a time, and some of the oldest while the file has too many bytes.

        Return whether there is more to remove. Raises sqlite3.Error: the file cannot be written now.
        """
        removed = self._remove("ended_unix_s < ? ORDER BY ended_unix_s", PRUNE_ROWS, before_unix_s)
        used = self.used_bytes()
        if used > max_bytes and removed < PRUNE_ROWS:
            share = 1 - (1 - PRUNE_MARGIN) * max_bytes / used
            (rows,) = self._connection.execute("SELECT count(*) FROM requests").fetchone()
            removed += self._remove("true ORDER BY id", min(math.ceil(share * rows), PRUNE_ROWS - removed))
        if removed:
            self._connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page
        return removed >= PRUNE_ROWS or (removed > 0 and self.used_bytes() > max_bytes)

    def used_bytes(self) -> int:
        """Return the bytes of the file's used pages; the log beside it is not counted."""
        pages, free, size = (self._pragma(name) for name in ("page_count", "freelist_count", "page_size"))
        return (pages - free) * size

    def close(self) -> None:
        self._connection.close()

    def _remove(self, which: str, most: int, *values: float) -> int:
        statement = f"DELETE FROM requests WHERE id IN (SELECT id FROM requests WHERE {which} LIMIT {most})"
        return self._connection.execute(statement, values).rowcount

    def _pragma(self, name: str) -> int:
        return self._connection.execute(f"PRAGMA {name}").fetchone()[0]


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    """Create the tables in an empty file, and set the file's journal. Raises ConfigError: the file is not ours, or its
    file system has no shared memory maps. sqlite3.Error: SQLite cannot read or write it."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect in an empty file only
    connection.execute("BEGIN IMMEDIATE")  # fails if the file cannot be written
    if _is_empty(connection):
        for table, columns in schema().items():
            connection.execute(f"CREATE TABLE {table} ({', '.join(f'{n} {kind}' for n, kind in columns.items())})")
        connection.execute("CREATE INDEX requests_by_end ON requests (ended_unix_s)")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
    _check_schema(path, connection)
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise ConfigError(f"{path} must be on a file system with shared memory maps, such as a local disk; choose one")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Return whether the file has no tables yet."""
    return not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()


def _check_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Raise ConfigError unless the file holds records of this version's schema."""
    found = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != APPLICATION_ID:
        raise ConfigError(f"{path} must be a file of records, it is an SQLite file of another program; give another")
    if version != SCHEMA_VERSION:
        age = "an older" if version < SCHEMA_VERSION else "a newer"
        raise ConfigError(
            f"{path} must have records of schema {SCHEMA_VERSION}, it has schema {version} of {age} version of "
            "adaserve; give another path, or use that version"
        )


def _cannot(path: Path, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigError(f"cannot keep records in {path}: {reason}; give a path that can be written as an SQLite file")


@dataclass(frozen=True)
class FileExtent:
    """Number of choices in a whole file, and when the first and the last of them ended, in Unix time."""

    choices: int
    first_unix_s: float | None
    last_unix_s: float | None


def read_records(
    path: Path, *, since_unix_s: float = 0.0, until_unix_s: float = math.inf
) -> tuple[list[ServedRecord], FileExtent]:
    """Read the records of choices that ended from `since` until before `until`, in the order of their ends.

    Texts stay in the file. Records and extent are of one moment, whatever a server writes meanwhile.

    Raises:
        ConfigError: there is no such file, it is not ours, or there are too many records.
    """
    with _reading(path) as connection:
        if _is_empty(connection):
            return [], FileExtent(0, None, None)
        _check_schema(path, connection)
        every = "SELECT count(*), min(ended_unix_s), max(ended_unix_s) FROM requests"
        extent = FileExtent(*connection.execute(every).fetchone())
        chosen, times = "FROM requests WHERE ended_unix_s >= ? AND ended_unix_s < ?", (since_unix_s, until_unix_s)
        (count,) = connection.execute(f"SELECT count(*) {chosen}", times).fetchone()
        if count > MAX_RECORDS:
            raise ConfigError(
                f"at most {MAX_RECORDS:,} choices can be reported on at once, {count:,} ended in that time; choose a "
                "shorter one, or ask the file with SQL"
            )
        runs = {
            number: ServerRun(*values)
            for number, *values in connection.execute(f"SELECT id, {', '.join(RUN_COLUMNS)} FROM runs")
        }
        columns = ", ".join(("run", *READ_COLUMNS))
        rows = connection.execute(f"SELECT {columns} {chosen} ORDER BY ended_unix_s, id", times)
        return [_record(runs[run], values) for run, *values in rows], extent


def _record(run: ServerRun, values: Sequence[Any]) -> ServedRecord:
    row = dict(zip(READ_COLUMNS, values, strict=True))
    for name in _BOOLS:
        row[name] = None if row[name] is None else bool(row[name])
    arrival_unix_s = row.pop("arrival_unix_s")
    return ServedRecord(
        run_id=run.run_id, policy=run.policy, rate_rps=0.0, due_s=arrival_unix_s, late_s=0.0, token_offsets_s=(),
        run=run, **row,
    )  # fmt: skip


@contextmanager
def _reading(path: Path) -> Generator[sqlite3.Connection, None, None]:
    """Yield a read-only connection within one transaction. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: expected a file that a server wrote with --records, found no file")
    try:
        connection = sqlite3.connect(_uri(path), uri=True, timeout=READER_BUSY_S, isolation_level=None)
        try:
            connection.execute("BEGIN")
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read {path} as a file that a server wrote with --records: {error}") from error


def _uri(path: Path) -> str:
    """Return the read-only address of the file.

    SQLite wants to create the log beside the file, which fails in a folder that cannot be written; a file without a log
    is opened there as one that does not change.
    """
    unchanging = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if unchanging else ''}"
