"""Figures of the papers: every figure has a name, statements are judged by arithmetic, ended steps are not run."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.traces import load_trace
from benchmarks.nightjar.segments import busiest_swing
from tests.bench.scripts import modules_of
from tests.conftest import ROOT

NAMES = (
    "papers.reproduce",
    "adaserve.sweeps_points",
    *(f"papers.{name}" for name in ("data", "entry", "pages", "registry", "running", "status")),
)
EXPECTED = {
    *(f"adaserve-{figure}" for figure in range(8, 16)),
    *(f"nightjar-{figure}" for figure in range(9, 17)),
    *(f"nightjar-table-{table}" for table in (4, 5, 6)),
    *(f"osd-table-{table}" for table in (1, 2, 3, 4)),
    *(f"osd-{figure}" for figure in range(3, 7)),
    "starsd-table-1", *(f"starsd-{figure}" for figure in range(4, 7)),
}  # fmt: skip
STATUS = ROOT / "benchmarks" / "results" / "reproduce.json"


modules = modules_of(*NAMES)


def run(modules, *arguments: object):
    return CliRunner().invoke(modules["reproduce"].app, [str(each) for each in arguments])


def forms(modules):
    """Every (entry, size, form) that can be run."""
    return [
        (entry, size, form)
        for entry in modules["registry"].ENTRIES.values() for size, form in entry.forms.items()
        if isinstance(form, modules["entry"].Form)
    ]  # fmt: skip


def test_every_figure_and_table_has_a_name_a_cpu_form_and_a_title(modules) -> None:
    entries = modules["registry"].ENTRIES
    assert entries.keys() == EXPECTED
    assert all("cpu" in entry.forms and entry.forms.keys() <= set(modules["entry"].SIZES) for entry in entries.values())
    titles = {entry.title for entry in entries.values()}
    assert {"AdaServe, figure 8", "Nightjar, table 6", "OSD, table 2", "StarSD, figure 4"} <= titles
    assert len(titles) == len(entries)
    with pytest.raises(
        ConfigError, match="no figure or table 'adaserve-7'; there are adaserve, nightjar, osd, starsd, adaserve-8"
    ):
        modules["registry"].find(["adaserve-7"])
    assert {entry.name for entry in modules["registry"].find(["starsd", "starsd-4"])} == {
        name for name in EXPECTED if name.startswith("starsd")
    }


def test_what_cannot_be_run_says_what_it_needs_and_ends_with_3(modules, tmp_path: Path) -> None:
    missing = {
        name for name, entry in modules["registry"].ENTRIES.items()
        if isinstance(entry.forms["cpu"], modules["entry"].NotYet)
    }  # fmt: skip
    assert missing == {name for name in EXPECTED if name.startswith("osd")} - {"osd-table-2"}
    for name, size, needs in (
        ("osd-3", "cpu", "training, which the simulator cannot do"), ("starsd-5", "gpu", "one GPU for the draft")
    ):  # fmt: skip
        done = run(modules, "run", name, "--size", size, "--out", tmp_path)
        assert done.exit_code == 3
        assert "not there yet: needs" in done.output and needs in done.output
    done = run(modules, "run", "nightjar-12", "--out", tmp_path, "--size", "gpu")
    assert done.exit_code == 3 and "a form of this size; nightjar-12 has cpu" in done.output
    wrong = run(modules, "run", "osd-3", "--out", tmp_path, "--size", "tpu")
    assert "--size must be one of cpu, engine, gpu, got 'tpu'" in str(wrong.exception)


def test_commands_are_of_scripts_and_options_that_there_are(modules) -> None:
    """Those of scripts by their text; placeholders are data, the own folder, or that of an earlier step."""
    known = {"here", *modules["data"].SOURCES}
    seen = set()
    for _, _, form in forms(modules):
        earlier: set[str] = set()
        for step in form.steps:
            places = set(re.findall(r"{([^}]*)}", " ".join(step.argv)))
            assert places <= known | earlier, step.argv
            earlier.add(step.name)
            if step.argv[0] == "python":
                assert step.argv[1] == "-m"
                text = (ROOT / f"{step.argv[2].replace('.', '/')}.py").read_text()
                options = [word for word in step.argv if word.startswith("--")]
                assert all(f'"{word}"' in text or f"    {word[2:].replace('-', '_')}: " in text for word in options)
            seen.add((step.name, step.argv))
    assert len({name for name, _ in seen}) == len(seen), "one name, one command: folders are shared by name"


def test_a_claim_is_decided_by_its_line_and_compared_with_the_papers_number(modules) -> None:
    claim = modules["entry"].Claim("violations over ours", "v", "at least", 1.0, 4.0)
    fewer = modules["entry"].Claim("latency", "l", "at most", 1.0, 0.5)
    first, second, third = modules["status"].judged([claim, fewer, claim], {"v": 3.0, "l": 0.4})[:3]
    assert (first["holds"], first["ratio"]) == (True, 0.75)
    assert (second["holds"], second["ratio"]) == (True, pytest.approx(0.8))
    assert claim.holds(1.0) and not claim.holds(0.99) and fewer.holds(1.0) and not fewer.holds(1.01)
    advantage = replace(claim, side="above")
    assert advantage.holds(1.1) and not advantage.holds(1.0 + 1e-12) and claim.holds(1.0 - 1e-12)
    (unknown,) = modules["status"].judged([claim], {"v": None})
    assert (unknown["ours"], unknown["holds"], unknown["ratio"]) == (None, None, None)
    cells = modules["pages"].claim_cells
    assert cells(first) == ("violations over ours", "at least 1", "4", "3", "yes", "0.75")
    assert cells(unknown)[3:] == ("-", "not known", "-") and third == first
    drawn = modules["entry"].Claim("share", "s", "at most", 0.4, None, "share")
    assert cells(*modules["status"].judged([drawn], {"s": 0.2654})) == (
        "share", "at most 40 %", "-", "26.54 %", "yes", "-"
    )  # fmt: skip


@pytest.mark.slow
def test_a_figure_is_run_judged_and_shown_from_end_to_end(modules, tmp_path: Path, monkeypatch) -> None:
    """The first 60 requests of the generated trace of AdaServe's figure 13, simulated: only chat has peaked by then."""
    monkeypatch.delitem(modules["pages"].RENDERERS, ".html")  # whose drawing takes longer than the rest
    entries = modules["registry"].ENTRIES
    form = entries["adaserve-13"].forms["cpu"]
    (step,) = form.steps
    short = replace(form, steps=(replace(step, argv=(*step.argv, "--requests", "60")),))
    monkeypatch.setitem(entries, "adaserve-13", replace(entries["adaserve-13"], forms={"cpu": short}))
    done = run(modules, "run", "adaserve-13", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "adaserve-13-cpu.json").read_text())
    assert found["values"]["peaks off, s"] > 20 and found["values"]["least swing"] > 1
    assert (tmp_path / "fluctuating" / "results.jsonl").exists()
    assert "AdaServe, figure 13 (cpu)" in done.output
    again = run(modules, "run", "adaserve-13", "--out", tmp_path)
    assert again.exit_code == 0 and "fluctuating: has ended in" in again.output
    written = tmp_path / "status.json"
    assert run(modules, "status", "--runs", tmp_path, "--out", written).exit_code == 0
    entries = {entry["name"]: entry for entry in json.loads(written.read_text())["entries"]}
    form = entries["adaserve-13"]["forms"]["cpu"]
    assert form["state"] == "measured" and [claim["holds"] for claim in form["claims"]] == [False, True]
    assert str(tmp_path) not in json.dumps(form), "commands are shown with placeholders"
    assert entries["osd-3"]["forms"]["cpu"]["state"] == "not there yet"
    assert entries["adaserve-8"]["forms"]["cpu"]["state"] == "not run"


def fake(modules, tmp_path: Path, **changes):
    """A form of one step that would write into its folder."""
    step = modules["entry"].Step("step", ("python", "x.py", "{traces}", "--out", "{here}/x"), 1, **changes)
    return modules["entry"].Form((step,), lambda _: None, (), "w", "x"), step


def test_a_step_is_run_once_and_again_when_its_command_changes_or_it_failed(modules, tmp_path: Path) -> None:
    running, ran, notes = modules["running"], [], []
    form, step = fake(modules, tmp_path)
    data = tmp_path / "data"
    modules["data"].make_data("traces", data, span_s=2.0)
    folder = tmp_path / "step"

    def code(argv, result=0):
        ran.append(argv[1:])
        return result

    with pytest.raises(running.StepError, match=r"step failed with exit code 7: .*; run the figure again to go on"):
        running.run_form(form, tmp_path, data, run=lambda argv: code(argv, 7), note=notes.append)
    (folder / "partial").write_text("kept")
    for _ in range(2):
        running.run_form(form, tmp_path, data, run=code, note=notes.append)
    traces = str(data / "adaserve-traces")
    assert ran == [["x.py", traces, "--out", f"{folder}/x"]] * 2
    assert (folder / "partial").exists() and notes[-1] == f"step: has ended in {folder}"
    other = replace(form, steps=(replace(step, argv=(*step.argv, "--seed", "1"), anew=True),))
    with pytest.raises(running.StepError):
        running.run_form(other, tmp_path, data, run=lambda argv: code(argv, 7), note=notes.append)
    (folder / "partial").write_text("of a step that begins anew")
    running.run_form(other, tmp_path, data, run=code, note=notes.append)
    assert len(ran) == 4 and not (folder / "partial").exists()
    assert (tmp_path / "step.old1" / "partial").read_text() == "kept"


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_what_another_commit_left_is_put_aside(modules, tmp_path: Path, monkeypatch, ended: bool, anew: bool) -> None:
    running, ran, notes = modules["running"], [], []
    form, _ = fake(modules, tmp_path, anew=anew)
    data, folder = tmp_path / "data", tmp_path / "step"
    modules["data"].make_data("traces", data, span_s=2.0)

    def write(argv) -> int:
        ran.append(argv)
        assert not (folder / "rows").exists(), "nothing of the other commit is gone on with"
        (folder / "rows").write_text(commit)
        if not ended and len(ran) == 1:
            raise KeyboardInterrupt
        return 0

    for commit in ("c1", "c2", "c3"):
        monkeypatch.setattr(running, "source_commit", lambda commit=commit: commit)
        with contextlib.suppress(KeyboardInterrupt):
            running.run_form(form, tmp_path, data, run=write, note=notes.append)
    found = {name: (tmp_path / name / "rows").read_text() for name in ("step", "step.old1", "step.old2")}
    assert len(ran) == 3 and found == {"step": "c3", "step.old1": "c1", "step.old2": "c2"}
    assert f"step: what another command or commit left is now in {tmp_path / 'step.old2'}" in notes


def test_an_interrupt_keeps_what_is_done_and_ends_with_130(modules, tmp_path: Path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(modules["reproduce"], "run_form", interrupted)
    done = run(modules, "run", "adaserve-13", "--out", tmp_path)
    assert done.exit_code == 130 and "run the same command again to go on" in done.output


def test_data_is_looked_for_where_it_is_said_to_be_or_made(modules, tmp_path: Path) -> None:
    data = modules["data"]
    with pytest.raises(ConfigError, match=r"has no rate_rps\*.jsonl\*, .*AdaServe-Artifact-Evaluation, Apache-2.0"):
        data.find_data("traces", tmp_path)
    with pytest.raises(ConfigError, match=r"Azure/AzurePublicDataset \(CC BY 4.0\)"):
        data.find_data("azure", tmp_path)
    for name in data.SOURCES:
        data.make_data(name, tmp_path, span_s=5.0)
    folder = data.find_data("traces", tmp_path)
    assert folder == data.find_data("traces", folder) == tmp_path / "adaserve-traces"
    assert data.find_data("azure", tmp_path).name == "AzureLLMInferenceTrace_conv.csv"


@pytest.mark.slow
def test_made_workloads_are_what_the_benchmarks_take(modules, tmp_path: Path) -> None:
    for name in modules["data"].SOURCES:
        modules["data"].make_data(name, tmp_path, span_s=30.0)
    points = modules["sweeps_points"].points(tmp_path / "adaserve-traces", requests=0, seed=0)
    by_sweep = {sweep: [p.value for p in points if (p.sweep, p.targets) == (sweep, "tpot")] for sweep in
                ("rate", "urgent", "scale")}  # fmt: skip
    assert by_sweep["rate"] == pytest.approx([2.4, 2.8, 3.2, 3.6, 4.0, 4.6], rel=0.3)
    assert by_sweep["urgent"] == [0.3, 0.6, 0.9]
    assert by_sweep["scale"] == [0.6, 0.8, 1.0, 1.2, 1.4, 1.6]
    urgent = next(point.trace for point in points if (point.sweep, point.value) == ("urgent", 0.9))
    share = sum(request.slo_class == "code" for request in urgent.requests) / len(urgent.requests)
    assert share == pytest.approx(0.9, abs=0.08)
    strict = next(point.trace for point in points if (point.sweep, point.value) == ("scale", 0.6))
    assert {request.slo.relative for request in strict.requests if request.slo_class == "code"} == {0.6}
    segment = busiest_swing(load_trace(modules["data"].find_data("azure", tmp_path), format="azure"), 20)
    assert len(segment.requests) > 1000


def test_a_status_goes_round_and_keeps_what_a_folder_lacks(modules, tmp_path: Path) -> None:
    status, entries = modules["status"], list(modules["registry"].ENTRIES.values())
    old = status.RunRow(
        "adaserve-8", "cpu", "2026-01-01", 3.0, "made", {"commit": "c0ffee"}, {"llama-70b: least lead": 0.1}
    )
    path = tmp_path / "status.json"
    path.write_text(json.dumps(status.status_of(entries, [old])))
    assert status.rows_of(status.read_status(path), "x") == [old]
    runs = tmp_path / "runs"
    runs.mkdir()
    status.write_row(replace(old, name="adaserve-9", values={"qwen-32b: goodput times": 1.5}), runs)
    assert run(modules, "status", "--runs", runs, "--out", path).exit_code == 0
    kept = {row.name: row for row in status.rows_of(status.read_status(path), "x")}
    assert kept["adaserve-8"] == old and kept.keys() == {"adaserve-8", "adaserve-9"}
    claims = next(e for e in status.read_status(path)["entries"] if e["name"] == "adaserve-9")["forms"]["cpu"]["claims"]
    assert [claim["holds"] for claim in claims] == [None, True, None, None]
    path.write_text('{"entries": 3}')
    with pytest.raises(ConfigError, match="expected a status that"):
        status.read_status(path)
    (runs / "adaserve-9-cpu.json").write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match=r"adaserve-9-cpu.json: expected what `reproduce.py run` wrote"):
        status.rows_in(runs, entries)


def test_the_committed_status_is_of_the_figures_as_they_are_now(modules) -> None:
    status = modules["status"]
    committed = status.read_status(STATUS)
    again = status.status_of(modules["registry"].ENTRIES.values(), status.rows_of(committed, str(STATUS)))
    assert json.loads(json.dumps(again)) == committed, (
        f"python -m benchmarks.papers.reproduce status --out {STATUS.name}"
    )
