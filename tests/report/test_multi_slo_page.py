"""The page of the multi-SLO benchmark says what the submissions hold, and when they cannot be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adaserve_jax.cli.report import write_suite_page
from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Table, Text
from adaserve_jax.report.html import render_html
from adaserve_jax.report.multi_slo import multi_slo_page, system_names
from adaserve_jax.results.submission import (
    ClassCount,
    ClassTarget,
    Definition,
    Submission,
    SuitePoint,
    System,
    judge,
    write_submission,
)
from tests.program import run_program

DEFINITION = Definition(
    preset="adaserve", baseline_ms=20.0, workload="packaged", workload_hash="ab", duration_s=60.0, least_requests=100,
    repeats=1, seed=0, classes=(
        ClassTarget(name="chat", tpot_ms=33.0, ttft_ms=2000.0, share=0.25),
        ClassTarget(name="code", tpot_ms=24.0, ttft_ms=2000.0, share=0.75),
    ),
)  # fmt: skip


def submission(name: str, policy: str, *loads: tuple[float, int, int], **changes) -> Submission:
    """Make one with a steady load per (rate, chat met, code met), each of 100 requests."""
    system = System(name=name, policy=policy, target="8B", draft=None, device="cpu", machine="a machine", client="c",
                    commit="abc", measured_at="2026-11-01")  # fmt: skip
    points = tuple(
        SuitePoint(stage="rate", rate_rps=rate, duration_s=60.0, classes=tuple(
            ClassCount(name=each, requests=100, met=met, lost=0, goodput_tps=float(met), ttft_p50_ms=10.0,
                       ttft_p99_ms=20.0, tpot_p50_ms=1.0, tpot_p99_ms=2.0)
            for each, met in (("chat", chat), ("code", code))
        ))
        for rate, chat, code in loads
    )  # fmt: skip
    return Submission(definition=replace(DEFINITION, **changes), system=system, points=points, verdict=judge(points))


OURS = submission("ours", "adaserve", (1, 100, 100), (2, 99, 96), (4, 95, 91), (8, 95, 20))
THEIRS = submission("theirs", "plain", (1, 100, 93), (2, 99, 60))


def test_the_headline_has_the_rates_of_each_system():
    document = multi_slo_page([OURS, THEIRS])
    assert document.headline is not None
    (table,) = (item for item in document.headline.items if isinstance(item, Table))
    assert [row[:4] for row in table.rows] == [
        ("ours, adaserve", "4 (8)", "2 (4)", "1 (2)"),
        ("theirs, plain", "1 (2)", "none (1)", "none (1)"),
    ]
    assert (0, 1) in table.strong and (1, 1) not in table.strong
    assert table.rows[0][-1] == "-", "no burst was measured"
    assert table.rows[0][5] == "186" and not any(isinstance(i, Text) and i.warns for i in document.headline.items)
    text = render_html(document)
    assert "worst class" in text and "chat (25%): TPOT 33 ms, TTFT 2000 ms" in text


def test_a_level_that_no_rate_missed_has_a_least_rate():
    headline = multi_slo_page([submission("quick", "ar", (1, 100, 100), (2, 99, 96))]).headline
    assert headline is not None
    (table,) = (item for item in headline.items if isinstance(item, Table))
    assert table.rows[0][1:4] == ("at least 2", "at least 2", "1 (2)")


def test_a_level_that_no_search_was_for_is_left_out():
    """With 20 requests of a class, one miss decides about 99 %."""
    few = [replace(each, definition=replace(each.definition, least_requests=20)) for each in (OURS, THEIRS)]
    headline = multi_slo_page(few).headline
    assert headline is not None
    (table,) = (item for item in headline.items if isinstance(item, Table))
    assert table.columns[1:4] == ("requests/s at 90%", "requests/s at 95%", "sure at 90%")
    assert table.rows[0][1:3] == ("4 (8)", "2 (4)") and {(0, 1), (0, 2), (1, 4)} == table.strong


def test_systems_that_were_asked_something_else_are_named():
    slower = submission("theirs", "plain", (1, 100, 93), seed=1, least_requests=20)
    document = multi_slo_page([OURS, replace(slower, system=replace(slower.system, notes=("a busy machine",)))])
    assert document.headline is not None
    warned = [item.text for item in document.headline.items if isinstance(item, Text) and item.warns]
    assert warned == [
        "The systems differ in seed, so that their rates cannot be compared.",
        "The systems differ in requests of each class, so that their rates cannot be compared.",
        "theirs: a busy machine",
    ]


def test_two_policies_of_one_system_are_told_apart_and_the_same_twice_is_refused():
    other = submission("ours", "ar", (1, 50, 50))
    assert [row[0] for item in multi_slo_page([OURS, other]).sections[0].items if isinstance(item, Table)
            for row in item.rows] == ["ours, adaserve", "ours, ar"]  # fmt: skip
    drafting = replace(OURS, system=replace(OURS.system, draft="small"))
    assert system_names([OURS, drafting]) == ["ours, adaserve, no draft", "ours, adaserve, small"]
    with pytest.raises(ConfigError, match="two submissions are of ours, adaserve, no draft; give each system"):
        multi_slo_page([OURS, OURS])
    with pytest.raises(ConfigError, match="expected one or more submissions to the multi-SLO benchmark, got none"):
        multi_slo_page([])


def test_the_command_prints_the_headline_or_writes_the_page(tmp_path: Path, capsys):
    write_submission(tmp_path / "ours.json", OURS)
    write_suite_page([tmp_path / "ours.json"], None, None)
    printed, told = capsys.readouterr()
    assert "4 (8)" in printed and "adaserve report" in told
    assert run_program("report", str(tmp_path / "ours.json"), "-o", str(tmp_path / "page.md"), "--title", "Mine") == 0
    assert (tmp_path / "page.md").read_text().startswith("# Mine")
    assert run_program("report", str(tmp_path / "ours.json"), "--against", str(tmp_path)) == 2
    said = "--against belongs to folders or records, not to the files of a suite; leave it out"
    assert said in capsys.readouterr().err
