"""Policies x rates on one engine: same requests for all, rows and records on disk, invalid runs marked."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaserve_jax.bench.console import result_table
from adaserve_jax.bench.engine import EngineAbout
from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.runner import run_bench
from adaserve_jax.engine.client import MAX_SALT_CHARS
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import read_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import REQUESTS
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.sim.acceptance import AcceptanceRecord
from adaserve_jax.workloads.items import Workload
from adaserve_jax.workloads.workload import load_workload
from tests.bench.conftest import ScriptedBench

PLAN = BenchPlan(("ar",), (60.0,), duration_s=0.2, max_late_s=60.0)
"""One point, however late a busy machine makes the client."""


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    path = tmp_path / "w.jsonl"
    lines = [
        {"prompt": "secret words", "max_tokens": 3, "slo_class": "tight", "slo_relative": 50, "seed": 1},
        {"prompt": "more of them", "max_tokens": 5, "slo_class": "loose", "slo_tpot_ms": 60_000},
        {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 2, "slo_class": "free"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_workload(path)


def test_one_engine_serves_all_points_with_the_same_requests(make_bench, workload, tmp_path: Path):
    opened = []

    def open_engine():
        opened.append(make_bench())
        return opened[-1]

    plan = BenchPlan(("ar", "spec:4"), (40.0, 80.0), duration_s=0.25, seed=3, warmup_requests=0, max_late_s=60.0)
    rows = run_bench(plan, workload, open_engine, tmp_path / "out")
    (engine,) = opened
    assert engine.client.policies[:3] == ["ar", "ar", "spec:4"]  # opened, then every name is tried
    assert engine.client.policies[3:] == ["ar", "spec:4", "spec:4", "ar"]  # the first policy rotates by rate
    sent: dict[str, list] = {}
    for r in engine.client.submitted:
        sent.setdefault(r.request_id.rpartition("-")[0], []).append((r.prompt_ids, r.sampling, r.slo, r.slo_class))
    assert sent["ar@40/s"] == sent["spec:4@40/s"] and sent["ar@80/s"] == sent["spec:4@80/s"]
    assert {(r.policy, r.rate_rps) for r in rows} == {(p, rate) for p in ("ar", "spec:4") for rate in (40.0, 80.0)}
    assert len({r.run_id for r in rows}) == 1


def test_requests_take_the_loaded_adapters_in_turn(make_bench, workload, tmp_path: Path):
    engine = make_bench("ar", adapters=("code", "sums", "third"))
    plan = BenchPlan(("ar",), (40.0,), duration_s=0.2, warmup_requests=0, max_late_s=60.0)
    run_bench(plan, workload, lambda: engine, tmp_path / "out")
    taken = [request.adapter for request in engine.client.submitted]
    assert len(taken) >= 6 and taken == [("code", "sums", "third")[index % 3] for index in range(len(taken))]


def test_no_point_and_no_warm_up_shares_cached_prompts_with_another(make_bench, workload, tmp_path: Path):
    engine = make_bench("ar")
    plan = BenchPlan(("ar", "spec:4"), (40.0, 80.0), duration_s=0.1, warmup_requests=2, max_late_s=60.0)
    for _ in range(2):
        run_bench(plan, workload, lambda: engine, tmp_path)
    salts: dict[str, set[str]] = {}
    for request in engine.client.submitted:
        salts.setdefault(request.cache_salt, set()).add(request.request_id.rpartition("-")[0])
    assert len(salts) >= 2 * 4 * 2, "a salt for each point of each run, and for its warm-up"
    assert all(len(points) == 1 for points in salts.values())


def test_a_point_that_is_measured_again_has_new_salts(make_bench, workload, tmp_path: Path):
    """A server that outlives a stopped run has cached its answers. Long names of points make no salt too long."""
    engine = make_bench("ar")
    plan = BenchPlan(("p" * MAX_SALT_CHARS,), (60.0,), duration_s=0.2, max_late_s=0.0)
    for _ in range(2):
        assert not any(row.valid for row in run_bench(plan, workload, lambda: engine, tmp_path / "out", use="resume"))
    sent = [(request.cache_salt, tuple(request.prompt_ids)) for request in engine.client.submitted]
    assert len(sent) == len(set(sent)) and max(len(salt) for salt, _ in sent) <= MAX_SALT_CHARS


def test_no_request_shares_a_salt_with_its_own_copy(make_bench, workload, tmp_path: Path):
    """Neither when the workload comes around again nor when another share repeats some of its requests."""
    engine = make_bench("ar")
    loads = {"urgent_shares": (None, 0.9), "slo_scales": (None,)}
    plan = BenchPlan(("ar",), (100.0,), duration_s=0.3, warmup_requests=0, max_late_s=60.0, **loads)
    run_bench(plan, workload, lambda: engine, tmp_path)
    sent = [(request.cache_salt, tuple(request.prompt_ids)) for request in engine.client.submitted]
    assert len(sent) > 3 * len(workload.items) and len(sent) == len(set(sent))


def test_a_policy_that_the_engine_does_not_have_is_refused_before_anything_is_measured(
    make_engine, workload, tmp_path: Path
):
    class OfTwoPolicies(ScriptedBench):
        @property
        def about(self) -> EngineAbout:
            return replace(super().about, policies=("ar", "spec:4"))

    engine = OfTwoPolicies(make_engine("ar"))
    with pytest.raises(ConfigError, match=f"{engine.about.system} serves by ar, spec:4, not by 'fast'"):
        run_bench(BenchPlan(("ar", "fast"), (40.0,), 0.1), workload, lambda: engine, tmp_path / "out")
    assert engine.client.submitted == []


def test_rows_and_records_are_on_disk_and_agree(make_bench, workload, tmp_path: Path):
    rows = run_bench(PLAN, workload, make_bench, tmp_path)
    assert read_rows(tmp_path / "results.jsonl", ResultRow) == rows
    records = read_rows(tmp_path / "requests.jsonl", RequestRecord)
    total, *classes = rows
    assert total.slo_class == "all" and {c.slo_class for c in classes} == {"free", "loose", "tight"}
    assert total.requests == len(records) == sum(c.requests for c in classes) > 3
    assert total.output_tokens == sum(r.output_tokens for r in records)
    assert total.throughput_tps == pytest.approx(total.output_tokens / total.wall_s)
    assert not any(r.request_id.startswith("warmup") for r in records)
    assert (total.attainment, total.valid, total.invalid_reason) == (1.0, True, None)
    assert (total.workload, total.workload_hash) == ("w.jsonl", workload.sha256)
    assert (total.target_params, total.draft_params, total.arrival_process) == (1234, None, "poisson")


def test_no_text_of_a_request_is_written(make_bench, workload, tmp_path: Path):
    run_bench(PLAN, workload, make_bench, tmp_path)
    files = [each for each in tmp_path.rglob("*") if each.is_file() and each.name != "w.jsonl"]
    assert {"plan.json", "results.jsonl", "requests.jsonl"} <= {each.name for each in files}
    for file in files:
        assert "secret" not in file.read_text() and "words" not in file.read_text()


def test_a_relative_target_is_judged_against_the_measured_baseline(make_bench, workload, tmp_path: Path):
    rows = run_bench(PLAN, workload, lambda: make_bench("ar", tpot_s=0.25), tmp_path)
    by_class = {row.slo_class: row for row in rows}
    assert by_class["tight"].attainment == 0.0  # 50 x 4 ms < 250 ms
    assert by_class["loose"].attainment == 1.0
    assert by_class["free"].attainment is None


def test_a_point_is_invalid_if_a_program_was_compiled_while_it_was_measured(make_bench, workload, tmp_path: Path):
    engine, counts = make_bench("ar"), iter([3, 3, 3, 5])
    engine.compiles_after_ready = lambda: next(counts)
    rows = run_bench(replace(PLAN, rates=(60.0, 80.0)), workload, lambda: engine, tmp_path / "out")
    overall = [row for row in rows if row.slo_class == "all"]
    assert [(row.valid, row.compiles_after_ready) for row in overall] == [(True, 0), (False, 2)]
    assert overall[1].invalid_reason == "2 programs were compiled while it was measured"


def test_a_warm_up_that_is_interrupted_measures_nothing(make_bench, workload, tmp_path: Path):
    engine = make_bench()

    def submit(request, sink):
        raise KeyboardInterrupt

    engine.client.submit = submit
    with pytest.raises(KeyboardInterrupt):
        run_bench(PLAN, workload, lambda: engine, tmp_path)
    assert not (tmp_path / "results.jsonl").exists()


def test_a_point_that_no_request_came_to_is_invalid(make_bench, workload, tmp_path: Path):
    (row,) = run_bench(BenchPlan(("ar",), (1e-6,), 0.05, warmup_requests=0), workload, make_bench, tmp_path)
    assert (row.valid, row.invalid_reason) == (False, "no request arrived; raise the rate or the duration")
    assert (row.requests, row.output_tokens, row.attainment) == (0, 0, None)


def test_a_dead_engine_is_reported_and_ends_the_run(make_bench, workload, tmp_path: Path):
    plan = BenchPlan(("ar", "spec:4"), (50.0,), 0.3, warmup_requests=0)
    rows = run_bench(plan, workload, lambda: make_bench("ar", dies_after=2), tmp_path)
    assert (rows[0].policy, rows[0].valid, rows[0].invalid_reason) == ("ar", False, "engine died")
    assert rows[0].cause_failed == 1 or rows[0].failed == 1


def shown(rows: list[ResultRow], width: int, **more: Any) -> list[str]:
    """Return the lines of the table on a terminal of so many columns."""
    console = Console(width=width, force_terminal=True, color_system=None, file=StringIO())
    console.print(result_table(rows, **more))
    return console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_table_has_a_line_per_policy_and_load_and_fits_80_columns(make_bench, workload, tmp_path: Path):
    plan = replace(PLAN, policies=("ar", "adaserve-paper"), repeats=2)
    rows = run_bench(plan, workload, make_bench, tmp_path)
    assert result_table(rows).row_count == 2 and result_table([]).row_count == 0
    assert result_table(rows, by_class=True).row_count == 2 * 4
    lines = shown(rows, 80)
    assert "scripted" in lines[0] and not any("…" in line for line in lines)
    assert any(line.split()[:2] == ["adaserve-paper", "60"] for line in lines)
    assert any(line.split()[2:3] == ["loose"] for line in shown(rows, 120, by_class=True))


def test_brackets_in_names_are_shown(make_bench, workload, tmp_path: Path):
    rows = run_bench(PLAN, workload, make_bench, tmp_path)
    lines = shown([replace(row, workload="a[b].jsonl", policy="p[red].py", slo_class="[/b]") for row in rows[1:2]], 120,
                  by_class=True)  # fmt: skip
    assert "workload a[b].jsonl" in lines[0] and any("p[red].py" in line and "[/b]" in line for line in lines)


def test_repeats_are_pooled_in_the_table(make_bench, workload, tmp_path: Path):
    row = run_bench(PLAN, workload, make_bench, tmp_path)[0]
    repeats = [replace(row, repeat=n, requests=100 * (n + 1), requests_with_slo=100 * (n + 1), attainment=n / 1.0,
                       goodput_tps=10.0 + n, ttft_p50_s=None) for n in (0, 1)]  # fmt: skip
    (line,) = (line.split() for line in shown(repeats, 80) if line.strip().startswith("ar"))
    assert line[:4] == ["ar", "60", "300", "66.7%"], "200 of 300 requests"
    assert "10.5" in line and "-" in line
    some = [replace(row, repeat=n, point=f"p{n}", requests_with_slo=count, attainment_tpot=share, attainment_ttft=1.0)
            for n, (count, share) in enumerate([(10, 1.0), (30, 0.0)])]  # fmt: skip
    (record,) = read_rows(tmp_path / REQUESTS, RequestRecord)[:1]
    records = [replace(record, point=f"p{n}", tpot_met=met) for n, met, count in
               [(0, True, 10), (1, False, 5), (1, None, 25)] for _ in range(count)]  # fmt: skip
    (line,) = (line.split() for line in shown(some, 80, records=records) if line.strip().startswith("ar"))
    assert line[4] == "66.7%", "10 of the 15 that have a TPOT target"
    (line,) = (line.split() for line in shown(some, 80) if line.strip().startswith("ar"))
    assert line[4] == "-", "rows alone do not say how many have one"
    without = replace(row, requests_with_slo=0, attainment=None, attainment_tpot=None, goodput_tps=0.0)
    (line,) = (line.split() for line in shown([without], 80) if line.strip().startswith("ar"))
    assert line[3:6] == ["-", "-", "-"], "no targets, so no goodput"


class Noting:
    """A recorder that gives one record per seed it is asked for, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[int, tuple[str, str]]] = []

    def take(self, requests: dict[int, tuple[str, str]], *, run_id: str, policy: str, rate_rps: float):
        self.asked.append(requests)
        return [
            AcceptanceRecord(run_id, policy, rate_rps, name, kind, (5,), (0,), (1,), (0.5,))
            for name, kind in requests.values()
        ]


def test_recorded_requests_have_seeds_of_their_own_and_the_warm_up_is_left_out(make_engine, workload, tmp_path: Path):
    recorder = Noting()
    engine = ScriptedBench(make_engine("ar"), max_prefill_tokens=96)
    engine.recorder = recorder
    rows = run_bench(replace(PLAN, record=True), workload, lambda: engine, tmp_path)
    records = read_rows(tmp_path / "acceptance.jsonl", AcceptanceRecord)
    requests = read_rows(tmp_path / "requests.jsonl", RequestRecord)
    assert {(r.request_id, r.slo_class) for r in records} == {(r.request_id, r.slo_class) for r in requests}
    assert len(records) == len(requests) > 3
    assert len(recorder.asked) == 2  # what the warm-up left, dropped; then the point
    sent = [r for r in engine.client.submitted if not r.request_id.startswith("warmup")]
    assert {r.request_id: r.sampling.seed for r in sent} == {
        name: seed for seed, (name, _) in recorder.asked[1].items()
    }
    assert {(row.replicas, row.router, row.label, row.max_prefill_tokens) for row in rows} == {(1, None, None, 96)}


def test_rows_say_with_which_settings_the_engine_served(make_bench, workload, tmp_path: Path):
    hashes = []
    for about in (
        {"max_requests": 4, "elastic": "auto"},
        {"elastic": "auto", "max_requests": 4},
        {"max_requests": 5},
        None,
    ):
        rows = run_bench(replace(PLAN, warmup_requests=0), workload, make_bench, tmp_path, about=about)
        hashes += {row.engine_hash for row in rows}
    same, again, other, unknown = hashes
    assert same == again != other and len(same) == len(other) == 64 and unknown == ""
