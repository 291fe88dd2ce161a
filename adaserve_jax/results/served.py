"""What a server keeps of each choice that ended: a request record, and what only a server knows. No storage here.

Numbers and names; text only where the server was told to keep it.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from adaserve_jax.errors import SLO_INFEASIBLE, AdaServeError, ConfigError, EngineDeadError, EngineRestartingError
from adaserve_jax.results.aggregate import percentiles, summarize
from adaserve_jax.results.records import RequestRecord, Status, violation_cause
from adaserve_jax.results.schema import ALL_CLASSES, Summary
from adaserve_jax.types import RequestMetrics

STATUS_OF: dict[str, Status] = {
    "stop": "finished",
    "length": "finished",
    "abort": "failed",
    "error": "failed",
    "rejected": "rejected",
}
"""How an ending counts. An abort is the client's, or that of a server that shuts down: the request failed."""
LOST = (EngineDeadError.code, EngineRestartingError.code, AdaServeError.code)
"""Codes of choices that were not refused: the engine ended, or failed, while it had them."""


@dataclass(frozen=True)
class ServerRun:
    """One start of an engine behind a server, the same for all its choices. started_unix_s: the first end of them.

    model: the name in the API. target, draft: as configured.
    """

    run_id: str
    started_unix_s: float
    package_version: str
    jax_version: str
    device: str
    policy: str
    model: str
    target: str
    draft: str | None
    baseline_s: float


@dataclass(frozen=True, slots=True)
class ServedChoice:
    """One choice of one HTTP request, and how it ended.

    record: its due_s is the arrival in Unix time, and it has no times of tokens. choice: index in the answer. key: name
    of the API key, "" without keys. cause: why a target was missed, by the acceptance of the server so far. prompt,
    output: texts, None unless the server keeps them.
    """

    run: ServerRun
    record: RequestRecord
    choice: int
    key: str
    ending: str
    cause: str | None
    cached_tokens: int
    ended_unix_s: float
    prompt: str | None = None
    output: str | None = None

    @property
    def arrival_unix_s(self) -> float:
        """When it came; of a choice that the engine never began, when it ended."""
        return self.record.due_s


def status_of(ending: str, error_code: str | None) -> Status:
    """How a choice counts that ended so, for records, dashboard and metrics alike."""
    return "failed" if error_code in LOST else STATUS_OF[ending]


def served_choice(
    metrics: RequestMetrics,
    *,
    run: ServerRun,
    request_id: str,
    choice: int,
    key: str,
    ending: str,
    error_code: str | None,
    arrival_unix_s: float,
    ended_unix_s: float,
    acceptance_rate: float,
    prompt: str | None = None,
    output: str | None = None,
) -> ServedChoice:
    """What is kept of a choice with these metrics. acceptance_rate: accepted/drafted of the server so far."""
    record = RequestRecord.of(
        metrics,
        run_id=run.run_id,
        policy=run.policy,
        rate_rps=0.0,
        request_id=request_id,
        status=status_of(ending, error_code),
        error_code=error_code,
        due_s=arrival_unix_s,
    )
    cause = violation_cause(record, acceptance_rate=acceptance_rate)
    return ServedChoice(run, record, choice, key, ending, cause, metrics.cached_tokens, ended_unix_s, prompt, output)


def unbegun(
    tpot_slo_s: float | None, ttft_slo_s: float | None, slo_class: str, error_code: str | None
) -> RequestMetrics:
    """Metrics of a choice that the engine never began: its targets, and whether they were the reason."""
    feasible = False if error_code == SLO_INFEASIBLE else None
    return RequestMetrics(
        arrival_s=0.0, tpot_slo_s=tpot_slo_s, ttft_slo_s=ttft_slo_s, slo_class=slo_class, slo_feasible=feasible
    )


# The file of a server's records: SQLite with a schema of its own, written in batches, kept within age and size.
#
# Knows neither threads nor the server; reading is in record_reader.py. The schema is documented in
# docs/records.md.

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


# Reads a server's records, also while the server writes them. Changes nothing.

READER_BUSY_S = 10.0
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
        connection = sqlite3.connect(_uri(path), uri=True, timeout=READER_BUSY_S, isolation_level=None)
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


# What a server did in a time, from its records: the summaries of docs/metrics.md, and what only records tell.

Percentiles = tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class Targets:
    """Targets of one kind in one class, and how the choices kept them.

    least_s, most_s: targets in force, None without any. over: 50th, 90th and 99th percentile of measured / target, over
    the choices that have both.
    """

    least_s: float | None
    most_s: float | None
    over: Percentiles


@dataclass(frozen=True)
class ClassReport:
    """One SLO class, or all. aborted: those of summary.failed whose client, or whose server, stopped them. errors:
    codes and how many choices ended with them, the most frequent first."""

    summary: Summary
    tpot: Targets
    ttft: Targets
    cached_tokens: int
    aborted: int
    errors: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ServedReport:
    """The choices that ended from `since` until before `until`.

    first, last: the first arrival and the last end of them, None where there are none; wall_s: between the two, also
    where only one key or class is reported. runs: the engines that served them. classes: all of them first, then each;
    empty where nothing fits.
    """

    held: Held
    since_unix_s: float
    until_unix_s: float
    first_unix_s: float | None
    last_unix_s: float | None
    wall_s: float
    runs: tuple[ServerRun, ...]
    classes: tuple[ClassReport, ...]


def report_of(
    path: Path, *, since_unix_s: float, until_unix_s: float, slo_class: str | None = None, key: str | None = None
) -> ServedReport:
    """Report on a file of records; of one class or one key only, where they are given. Raises ConfigError."""
    choices, held = read_choices(path, since_unix_s=since_unix_s, until_unix_s=until_unix_s)
    first = min((choice.arrival_unix_s for choice in choices), default=None)
    last = max((choice.ended_unix_s for choice in choices), default=None)
    wall_s = 0.0 if first is None or last is None else last - first
    chosen = [choice for choice in choices if key is None or choice.key == key]
    classes = [each for each in _classes(chosen, wall_s) if slo_class is None or each.summary.slo_class == slo_class]
    runs = dict.fromkeys(choice.run for choice in chosen)
    return ServedReport(held, since_unix_s, until_unix_s, first, last, wall_s, tuple(runs), tuple(classes))


def _classes(choices: Sequence[ServedChoice], wall_s: float) -> list[ClassReport]:
    if not choices:
        return []
    summaries = summarize([choice.record for choice in choices], wall_s=wall_s)
    return [_class_report(each, [c for c in choices if _belongs(c, each.slo_class)]) for each in summaries]


def _belongs(choice: ServedChoice, slo_class: str) -> bool:
    return slo_class in (ALL_CLASSES, choice.record.slo_class)


def _class_report(summary: Summary, choices: Sequence[ServedChoice]) -> ClassReport:
    records = [choice.record for choice in choices]
    errors = Counter(record.error_code for record in records if record.error_code is not None)
    return ClassReport(
        summary=summary,
        tpot=_targets((record.tpot_slo_s, record.tpot_s) for record in records),
        ttft=_targets((record.ttft_slo_s, record.ttft_s) for record in records),
        cached_tokens=sum(choice.cached_tokens for choice in choices),
        aborted=sum(choice.ending == "abort" for choice in choices),
        errors=tuple(errors.most_common()),
    )


def _targets(pairs: Iterable[tuple[float | None, float | None]]) -> Targets:
    """pairs: target, measured."""
    carried = [(target_s, measured_s) for target_s, measured_s in pairs if target_s is not None]
    over = [measured_s / target_s for target_s, measured_s in carried if measured_s is not None]
    targets = [target_s for target_s, _ in carried]
    return Targets(min(targets, default=None), max(targets, default=None), percentiles(over))
