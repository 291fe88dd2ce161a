"""`adaserve report DIR`: what is refused, what is written, what the terminal shows."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaserve_jax.cli.app import app
from adaserve_jax.cli.report import print_summary, renderer, report
from adaserve_jax.errors import ConfigError
from adaserve_jax.report import figures as svg
from adaserve_jax.results.jsonl import append_rows
from tests.report import made as runs
from tests.report import made_document as made


def refused(*arguments: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    return str(caught.value)


@pytest.mark.parametrize(
    "arguments", [["--since", "2h"], ["--until", "1h"], ["--class", "chat"], ["--key", "k"], ["--format", "json"]]
)
def test_options_of_the_table_mean_nothing_for_a_report(tmp_path, arguments):
    said = f"{arguments[0]} belongs to the table of one server's records, not to a report; leave it out"
    assert refused(tmp_path, *arguments) == said
    (tmp_path / "records.sqlite").touch()
    assert refused(tmp_path / "records.sqlite", "-o", tmp_path / "report.md", *arguments) == said
    assert refused(tmp_path / "records.sqlite", tmp_path, *arguments) == said


@pytest.mark.parametrize("option", ["--against", "--timeline", "--perfetto", "--rate", "--subject", "--since", "--key"])
def test_options_of_folders_and_records_mean_nothing_for_the_files_of_a_suite(tmp_path, option):
    assert refused(tmp_path / "suite.json", option, "2").startswith(f"{option} belongs to folders or records")


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.txt", "report.html.gz"])
def test_only_html_and_markdown_are_written(tmp_path, name):
    assert f"-o must end in .html or .md, got {tmp_path / name}" in refused(tmp_path, "-o", tmp_path / name)


def test_html_needs_matplotlib_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(svg, "find_spec", lambda name: None)
    assert "pip install adaserve-jax[plot]" in refused(tmp_path / "none", "-o", tmp_path / "report.html")


def test_what_an_ending_means():
    assert renderer(Path("a.md")).__name__ == "render_markdown"
    assert renderer(Path("a.HTML")).__name__ == "render_html"


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_a_narrow_terminal_shows_whole_figures_and_says_what_it_leaves_out(monkeypatch, capsys, folder, columns):
    """Rich takes stdout for a terminal of that width: no cell and no heading may be cut."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    report([folder])
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table = out[out.index("Policies side by side") :].split("Bold: ")[0]
    assert "\u2026" not in table and max(map(len, table.splitlines()[:-1])) <= columns
    assert "Left out here: intervals" in table
    assert ("; TTFT p99, ms" in table) == (columns < 100), "the last column goes first"


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two policies at two rates, as files; a class whose name is markup."""
    path = tmp_path_factory.mktemp("runs") / "run"
    path.mkdir()
    for policy, tpot in (("ar", 0.25), ("adaserve", 0.15)):
        for rate in (1.0, 2.0):
            requests = runs.random_requests(24, seed=int(rate), policy=policy, tpot=tpot * rate)
            odd = runs.request(99, slo_class=made.HOSTILE, policy=policy)
            rows, records, samples = runs.point(
                [*requests, odd], policy=policy, rate=rate, samples=runs.samples_over(4)
            )
            append_rows(path / "results.jsonl", rows)
            append_rows(path / "requests.jsonl", records)
            append_rows(path / "samples.jsonl", samples)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The same with few figures: one rate, one class, no samples."""
    path = tmp_path_factory.mktemp("small")
    for policy, tpot in (("ar", 0.25), ("adaserve", 0.15)):
        requests = [runs.request(i, slo_class=made.HOSTILE, tpot=tpot + i / 100, policy=policy) for i in range(9)]
        rows, records, _ = runs.point(requests, policy=policy)
        append_rows(path / "results.jsonl", rows)
        append_rows(path / "requests.jsonl", records)
    return path


def run(*arguments: str | Path) -> str:
    """What it wrote to stdout."""
    done = CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_folder_becomes_a_page_and_markdown(folder, small, tmp_path):
    assert run(small, "-o", tmp_path / "new" / "report.html", "--title", "Ours & theirs") == ""
    page = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert "<title>Ours &amp; theirs</title>" in page and "<script" not in page
    assert page.count("<figure") == page.count("<details>") >= 4
    (tmp_path / "report.md").write_text("old")
    with (tmp_path / "report.md").open() as old:
        run(folder, "-o", tmp_path / "report.md")
        assert old.read() == "old"  # the file is replaced, never half written
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Report of ") and "## Headline" in text
    for policy in ("ar", "adaserve"):
        assert re.search(rf"^\| .*{policy} \| ", text, re.MULTILINE) and policy in page


def test_without_a_file_the_headline_goes_to_the_terminal(folder):
    out = run(folder)
    rows = [set(line.split()) for line in out.splitlines()]
    assert [row for row in rows if {"adaserve", "2/s", "25"} <= row], out
    assert "Time per phase" not in out


def test_a_run_against_another_and_exports(folder, tmp_path):
    trace = tmp_path / "trace.json"
    then = Path(shutil.copytree(folder, tmp_path / "then" / folder.name))
    asked = ["--against", then, "--timeline", "ar@2/s", "--perfetto", trace]
    run(folder, "-o", tmp_path / "report.md", *asked)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "ar@2/s over time" in text
    assert f"Compared with then/{folder.name}" in text and f"Report of {folder.parent.name}/{folder.name}" in text
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_run_is_not_compared_with_itself(folder, small, tmp_path):
    said = refused(small, folder, "--against", folder / ".." / folder.name, "-o", tmp_path / "report.md")
    assert said.startswith("expected the folder of another run for --against, got ")


def test_the_rate_chooses_the_point_that_is_traced(folder, tmp_path):
    for rate in ("1", "2"):
        trace = tmp_path / f"{rate}.json"
        run(folder, "-o", tmp_path / "report.md", "--rate", rate, "--perfetto", trace)
        names = [
            event["args"].get("name") for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"
        ]
        assert names[0] == f"requests of ar@{rate}/s"


def test_what_is_not_there_is_named(folder, tmp_path):
    assert f"found no results.jsonl in {tmp_path}" in refused(tmp_path, "-o", tmp_path / "report.md")
    said = refused(folder, "--timeline", "ar@3/s")
    assert "got 'ar@3/s'" in said and all(
        f"'{name}@{rate}/s'" in said for name in ("ar", "adaserve") for rate in (1, 2)
    )
    assert "rate" in refused(folder, "--rate", "7")
    (tmp_path / "file").touch()
    assert "choose another -o" in refused(folder, "-o", tmp_path / "file" / "report.md")
