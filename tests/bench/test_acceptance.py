"""Recorded acceptance: what a verification reveals, by hand; a fit that finds the truth; a run that is repeated."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.runner import run_bench
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows, read_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.sampling import RowSampling
from adaserve_jax.sim.acceptance import (
    MISS,
    AcceptanceModel,
    AcceptanceRecord,
    AcceptanceRecorder,
    fit_acceptance,
    load_acceptance,
)
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import Simulated, SimulationPlan, simulate
from adaserve_jax.types import DraftTrees, StepOutcome, StepPlan
from adaserve_jax.workloads.workload import load_workload
from tests.bench.test_cluster import short_trace
from tests.plans import step_plan

MACHINE = load_machine("llama-70b")


def plan_of(seeds: list[int], ctx_len: list[int]) -> StepPlan:
    sampling = RowSampling.greedy(len(seeds))._replace(seed=np.array(seeds, np.uint64))
    return step_plan(len(seeds), ctx_len=np.array(ctx_len), sampling=sampling)


def test_a_verification_reveals_ranks_by_position_and_where_none_was_right() -> None:
    """Row 0: children a (0.6), b (0.3) of the root, b accepted; b's children c (0.2), d (0.1), neither. Row 1: a root
    alone. Row 2: a chain of two, both accepted, the last without children."""
    trees = DraftTrees(
        row=np.array([0, 0, 0, 0, 0, 1, 2, 2, 2]),
        token=np.zeros(9, np.int32),
        parent=np.array([-1, 0, 0, 2, 2, -1, -1, 6, 7]),
        depth=np.array([0, 1, 1, 2, 2, 0, 0, 1, 2]),
        candidate=np.array([-1, 0, 1, 3, 2, -1, -1, 0, 1]),
        f=np.array([1.0, 0.6, 0.3, 0.1, 0.2, 1.0, 1.0, 0.5, 0.4], np.float32),
    )
    accepted = np.array([True, False, True, False, False, True, True, True, True])
    outcome = StepOutcome(np.zeros((3, 4), np.int32), np.array([2, 1, 3]), accepted, 0.0, 0.0, 0.0, 16)
    recorder = AcceptanceRecorder()
    recorder.observe(plan_of([7, 8, 9], [20, 30, 40]), trees, outcome)
    about = {"run_id": "r", "policy": "p", "rate_rps": 1.0}
    first, third = recorder.take({7: ("first", "code"), 8: ("second", "chat"), 9: ("third", "chat")}, **about)
    assert (first.request_id, first.slo_class, first.positions) == ("first", "code", (21, 22))
    assert (first.ranks, first.children) == ((1, MISS), (2, 2))
    assert first.f == (0.6, round(0.2 / 0.3, 3))
    assert (third.request_id, third.positions, third.ranks, third.f) == ("third", (41, 42), (0, 0), (0.5, 0.8))
    assert recorder.take({7: ("first", "code")}, **about) == []


def record(kind: str, hits: int, misses: int, start: int = 0) -> AcceptanceRecord:
    ranks = tuple(np.random.default_rng(0).permutation([0] * hits + [MISS] * misses).tolist())
    return AcceptanceRecord(
        "r", "p", 1.0, "q", kind, tuple(range(start, start + len(ranks))), ranks, (1,) * len(ranks), (0.5,) * len(ranks)
    )


def test_the_fit_tells_even_requests_from_uneven_ones() -> None:
    even = fit_acceptance([record("a", 350, 150)] * 8)
    assert even.mean["a"] == pytest.approx(0.7, abs=0.021)
    assert even.spread["a"] == 0.0
    uneven = fit_acceptance([record("a", 450, 50), record("a", 250, 250)] * 8 + [record("b", 100, 300)])
    assert uneven.mean["a"] == pytest.approx(0.7, abs=0.03)
    assert uneven.spread["a"] == pytest.approx(0.2, abs=0.06)
    assert uneven.mean["b"] == pytest.approx(0.25, abs=0.05)


def trees_of(policy: str, kind: str, first: int, second: int, missed: int, single: int = 0) -> AcceptanceRecord:
    """Positions with two children where the first, the second and none was right, and missed ones with one child."""
    ranks = (0,) * first + (1,) * second + (MISS,) * (missed + single)
    children = (2,) * (first + second + missed) + (1,) * single
    return AcceptanceRecord("r", policy, 1.0, "q", kind, tuple(range(len(ranks))), ranks, children, (0.5,) * len(ranks))


def test_the_fit_takes_the_decay_of_choices_from_trees_and_all_else_from_chains() -> None:
    """Chains accept 0.6 evenly, at a concentration so high that the chance is 0.6 everywhere. In trees the first choice
    is right in 9 of 10; where it is wrong, in 0.3."""
    chain = replace(record("a", 300, 200), policy="spec:4")
    alone = fit_acceptance([chain] * 8)
    assert alone.choice_decay == 1.0
    tree = trees_of("adaserve", "a", first=900, second=30, missed=70, single=100)
    both = fit_acceptance([chain] * 8 + [tree] * 4)
    assert (both.mean, both.spread, both.concentration) == (alone.mean, alone.spread, alone.concentration)
    assert both.mean["a"] == pytest.approx(0.6, abs=0.011) and both.concentration == 50.0
    assert both.choice_decay == pytest.approx(0.5, rel=0.05)
    few = fit_acceptance([chain] * 8 + [trees_of("adaserve", "a", first=900, second=9, missed=90)])
    assert few.choice_decay == 1.0, "99 second choices are too few"
    assert fit_acceptance([tree] * 4).mean["a"] > 0.7, "without a chain the trees are all there is"


def test_a_simulation_draws_by_the_fitted_decay() -> None:
    """Trees gain from second choices; a chain has none."""
    trace = short_trace(20, rate=4.0, output=60)
    for policy, gains in (("adaserve-paper", True), ("spec:4", False)):
        models = [AcceptanceModel({"code": 0.5}, {}, choice_decay=decay) for decay in (1.0, 0.3)]
        runs = [simulate(policy, SimulationPlan((), acceptance=model), MACHINE, trace) for model in models]
        even, decayed = map(accepted_per_verification, runs)
        assert even > 1.1 * decayed if gains else even == decayed
    worse = replace(MACHINE, choice_decay=0.3)
    by_machine = [simulate("adaserve-paper", SimulationPlan(()), machine, trace) for machine in (MACHINE, worse)]
    assert accepted_per_verification(by_machine[0]) > 1.1 * accepted_per_verification(by_machine[1])


def test_draws_have_the_mean_and_the_spread() -> None:
    model = AcceptanceModel({"a": 0.5, "b": 0.7}, {"a": 0.1})
    drawn = model.draw(["a", "b", "c"] * 4000, 3)
    assert (drawn[0::3].mean(), drawn[0::3].std()) == pytest.approx((0.5, 0.1), abs=0.005)
    assert set(drawn[1::3]) == {0.7}
    assert set(drawn[2::3]) == {0.6}  # of a class without a mean: the mean of all


def accepted_per_verification(simulated: Simulated) -> float:
    steps = sum(record.verify_steps for record in simulated.records)
    return sum(record.accepted_tokens for record in simulated.records) / steps


@pytest.mark.slow
def test_a_fit_to_a_recorded_simulation_finds_its_truth_and_repeats_its_run() -> None:
    trace = short_trace(50, rate=4.0, output=100)
    trace = replace(trace, requests=tuple(replace(r, slo_class="code") for r in trace.requests))
    truth = AcceptanceModel({"code": 0.62}, {"code": 0.12}, 4.0)
    plan, recorder = SimulationPlan((), seed=2, acceptance=truth), AcceptanceRecorder()
    recorded = simulate("spec:4", plan, MACHINE, trace, recorder=recorder)
    seeds = np.random.default_rng(plan.seed).integers(0, 2**63, len(trace.requests)).tolist()
    names = {seed: (f"spec:4-{i}", "code") for i, seed in enumerate(seeds)}
    records = recorder.take(names, run_id="r", policy="spec:4", rate_rps=1.0)
    assert len(records) == 50
    fit = fit_acceptance(records)
    of_requests = truth.draw(["code"] * 50, plan.seed)
    assert fit.mean["code"] == pytest.approx(of_requests.mean(), abs=0.025)
    assert fit.spread["code"] == pytest.approx(of_requests.std(), abs=0.05)
    assert fit.concentration == pytest.approx(4.0, rel=0.1)
    again = simulate("spec:4", replace(plan, acceptance=fit), MACHINE, trace)
    # each of so short runs is a draw with a standard deviation of 2.5 %
    assert accepted_per_verification(again) == pytest.approx(accepted_per_verification(recorded), rel=0.08)
    known = {record.request_id: record for record in records}
    for request in recorded.records:  # every accepted token was seen, at its rank in the chain
        assert sum(rank == 0 for rank in known[request.request_id].ranks) == request.accepted_tokens
    calibrated = [f for record in records for f in record.f]
    assert np.mean(calibrated) == pytest.approx(np.mean([r == 0 for x in records for r in x.ranks]), abs=0.02)


def test_a_file_of_records_is_read_and_one_without_drafts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.jsonl"
    append_rows(path, [record("a", 30, 10), record("a", 0, 0)])
    assert math.isclose(load_acceptance(path).mean["a"], 0.75, abs_tol=0.05)
    empty = tmp_path / "empty.jsonl"
    append_rows(empty, [record("a", 0, 0)])
    with pytest.raises(ConfigError, match="has no verification with a draft; record a policy that speculates"):
        load_acceptance(empty)
    empty.write_text("{}\n")
    with pytest.raises(
        ConfigError, match=r"empty.jsonl:1: .* columns of a AcceptanceRecord; column 'run_id': Field required"
    ):
        load_acceptance(empty)


@pytest.mark.slow
def test_a_recorded_run_of_the_embedded_pair_accounts_for_every_accepted_token(tmp_path: Path) -> None:
    """Chains: a token was accepted where it was the one child, and each position of a text is tested once."""
    from adaserve_jax.bench.local_client import LocalBenchEngine

    config = EngineConfig(
        policy="spec:4", max_requests=16, max_context=512, page_size=16, num_pages=64, max_depth=4, max_width=3,
        max_tree_tokens=64, token_edges=(16, 64), row_edges=(16,),
    )  # fmt: skip
    plan = BenchPlan(("spec:4",), (20.0,), duration_s=0.6, drain_s=60.0, record=True)
    workload = load_workload()
    workload = replace(workload, items=tuple(replace(item, max_tokens=40) for item in workload.items))
    with closing(LocalBenchEngine(config, record=True)) as engine:
        run_bench(plan, workload, lambda: engine, tmp_path)
    recorded = {r.request_id: r for r in read_rows(tmp_path / "acceptance.jsonl", AcceptanceRecord)}
    requests = [r for r in read_rows(tmp_path / "requests.jsonl", RequestRecord) if r.drafted_tokens]
    assert len(requests) > 4
    for request in requests:
        seen = recorded[request.request_id]
        assert sum(rank == 0 for rank in seen.ranks) == request.accepted_tokens
        assert len(set(seen.positions)) == len(seen.positions)
        assert min(seen.positions) > request.prompt_tokens
        assert set(seen.children) == {1} and set(seen.ranks) <= {0, MISS}
    assert 0.3 < load_acceptance(tmp_path / "acceptance.jsonl").mean[requests[0].slo_class] < 0.95
