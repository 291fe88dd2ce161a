"""A run goes on where it ended, whatever ended it; another plan is refused by what differs."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.resume import begin_folder, check_folder, drop_unfinished
from adaserve_jax.bench.runner import RunObserver, run_bench
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows, read_rows
from adaserve_jax.results.run_folder import RunResults, key_of
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.sim.acceptance import AcceptanceRecord
from adaserve_jax.workloads.items import Workload
from adaserve_jax.workloads.workload import load_workload
from tests.bench.conftest import BASELINE_S
from tests.results.points import record, row, sample

PLAN = BenchPlan(("ar", "spec:4"), (80.0,), duration_s=0.1, warmup_requests=0, repeats=2, drain_s=60.0, max_late_s=60.0)
FILES = ("results.jsonl", "requests.jsonl", "samples.jsonl")


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps({"prompt": "words", "max_tokens": 3, "slo_tpot_ms": 500}) + "\n")
    return load_workload(path)


class Noting(RunObserver):
    """Note which points were measured."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begins(self, point) -> None:
        self.begun.append(point.name)


def points(folder: RunResults) -> list[tuple[str, bool]]:
    return [(row.point, row.valid) for row in folder.rows if row.slo_class == ALL_CLASSES]


def test_a_run_that_is_done_measures_nothing_and_opens_nothing(make_bench, workload, tmp_path: Path):
    rows = run_bench(PLAN, workload, make_bench, tmp_path, use="new")
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    again = run_bench(PLAN, workload, lambda: pytest.fail("opened"), tmp_path, use="resume")
    assert sorted(map(key_of, again)) == sorted(map(key_of, rows)) and set(again) == set(rows)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before


def test_whatever_byte_a_run_was_killed_at_it_ends_as_if_it_had_not_been(make_bench, workload, tmp_path: Path):
    """Files are cut as a kill leaves them: rows of a point come last, so those of later points are gone before it."""
    run_bench(PLAN, workload, make_bench, tmp_path, use="new")
    whole = {name: (tmp_path / name).read_bytes() for name in FILES}
    names = [point.name for point in PLAN.points]
    cuts = random.Random(0)
    for cut in [
        0,
        1,
        *(cuts.randrange(len(whole["results.jsonl"])) for _ in range(3)),
        len(whole["results.jsonl"]) - 1,
    ]:
        for name in FILES:
            (tmp_path / name).write_bytes(whole[name])
        (tmp_path / "results.jsonl").write_bytes(whole["results.jsonl"][:cut])
        done = whole["results.jsonl"][: cut + 1].count(b"\n") // 2  # rows over all, and of the one class
        watch = Noting()
        rows = run_bench(PLAN, workload, make_bench, tmp_path, watch, use="resume")
        assert watch.begun == names[done:]
        folder = RunResults.load(tmp_path)
        assert folder.notes == () and [name for name, _ in points(folder)] == names
        assert set(folder.rows) == set(rows) and all(valid for _, valid in points(folder))
        assert {key_of(r) for r in rows} == set(folder.records)
        for result in folder.rows:
            assert len(folder.records[key_of(result)]) == result.requests, "none is there twice"


def test_points_that_are_not_valid_are_measured_again(make_bench, workload, tmp_path: Path):
    plan = dataclasses.replace(PLAN, max_late_s=0.01)
    late = run_bench(plan, workload, lambda: make_bench("ar", submit_s=0.03), tmp_path, use="new")
    assert not any(row.valid for row in late)
    plan_again = dataclasses.replace(PLAN, max_late_s=0.01)
    rows = run_bench(plan_again, workload, make_bench, tmp_path, use="resume")
    folder = RunResults.load(tmp_path)
    assert list(folder.rows) == rows and len(points(folder)) == 4


def test_other_runs_in_the_folder_stay(make_bench, workload, tmp_path: Path):
    other = {"run_id": "other", "point": "p"}
    append_rows(tmp_path / "results.jsonl", [row(slo_class=ALL_CLASSES, **other)])
    append_rows(tmp_path / "requests.jsonl", [record(**other)])
    append_rows(tmp_path / "samples.jsonl", [sample(**other)])
    run_bench(PLAN, workload, make_bench, tmp_path, use="append")
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(lines[:3]))
    run_bench(PLAN, workload, make_bench, tmp_path, use="resume")
    folder = RunResults.load(tmp_path)
    assert folder.notes == () and ("other", "p") in folder.records and ("other", "p") in folder.samples
    assert len({r.run_id for r in folder.rows}) == 2 and len(points(folder)) == 5


def test_another_plan_is_refused_by_what_differs(tmp_path: Path):
    begin_folder(tmp_path, {"rates": (1.0, 2.0), "seed": 3, "draft": None}, "new")
    begin_folder(tmp_path, {"rates": (1.0, 2.0), "seed": 3, "draft": None}, "resume")
    with pytest.raises(
        ConfigError, match=r"cannot resume .*: seed was 3, is 4; give the options of that run, or another"
    ):
        begin_folder(tmp_path, {"rates": (1.0, 2.0), "seed": 4, "draft": None}, "resume")
    with pytest.raises(ConfigError, match=r"a was None, is 1; draft was None, is 'd'; rates was .*; 1 more differ"):
        begin_folder(tmp_path, {"rates": (1.0,), "seed": 4, "draft": "d", "a": 1}, "resume")


def test_one_plan_has_one_hash(tmp_path: Path):
    settings = {"rates": (1.0, 2.0), "seed": 3}
    hashes = [begin_folder(tmp_path / name, settings, "new").plan_hash for name in "ab"]
    other = begin_folder(tmp_path / "c", settings | {"seed": 4}, "new").plan_hash
    assert hashes[0] == hashes[1] != other and len(other) == 64


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path):
    assert begin_folder(tmp_path / "empty", {"seed": 1}, "resume").rows == ()
    append_rows(tmp_path / "results.jsonl", [row()])
    with pytest.raises(ConfigError, match=r"it has rows but no plan.json; run without --resume into another folder"):
        begin_folder(tmp_path, {"seed": 1}, "resume")
    for text in ("", "[]", '{"run_id": "r"}'):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(ConfigError, match=r"plan.json is not the plan of a bench run; remove it, or give another"):
            begin_folder(tmp_path, {"seed": 1}, "resume")


def test_rows_say_which_repeat_and_load_they_are_of(make_bench, workload, tmp_path: Path):
    run_bench(PLAN, workload, make_bench, tmp_path, use="new", about={"max_requests": 3})
    rows = read_rows(tmp_path / "results.jsonl", ResultRow)
    held = json.loads((tmp_path / "plan.json").read_text())
    assert {(row.run_id, row.plan_hash) for row in rows} == {(held["run_id"], held["plan_hash"])}
    assert held["plan"]["max_requests"] == 3 and held["plan"]["workload_hash"] == workload.sha256
    assert [row.repeat for row in rows if row.slo_class == ALL_CLASSES] == [0, 0, 1, 1]
    assert {(row.system, row.burstiness, row.urgent_share, row.slo_scale) for row in rows} == {
        ("adaserve_jax", 1.0, None, None)
    }
    first, second = (
        [r.due_s for r in RunResults.load(tmp_path).records[held["run_id"], f"ar@80/s #{i}"]] for i in (0, 1)
    )
    assert first != second, "arrivals of a repeat are its own"


def test_what_was_recorded_of_a_point_goes_and_stays_with_it(tmp_path: Path):
    settings = {"seed": 1}
    run_id = begin_folder(tmp_path, settings, "new").run_id
    done = [row(run_id=run_id, point="ar@2/s slo=as-is", slo_class=name, valid=True) for name in (ALL_CLASSES, "chat")]
    append_rows(tmp_path / "results.jsonl", done)
    made = [
        AcceptanceRecord(run, "ar", 2.0, f"{point}-{number}", "chat", (5,), (0,), (1,), (0.5,))
        for run, point in ((run_id, "ar@2/s slo=as-is"), (run_id, "ar@2/s slo=2"), ("other", "ar@2/s slo=2"))
        for number in (0, 12)
    ]
    append_rows(tmp_path / "acceptance.jsonl", made)
    begun = begin_folder(tmp_path, settings, "resume")
    assert begun.rows == tuple(done)
    assert read_rows(tmp_path / "acceptance.jsonl", AcceptanceRecord) == made, "until it is sure that it goes on"
    drop_unfinished(tmp_path, begun)
    assert read_rows(tmp_path / "acceptance.jsonl", AcceptanceRecord) == made[:2] + made[4:]


def half_done(make_bench, workload: Workload, out: Path) -> dict[str, bytes]:
    """A run whose first two points are done; what its files hold."""
    run_bench(PLAN, workload, make_bench, out, use="new")
    lines = (out / "results.jsonl").read_bytes().splitlines(keepends=True)
    (out / "results.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("name", "then"), [("source_commit", "c0ffee"), ("machine_name", "another processor"), ("device", "cuda: big"),
                       ("target_params", 99)]
)  # fmt: skip
def test_what_was_measured_with_something_else_is_not_gone_on_with(
    make_bench, workload, tmp_path: Path, monkeypatch, name: str, then: object
):
    held = half_done(make_bench, workload, tmp_path)
    opened = []

    def open_other():
        engine, about = make_bench(), make_bench().about
        opened.append(engine)
        if name in ("device", "target_params"):
            monkeypatch.setattr(type(engine), "about", dataclasses.replace(about, **{name: then}))
        return engine

    if name not in ("device", "target_params"):
        monkeypatch.setattr(f"adaserve_jax.results.provenance.{name}", lambda: then)
    column = {"source_commit": "commit", "machine_name": "machine"}.get(name, name)
    expected = rf"cannot resume .*: {column} was .*, is {then!r}; its points could not be compared .* another --out"
    with pytest.raises(ConfigError, match=expected):
        run_bench(PLAN, workload, open_other, tmp_path, use="resume")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == held
    assert bool(opened) == (name in ("device", "target_params")), "no model is loaded in vain"
    if name == "source_commit":
        run_bench(PLAN, workload, make_bench, tmp_path / "other", use="resume")
        monkeypatch.setattr("adaserve_jax.results.provenance.source_commit", lambda: "later")
        run_bench(PLAN, workload, make_bench, tmp_path / "other", use="resume")  # is done: nothing is measured


def test_relative_targets_of_a_resumed_run_are_those_it_had(make_bench, tmp_path: Path, monkeypatch):
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps({"prompt": "words", "max_tokens": 3, "slo_relative": 2.5}) + "\n")
    relative = load_workload(path)
    out = tmp_path / "out"
    held = half_done(make_bench, relative, out)
    engine = make_bench()
    slower = dataclasses.replace(engine.client.info, baseline_s=BASELINE_S * 1.2)
    monkeypatch.setattr(type(engine.client), "info", slower)
    run_bench(PLAN, relative, make_bench, out, use="resume")
    folder = RunResults.load(out)
    assert len(points(folder)) == 4 and {row.baseline_s for row in folder.rows} == {BASELINE_S}
    assert len({row.started_at for row in folder.rows}) == 1, "what is of a run is the same in all of its rows"
    targets = [r.tpot_slo_s for each in folder.records.values() for r in each]
    assert targets == [pytest.approx(2.5 * BASELINE_S)] * len(targets)
    for name, content in held.items():
        (out / name).write_bytes(content)
    monkeypatch.setattr(type(engine.client), "info", dataclasses.replace(slower, baseline_s=BASELINE_S * 1.3))
    with pytest.raises(ConfigError, match=r"took 4 ms when it was begun, and takes 5.2 ms now, more than 25% off"):
        run_bench(PLAN, relative, make_bench, out, use="resume")
    assert (out / "requests.jsonl").read_bytes() == held["requests.jsonl"]


def test_a_plan_that_is_none_is_not_added_to(tmp_path: Path):
    (tmp_path / "plan.json").write_text('{"run_id": "r", "plan_hash": "", "plan": {"seed": 3}}')
    with pytest.raises(ConfigError, match=r"plan.json is not the plan of a bench run; remove it, or give another"):
        check_folder(tmp_path, "append")


def test_a_run_is_added_only_to_what_is_done(make_bench, workload, tmp_path: Path):
    held = half_done(make_bench, workload, tmp_path)
    with pytest.raises(
        ConfigError, match=r"a run that is not done: spec:4@80/s #1, ar@80/s #1 are missing or not valid"
    ):
        check_folder(tmp_path, "append")
    with pytest.raises(ConfigError, match=r"end it first with its own options and --resume, or give another --out"):
        run_bench(PLAN, workload, make_bench, tmp_path, use="append")
    assert (tmp_path / "plan.json").read_bytes() == held["plan.json"]
    run_bench(PLAN, workload, make_bench, tmp_path, use="resume")
    run_bench(PLAN, workload, make_bench, tmp_path, use="append")
    assert len(points(RunResults.load(tmp_path))) == 8


def test_a_line_that_nobody_can_read_is_named(make_bench, workload, tmp_path: Path):
    half_done(make_bench, workload, tmp_path)
    first, *rest = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join([first, "\n", *rest]))
    run_bench(PLAN, workload, make_bench, tmp_path, use="resume")  # a blank line does no harm
    half_done(make_bench, workload, tmp_path / "other")
    samples = tmp_path / "other" / "samples.jsonl"
    for line in ('{"point": "p"}', "{broken", "3", '{"run_id": "r", "request_id": 3}'):
        samples.write_text("".join([first, f"{line}\n", *rest]))
        with pytest.raises(ConfigError, match=r"samples.jsonl:2: expected a JSON object with run_id and point, got b'"):
            run_bench(PLAN, workload, make_bench, tmp_path / "other", use="resume")
