"""The file of records: what goes in comes out, others are refused, age and size are bounded, kills are survived."""

from __future__ import annotations

import functools
import math
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.results import record_store
from adaserve_jax.results.record_store import APPLICATION_ID, FileExtent, RecordStore, read_records, schema
from adaserve_jax.results.records import ServedRecord
from tests.conftest import ROOT
from tests.results.made import RUN, begun, made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.sqlite"


def filled(path: Path, choices) -> RecordStore:
    store = RecordStore.open(path)
    store.add(choices)
    return store


def names(path: Path, **between: float) -> list[str]:
    return [choice.request_id for choice in read_records(path, **between)[0]]


def test_what_is_written_is_read_again(path):
    texts = begun("t", 1009.0, ended=1010.0, ttft=0.5, last=0.5, tokens=1, texts=("question", "answer"))
    filled(path, [*made(), texts]).close()
    found, held = read_records(path)
    assert found == [*made(), replace(texts, prompt=None, output=None)]
    assert held == FileExtent(7, 1001.0, 1010.0)
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT prompt, output FROM requests WHERE request_id = 't'").fetchall() == [
            ("question", "answer")
        ]
        assert plain.execute("SELECT count(*) FROM runs").fetchone() == (2,)
    plain.close()


def test_a_file_goes_on_where_it_was(path):
    filled(path, made()[:2]).close()
    filled(path, made()[2:]).close()
    assert names(path) == list("abcdef")


def test_times_choose_by_the_end_of_a_choice(path):
    filled(path, made()).close()
    assert names(path, since_unix_s=1003.0, until_unix_s=1007.0) == ["b", "c", "d"]


def test_more_than_memory_holds_is_refused(path, monkeypatch):
    monkeypatch.setattr(record_store, "MAX_RECORDS", 3)
    filled(path, made()).close()
    with pytest.raises(
        ConfigError, match="at most 3 choices can be reported on at once, 6 ended in that time; choose a"
    ):
        read_records(path)
    assert names(path, since_unix_s=1003.0, until_unix_s=1007.0) == ["b", "c", "d"]


def test_it_can_be_read_while_it_is_written(path):
    store = filled(path, made()[:1])
    assert names(path) == ["a"]
    store.add(made()[1:3])
    assert names(path) == ["a", "b", "c"]
    store.close()
    assert names(path) == ["a", "b", "c"]


def test_a_folder_that_cannot_be_written_can_be_read(path, monkeypatch):
    store = filled(path, made()[:1])
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert names(path) == ["a"]  # by the log
    store.close()
    assert names(path) == ["a"]
    assert [file.name for file in path.parent.iterdir()] == ["records.sqlite"]


def test_only_the_owner_may_read_it(path):
    before = os.umask(0)
    try:
        store = filled(path, made())
    finally:
        os.umask(before)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["records.sqlite", "records.sqlite-shm", "records.sqlite-wal"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    store.close()


@functools.cache
def many(begin_unix_s: float) -> list[ServedRecord]:
    """12,000 choices, one a second."""
    first = made()[0]
    return [replace(first, ended_unix_s=begin_unix_s + i) for i in range(12_000)]


def test_old_choices_are_removed_and_the_file_shrinks(path):
    store = filled(path, many(1000.0))
    before = store.used_bytes()
    calls = 1
    while store.prune(before_unix_s=1000.0 + 11_000, max_bytes=2**30):
        calls += 1
    found, held = read_records(path)
    assert (len(found), held.first_unix_s) == (1000, 12_000.0)
    assert calls == 3
    assert store.used_bytes() < before / 5
    store.close()
    assert path.stat().st_size < before / 5


@pytest.mark.parametrize("share", [0.1, 0.5, 0.98])
def test_of_too_many_bytes_the_oldest_go_and_no_more(path, share):
    store = RecordStore.open(path)
    empty = store.used_bytes()
    store.add(many(2000.0))
    most = int(store.used_bytes() * share)
    fits = 12_000 * (most - empty) / (store.used_bytes() - empty)
    while store.prune(before_unix_s=0.0, max_bytes=most):
        pass
    read_none = functools.partial(read_records, path, since_unix_s=math.inf)  # the extent is that of the whole file
    held = read_none()[1]
    assert held.last_unix_s == 2000.0 + 11_999 and 0.9 * fits < held.choices <= fits
    assert store.used_bytes() <= most
    assert not store.prune(before_unix_s=0.0, max_bytes=most)
    assert read_none()[1] == held
    store.close()


def test_a_batch_that_fails_leaves_nothing_and_can_be_repeated(path):
    store = filled(path, made()[:1])
    wrong = replace(made()[3], key=object())  # nothing that SQLite takes
    with pytest.raises(sqlite3.Error):
        store.add([made()[2], wrong])
    assert names(path) == ["a"]
    store.add(made()[2:4])
    assert names(path) == ["a", "c", "d"]
    found = read_records(path)[0]
    assert [choice.run for choice in found] == [made()[0].run, made()[2].run, made()[3].run]
    store.close()


def foreign(path: Path, application: int, version: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (x)")
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


@pytest.mark.parametrize(
    ("application", "version", "text"),
    [
        (0, 0, "must be a file of records, it is an SQLite file of another program; give another"),
        (APPLICATION_ID, 3, "must have records of schema 4, it has schema 3 of an older version of adaserve"),
        (APPLICATION_ID, 5, "must have records of schema 4, it has schema 5 of a newer version of adaserve"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(path, application, version, text):
    foreign(path, application, version)
    before = path.read_bytes()
    for attempt in (lambda: RecordStore.open(path), lambda: read_records(path)):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert text in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_a_path_that_cannot_be_written_is_refused(path, tmp_path):
    path.write_text("this is a long enough text that nobody would take for a database of any kind at all\n" * 4)
    for wrong, text in (
        (path, "file is not a database"),
        (tmp_path, "unable to open database file"),
        (tmp_path / "none" / "records.sqlite", "No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=r"cannot keep records in .*; give a path that can be written") as caught:
            RecordStore.open(wrong)
        assert text in str(caught.value)


def test_reading_says_what_is_wrong(path):
    with pytest.raises(ConfigError, match="expected a file that a server wrote with --records, found no file"):
        read_records(path)
    path.write_text("no database at all, whatever its name says, and long enough to be looked at\n" * 4)
    with pytest.raises(ConfigError, match=r"cannot read .* as a file that a server wrote with --records: file is not"):
        read_records(path)


def test_an_empty_file_has_no_records_and_can_be_begun(path):
    path.touch()
    assert read_records(path) == ([], FileExtent(0, None, None))
    store = RecordStore.open(path)
    assert read_records(path) == ([], FileExtent(0, None, None))
    store.close()


WRITER = """
import sys
from pathlib import Path
from adaserve_jax.results.record_store import RecordStore
from dataclasses import replace
from tests.results.made import made
store = RecordStore.open(Path(sys.argv[1]))
for number in range(1_000_000):
    store.add([replace(choice, choice=number) for choice in made()])
    print(number, flush=True)
    if number % 50 == 49:
        store.prune(before_unix_s=0.0, max_bytes=100_000)
"""


def test_a_killed_writer_loses_nothing_that_it_had_written(path):
    command = [sys.executable, "-c", WRITER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 60:
            process.send_signal(signal.SIGKILL)
            break
    last = max([60, *(int(line) for line in process.stdout if line.endswith("\n"))])
    process.wait()
    process.stdout.close()
    written = [choice.choice for choice in read_records(path)[0]]
    assert last in written and written.count(last) == len(made())
    store = RecordStore.open(path)
    store.add(made())
    store.close()
    with sqlite3.connect(path) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    plain.close()


def test_the_documented_tables_are_those_of_the_file(path):
    text = (ROOT / "docs" / "records.md").read_text()
    for table, columns in schema().items():
        part = text.partition(f"### `{table}`\n")[2].partition("\n#")[0]
        rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in part.splitlines() if line.startswith("| `")]
        assert rows == [[f"`{name}`", kind.partition(" ")[0].lower()] for name, kind in columns.items()]
    RecordStore.open(path).close()
    with sqlite3.connect(path) as plain:
        for table, columns in schema().items():
            found = [(name, kind) for _, name, kind, *_ in plain.execute(f"PRAGMA table_info({table})")]
            assert found == [(name, kind.partition(" ")[0]) for name, kind in columns.items()]
    plain.close()


def test_runs_are_of_equal_engines_once(path):
    store = filled(path, made()[:1])
    store.add([replace(made()[1], run=replace(RUN))])
    store.close()
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT count(*) FROM runs").fetchone() == (1,)
    plain.close()


def test_the_documented_questions_have_answers(path):
    filled(path, made()).close()
    text = (ROOT / "docs" / "records.md").read_text().partition("```sql\n")[2].partition("```")[0]
    with sqlite3.connect(path) as plain:
        slowest, attainment, tokens = (plain.execute(query).fetchall() for query in text.split(";")[:3])
    plain.close()
    assert slowest == []  # of the last hour
    assert attainment == [("1970-01-01", "batch", None, 0), ("1970-01-01", "chat", 0.2, 5)]
    assert tokens == [("", "adaserve", 20, 8), ("", "ar", 10, 2), ("team", "ar", 10, 9)]


def test_a_file_system_that_keeps_no_log_beside_the_file_is_refused(path, monkeypatch):
    class Mapless(sqlite3.Connection):
        """A connection on a network share, where the journal stays what it was."""

        def execute(self, sql: str, *values):
            return super().execute(sql.replace("journal_mode = WAL", "journal_mode = MEMORY"), *values)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Mapless))
    with pytest.raises(ConfigError, match="must be on a file system with shared memory maps, such as a local disk"):
        RecordStore.open(path)
