"""`adaserve report DIR`: what is refused, what is written, what the terminal shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaserve_jax.cli.app import app
from adaserve_jax.cli.report_folders import print_summary, renderer
from adaserve_jax.errors import ConfigError
from adaserve_jax.report import svg
from tests.report import made_document as made


def refused(*arguments: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    return str(caught.value)


def test_folders_or_records_but_not_both(tmp_path):
    assert "got neither; give one of them" in refused()
    assert "got both; give one of them" in refused(tmp_path, "--from", tmp_path / "records.sqlite")


@pytest.mark.parametrize(
    "arguments", [["--since", "2h"], ["--until", "1h"], ["--class", "chat"], ["--key", "k"], ["--format", "json"]]
)
def test_options_of_records_mean_nothing_for_folders(tmp_path, arguments):
    assert refused(tmp_path, *arguments).startswith(f"{arguments[0]} belongs to --from with a server's records")


@pytest.mark.parametrize("option", ["-o", "--against", "--title", "--timeline", "--perfetto", "--parquet", "--rate"])
def test_options_of_folders_mean_nothing_for_records(tmp_path, option):
    said = refused("--from", tmp_path / "records.sqlite", option, "2")
    assert said.startswith(f"{option} belongs to a folder that `adaserve bench` or `adaserve simulate` wrote")


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.txt", "report.html.gz"])
def test_only_html_and_markdown_are_written(tmp_path, name):
    assert f"-o must end in .html or .md, got {tmp_path / name}" in refused(tmp_path, "-o", tmp_path / name)


def test_html_needs_matplotlib_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(svg, "find_spec", lambda name: None)
    assert "pip install adaserve-jax[plot]" in refused(tmp_path / "none", "-o", tmp_path / "report.html")


def test_what_an_ending_means():
    assert renderer(Path("a.md")).__name__ == "render_markdown"
    assert renderer(Path("a.HTML")).__name__ == "render_html"


def test_the_terminal_shows_the_headline_and_every_warning(capsys):
    print_summary(made.document())
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == f"Four policies on 110M {made.HOSTILE}"
    assert lines[1] == f"warning: 1 of 20 points is invalid: {made.HOSTILE}"
    assert "At 2 requests/s `adaserve` meets 94.1% of targets." in lines
    head = next(line for line in lines if line.startswith("policy"))
    assert "  ".join(made.COLUMNS) == re.sub(r" {2,}", "  ", head.rstrip())
    assert [line.split()[0] for line in lines if line.startswith(made.POLICIES)] == list(made.POLICIES)
    assert "Odd names" not in out
