"""Parquet files hold every line of the JSON files, with types, and read back as the same lines."""

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.parquet import FOLDER, write_parquet
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ResultRow
from tests.report.made import folder, point, random_requests, samples_over

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def held(path: str = "run"):
    return folder(point(random_requests(9, 0), samples=samples_over(2)), path=path)


def test_lines_read_back_the_same(tmp_path: Path):
    run = held()
    paths = write_parquet([run, held("other")], tmp_path / "out")
    assert [path.name for path in paths] == ["results.parquet", "requests.parquet", "samples.parquet"]
    kinds = (
        (ResultRow, run.rows),
        (RequestRecord, [line for lines in run.records.values() for line in lines]),
        (Sample, [line for lines in run.samples.values() for line in lines]),
    )
    for path, (kind, lines) in zip(paths, kinds, strict=True):
        read = parquet.read_table(path).to_pylist()
        assert [line.pop(FOLDER) for line in read] == ["run"] * len(lines) + ["other"] * len(lines)
        assert [kind(**line) for line in read] == list(lines) * 2


def test_columns_have_types(tmp_path: Path):
    paths = write_parquet([held()], tmp_path)
    schemas = {path.stem: parquet.read_schema(path) for path in paths}
    assert schemas["results"].names == [FOLDER, *(field.name for field in fields(ResultRow))]
    found = {(name, column): schemas[name].field(column) for name, column in (
        ("results", "attainment"), ("results", "requests"), ("results", "valid"), ("requests", "token_offsets_s"),
        ("requests", "status"), ("requests", "slo_met"), ("samples", "draft_resident"),
    )}  # fmt: skip
    assert {key: (str(field.type), field.nullable) for key, field in found.items()} == {
        ("results", "attainment"): ("double", True), ("results", "requests"): ("int64", False),
        ("results", "valid"): ("bool", False), ("requests", "token_offsets_s"): ("list<element: double>", False),
        ("requests", "status"): ("string", False), ("requests", "slo_met"): ("bool", True),
        ("samples", "draft_resident"): ("bool", False),
    }  # fmt: skip


def test_kinds_without_a_line_have_no_file(tmp_path: Path):
    run = folder((point(random_requests(3, 0))[0], [], []))
    assert [path.name for path in write_parquet([run], tmp_path)] == ["results.parquet"]


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"Parquet files need pyarrow: pip install 'adaserve-jax\[report\]'"):
        write_parquet([held()], tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create output folder"):
        write_parquet([held()], tmp_path / "file")
