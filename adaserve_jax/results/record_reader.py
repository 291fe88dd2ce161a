"""Reads a server's records, also while the server writes them. Changes nothing."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.record_store import OWN_COLUMNS, RECORD_COLUMNS, RUN_COLUMNS, check_schema, is_empty
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.served import ServedChoice, ServerRun

BUSY_S = 10.0
BY = "ended_unix_s"
MOST_CHOICES = 2_000_000
"""That are read at once; a million of them takes a gigabyte of memory."""
READ_COLUMNS = tuple(name for name in OWN_COLUMNS if name not in ("prompt", "output"))
"""Texts stay in the file."""
_BOOLS = tuple(name for name in RECORD_COLUMNS if bool in get_args(get_type_hints(RequestRecord)[name]))


@dataclass(frozen=True)
class Held:
    """What a whole file has: choices, and when the first and the last of them ended, in Unix time."""

    choices: int
    first_unix_s: float | None
    last_unix_s: float | None


def read_choices(path: Path, *, since_unix_s: float, until_unix_s: float) -> tuple[list[ServedChoice], Held]:
    """The choices that ended from `since` until before `until`, in the order of their ends; and what the file has.

    Both at one moment, whatever is written meanwhile. Raises ConfigError: there is no such file, it is not ours, or
    there are too many choices.
    """
    with _connection(path) as connection:
        if is_empty(connection):
            return [], Held(0, None, None)
        check_schema(path, connection)
        held = Held(*connection.execute(f"SELECT count(*), min({BY}), max({BY}) FROM requests").fetchone())
        chosen, times = f"FROM requests WHERE {BY} >= ? AND {BY} < ?", (since_unix_s, until_unix_s)
        (count,) = connection.execute(f"SELECT count(*) {chosen}", times).fetchone()
        if count > MOST_CHOICES:
            raise ConfigError(
                f"at most {MOST_CHOICES:,} choices can be reported on at once, {count:,} ended in that time; choose a "
                "shorter one, or ask the file with SQL"
            )
        runs = dict(_runs(connection))
        columns = ", ".join(("run", *RECORD_COLUMNS, *READ_COLUMNS))
        rows = connection.execute(f"SELECT {columns} {chosen} ORDER BY {BY}, id", times)
        return [_choice(runs[row[0]], row[1:]) for row in rows], held


@contextmanager
def _connection(path: Path) -> Generator[sqlite3.Connection, None, None]:
    """A read-only connection within one transaction."""
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: expected a file that a server wrote with --records, found no file")
    try:
        connection = sqlite3.connect(_uri(path), uri=True, timeout=BUSY_S, isolation_level=None)
        try:
            connection.execute("BEGIN")
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read {path} as a file that a server wrote with --records: {error}") from error


def _uri(path: Path) -> str:
    """SQLite reads a log beside the file even where there is none, but not in a folder that it cannot write; there a
    file without one is at rest."""
    at_rest = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if at_rest else ''}"


def _runs(connection: sqlite3.Connection) -> Iterator[tuple[int, ServerRun]]:
    for number, *values in connection.execute(f"SELECT id, {', '.join(RUN_COLUMNS)} FROM runs"):
        yield number, ServerRun(*values)


def _choice(run: ServerRun, values: tuple[Any, ...]) -> ServedChoice:
    record = dict(zip(RECORD_COLUMNS, values, strict=False))
    own = dict(zip(READ_COLUMNS, values[len(RECORD_COLUMNS) :], strict=True))
    for name in _BOOLS:
        record[name] = None if record[name] is None else bool(record[name])
    arrival_unix_s = own.pop("arrival_unix_s")
    made = RequestRecord(
        run_id=run.run_id, policy=run.policy, rate_rps=0.0, due_s=arrival_unix_s, late_s=0.0, token_offsets_s=(),
        **record,
    )  # fmt: skip
    return ServedChoice(run=run, record=made, **own)
