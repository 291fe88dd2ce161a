"""benchmarks/nightjar/tables.py: which points there are, its arithmetic by hand, and that it goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from tests.bench.scripts import modules_of

NAMES = tuple(f"nightjar.{name}" for name in ("tables", "points", "paper", "views", "report", "summary"))


modules = modules_of(*NAMES, left_out="nightjar_")


def test_the_papers_averages_are_the_means_of_its_cells_ratios(modules) -> None:
    """Its text: 27.29 % more throughput and 12.90 % less latency than plain decoding."""
    paper = modules["paper"]
    assert paper.times_without(paper.THROUGHPUT_TPS, "Nightjar") == pytest.approx(1.2729, abs=5e-5)
    assert paper.times_without(paper.LATENCY_MS, "Nightjar") == pytest.approx(1 - 0.1290, abs=5e-5)
    assert {len(cells) for table in (paper.THROUGHPUT_TPS, paper.LATENCY_MS) for cells in table.values()} == {6}


def test_every_policy_runs_at_the_three_loads_and_every_length_at_every_rate(modules) -> None:
    places = modules["points"]
    found = places.points(places.SETUPS, places.Scale(seeds=2))
    assert len(found) == len(set(found))
    assert [point.seed for point in found] == sorted(point.seed for point in found)
    for setup in places.SETUPS[::2]:
        mine = [point for point in found if point.setup is setup and point.pool is None and point.seed == 1]
        for at in places.CLASSES.values():
            assert set(places.METHODS) <= {point.policy for point in mine if (point.load, point.share) == at}
        for share in places.SHARES:
            policies = {point.policy for point in mine if (point.load, point.share) == (places.POISSON, share)}
            assert {*places.chains(setup), *places.CONTEXTUAL, "adaserve"} <= policies
    assert places.chains(places.SETUPS[0]) == ["ar", *(f"spec:{k}" for k in range(1, 9))]
    recorded = [point for point in found if point.setup is places.SETUPS[1]]
    assert {(point.load, point.pool) for point in recorded} == {(places.DYNAMIC, None)}


def test_elastic_memory_is_swept_with_the_swap_rule_in_the_plan(modules) -> None:
    places = modules["points"]
    pools = [point for point in places.points(places.SETUPS, places.Scale(seeds=1)) if point.pool is not None]
    assert {point.setup.name for point in pools} == {"grown-110M"}
    swept = {(p.pool.tau_low, p.pool.persist_steps) for p in pools if p.share == places.THRESHOLD_SHARE}
    assert swept == {(tau, persist) for tau in places.TAUS for persist in places.PERSISTS}
    assert {(p.share, p.pool.elastic) for p in pools} >= {(s, e) for s in places.OFFLOAD_SHARES for e in ("on", "off")}
    point = places.Point(places.SETUPS[0], places.POISSON, 1.0, "nightjar", 3, places.Pool(64, 16, "on", 0.2, 8))
    plan = point.plan
    assert (plan.num_pages, plan.extension_pages, plan.elastic, plan.seed) == (64, 16, "on", 3)
    assert (plan.elastic_rule.tau_low, plan.elastic_rule.persist_steps) == (0.2, 8)
    assert replace(point, pool=None).plan.num_pages == 0, "so many that they never run out"
    with pytest.raises(ConfigError, match="no setup 'qwen'; there are llama-70b; "):
        places.find_setups(["qwen"])


def test_loads_are_shares_of_what_plain_decoding_completes(modules) -> None:
    places = modules["points"]
    setup = places.SETUPS[0]
    loads = places.Workloads(setup, places.made_segment(), places.QUICK)
    poisson, dynamic = (
        loads.trace(places.Point(setup, load, 0.5, "ar", 0)) for load in (places.POISSON, places.DYNAMIC)
    )
    assert loads.capacity_rps > 0 and loads.about()["capacity_rps"] == loads.capacity_rps
    assert len(poisson.requests) == places.QUICK.requests
    assert f"Poisson {0.5 * loads.capacity_rps:.4g}/s" in poisson.name
    assert len(dynamic.requests) == 45, "faster, for the machine does more than the segment has"
    assert dynamic.rate_rps == pytest.approx(0.5 * loads.capacity_rps)
    assert loads.trace(places.Point(setup, places.POISSON, 0.5, "ar", 1)).requests != poisson.requests


def line(
    modules, policy: str, tps: float, latency: float, *, seed: int = 0, share: float = 0.25, pool=None, swaps=None
):
    figures = dict.fromkeys(modules["views"].FIGURES, 1.0)
    figures |= {"throughput_tps": tps, "busy_throughput_tps": 2 * tps, "e2e_mean_s": latency}
    about = {
        "rate_rps": 4 * share,
        "requests": 9,
        "wall_s": 5.0,
        "workload": "w",
        "workload_hash": "h",
        "commit": "c0ffee",
    }
    key = f"{policy} {seed} {share} {pool}"
    return modules["views"].Line(
        key, "grown-110M", "Poisson", share, policy, seed, None if pool is None else asdict(pool), figures, about, swaps
    )


def hand_made(modules):
    """At the low load `spec:2` is the best length, at the high one none; two seeds at the low load."""
    pool = modules["points"].Pool
    return [
        line(modules, "ar", 100.0, 4.0), line(modules, "ar", 50.0, 2.0, seed=1),
        line(modules, "spec:2", 120.0, 2.0), line(modules, "spec:2", 80.0, 1.5, seed=1),
        line(modules, "nightjar", 110.0, 2.2), line(modules, "nightjar", 60.0, 1.5, seed=1),
        line(modules, "ar", 300.0, 8.0, share=1.25), line(modules, "spec:2", 200.0, 16.0, share=1.25),
        line(modules, "nightjar", 294.0, 8.4, share=1.25),
        line(modules, "nightjar", 100.0, 9.0, share=1.25, pool=pool(64, 16, "off"), swaps={"expand": 0}),
        line(modules, "nightjar", 115.0, 6.0, share=1.25, pool=pool(64, 16, "on"), swaps={"expand": 2, "contract": 1}),
        line(modules, "nightjar", 90.0, 7.0, share=1.25, pool=pool(64, 16, "on", 0.3, 8), swaps={"expand": 5}),
    ]  # fmt: skip


def test_ratios_are_taken_within_seeds(modules) -> None:
    tables = modules["views"].Tables(hand_made(modules))
    low = tables.view("grown-110M", "Poisson", 0.25)
    assert low.mean("ar", "throughput_tps") == 75.0
    assert low.times("nightjar", "throughput_tps") == pytest.approx((1.1 + 1.2) / 2)
    assert low.times("spec:2", "e2e_mean_s") == pytest.approx((0.5 + 0.75) / 2)
    assert low.fixed == ["ar", "spec:2"] and low.rate_rps == 1.0
    assert (low.best(low.fixed, "throughput_tps"), low.best(low.fixed, "e2e_mean_s")) == ("spec:2", "spec:2")
    first, second = tables.against_fixed("grown-110M", "Poisson")
    assert first.throughput_times == pytest.approx((110 / 120 + 60 / 80) / 2)
    assert first.latency_times == pytest.approx((2.2 / 2.0 + 1.5 / 1.5) / 2)
    assert (second.best_throughput, second.best_latency) == ("ar", "ar")
    assert (second.throughput_times, second.latency_times) == (pytest.approx(0.98), pytest.approx(1.05))


def test_the_summary_and_the_page_say_so(modules) -> None:
    tables = modules["views"].Tables(hand_made(modules))
    found = modules["summary"].summary(tables)
    low, high = found["loads"]
    assert (low["load"], low["best_throughput"]) == ("low", "spec:2")
    assert low["busy_throughput_times_plain"] == pytest.approx(1.15)
    assert high["throughput_times_best"] == pytest.approx(0.98)
    (offload,) = found["offload"]
    assert (offload["throughput_tps_off"], offload["throughput_tps_on"], offload["expand"]) == (100.0, 115.0, 2.0)
    about = {"prompt_parts": 13, "mean_prompt_tokens": 85.5, "mean_output_tokens": 138.2, "capacity_rps": 1.78,
             "max_depth": 6, "max_requests": 32}  # fmt: skip
    result = {
        "commit": "c0ffee", "segment": {"trace": "t", "requests": 9, "rate_rps": 1.0}, "setups": {"grown-110M": about}
    }  # fmt: skip
    page = modules["report"].readme(result, tables)
    assert "means over 1 to 2 independent runs" in page
    assert "| `nightjar` | 85 | 1.150 | 170 | 1.150 | 1.85 | 0.650 |" in page
    assert "| 1.25 | `ar` | 0.980 | `ar` | 1.050 |" in page
    assert "| 1.25 | `nightjar` | 1.0 | 1.0 | 100.0 | 115.0 | 1.150 | 9.00 | 6.00 | 0.667 | 2, 1 |" in page
    assert "| 0.1 |  | 115.0 (6.00; 2) |" in page and "| 0.3 | 90.0 (7.00; 5) |  |" in page
    assert "| `nightjar` | Nightjar | 1.273 | 0.871 |" in page


def test_points_that_are_there_are_not_run_again_and_minutes_bound_a_run(
    modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, places = modules["tables"], modules["points"]
    setups, segment = [places.SETUPS[0]], places.made_segment()
    monkeypatch.setattr(main, "source_commit", lambda: "c")
    lines, _, left = main.run_all(setups, segment, places.QUICK, tmp_path, minutes=0.0)
    assert (lines, left) == ([], 9)
    lines, about, left = main.run_all(setups, segment, places.QUICK, tmp_path, minutes=10.0)
    assert (len(lines), left, about["llama-70b"]["prompt_parts"]) == (9, 0, 10)
    assert {each.policy for each in lines} == {"ar", "spec:3", "nightjar"}
    monkeypatch.setattr(main, "run", lambda *_: pytest.fail("run again"))
    again, _, _ = main.run_all(setups, segment, places.QUICK, tmp_path, minutes=10.0)
    assert [asdict(each) for each in again] == json.loads(json.dumps([asdict(each) for each in lines]))
    point = places.points(setups, places.QUICK)[0]
    keys = {main.key_of(point, segment, places.QUICK, commit) for commit in ("c", "d")}
    keys |= {main.key_of(replace(point, seed=5), segment, places.QUICK, "c")}
    assert len(keys | {main.key_of(point, replace(segment, sha256="other"), places.QUICK, "c")}) == 4


@pytest.mark.slow
def test_tables_and_figures_of_a_whole_run(modules, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    main = modules["tables"]
    main.nightjar_tables(out=tmp_path, setups="", seeds=1, minutes=5.0, jobs=1, report_only=False, quick=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"nightjar-lengths.png", "nightjar-methods.svg", "nightjar-sim.json", "tables.md"} <= names
    written = json.loads((tmp_path / "nightjar-sim.json").read_text())
    assert written["kind"] == "simulated" and len(written["offload"]) == 1
    before = (tmp_path / "tables.md").read_text()
    main.nightjar_tables(out=tmp_path, report_only=True)
    assert (tmp_path / "tables.md").read_text() == before
