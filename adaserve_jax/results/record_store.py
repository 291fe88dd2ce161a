"""The file of a server's records: SQLite with a schema of its own, written in batches, kept within age and size.

Knows neither threads nor the server; reading is in record_reader.py. The schema is documented in docs/records.md.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.served import ServedChoice, ServerRun

APPLICATION_ID = 0x41645356
"""Marks the file as ours, in SQLite's header."""
SCHEMA_VERSION = 1
"""In SQLite's user_version; rises with any change of the tables."""
BUSY_S = 1.0
PRUNE_ROWS = 5000
"""Most rows that one call of `prune` removes."""
SPARE = 0.02
"""Share of the bytes that are allowed which is freed beyond need, so that the next rows find room."""
WAL_BYTES = 16 * 2**20
"""What the log beside the file shrinks to, once it was larger."""
NOT_STORED = ("run_id", "policy", "rate_rps", "due_s", "late_s", "token_offsets_s", "replica", "point")
"""Fields of a RequestRecord that are in `runs`, that have another name here, or that a server does not have."""

RUN_COLUMNS = tuple(f.name for f in fields(ServerRun))
RECORD_COLUMNS = tuple(f.name for f in fields(RequestRecord) if f.name not in NOT_STORED)
OWN_COLUMNS = (
    "choice", "key", "ending", "cause", "cached_tokens", "arrival_unix_s", "ended_unix_s", "prompt", "output",
)  # fmt: skip
_SQL_TYPES = {int: "INTEGER", bool: "INTEGER", float: "REAL"}


def schema() -> dict[str, dict[str, str]]:
    """SQL type of every column, by table: `runs`, one row per start of an engine, and `requests`, one per choice."""
    runs, record = get_type_hints(ServerRun), get_type_hints(RequestRecord)
    own = get_type_hints(ServedChoice) | {"arrival_unix_s": float}
    return {
        "runs": {"id": "INTEGER PRIMARY KEY"} | {name: _sql_type(runs[name]) for name in RUN_COLUMNS},
        "requests": {"id": "INTEGER PRIMARY KEY", "run": "INTEGER NOT NULL REFERENCES runs(id)"}
        | {name: _sql_type(record[name]) for name in RECORD_COLUMNS}
        | {name: _sql_type(own[name]) for name in OWN_COLUMNS},
    }


def _sql_type(hint: Any) -> str:
    optional = isinstance(hint, UnionType) and NoneType in get_args(hint)
    kind: Any = get_args(hint)[0] if optional else hint
    return _SQL_TYPES.get(kind, "TEXT") + ("" if optional else " NOT NULL")


class RecordStore:
    """Writes one file. Used from one thread at a time; other processes may read the file meanwhile.

    What is committed survives the end of this process however it comes; a power failure may take the last commits.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection):
        self.path = path
        self._connection = connection
        self._run_ids: dict[ServerRun, int] = {}
        columns = ("run", *RECORD_COLUMNS, *OWN_COLUMNS)
        self._insert = f"INSERT INTO requests ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        self._insert_run = f"INSERT INTO runs ({', '.join(RUN_COLUMNS)}) VALUES ({', '.join('?' * len(RUN_COLUMNS))})"

    @classmethod
    def open(cls, path: Path) -> RecordStore:
        """Continue the file, or make it, readable by its owner only. Raises ConfigError."""
        try:
            _create(path)
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
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

    def add(self, choices: Sequence[ServedChoice]) -> None:
        """Write all of them, or none. Raises sqlite3.Error: the disk is full, or another process holds the file."""
        made: dict[ServerRun, int] = {}
        with self._transaction():
            for run in dict.fromkeys(choice.run for choice in choices):
                if run not in self._run_ids:
                    made[run] = self._connection.execute(self._insert_run, astuple(run)).lastrowid or 0
            ids = self._run_ids | made
            self._connection.executemany(self._insert, ((ids[choice.run], *_values(choice)) for choice in choices))
        self._run_ids = ids

    def prune(self, *, before_unix_s: float, max_bytes: int) -> bool:
        """Remove some of the choices that ended before a time, and of the oldest while there are more bytes.

        Returns whether there is more to remove. Raises sqlite3.Error.
        """
        removed = self._remove("ended_unix_s < ? ORDER BY ended_unix_s", PRUNE_ROWS, before_unix_s)
        used = self.used_bytes()
        if used > max_bytes and removed < PRUNE_ROWS:
            share = 1 - (1 - SPARE) * max_bytes / used
            removed += self._remove("true ORDER BY id", min(math.ceil(share * self._rows()), PRUNE_ROWS - removed))
        if removed:
            self._connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page
        return removed >= PRUNE_ROWS or (removed > 0 and self.used_bytes() > max_bytes)

    def used_bytes(self) -> int:
        """Of the file, without pages that are free; the log beside it is not counted."""
        pages, free, size = (self._pragma(name) for name in ("page_count", "freelist_count", "page_size"))
        return (pages - free) * size

    def close(self) -> None:
        self._connection.close()

    def _remove(self, which: str, most: int, *values: float) -> int:
        statement = f"DELETE FROM requests WHERE id IN (SELECT id FROM requests WHERE {which} LIMIT {most})"
        return self._connection.execute(statement, values).rowcount

    def _rows(self) -> int:
        return self._connection.execute("SELECT count(*) FROM requests").fetchone()[0]

    def _pragma(self, name: str) -> int:
        return self._connection.execute(f"PRAGMA {name}").fetchone()[0]

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite ends it by itself on a full disk
                self._connection.execute("ROLLBACK")
            raise


def _values(choice: ServedChoice) -> tuple[Any, ...]:
    record = tuple(getattr(choice.record, name) for name in RECORD_COLUMNS)
    return record + tuple(getattr(choice, name) for name in OWN_COLUMNS)


def _create(path: Path) -> None:
    """Make an empty file with mode 0600 where there is none; SQLite gives the log beside it the same mode."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file; raises ConfigError for a file that is not ours, sqlite3.Error as it comes."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of an empty file only
    connection.execute("BEGIN IMMEDIATE")  # also finds out whether the file can be written
    if is_empty(connection):
        for table, columns in schema().items():
            connection.execute(f"CREATE TABLE {table} ({', '.join(f'{n} {kind}' for n, kind in columns.items())})")
        connection.execute("CREATE INDEX requests_by_end ON requests (ended_unix_s)")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
    check_schema(path, connection)
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise ConfigError(f"{path} must be on a file system with shared memory maps, such as a local disk; choose one")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether nobody has written anything into the file."""
    return not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()


def check_schema(path: Path, connection: sqlite3.Connection) -> None:
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
