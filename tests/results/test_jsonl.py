"""Rows and records survive their files; wrong lines are named."""

import dataclasses
import json
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows, as_line, make_folder, read_good_rows, read_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.sim.acceptance import AcceptanceRecord
from tests.results.points import record, row, sample


def test_rows_survive_a_file(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    append_rows(path, [row(policy="ar")])
    append_rows(path, [row(policy="spec:4", valid=False, invalid_reason="interrupted")])
    assert read_rows(path, ResultRow) == [
        row(policy="ar"),
        row(policy="spec:4", valid=False, invalid_reason="interrupted"),
    ]


def test_rows_of_the_version_before_are_read(tmp_path: Path):
    append_rows(tmp_path / "rows.jsonl", [row(schema_version=1)])
    assert read_rows(tmp_path / "rows.jsonl", ResultRow) == [row(schema_version=1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "Input should be an object"),
        ('{"schema_version": 99}', "column 'schema_version': Input should be 1 or 2, got 99"),
        (as_line(row())[:-2] + ',"colour":1}', "column 'colour': Unexpected .*, got 1"),
        ("{}", "column 'run_id': Field required"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(dataclasses.asdict(row())) + "\n" + line + "\n")
    expected = "rows.jsonl:2: expected one JSON object with the columns of a ResultRow; "
    with pytest.raises(ConfigError, match=expected + message):
        read_rows(path, ResultRow)


def test_a_column_with_a_default_may_be_absent_from_an_older_file(tmp_path: Path):
    values = dataclasses.asdict(row())
    later = ("replicas", "router", "label", "max_prefill_tokens", "num_pages", "extension_pages", "elastic", "system",
             "point", "repeat", "urgent_share", "slo_scale", "burstiness", "token_source", "plan_hash")  # fmt: skip
    for name in later:
        del values[name]
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(values) + "\n")
    (read,) = read_rows(path, ResultRow)
    assert (read.replicas, read.router, read.label, read.max_prefill_tokens) == (1, None, None, 0)
    assert (read.system, read.point, read.repeat, read.plan_hash) == ("adaserve_jax", "", 0, "")


def test_missing_file_is_one_clear_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.jsonl: No such file"):
        read_rows(tmp_path / "none.jsonl", ResultRow)


def test_every_column_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    kinds = (ResultRow, RequestRecord, Sample, AcceptanceRecord)
    columns = [f.name for kind in kinds for f in dataclasses.fields(kind)]
    missing = [name for name in columns if f"`{name}`" not in text]
    assert not missing, f"undocumented columns in docs/metrics.md: {missing}"


def test_a_line_that_was_not_written_to_its_end_is_left_out_and_said(tmp_path: Path):
    """Wherever the last line is cut: it is there whole, or it is left out; the line before always is."""
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(policy="ar"), row(policy="é")])
    whole = path.read_bytes().replace(b"\\u00e9", "é".encode())
    first = whole.index(b"\n") + 1
    accent = whole.index("é".encode()) + 1  # cut inside a character too
    for end in (*range(first, len(whole), 97), accent, *range(len(whole) - 3, len(whole) + 1)):
        path.write_bytes(whole[:end])
        rows, note = read_good_rows(path, ResultRow)
        complete = end >= len(whole) - 1
        assert [r.policy for r in rows] == (["ar", "é"] if complete else ["ar"])
        half = f"{path}:2: left out: the line was not written to its end"
        assert note == (None if complete or end == first else half)


def test_nothing_is_appended_to_half_a_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(policy="ar"), row(policy="x" * 200_000)])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in (0, 10, first - 1, first, first + 1, first + 199_000, len(whole) - 2, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:end])
        before, _ = read_good_rows(path, ResultRow)
        append_rows(path, [row(policy="next")])
        assert read_rows(path, ResultRow) == [*before, row(policy="next")]


@pytest.mark.parametrize("tail", [b"", b'{"half', b"\x00\x00", b"[" * 100_000])
def test_a_wrong_line_before_the_last_one_is_an_error_also_for_who_reads_good_rows(tmp_path: Path, tail: bytes):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row()])
    path.write_bytes(path.read_bytes() + b'{"half\n' + tail)
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: expected one JSON object .*Invalid JSON"):
        read_good_rows(path, ResultRow)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("requests", "3", "integer, got '3'"),
        ("requests", 3.5, "integer, got 3.5"),
        ("requests", True, "integer, got True"),
        ("wall_s", None, "number, got None"),
        ("policy", 4, "string, got 4"),
        ("valid", 1, "boolean, got 1"),
        ("draft", 1, "string, got 1"),
        ("attainment", "high", "number, got 'high'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(tmp_path: Path, column: str, value: object, expected: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(dataclasses.asdict(row()) | {column: value}) + "\n")
    with pytest.raises(ConfigError, match=f"rows.jsonl:1: .*; column '{column}': .* {expected}"):
        read_rows(path, ResultRow)


def test_a_whole_number_may_stand_for_a_number(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(dataclasses.asdict(row()) | {"wall_s": 2}) + "\n")
    assert read_rows(path, ResultRow)[0].wall_s == 2


def test_samples_and_records_of_a_point_survive_a_file(tmp_path: Path):
    for kind, made in ((Sample, sample(point="ar@2/s")), (RequestRecord, record(point="ar@2/s"))):
        append_rows(tmp_path / kind.__name__, [made])
        assert read_rows(tmp_path / kind.__name__, kind) == [made]


def test_a_folder_below_a_file_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot create output folder .*: Not a directory; choose another --out"):
        make_folder(tmp_path / "file" / "out")
