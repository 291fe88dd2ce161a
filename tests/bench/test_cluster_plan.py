"""The benchmarks of clusters and of targets per draft run, and their tables say what they wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from scripts import results_cluster
from tests.bench.scripts import imported


@pytest.fixture(scope="module")
def scripts():
    with imported("cluster.plan") as made, imported("starsd.plan") as star:
        yield {**made, "star_plan": star["plan"]}


def test_requests_are_of_the_mix(scripts) -> None:
    trace = scripts["plan"].requests_of("adaserve", 4000, 50.0, 0)
    assert trace.rate_rps == pytest.approx(50.0, rel=0.06)
    kinds = [request.slo_class for request in trace.requests]
    assert np.mean([kind == "code" for kind in kinds]) == pytest.approx(0.6, abs=0.03)
    assert np.mean([request.output_tokens for request in trace.requests]) == pytest.approx(200, rel=0.05)
    longest = max(request.prompt_tokens + request.output_tokens for request in trace.requests)
    assert longest < 4096 and min(request.prompt_tokens for request in trace.requests) >= 1


def test_requests_in_columns_are_made_when_they_are_asked_for(scripts) -> None:
    plan = scripts["plan"]
    columns = plan.RequestColumns(np.array([0.0, 0.5, 2.0]), np.arange(3, 6), np.arange(6, 9), np.array([1, 0, 1]))
    (code, relative), (chat, absolute) = plan.CLASSES[:2]
    made = (
        TraceRequest(0.0, 3, 6, absolute, chat), TraceRequest(0.5, 4, 7, relative, code),
        TraceRequest(2.0, 5, 8, absolute, chat),
    )  # fmt: skip
    assert tuple(columns) == made and columns[-1] == made[2] and columns[:2] == list(made[:2])
    traces = [Trace("", "", each) for each in (columns, made)]
    assert (traces[0].duration_s, traces[0].rate_rps, traces[0].classes) == (2.0, 1.5, sorted((chat, code)))
    runs = [simulate("ar", SimulationPlan((), seed=4), load_machine("llama-70b"), trace) for trace in traces]
    assert runs[0].records == runs[1].records


@pytest.mark.slow
def test_a_point_is_simulated_once_and_shown(scripts, tmp_path: Path) -> None:
    plan = scripts["plan"]
    assert results_cluster.cluster_tables(tmp_path) == []
    with (tmp_path / "points.jsonl").open("w") as file:
        for part, router, replicas in (
            ("fixed", "least-loaded", 2),
            ("fixed", "slo-aware:4", 2),
            ("million", "least-loaded", 3),
        ):
            point = plan.Point(part, replicas, router, "ar", 0.9, "adaserve", 6)
            line = plan.run(point, "0123456789abcdef", 5.0)
            assert line.rate_rps == pytest.approx(0.9 * 5.0 * replicas)
            assert line.summaries[0]["finished"] == 6 and line.steps > 0 and line.cpu_s > 0 and line.peak_bytes > 1e6
            file.write(json.dumps(vars(line)) + "\n")
    shown = "\n\n".join(results_cluster.cluster_tables(tmp_path))
    assert "| policy | mix | load | replicas | `round-robin` | `least-loaded` | `slo-aware:4` | `slo-aware` |" in shown
    assert "| `ar` | adaserve | 90% | 2 |  | 100.0% | 100.0% |  |" in shown
    assert "| 6 | 3 | `ar` | `least-loaded` | 90% |" in shown
    assert "Capacity of a replica, requests per second: `ar` on adaserve 5.00" in shown and "0123456789ab" in shown


def test_every_part_has_points_and_no_two_are_the_same(scripts) -> None:
    plan = scripts["plan"]
    points = plan.points(plan.PARTS, quick=False)
    assert len(set(points)) == len(points)
    assert {point.part for point in points} == set(plan.PARTS)
    million = [point for point in points if point.requests == 10**6]
    assert {point.policy for point in million} == {"ar", "spec:4", "adaserve"}
    of_most = [point for point in points if point.mix == "adaserve" and point.load == 0.9]
    assert points[: len(of_most)] == of_most and million == of_most[-3:], "those that everybody asks for first"
    exact = [point.replicas for point in points if point.router == "slo-aware"]
    assert max(exact) == plan.EXACT_TO and max(point.replicas for point in points) == 1000


@pytest.mark.slow
def test_targets_per_draft_by_both(scripts, tmp_path: Path) -> None:
    plan, path = scripts["star_plan"], tmp_path / "star-plan.json"
    assert results_cluster.star_tables(path) == []
    plan.star_plan(path, rounds=24, quick=True)
    result = json.loads(path.read_text())
    assert {row["kind"] for row in result["rows"]} == {"closed", "simulated"}
    for each in result["plans"]:
        assert each["full"] == each["full_simulated"] == 2
        assert abs(each["most"] - each["most_simulated"]) <= 1
    shown = "\n\n".join(results_cluster.star_tables(path))
    assert "| 1 | 0.5 | 2 | 1.75 | 2 | 2 | 0 | 0 | 0 | 0 |" in shown
    assert "| 3 | batched |" in shown


def test_what_holds_first_and_last_is_found_from_any_guess(scripts) -> None:
    plan = scripts["star_plan"]
    for guess in (1, 5, 9, 40):
        assert plan._first(lambda n: n >= 7, guess) == 7
        assert plan._last(lambda n: n <= 7, guess) == 7
    assert plan._last(lambda n: False, 3) == 0 and plan._last(lambda n: n <= 2, 0) == 2
    assert plan._last(lambda n: True, 3) is None and plan._first(lambda n: False, 3) is None
