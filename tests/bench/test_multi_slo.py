"""The multi-SLO suite: its search against known limits, its verdict by hand, and a whole run on a scripted engine."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.bench.multi_slo import (
    LEAST,
    MOST,
    PRECISION,
    PRESETS,
    Suite,
    SuiteSettings,
    begin,
    define,
    doubted_rate,
    held_definition,
    next_rate,
    without_place,
)
from adaserve_jax.bench.runner import RunObserver
from adaserve_jax.errors import ConfigError, QueueFullError
from adaserve_jax.results.jsonl import read_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import REQUESTS
from adaserve_jax.results.submission import (
    FILE,
    LEVELS,
    ClassCount,
    Submission,
    SuitePoint,
    System,
    json_schema,
    judge,
    read_submission,
    recovery_s,
    write_submission,
)
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Workload
from adaserve_jax.workloads.workload import load_workload
from benchmarks.multi_slo import compare, from_aiperf
from benchmarks.peers import common

SCHEMA = Path("benchmarks/multi_slo/schema.json")


def searched(limits: dict[float, float], start: float) -> dict[float, float]:
    """Run the search on a system whose worst class keeps each level up to its limit."""
    found: dict[float, float] = {}
    while (rate := next_rate(found, start)) is not None:
        assert rate not in found and len(found) < 40
        found[rate] = max((level for level in LEVELS if rate <= limits[level]), default=0.0)
    return found


@given(st.lists(st.floats(0.3, 30), min_size=3, max_size=3))
def test_the_search_brackets_the_limit_of_every_level(ends: list[float]):
    limits = dict(zip(LEVELS, sorted(ends, reverse=True), strict=True))
    found = searched(limits, 1.0)
    for level, limit in limits.items():
        kept = max(rate for rate in found if rate <= limit)
        missed = min(rate for rate in found if rate > limit)
        assert kept <= limit < missed <= PRECISION * kept * 1.01, (level, sorted(found))


def test_the_search_ends_where_nothing_or_everything_is_met():
    nothing = searched(dict.fromkeys(LEVELS, 0.0), 1.0)
    assert min(nothing) == LEAST and max(nothing) == 1.0
    everything = searched(dict.fromkeys(LEVELS, math.inf), 1.0)
    assert max(everything) == pytest.approx(MOST, rel=PRECISION - 1) and min(everything) == 1.0


def test_a_rate_that_misses_what_a_higher_one_keeps_is_doubted_once():
    found = {0.5: 0.93, 1.0: 0.97, 2.0: 0.85, 4.0: 0.3}
    assert doubted_rate(found, ()) == 0.5, "95 % is kept at 1.0"
    assert doubted_rate(found, {0.5}) is None
    assert doubted_rate(found, (), (0.9,)) is None, "both keep 90 %"
    assert doubted_rate({}, ()) is None


@pytest.mark.parametrize(("requests", "levels"), [(1, (0.9,)), (19, (0.9,)), (20, (0.9, 0.95)), (100, LEVELS)])
def test_a_level_is_searched_where_one_miss_of_a_class_does_not_decide(
    workload: Workload, requests: int, levels: tuple[float, ...]
):
    assert define(replace(SETTINGS, class_requests=requests), workload, 1.0)[0].searched_levels == levels
    assert next_rate({1.0: 0.96, 1.1: 0.89}, 1.0, levels) == (0.5 if 0.99 in levels else None)


def count(name: str, met: int, requests: int = 10, goodput: float = 1.0) -> ClassCount:
    return ClassCount(name=name, requests=requests, met=met, lost=0, goodput_tps=goodput, ttft_p50_ms=1.0,
                      ttft_p99_ms=2.0, tpot_p50_ms=None, tpot_p99_ms=None)  # fmt: skip


def point(rate: float, *met: int, stage="rate", requests: int = 100, **more) -> SuitePoint:
    classes = tuple(count(name, each, requests) for name, each in zip("abc", met, strict=False))
    return SuitePoint(stage=stage, rate_rps=rate, duration_s=1.0, classes=classes, **more)


def test_the_verdict_by_hand():
    points = [
        point(4, 96, 80), point(1, 100, 99), point(2, 97, 91), point(3, 100, 89),
        point(4, 50, 0, stage="overload"), point(4, 0, 0, stage="burst", recovery_s=2.5),
    ]  # fmt: skip
    verdict = judge(points)
    ninety, ninety_five, ninety_nine = verdict.levels
    assert (ninety.rate_rps, ninety.missed_rps) == (2, 3), "at 3 class b misses it, whatever class a does"
    assert (ninety_five.rate_rps, ninety_five.missed_rps) == (1, 2)
    assert (ninety_nine.rate_rps, ninety_nine.missed_rps) == (1, 2)
    assert (ninety.sure_rps, ninety_nine.sure_rps) == (1, None), "99 of 100 may be 94.6 %, 91 of 100 84 %"
    assert ninety.goodput_tps == 2.0 and ninety.fairness == pytest.approx(1.88**2 / (2 * (0.97**2 + 0.91**2)))
    assert (verdict.overload_rps, verdict.overload_attainment, verdict.overload_worst) == (4, 0.25, 0)
    assert verdict.overload_fairness == pytest.approx(0.5) and verdict.recovery_s == 2.5
    assert judge([point(1, 0, 0)]).levels[0].rate_rps is None and point(1, 0, 0).fairness is None
    with pytest.raises(ConfigError, match="needs points of the stage 'rate', got none"):
        judge(points[-2:])


def test_an_interval_is_wilsons():
    low, high = count("a", 9).interval
    assert (low, high) == (pytest.approx(0.5958, abs=1e-3), pytest.approx(0.9821, abs=1e-3))
    assert count("a", 0, 0).interval == (0.0, 1.0) and count("a", 0, 0).attainment == 1.0


def test_recovery_is_when_the_requests_that_follow_meet_their_targets():
    burst = [(float(t), False) for t in range(10)]
    assert recovery_s([*burst, *((10.0 + t, True) for t in range(20))], 10.0) == 0.0
    late = [*burst, *((10.0 + t, t >= 3) for t in range(23))]
    assert recovery_s(late, 10.0) == 1.0, "from 11 on 20 of 22 are met, from 10 on 20 of 23"
    assert recovery_s([*burst, *((10.0 + t, False) for t in range(20))], 10.0) is None
    assert recovery_s([(10.0 + t, True) for t in range(9)], 10.0) is None, "nine requests cannot tell"
    last = [*burst, *((10.0 + t, t >= 61) for t in range(81))]
    assert recovery_s(last, 10.0) == 59.0, "from 69 on 20 of 22 are met, in 21 of 80 seconds"
    assert recovery_s([*burst, *((10.0 + t, t >= 70) for t in range(81))], 10.0) is None, "in 12 of 80 seconds"


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    path = tmp_path / "w.jsonl"
    lines = [{"prompt": "p" * 9, "max_tokens": 4, "slo_class": name} for name in ("code", "code", "chat", "summary")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_workload(path)


SETTINGS = SuiteSettings(duration_s=0.03, drain_s=1.0, max_late_s=60.0, warmup_requests=0)


def begun_suite(
    engine, workload: Workload, out: Path, settings: SuiteSettings = SETTINGS, baseline_s: float | None = None
):
    """Begin or resume a suite. baseline_s: of one that is resumed; None: what the engine has."""
    definition, targeted = define(settings, workload, (baseline_s or engine.about.baseline_s) * 1e3)
    begin(out, definition, held_definition(out, resume=True))
    suite = Suite(definition, settings, targeted, lambda: engine, lambda plan: nullcontext(RunObserver()), about={},
                  policy_files={})  # fmt: skip
    return suite.run("ar", out / "ar")


def run_suite(engine, workload: Workload, out: Path):
    return list(begun_suite(engine, workload, out))


def test_a_load_is_not_measured_at_another_speed_than_those_before(
    make_bench, workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = make_bench(capacity=3, tpot_s=0.001, ttft_s=0.004)
    first = begun_suite(engine, workload, tmp_path)
    next(first)
    first.close()
    held_s = engine.about.baseline_s
    slower = replace(engine.about, baseline_s=2 * held_s)
    monkeypatch.setattr(type(engine), "about", property(lambda _: slower))
    loads = begun_suite(engine, workload, tmp_path, baseline_s=held_s)
    next(loads)
    with pytest.raises(ConfigError, match=r"cannot resume .*: one token alone took .* ms when it was begun, and takes"):
        next(loads)


def test_a_whole_run_finds_its_rates_and_goes_on_where_it_ended(make_bench, workload, tmp_path: Path):
    *points, submission = run_suite(make_bench(capacity=3, tpot_s=0.001, ttft_s=0.004), workload, tmp_path / "out")
    last = {(each.stage, each.rate_rps): each for each in points}  # of a rate that was measured twice
    assert isinstance(submission, Submission) and set(submission.points) == set(last.values())
    assert [each.stage for each in points[-2:]] == ["overload", "burst"]
    assert all([c.name for c in each.classes] == ["chat", "code", "summary"] for each in points)
    assert max(points[:-2], key=lambda p: p.rate_rps).worst.attainment < LEVELS[0], "a full engine refuses requests"
    assert (without_place("/a/b/8B"), without_place("org/8B")) == ("8B", "org/8B")
    path = tmp_path / "out" / "ar" / FILE
    assert read_submission(path) == submission
    jsonschema.validate(json.loads(path.read_text()), json.loads(SCHEMA.read_text()))
    again = make_bench()
    assert run_suite(again, workload, tmp_path / "out")[-1] == submission
    assert again.client.submitted == [], "every load was there"


def test_a_doubted_rate_is_measured_again_and_both_measurements_count(
    make_bench, workload, tmp_path: Path, monkeypatch
):
    """One request in twelve of a class is refused at the first load, none at twice its rate, all at any higher one."""
    engine = make_bench()
    loads, asked = itertools.count(), itertools.count(1)
    load, submit = -1, engine.client.submit

    def refusing(request, sink):
        if load > 2 or (load == 0 and request.slo_class == "code" and next(asked) % 12 == 0):
            raise QueueFullError("scripted: full")
        submit(request, sink)

    def opened():
        nonlocal load
        load = next(loads)
        return engine

    monkeypatch.setattr(engine.client, "submit", refusing)
    settings = replace(SETTINGS, preset="workload", duration_s=0.1, class_requests=20)
    loose = replace(workload, items=tuple(replace(item, slo=SLO(tpot_ms=5e3, ttft_ms=5e3)) for item in workload.items))
    definition, targeted = define(settings, loose, 1.0)  # and so a high rate to begin with
    suite = Suite(
        definition, settings, targeted, opened, lambda plan: nullcontext(RunObserver()), about={}, policy_files={}
    )
    first, second, again, *_, submission = suite.run("ar", tmp_path)
    assert LEVELS[0] < first.worst.attainment < LEVELS[1] <= second.worst.attainment
    assert (again.rate_rps, second.rate_rps) == (first.rate_rps, 2 * first.rate_rps)
    folders = (tmp_path / f"rate-{first.rate_rps:g}{name}" for name in ("", "-again"))
    records = [read_rows(folder / REQUESTS, RequestRecord) for folder in folders]
    assert [each.due_s for each in records[0]] != [each.due_s for each in records[1]], "other arrivals"
    assert sum(each.requests for each in again.classes) == len(records[0]) + len(records[1])
    refused = sum(each.requests - each.met for each in first.classes)
    assert sum(each.requests - each.met for each in again.classes) == refused > 0
    assert again.duration_s == 2 * first.duration_s
    assert first not in submission.points and again in submission.points
    assert submission.verdict.levels[1].rate_rps == second.rate_rps


def test_the_duration_of_a_load_is_that_of_all_its_repeats(make_bench, workload: Workload, tmp_path: Path):
    settings = replace(SETTINGS, class_requests=1)
    once, twice = (
        next(begun_suite(make_bench(), workload, tmp_path / f"{repeats}", replace(settings, repeats=repeats)))
        for repeats in (1, 2)
    )
    assert twice.rate_rps == once.rate_rps and twice.duration_s == pytest.approx(2 * once.duration_s)


def test_the_targets_of_a_preset_are_multiples_of_the_baseline_or_limits(workload):
    definition, targeted = define(SETTINGS, workload, 20.0)
    assert {each.name: (each.tpot_ms, each.ttft_ms, each.share) for each in definition.classes} == {
        "code": (24.0, 2666.7, 0.5), "chat": (33.333, 2666.7, 0.25), "summary": (100.0, 2666.7, 0.25)
    }  # fmt: skip
    assert {item.slo.tpot_ms for item in targeted.items if item.slo_class == "code"} == {24.0}
    limits, _ = define(replace(SETTINGS, preset="mlperf-deepseek-r1"), workload, 20.0)
    assert {(each.tpot_ms, each.ttft_ms) for each in limits.classes} == {(15.0, 1500.0)}


@pytest.mark.parametrize("name", ["team:chat", "a;b", " x", "*", "none"])
def test_a_preset_for_every_class_takes_any_name_of_a_class(workload: Workload, name: str):
    named = replace(workload, items=tuple(replace(item, slo_class=name) for item in workload.items))
    definition, targeted = define(replace(SETTINGS, preset="mlperf-deepseek-r1"), named, 20.0)
    assert [each.name for each in definition.classes] == [name]
    assert {item.slo for item in targeted.items} == {SLO(tpot_ms=15.0, ttft_ms=1500.0)}


def test_what_cannot_be_asked_of_a_system_is_refused(workload, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"--preset must be one of {', '.join(PRESETS)}, workload, got 'fast'"):
        SuiteSettings("fast")
    other = replace(workload, items=tuple(replace(item, slo_class="batch") for item in workload.items))
    with pytest.raises(ConfigError, match=r"preset adaserve has no targets for class 'batch' of w.jsonl; it has code"):
        define(SETTINGS, other, 1.0)
    with pytest.raises(ConfigError, match=r"class 'chat' of w.jsonl must have the same targets in every request"):
        define(replace(SETTINGS, preset="workload"), workload, 1.0)
    with pytest.raises(ConfigError, match="preset adaserve with a baseline of 0 ms: slo_tpot_ms"):
        define(SETTINGS, workload, 0.0)
    definition, _ = define(SETTINGS, workload, 20.0)
    begin(tmp_path, definition, None)
    with pytest.raises(ConfigError, match="holds another suite; give another --out, or --resume"):
        held_definition(tmp_path, resume=False)
    with pytest.raises(ConfigError, match=r"cannot resume .*: seed was 0, is 1; give the options of that suite"):
        begin(tmp_path, replace(definition, seed=1), held_definition(tmp_path, resume=True))
    for text in ("[", "[]", "{}", '{"baseline_ms": null}'):
        (tmp_path / "definition.json").write_text(text)
        with pytest.raises(ConfigError, match="is not the definition of a suite; give another --out"):
            held_definition(tmp_path, resume=True)


def made_submission(workload: Workload) -> Submission:
    definition, _ = define(SETTINGS, workload, 20.0)
    system = System(name="a server", policy="plain", target="8B", draft=None, device="cpu", machine="a machine",
                    client="by hand", commit="unknown", measured_at="2026-11-01T10:00:00+00:00")  # fmt: skip
    points = (point(1, 100, 99, 98), point(2, 97, 91, 70), point(2, 50, 50, 50, stage="overload"))
    return Submission(definition=definition, system=system, points=points, verdict=judge(points))


def test_a_submission_is_read_as_it_was_written_and_anything_else_is_refused(workload, tmp_path: Path):
    submission = made_submission(workload)
    path = tmp_path / "changed.json"
    write_submission(path, submission)
    assert read_submission(path) == submission
    values = asdict(submission)
    figures, fairness = values["verdict"], submission.verdict.overload_fairness
    figures["overload_fairness"] = math.nextafter(fairness, 0)  # as another version of Python sums
    path.write_text(json.dumps(values))
    assert read_submission(path).points == submission.points
    for name, other in (("overload_fairness", fairness - 1e-6), ("recovery_s", 123.0)):
        path.write_text(json.dumps(values | {"verdict": figures | {name: other}}))
        with pytest.raises(ConfigError, match="the verdict does not follow from the points"):
            read_submission(path)
    first = values["points"][0]
    for field, wrong, message in (
        (
            "classes",
            [first["classes"][0] | {"met": 101}],
            "points.0.classes.0: .*met must be at most requests, got 101 of",
        ),
        ("classes", [first["classes"][0] | {"lost": -1}], "points.0.classes.0.lost: .*greater than or equal to 0"),
        ("classes", [], "points.0.classes: .*at least 1 item"),
        ("rate_rps", 0.0, "points.0.rate_rps: .*greater than 0"),
        ("rate_rps", math.inf, "points.0.rate_rps: .*finite number"),
        ("duration_s", -1.0, "points.0.duration_s: .*greater than 0"),
    ):
        path.write_text(json.dumps(values | {"points": [first | {field: wrong}, *values["points"][1:]]}))
        with pytest.raises(ConfigError, match=f"is not a submission to multi-slo: {message}"):
            read_submission(path)
    del values["system"]["name"]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"is not a submission to multi-slo: system.name: "):
        read_submission(path)
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file or directory; give a multi-slo.json"):
        read_submission(tmp_path / "none.json")


def test_every_server_is_asked_the_same_on_the_same_models(workload, tmp_path: Path):
    places = {"target": "T", "draft": "D", "gguf": "G"}
    commands = {entry.name: entry.command(places, tmp_path, tmp_path / "adaserve", ["--suite", "multi-slo"])
                for entry in compare.ENTRIES}  # fmt: skip
    for name, command in commands.items():
        assert command[command.index("--targets-of") + 1] == str(tmp_path / "adaserve")
        assert command[command.index("--out") + 1] == str(tmp_path / name)
        assert command[command.index("--") + 1 :] == ["--suite", "multi-slo"]
    assert "G/target.gguf" in commands["llama-draft"] and "G/draft.gguf" in commands["llama-draft"]
    assert "--no-draft" in commands["vllm-plain"] and "D" in commands["vllm-draft"]
    definition, _ = define(SETTINGS, workload, 20.0)
    begin(tmp_path / "adaserve", definition, None)
    assert common.baseline_ms(tmp_path / "adaserve") == 20.0
    with pytest.raises(ConfigError, match=r"--only must name adaserve and some of llama-draft, .*got 'vllm-plain'"):
        compare.compare(tmp_path, only="vllm-plain")


def test_a_checkpoint_whose_making_was_stopped_is_made_again(tmp_path: Path, monkeypatch):
    begun, codes = [], [1, 0, -2, 0, 0]

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        made, code = Path(command[-1]), codes.pop(0)
        begun.append(made.name)
        if "grow" in command:
            made.mkdir()
        (made / "weights" if made.is_dir() else made).write_text("half" if code else "whole")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    for name in ("adaserve_jax.cli grow", "benchmarks.peers.to_gguf .*grown-110M"):
        with pytest.raises(ConfigError, match=f"{name} failed; its message is above"):
            compare.prepare(tmp_path, compare.NAMES)
    places = compare.prepare(tmp_path, compare.NAMES)
    files = [
        Path(places["target"]) / "weights",
        *(Path(places["gguf"]) / f"{role}.gguf" for role in ("target", "draft")),
    ]
    assert [file.read_text() for file in files] == ["whole"] * 3 and len(list(tmp_path.iterdir())) == 3
    assert len(begun) == 5, "what is whole is kept"


def test_the_committed_schema_is_that_of_the_code():
    assert json.loads(SCHEMA.read_text()) == json_schema()


def exported(start_s: float, ttft_ms: float, latency_ms: float, tokens: int, error: object = None) -> str:
    """Return a line as aiperf writes it."""
    metrics = {"time_to_first_token": {"value": ttft_ms, "unit": "ms"},
               "request_latency": {"value": latency_ms, "unit": "ms"},
               "output_sequence_length": {"value": tokens, "unit": "tokens"}}  # fmt: skip
    metadata = {"request_start_ns": int(start_s * 1e9), "was_cancelled": False}
    return json.dumps({"metadata": metadata, "metrics": metrics if error is None else {}, "error": error}) + "\n"


def test_runs_of_aiperf_become_a_submission(workload, tmp_path: Path):
    definition, _ = define(SETTINGS, workload, 20.0)  # code: 24 ms a token, 2.67 s to the first
    ok, slow = exported(0.0, 100, 100 + 9 * 20, 10), exported(1.0, 100, 100 + 9 * 30, 10)
    late, failed = exported(2.0, 3000, 3180, 10), exported(3.0, 0, 0, 0, {"code": 500})
    (tmp_path / "code.jsonl").write_text(ok + slow + late + failed)
    (tmp_path / "rest.jsonl").write_text(exported(0.0, 100, 280, 10))
    (tmp_path / "definition.json").write_text(json.dumps(asdict(definition)))
    runs = [f"2:{name}={tmp_path}/{'code' if name == 'code' else 'rest'}.jsonl" for name in ("code", "chat", "summary")]
    out = tmp_path / "multi-slo.json"
    from_aiperf.main(runs, tmp_path / "definition.json", "vLLM", "8B", "a GPU", out)
    found = read_submission(out)
    jsonschema.validate(json.loads(out.read_text()), json.loads(SCHEMA.read_text()))
    (at,) = found.points
    by_class = {each.name: each for each in at.classes}
    code = by_class["code"]
    assert (code.requests, code.met, code.lost) == (4, 1, 1) and code.tpot_p50_ms == pytest.approx(20)
    assert code.goodput_tps == pytest.approx(10 / 5.18) and by_class["chat"].attainment == 1.0
    assert found.verdict.levels[0].rate_rps is None and found.verdict.overload_rps is None
    warm = json.loads(exported(-60.0, 9000, 9180, 10))
    warm["metadata"]["benchmark_phase"] = "warmup"
    counted = json.loads(ok)
    counted["metadata"]["benchmark_phase"] = "profiling"
    (tmp_path / "code.jsonl").write_text("\n".join(map(json.dumps, (warm, counted))) + "\n" + slow + late + failed)
    assert from_aiperf.points_of(runs, definition.classes) == list(found.points)
    with pytest.raises(ConfigError, match="rate 2 lacks a run of class 'chat'"):
        from_aiperf.points_of(runs[:1], definition.classes)
    with pytest.raises(ConfigError, match="a run of 2:code is given twice, the second as "):
        from_aiperf.points_of([*runs, runs[0]], definition.classes)
    with pytest.raises(ConfigError, match="expected RATE:CLASS=FILE with a class of chat, code, summary, got 'code=x'"):
        from_aiperf.points_of(["code=x"], definition.classes)
    (tmp_path / "rest.jsonl").write_text(exported(3.5, 100, 280, 10))
    with pytest.raises(ConfigError, match="at rate 2 class 'chat' starts after the last request of class 'code'"):
        from_aiperf.points_of(runs, definition.classes)
    (tmp_path / "rest.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"rest.jsonl:1: not a record of aiperf: KeyError\('metadata'\)"):
        from_aiperf.points_of(runs, definition.classes)
    (tmp_path / "rest.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"rest.jsonl holds no records; give the profile_export.jsonl of a run"):
        from_aiperf.points_of(runs, definition.classes)
    with pytest.raises(ConfigError, match=r"cannot read .*; give a profile_export.jsonl"):
        from_aiperf.points_of(["2:code=nowhere"], definition.classes)
    with pytest.raises(ConfigError, match="is not the definition of a suite"):
        from_aiperf.main(runs, tmp_path / "code.jsonl", "vLLM", "8B", "a GPU", out)
