"""Rows and records survive their files; wrong lines are named."""

import dataclasses
import json
from pathlib import Path
from typing import get_type_hints

import pytest

from adaserve_jax.bench.recording import AcceptanceRecord
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows, read_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import SCHEMA_VERSION, ResultRow
from adaserve_jax.types import RequestMetrics

SAMPLES = {str: "x", int: 3, float: 0.5, bool: True}


def row(**changes: object) -> ResultRow:
    hints = get_type_hints(ResultRow)
    values = {f.name: SAMPLES.get(hints[f.name]) for f in dataclasses.fields(ResultRow)}
    return ResultRow(**(values | {"schema_version": SCHEMA_VERSION} | changes))


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


def test_records_survive_a_file(tmp_path: Path):
    metrics = RequestMetrics(arrival_s=0.0, first_token_s=1.0, last_token_s=2.0, output_tokens=3, tpot_slo_s=1.0)
    record = RequestRecord.of(
        metrics,
        run_id="r",
        policy="ar",
        rate_rps=2.0,
        request_id="1",
        status="finished",
        token_offsets_s=(0.0, 0.5, 1.0),
    )
    append_rows(tmp_path / "requests.jsonl", [record])
    assert read_rows(tmp_path / "requests.jsonl", RequestRecord) == [record]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"rows.jsonl:2: expected one JSON object per line, got invalid JSON"),
        ("[1]", r"rows.jsonl:2: expected a JSON object, got list"),
        ('{"schema_version": 99}', r"rows.jsonl:2: schema_version is 99, this version reads 1 and 2"),
        ('{"colour": 1}', r"rows.jsonl:2: unknown column 'colour' for a ResultRow"),
        ("{}", r"rows.jsonl:2: missing column 'acceptance_rate' for a ResultRow"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(dataclasses.asdict(row())) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(path, ResultRow)


def test_a_column_with_a_default_may_be_absent_from_an_older_file(tmp_path: Path):
    values = dataclasses.asdict(row())
    for name in ("replicas", "router", "label", "max_prefill_tokens", "num_pages", "extension_pages", "elastic"):
        del values[name]
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(values) + "\n")
    (read,) = read_rows(path, ResultRow)
    assert (read.replicas, read.router, read.label, read.max_prefill_tokens) == (1, None, None, 0)


def test_missing_file_is_one_clear_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.jsonl: No such file"):
        read_rows(tmp_path / "none.jsonl", ResultRow)


def test_the_columns_that_provenance_needs_are_there():
    columns = {f.name for f in dataclasses.fields(ResultRow)}
    assert columns >= {
        "commit", "machine", "device", "jax_version", "target", "draft", "target_params", "policy", "workload",
        "workload_hash", "seed", "arrival_process", "rate_rps", "wall_s",
    }  # fmt: skip


def test_every_column_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    columns = [f.name for kind in (ResultRow, RequestRecord, AcceptanceRecord) for f in dataclasses.fields(kind)]
    missing = [name for name in columns if f"`{name}`" not in text]
    assert not missing, f"undocumented columns in docs/metrics.md: {missing}"
