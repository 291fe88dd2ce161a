"""`adaserve report`: its times, its formats, and what it says when there is nothing."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaserve_jax.cli.app import app
from adaserve_jax.cli.report import parse_time
from adaserve_jax.errors import ConfigError
from tests.results.made import records_file

NOW = 1_700_000_000.0


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return records_file(tmp_path_factory.mktemp("records"))


def run(path: Path, *arguments: str) -> str:
    command = ["report", str(path), *arguments]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def all_there_is(path: Path, *arguments: str) -> str:
    return run(path, "--since", "1970-01-01T00:00:00Z", *arguments)


def cells(text: str) -> dict[str, list[str]]:
    """Columns by label, of a Markdown table."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows if row[0] != "---"}


def test_markdown_has_a_column_per_class(path):
    text = all_there_is(path, "--format", "markdown")
    found = cells(text)
    assert found[""] == ["all", "batch", "chat"]
    assert found["choices"] == ["6", "1", "5"]
    assert found["cancelled by the client"] == ["0", "0", "0"]
    assert found["failed (of them aborted)"] == ["1 (1)", "0 (0)", "1 (1)"]
    assert found["all targets met"] == ["20.0%", "-", "20.0%"]
    assert found["goodput, tokens/s"] == ["0.6", "0.0", "0.6"]
    assert found["TPOT target, ms"] == ["125", "-", "125"]
    assert found["TPOT / target, p50 / p90 / p99"] == ["2.00 / 3.60 / 3.96", "- / - / -", "2.00 / 3.60 / 3.96"]
    assert found["prompt tokens (of them cached)"] == ["40 (3)", "10 (3)", "30 (0)"]
    causes = {label: values for label, values in found.items() if label.startswith("violations")}
    assert causes == {f"violations: {name}": ["1", "0", "1"] for name in ("rejected", "failed", "infeasible", "budget")}
    assert found["error queue_full"] == found["error slo_infeasible"] == ["1", "0", "1"]
    assert "served: policy adaserve, target folder/target, draft folder/draft, on cpu, version 0.1.0" in text


def test_the_table_says_the_same(path):
    text = all_there_is(path)
    for label, values in cells(all_there_is(path, "--format", "markdown")).items():
        assert any(all(part in line for part in (label, *values)) for line in text.splitlines()), label
    assert "batch" not in all_there_is(path, "--class", "chat")


@pytest.mark.parametrize("columns", [64, 84, 110])
def test_a_narrow_terminal_gets_the_classes_in_several_tables(monkeypatch, path, columns):
    """Rich takes stdout for a terminal of that width: no figure is cut or broken, and each has its label."""
    whole = cells(all_there_is(path, "--format", "markdown"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in all_there_is(path).splitlines()]
    assert not any("\u2026" in line for line in shown)
    lines = [line for line in shown if line.startswith("TTFT p50 / p90 / p99, ms")]
    assert len(lines) == {64: 3, 84: 2, 110: 1}[columns]
    values = [value for line in lines for value in re.split(" {2,}", line)[1:]]
    assert values == whole["TTFT p50 / p90 / p99, ms"]


def test_json_is_for_programs(path):
    found = json.loads(all_there_is(path, "--format", "json"))
    assert (found["since"], found["until"]) == ("1970-01-01T00:00:00+00:00", None)
    assert (found["first"], found["last"]) == ("1970-01-01T00:16:40+00:00", "1970-01-01T00:16:48+00:00")
    assert (found["wall_s"], found["records_in_file"], len(found["runs"])) == (8.0, 6, 2)
    every = found["classes"][0]
    assert (every["slo_class"], every["goodput_tps"], every["aborted"]) == ("all", 0.625, 1)
    assert every["errors"] == {"queue_full": 1, "slo_infeasible": 1}
    assert json.loads(run(path, "--format", "json"))["classes"] == []


def test_records_are_records_whatever_their_file_is_called(path, tmp_path):
    named = tmp_path / "records.json"
    named.write_bytes(path.read_bytes())
    assert all_there_is(named, "--format", "json") == all_there_is(path, "--format", "json")


def test_it_says_when_nothing_is_there(path, tmp_path):
    text = run(path)  # the last hour
    assert text.startswith("no records from ") and f"{path} has 6, whose choices ended from " in text
    assert "no records of class 'x' with key 'y' from" in all_there_is(path, "--class", "x", "--key", "y")
    empty = tmp_path / "empty.sqlite"
    empty.touch()
    assert run(empty) == f"{empty} has no records yet: no choice has ended since the server began to write it\n"


@pytest.mark.parametrize(
    ("text", "unix_s"),
    [
        ("30m", NOW - 1800),
        ("1h", NOW - 3600),
        ("7d", NOW - 7 * 86_400),
        ("1.5s", NOW - 1.5),
        ("2w", NOW - 14 * 86_400),
        ("999999w", 0.0),
        ("2023-11-14T22:13:20Z", NOW),
        ("2023-11-14T23:13:20+01:00", NOW),
        ("2023-11-14 22:13:20.5+00:00", NOW + 0.5),
    ],
)
def test_times(text, unix_s):
    assert parse_time(text, NOW, "--since") == unix_s


def test_a_time_without_a_zone_is_local():
    assert parse_time("2023-11-14", NOW, "--since") == datetime(2023, 11, 14).astimezone().timestamp()
    local = datetime.fromtimestamp(NOW).replace(tzinfo=None).isoformat()
    assert parse_time(local, 0.0, "--since") == NOW
    assert datetime.fromtimestamp(NOW, UTC).isoformat().startswith("2023-11-14T22:13:20")


@pytest.mark.parametrize("text", ["", "h", "1y", "-1h", "yesterday", "2023-13-01"])
def test_wrong_times_are_refused(text):
    with pytest.raises(ConfigError, match="--until must be a time before now such as 30m, 1h or 7d, or an ISO time"):
        parse_time(text, NOW, "--until")


def test_wrong_options_are_refused(path, tmp_path):
    for arguments, text in (
        ([str(path), "--since", "1h", "--until", "2h"], "--since must be before --until, got 1h and 2h"),
        ([str(tmp_path / "none")], "or the file of `adaserve serve --records`, found no results.jsonl in"),
    ):
        with pytest.raises(ConfigError, match=text):
            CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
