"""The whole document: its sections in order, what every figure says of itself, and what the reader is warned of."""

from dataclasses import replace
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.build import FOLDED, build, load_folders
from adaserve_jax.report.document import Document, Figure, Table, Text
from adaserve_jax.report.points import measured
from adaserve_jax.results.jsonl import append_rows
from tests.report.made import PROVENANCE, folder, point, random_requests, request, samples_over
from tests.results.made import records_file

SECTIONS = (
    "headline", "versus", "comparison", "curves", "latency", "mlperf", "pareto", "acceptance", "violations", "phases",
    "timeline",
)  # fmt: skip


def full(path: str = "run", notes: tuple[str, ...] = (), **changes: object):
    points = [
        point(random_requests(30, seed, policy, tpot), policy=policy, rate=rate, samples=samples_over(3), **changes)
        for seed, rate in enumerate((1.0, 2.0))
        for policy, tpot in (("ar", 0.25), ("adaserve", 0.15))
    ]
    return folder(*points, path=path, notes=notes)


def warnings_of(document: Document) -> list[str]:
    return [i.text for section in document.sections for i in section.items if isinstance(i, Text) and i.warns]


def test_every_section_is_there_in_its_order():
    document = build(measured([full()]), against=measured([full("before")]))
    assert tuple(section.key for section in document.sections) == SECTIONS
    assert document.title == "Report of run"
    assert warnings_of(document) == []


def test_the_headline_draws_what_it_says_and_its_table_has_the_conditions():
    sections = build(measured([full()])).sections
    items = [item for section in sections for item in section.items if not isinstance(item, Text)]
    assert len(items) > 10 and len({item.key for item in items}) == len(items)
    drawn, table = items[:2]
    assert isinstance(drawn, Figure) and isinstance(table, Table)
    assert [panel.title for panel in drawn.panels] == ["Attainment, joint", "Goodput"]
    conditions = ("mixed (sha256 abababababab)", "a machine", "110.2M", "12.6M", "0123456789ab", "0.10.2", "2026-11-01")
    for said in conditions:
        assert [item.key for item in items if said in item.caption] in ([table.key], [table.key, "timeline"]), said
    assert {section.key for section in sections if section.folded} == set(FOLDED)


def test_a_policy_has_the_same_colour_in_every_report():
    one, other = (
        measured([folder(*(point([request(0)], policy=name) for name in names))])
        for names in (("ar", "adaserve", "x"), ("y", "x", "adaserve"))
    )
    assert {name: one.colour(name) for name in one.policies} == {"adaserve": 0, "x": 1, "ar": 3}
    assert {name: other.colour(name) for name in other.policies} == {"adaserve": 0, "y": 1, "x": 2}


def test_facts_are_those_of_the_rows():
    facts = dict(build(measured([full()])).facts)
    assert facts["target"] == "demo/target (110.2M parameters)"
    assert facts["points"] == "4, of them 4 valid"
    assert facts["requests of valid points"] == "120, of them 80 with a target and 40 without"
    assert facts["commit"] == "0123456789ab"


def test_invalid_points_come_first_and_are_in_nothing_else():
    late = point([request(0)], policy="late", valid=False, invalid_reason="client was late")
    document = build(measured([folder(late, point([request(0)]))]))
    text, table = document.sections[0].items[:2]
    assert text == Text("1 of 2 points are invalid and left out of everything below.", warns=True)
    assert table.rows == (("late@1/s", "client was late"),)
    rest = [item for section in document.sections for item in section.items[2 if section.key == "headline" else 0 :]]
    assert not any("late" in cell for item in rest if isinstance(item, Table) for row in item.rows for cell in row)


def test_with_no_valid_point_nothing_is_drawn():
    document = build(measured([folder(point([request(0)], valid=False, invalid_reason="engine died"))]))
    assert [section.key for section in document.sections] == ["headline"]
    assert warnings_of(document)[-1] == "No point is valid: there is nothing to compare and nothing to draw."


def test_warnings_say_what_makes_results_mean_less():
    dirty = replace(PROVENANCE, commit="0123456789abcdef-dirty", device="simulated: a100")
    one = point([request(0)], provenance=dirty, compiles_after_ready=2)
    document = build(measured([folder((one[0], [], []), notes=("requests.jsonl is not there",))]))
    assert warnings_of(document) == [
        "run: requests.jsonl is not there",
        "Tracked files differed from the commit: this code cannot be looked up by its commit alone.",
        "No model ran: times are those of a simulated machine (a100).",
        "Programs were compiled while serving at ar@1/s: their times hold compilation.",
        "Not all requests of ar@1/s have records: figures are their rows' means, without intervals.",
    ]
    assert dict(document.facts)["commit"] == "0123456789ab-dirty"
    spread = build(measured([folder(point([request(0)], system="vllm", token_source="usage_spread"))]))
    assert warnings_of(spread)[0].startswith("vllm: tokens were counted at the end of each answer")


def test_folders_that_were_not_measured_alike_are_warned_of():
    other = replace(PROVENANCE, run_id="r2", machine="b machine", target="/some/where/big", target_params=8_030_000_000)
    document = build(measured([full("a"), folder(point([request(0)], policy="spec:4", provenance=other), path="b")]))
    unpaired, text = warnings_of(document)
    assert unpaired.startswith("2 of 4 comparisons are not of the same requests at the same times")
    assert text == (
        "a and b were not measured alike: machine (a machine, 2 cores against b machine); target (demo/target (110.2M "
        "parameters) against big (8.03B parameters))."
    )
    assert dict(document.facts)["machine"] == "a machine, 2 cores / b machine"


def test_same_folder_twice_is_refused(tmp_path: Path):
    rows, records, _ = point([request(0)])
    append_rows(tmp_path / "results.jsonl", rows)
    append_rows(tmp_path / "requests.jsonl", records)
    (loaded,), _ = load_folders([tmp_path])
    assert loaded.rows == tuple(rows)
    with pytest.raises(ConfigError, match="expected each folder once"):
        load_folders([tmp_path, tmp_path / ".." / tmp_path.name])
    with pytest.raises(ConfigError, match="expected one or more folders"):
        load_folders([])


def test_a_servers_file_has_the_report_of_a_folder(tmp_path: Path):
    (loaded,), _ = load_folders([records_file(tmp_path)])
    document = build(measured([loaded]))
    facts = dict(document.facts)
    assert (facts["workload"], facts["commit"], facts["arrivals"]) == ("requests of clients", "unknown", "served")
    assert facts["requests of valid points"] == "6, of them 5 with a target and 1 without"
    assert not facts.keys() & {"requests at once, at most", "context, at most", "deterministic"}
    assert {section.key for section in document.sections} >= {"headline", "curves", "latency", "mlperf", "violations"}
    table = next(item for item in document.sections[0].items if isinstance(item, Table))
    assert [row[:3] for row in table.rows] == [("adaserve", "0.75/s", "3"), ("ar", "1/s", "3 (1 without target)")]
