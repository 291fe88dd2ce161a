"""benchmarks/adaserve/sweeps.py: who runs where with which setting, its verdicts by hand, and that it goes on."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.bench.simulate import ChainSetting, Grid
from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.policies import find_policy
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.types import SLO
from adaserve_jax.workloads.reshaping import at_rate, with_requests
from adaserve_jax.workloads.traces import fluctuating_trace, save_trace
from scripts.results_policies import sweeps_table
from tests.bench.scripts import modules_of

NAMES = ("adaserve.sweeps", "adaserve.sweeps_points", "adaserve.sweeps_tables")
FIGURES = "benchmarks.adaserve.sweeps_figures"


modules = modules_of(*NAMES, left_out="sweeps")


def folder_of(tmp_path: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        save_trace(with_requests(fluctuating_trace(seed=number, rate_rps=1.0 + number), 400, 0), tmp_path / name)
    return tmp_path


def test_everyone_runs_at_a_setting_that_is_stated(modules) -> None:
    found = {contender.name: contender for contender in modules["points"].contenders()}
    machine = load_machine("qwen-32b")
    assert {name for name in found if name.startswith("spec:")} == {"spec:4", "spec:6", "spec:8"}
    assert {
        "ar",
        "sarathi",
        "priority",
        "specinfer",
        "dsd",
        "tetris:4",
        "adaserve-code",
        "tuned",
        "dspark:4",
        "niyama",
    } <= found.keys()
    for contender in found.values():
        if contender.policy is not None:
            find_policy(contender.policy, contender.machine(machine).max_depth)
        if contender.group == "baseline":
            own_chunks = contender.name in ("niyama", "slidingserve", "jitserve")
            assert (contender.max_prefill_tokens, contender.max_requests) == (0 if own_chunks else 128, 64)
    assert (found["adaserve"].max_prefill_tokens, found["adaserve"].max_requests) == (0, 0)
    assert found["adaserve"].machine(machine) == machine  # whose depth is AdaServe's own setting
    assert found["spec:8"].machine(machine).max_depth == 8


def test_points_are_the_traces_of_the_sweeps_under_both_kinds_of_targets(modules, tmp_path: Path) -> None:
    names = ("rate_rps2.4_ol256.jsonl.gz", "urgent_prop0.6.jsonl.gz", "scale_slo0.8_ol256.jsonl", "breakdown_x.jsonl")
    found = modules["points"].points(folder_of(tmp_path, *names), requests=50, seed=0)
    joint = [point for point in found if point.targets == "joint"]
    assert [(p.sweep, p.value) for p in joint if p.sweep != "rate"] == [
        ("urgent", 0.6), *(("mix", share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)), ("scale", 0.8), ("scale", 1.2),
        ("fluctuating", 2.4), ("fluctuating", 3.0), ("fluctuating", 3.6),
        *(("deadline", seconds) for seconds in (8.0, 12.0, 16.0, 24.0, 32.0)),
        *(("overload", rate) for rate in (2.0, 2.5, 3.0, 3.5)),
    ]  # fmt: skip
    assert [(p.sweep, p.value) for p in joint] == [(p.sweep, p.value) for p in found if p.targets == "tpot"]
    assert {r.slo.ttft_s for p in joint for r in p.trace.requests} == {4.0}
    assert {r.slo.ttft_s for p in found if p.targets == "tpot" for r in p.trace.requests} == {None}
    assert {len(p.trace.requests) for p in found} == {50}
    whole = modules["points"].points(tmp_path, requests=0, seed=0)
    for point in whole:
        if point.sweep == "mix":
            (of_sweep,) = (p.trace for p in whole if (p.sweep, p.targets) == ("urgent", point.targets))
            assert [r.due_s for r in point.trace.requests] == [r.due_s for r in of_sweep.requests]
            urgent = np.mean([r.slo_class == "code" for r in point.trace.requests])
            assert urgent == pytest.approx(point.value, abs=0.08)
        if point.sweep == "overload":
            (of_rate,) = (p.trace for p in whole if (p.sweep, p.targets) == ("rate", point.targets))
            steady = at_rate(of_rate, point.value).requests
            for since, until, as_since, as_until in ((0, 90, 0, 90), (90, 150, 90, 210), (150, 240, 210, 300)):
                found = sum(since <= r.due_s < until for r in point.trace.requests)
                assert found == sum(as_since <= r.due_s < as_until for r in steady)
        if point.sweep == "deadline":
            asked = {(r.slo_class == "code", r.slo.e2e_s, r.slo.tpot_ms is None) for r in point.trace.requests}
            assert asked == {(True, None, True), (False, point.value, True)}
            assert {r.max_tokens for r in point.trace.requests} == {1024}
            assert len({r.output_tokens for r in point.trace.requests}) > 50
    with pytest.raises(ConfigError, match="no trace named as AdaServe's are"):
        modules["points"].points(tmp_path / "none", requests=0, seed=0)


def line(modules, contender: str, group: str, attainment: float, goodput: float, *, value: float = 4.0, **changes):
    row = {
        "slo_class": "all", "attainment": attainment, "goodput_tps": goodput, "policy": "spec:2",
        "max_prefill_tokens": 512, "max_requests": 48, "commit": "c0ffee", "requests": 40,
    }  # fmt: skip
    about = {"machine": "m", "sweep": "rate", "targets": "joint", **changes}
    return modules["tables"].Line("k", value=value, contender=contender, group=group, rows=(row,), **about)


def test_every_contender_at_every_point(modules) -> None:
    found = modules["tables"].contenders_by_point(
        [line(modules, "tuned", "tuned", 0.97, 880.0), line(modules, "ar", "baseline", 0.7, 750.0),
         line(modules, "ar", "baseline", 0.9, 650.0, value=2.0)]
    )  # fmt: skip
    assert [(point["value"], point["requests"], list(point["contenders"])) for point in found] == [
        (2.0, 40, ["ar"]), (4.0, 40, ["ar", "tuned"])
    ]  # fmt: skip
    assert found[1]["contenders"] == {
        "tuned": {"attainment": 0.97, "goodput_tps": 880.0, "setting": "spec:2, chunk 512, 48 running"},
        "ar": {"attainment": 0.7, "goodput_tps": 750.0, "setting": None},
    }


def test_the_verdict_is_by_the_definitions(modules) -> None:
    lines = [
        line(modules, "adaserve", "ours", 0.95, 900.0), line(modules, "tuned", "tuned", 0.97, 880.0),
        line(modules, "adaserve-paper", "authors", 0.5, 500.0), line(modules, "spec:4", "baseline", 0.80, 600.0),
        line(modules, "ar", "baseline", 0.70, 750.0),
        line(modules, "adaserve", "ours", 1.0, 700.0, value=2.0),
        line(modules, "ar", "baseline", 0.9, 650.0, value=2.0),
    ]  # fmt: skip
    judged = modules["tables"].verdict(lines)
    low, high = judged["points"]
    assert (low["value"], low["violation_ratio"], low["minus_tuned"]) == (2.0, None, None)
    assert (high["best_baseline"], high["best_goodput_baseline"]) == ("spec:4", "ar")
    assert high["violation_ratio"] == pytest.approx(0.20 / 0.05)
    assert high["goodput_ratio"] == pytest.approx(900 / 750)
    assert high["minus_tuned"] == pytest.approx(-0.02)
    assert high["minus_paper"] == pytest.approx(0.45)
    assert high["tuned_setting"] == "spec:2, chunk 512, 48 running"
    overall = judged["overall"]["m joint"]
    assert overall["goodput_ratio_at_highest_rate"] == pytest.approx(1.2)
    assert (overall["points"], overall["points_without_violations"]) == (2, 1)
    assert (overall["points_below_best_baseline"], overall["points_below_tuned"]) == (0, 1)
    assert overall["largest_violation_ratio"] == pytest.approx(4.0)
    assert "`spec:4` 80.0%" in sweeps_table({"commit": "c0ffee", **judged})
    alone = modules["tables"].verdict([line(modules, "adaserve", "ours", 0.95, 900.0, targets="tpot")])
    assert sweeps_table({"commit": "c0ffee", **alone}).endswith("| - | - | - | - | - | - |\n\nCommit c0ffee.")
    each = {"commit": "c0ffee", "points": modules["tables"].contenders_by_point(lines)}
    table = modules["tables"].tables(each)
    assert "## m, TPOT targets and TTFT within 4 s: by requests per second" in table
    assert "| policy | 2 | 4 |" in table
    assert "| `adaserve` | 100.0% / 700 | 95.0% / 900 |" in table
    assert "| `spec:4` | - | 80.0% / 600 |" in table
    assert "Settings of `tuned`, by column: 4: spec:2, chunk 512, 48 running." in table
    assert table.endswith("Simulated at commit c0ffee.")


def late(point: dict, recovery_s: float) -> dict:
    """The point at 2 requests/s, so that 80 seconds are left after the burst."""
    told = {"ar": {**point["contenders"]["ar"], "recovery_s": recovery_s}}
    return {**point, "value": 2.0, "requests": 580, "contenders": told}


def test_contenders_of_an_earlier_run_stand_beside_a_new_one(
    modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own lines give the same file again; those that ran anew, and only those, are replaced."""
    main, tables = modules["main"], modules["tables"]
    lines = [
        line(modules, "adaserve", "ours", 0.95, 900.0), line(modules, "tuned", "tuned", 0.97, 880.0),
        line(modules, "ar", "baseline", 0.70, 750.0),
        replace(line(modules, "ar", "baseline", 0.9, 650.0, sweep="overload"), recovery_s=3.0),
    ]  # fmt: skip
    monkeypatch.setitem(sys.modules, FIGURES, None)  # nobody looks at them here
    (tmp_path / "first").mkdir()
    first = main.write_report(lines, tmp_path / "first")
    file = tmp_path / "first" / "contenders.json"
    told = json.loads(file.read_text())
    assert tables.contenders_by_point(tables.lines_of(told)) == told["points"]
    assert tables.verdict(tables.lines_of(told)) == tables.verdict(lines)
    assert "| 90.0% / 650 / never |" in tables.tables({**told, "points": [late(told["points"][1], 61.0)]})
    assert "| 90.0% / 650 / 59 s |" in tables.tables({**told, "points": [late(told["points"][1], 59.0)]})
    anew = line(modules, "adaserve", "ours", 0.99, 910.0)
    anew.overall["commit"] = "decaf"
    second = main.write_report(main.with_earlier([anew], file), tmp_path / "first")
    assert second["commit"] == "c0ffee, decaf"
    (before,), (after,) = first["points"], second["points"]
    assert after == {
        **before, "attainment": 0.99, "goodput_tps": 910.0, "goodput_ratio": pytest.approx(910 / 750),
        "minus_best_baseline": pytest.approx(0.29), "violation_ratio": pytest.approx(30.0),
        "minus_tuned": pytest.approx(0.02), "goodput_ratio_to_tuned": pytest.approx(910 / 880),
    }  # fmt: skip
    told["points"][0]["contenders"]["gone"] = told["points"][0]["contenders"]["ar"]
    assert {each.contender for each in tables.lines_of(told)} == {"adaserve", "tuned", "ar"}
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"--beside: .*contenders.json is no contenders.json of a run"):
        main.with_earlier([], file)


@pytest.mark.slow
def test_an_overload_has_the_time_until_targets_are_met_again(modules) -> None:
    """All requests after the overload are met by the one contender, and none by the other."""
    main, places = modules["main"], modules["points"]
    steady = at_rate(fluctuating_trace(seed=0, rate_rps=1.0, ttft_slo_s=4.0), 1.0)
    for met, recovered in ((True, 0.0), (False, None)):
        trace = steady.derived(
            "short",
            (replace(request, output_tokens=4, slo=SLO(ttft_ms=1e6 if met else 1e-3)) for request in steady.requests),
        )
        point = places.Point("overload", 1.0, "joint", with_requests(trace, 240, 0))
        found = main.run(main.Job("c", load_machine("llama-70b"), point, places.contenders()[0], 0, Grid()))
        assert (found.attainment, found.recovery_s) == (float(met), recovered)
        (told,) = modules["tables"].contenders_by_point([found])
        assert told["contenders"]["adaserve"]["recovery_s"] == recovered
        assert ("/ 0 s |" if met else "/ never |") in modules["tables"].tables({"commit": "c", "points": [told]})


def test_points_that_are_there_are_not_run_again(modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, places = modules["main"], modules["points"]
    (point, *_) = places.points(None, requests=4, seed=1)
    short = tuple(replace(request, output_tokens=8) for request in point.trace.requests)
    point = replace(point, trace=replace(point.trace, requests=short))
    chosen = [each for each in places.contenders(quick=True) if each.name in ("adaserve", "ar", "tuned")]
    grid = Grid((1, 2), (128,), (8,))
    jobs = [main.Job("c", load_machine("llama-70b"), point, contender, 0, grid) for contender in chosen]
    lines = main.run_all(jobs[:2], tmp_path, 1)
    ran = []
    monkeypatch.setattr(main, "run", lambda job, run=main.run: ran.append(job.contender.name) or run(job))
    again = main.run_all(jobs, tmp_path, 1)
    assert ran == ["tuned"]
    assert [each.contender for each in again] == ["adaserve", "ar", "tuned"]
    assert again[0].rows[0] == json.loads(json.dumps(lines[0].rows[0]))
    assert again[2].overall["label"] == "tuned, best of 2 tried"
    edited = [replace(jobs[0], commit="c-dirty")]
    ran.clear()
    main.run_all(edited, tmp_path, 1)
    main.run_all(edited, tmp_path, 1)
    assert ran == ["adaserve"] * 2, "any two edits have the same name"
    others = {"commit": "d", "seed": 1, "machine": load_machine("qwen-32b"), "contender": chosen[1]}
    assert all(replace(jobs[0], **{name: value}).key != jobs[0].key for name, value in others.items())


def test_tuned_settings_of_earlier_runs_are_run_again(modules, tmp_path: Path) -> None:
    """A verdict and a file of contenders; points without a setting, and other machines, have none."""
    main = modules["main"]
    points = [
        {"machine": "llama-70b", "targets": "joint", "sweep": "rate", "value": 3.0, "tuned_setting": None},
        {"machine": "llama-70b", "targets": "joint", "sweep": "rate", "value": 4.0,
         "tuned_setting": "spec:2, chunk 512, 42 running"},
    ]  # fmt: skip
    (tmp_path / "verdict.json").write_text(json.dumps({"points": points}))
    tuned = {"tuned": {"setting": "ar, chunk 64, 8 running"}, "ar": {"setting": None}}
    of = {"machine": "m", "targets": "joint", "sweep": "mix", "value": 0.5, "contenders": tuned}
    (tmp_path / "contenders.json").write_text(json.dumps({"points": [of]}))
    found = main.known_settings([str(tmp_path / "verdict.json"), str(tmp_path / "contenders.json")])
    assert found == {
        ("llama-70b", "joint", "rate", 4.0): ChainSetting(2, 512, 42),
        ("m", "joint", "mix", 0.5): ChainSetting(0, 64, 8),
    }  # fmt: skip
    for text in ("{", "[]", '{"points": [{"tuned_setting": "ar, chunk 64, 8 running"}]}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ConfigError, match=r"--known: .*wrong.json is no verdict.json or contenders.json of a run"):
            main.known_settings([str(tmp_path / "wrong.json")])
    (point, *_) = modules["points"].points(None, requests=4, seed=1)
    (contender,) = (each for each in modules["points"].contenders(quick=True) if each.name == "tuned")
    job = main.Job("c", load_machine("llama-70b"), point, contender, 0, Grid(), ChainSetting(2, 512, 42))
    row = main.run(job).overall
    assert (row["label"], row["policy"]) == ("tuned, as found before", "spec:2")
    assert (row["max_prefill_tokens"], row["max_requests"]) == (512, 42)
    assert job.key != replace(job, setting=None).key


@pytest.mark.slow
def test_a_figure_is_drawn_for_each_machine_and_kind_of_targets(modules, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [
        line(modules, name, group, share - value / 20, 100 * value, value=value, sweep=sweep, targets=targets)
        for name, group, share in (("adaserve", "ours", 1.0), ("tuned", "tuned", 0.9), ("ar", "baseline", 0.7))
        for value in (1.0, 2.0, 3.0)
        for sweep in ("rate", "fluctuating")
        for targets in ("tpot", "joint")
    ]
    written = importlib.import_module(FIGURES).draw(lines, tmp_path)
    assert sorted(path.name for path in written) == ["m-joint.png", "m-joint.svg", "m-tpot.png", "m-tpot.svg"]
    assert all(path.stat().st_size > 5000 for path in written)
