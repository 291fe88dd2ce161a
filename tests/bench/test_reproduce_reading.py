"""What benchmarks/papers reads from results, by hand: the numbers that the papers' statements are decided by."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from tests.bench.scripts import modules_of

READERS = ("bench", "engine", "nightjar", "over_time", "sweep")
NAMES = (
    *(f"papers.{name}_reading" for name in READERS), "papers.adaserve", "papers.online", "adaserve.sweeps_tables",
    "nightjar.views", "nightjar.points", "nightjar.over_time", "adaserve.acceptance_speedup",
)  # fmt: skip


modules = modules_of(*NAMES)


def line(
    modules, contender: str, value: float, attainment: float, goodput: float, accepted: float | None = None, **row
):
    group = {"adaserve": "ours", "adaserve-paper": "authors"}.get(contender, "baseline")
    values = {
        "slo_class": "all", "attainment": attainment, "goodput_tps": goodput, "mean_accepted": accepted,
        "requests_with_slo": 200, "ttft_p99_s": 1.25, "commit": "c0ffee", "machine": "m", "device": "d", **row,
    }  # fmt: skip
    return modules["sweeps_tables"].Line(
        f"{contender}{value}", "llama-70b", "rate", value, "tpot", contender, group, (values,)
    )


def swept(modules):
    return [
        line(modules, "adaserve", 2.0, 1.0, 600.0, 3.0), line(modules, "spec:4", 2.0, 0.9, 590.0, 2.0),
        line(modules, "ar", 2.0, 0.5, 300.0), line(modules, "adaserve-paper", 2.0, 0.2, 900.0),
        line(modules, "adaserve", 4.0, 0.9, 1000.0, 1.5), line(modules, "spec:4", 4.0, 0.6, 500.0, 2.1),
        line(modules, "ar", 4.0, 0.3, 800.0),
    ]  # fmt: skip


def test_sweeps_are_judged_against_the_best_baseline_of_each_point(modules, tmp_path: Path) -> None:
    stale = line(modules, "adaserve", 2.0, 0.1, 1.0, commit="01d")
    path = tmp_path / "sweeps.jsonl"
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in (stale, *swept(modules))))
    found = modules["sweep_reading"].sweeps("step", "rate")({"step": tmp_path})
    values = {name.removeprefix("llama-70b: "): value for name, value in found.values.items()}
    assert values["attainment times"] == pytest.approx(0.9 / 0.6)
    assert values["violations times"] == pytest.approx(0.1 / (1 / 200)), "no violation counts as one"
    assert values["violations times at the last"] == pytest.approx(0.4 / 0.1)
    assert values["goodput times"] == pytest.approx(1000 / 800) and values["least goodput times"] == pytest.approx(
        600 / 590
    )
    assert values["least lead"] == pytest.approx(0.1)
    assert values["accepted falls"] == 2.0
    assert values["accepted of chains varies"] == pytest.approx(0.05)
    assert values["continuous batching where strict"] is None
    assert found.about == {"commit": "c0ffee", "machine": "m", "device": "d"}
    drawn, table = found.shown
    assert [panel.title for panel in drawn.panels] == ["requests met", "goodput", "accepted"]
    assert [each.name for each in drawn.panels[0].series] == ["adaserve", "adaserve-paper", "ar", "spec:4"]
    assert drawn.panels[0].series[0].y == (1.0, 0.9) and drawn.panels[2].series[2].y == (None, None)
    assert table.rows[0] == ("adaserve", "100.0%, 600, 1.2 s", "90.0%, 1000, 1.2 s")


def test_rows_of_a_bench_are_judged_the_same_way(modules, tmp_path: Path) -> None:
    def made(policy: str, rate: float, attainment: float, goodput: float, accepted: float = 2.0) -> ResultRow:
        known = {
            "policy": policy, "rate_rps": rate, "attainment": attainment, "goodput_tps": goodput, "valid": True,
            "mean_accepted": accepted, "requests_with_slo": 10, "slo_class": "all", "commit": "c",
        }  # fmt: skip
        empty = {"str": "", "int": 0, "float": 0.0, "bool": False}
        required = {f.name: empty.get(str(f.type)) for f in fields(ResultRow) if f.default is MISSING}
        return ResultRow(**required | known)

    rows = [
        made("adaserve", 1.0, 1.0, 90.0), made("ar", 1.0, 0.8, 80.0), made("adaserve-paper", 1.0, 1.0, 500.0),
        made("adaserve", 2.0, 0.5, 100.0, 1.6),
        made("ar", 2.0, 0.6, 50.0), made("spec:4", 2.0, 0.2, 120.0),
    ]  # fmt: skip
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in rows))
    values = modules["bench_reading"].bench_rows("step", "rate_rps")({"step": tmp_path}).values
    assert values["least lead"] == pytest.approx(-0.1)
    assert values["violations times"] == pytest.approx(0.2 / 0.1)
    assert values["goodput times"] == pytest.approx(90 / 80) and values["least goodput times"] == pytest.approx(
        100 / 120
    )
    assert values["accepted falls"] == 1.25
    again = [replace(row, repeat=1, goodput_tps=row.goodput_tps + 20.0) for row in rows]
    again[0] = replace(again[0], attainment=0.9)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in (*rows, *again)))
    found = modules["bench_reading"].bench_rows("step", "rate_rps")({"step": tmp_path})
    assert found.values["violations times"] == pytest.approx(0.2 / 0.05), "of the mean of the repeats, of 20 requests"
    assert found.values["goodput times"] == pytest.approx(100 / 90)
    assert found.shown[1].rows[0] == ("adaserve", "95.0%, 100", "50.0%, 110")
    for other in ({"commit": "d"}, {"run_id": "r"}):
        path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in (*rows, replace(rows[0], **other))))
        with pytest.raises(ConfigError, match="holds rows of several runs or commits; remove its folder"):
            modules["bench_reading"].bench_rows("step", "rate_rps")({"step": tmp_path})
    path.write_text(json.dumps(asdict(replace(rows[0], valid=False))) + "\n")
    with pytest.raises(ConfigError, match="has no valid row; the client was the bottleneck"):
        modules["bench_reading"].bench_rows("step", "rate_rps")({"step": tmp_path})


def nightjar_line(modules, policy: str, tps: float, latency: float, load: str, share: float, pool=None):
    figures = {"throughput_tps": tps, "busy_throughput_tps": 2 * tps, "e2e_mean_s": latency, "running_mean": 1.0}
    return modules["views"].Line(
        f"{policy}{load}{share}{pool}", "grown-110M", load, share, policy, 0, pool, figures, {"rate_rps": 1.0}, None
    )


def test_nightjars_numbers_are_ratios_at_its_loads(modules, tmp_path: Path) -> None:
    at = modules["points"].CLASSES
    lines = []
    for (load, share), factor in zip(at.values(), (1.2, 0.9, 1.0), strict=True):
        for policy, tps, latency in (
            ("ar", 100, 4),
            ("spec:3", 80, 5),
            ("linucb", 90, 5),
            ("lints", 90, 5),
            ("bingreedy", 90, 5),
        ):
            lines.append(nightjar_line(modules, policy, tps, latency, load, share))
        lines.append(nightjar_line(modules, "nightjar", 100 * factor, 4 / factor, load, share))
    high = modules["points"].THRESHOLD_SHARE
    for elastic, tau, persist, tps in (
        ("off", 0.1, 16, 200),
        ("on", 0.1, 16, 210),
        ("on", 0.2, 16, 230),
        ("on", 0.2, 8, 190),
    ):
        pool = {"elastic": elastic, "tau_low": tau, "persist_steps": persist, "num_pages": 9, "extension_pages": 3}
        lines.append(nightjar_line(modules, "nightjar", tps, 1.0, "Poisson", high, pool))
    result = {"commit": "c", "machine": "m", "segment": {"trace": "t"}, "lines": [asdict(each) for each in lines]}
    (tmp_path / "nightjar-lines.json").write_text(json.dumps(result))
    read, folders = modules["nightjar_reading"], {"s": tmp_path}
    values = read.methods("s")(folders).values
    assert values["low: busy times plain"] == pytest.approx(1.2) and values["high: times plain"] == pytest.approx(0.9)
    assert values["high: times SD"] == pytest.approx(90 / 80) and values["least times best"] == pytest.approx(0.9)
    assert values["mean throughput over spec:3"] == pytest.approx(np.mean([120, 90, 100]) / 80)
    assert values["mean throughput over dsd"] is None, "which was not run"
    assert values["least latency over ar"] == pytest.approx(1 / 1.2)
    bandits = read.bandits("s")(folders).values
    assert bandits == {"least throughput times": pytest.approx(1.0), "most latency times": pytest.approx(4 / 0.9 / 5)}
    assert read.lengths("s")(folders).values["least times best length"] == pytest.approx(0.9)
    assert read.offload("s")(folders).values == {"most times": 1.05, "least times": 1.05}
    assert read.thresholds("s")(folders).values == {"best times off": 1.15, "best threshold": 0.2}
    long = [nightjar_line(modules, policy, tps, 4, *at["high"]) for policy, tps in (("ar", 100), ("nightjar", 96))]
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "nightjar-lines.json").write_text(json.dumps(result | {"lines": [*map(asdict, long)]}))
    folders["long"] = tmp_path / "long"
    longer = read.methods_and_longer("s", "long")(folders).values
    assert longer == values | {"high: loss left in a longer run": pytest.approx(0.4)}, "4 % of what was 10 %"
    assert read.methods_on_both("s", "long")(folders).values["larger: mean throughput over ar"] == pytest.approx(0.96)


def test_a_dynamic_load_is_cut_into_intervals(modules) -> None:
    def record(due_s: float, ttft_s: float | None, *offsets_s: float, status: str = "finished"):
        names = RequestRecord.__dataclass_fields__
        values = dict.fromkeys(names) | {
            "due_s": due_s,
            "ttft_s": ttft_s,
            "token_offsets_s": offsets_s,
            "status": status,
        }
        return RequestRecord(**values)

    records = [record(1.0, 2.0, 0.0, 8.0, 30.0), record(12.0, 1.0, 0.0, 1.0), record(3.0, None, status="unfinished")]
    found = modules["over_time"].by_interval(records, 3, 10.0)
    assert found["tokens_per_s"] == [0.1, 0.3, 0.0], "one token comes after the last interval"
    assert found["latency_s"] == [32.0, 2.0, None]
    trace = Trace("t", "h", tuple(TraceRequest(at, 1, 1, SLO(), "c") for at in (0.0, 1.0, 15.0, 30.0)))
    assert modules["over_time"].arrivals(trace, 3, 10.0) == [0.2, 0.1, 0.1]


def test_thirds_of_a_dynamic_load_are_by_its_arrivals(modules, tmp_path: Path) -> None:
    policies = {
        "ar": {"tokens_per_s": [10.0, 20.0, 40.0], "latency_s": [2.0, None, 8.0]},
        "nightjar": {"tokens_per_s": [10.0, 20.0, 44.0], "latency_s": [1.0, 3.0, 12.0]},
    }
    result = {
        "commit": "c", "machine": "m", "setup": "s", "workload": "w", "interval_s": 30.0, "policies": policies,
        "arrivals_rps": [1.0, 2.0, 3.0], "segment_minutes_rps": [2.0, 5.0],
    }  # fmt: skip
    (tmp_path / "over-time.json").write_text(json.dumps(result))
    values = modules["over_time_reading"].over_time("s")({"s": tmp_path}).values
    assert values == {
        "busiest: times plain": pytest.approx(1.1), "busiest: times chain": None,
        "quietest: latency times plain": 0.5, "busiest: latency times plain": 1.5,
    }  # fmt: skip
    assert modules["over_time_reading"].rate_trace("s")({"s": tmp_path}).values == {"swing": 2.5}


def test_swaps_and_phases_are_read_as_medians_and_shares(modules, tmp_path: Path) -> None:
    seconds = {"expand": [0.2, 0.1, 0.3], "move": [0.01, 0.03, 0.02], "contract": [0.001, 0.002, 0.003]}
    result = {"swaps": {"seconds": seconds}, "params": {"target": 1e8}, "dtype": "f32", "device": "cpu",
              "commit": "c", "machine": "m"}  # fmt: skip
    (tmp_path / "elastic.json").write_text(json.dumps(result))
    values = modules["nightjar_reading"].swaps("s")({"s": tmp_path}).values
    assert (values["expansion, s"], values["contraction, s"]) == pytest.approx((0.2, 0.023))
    assert values["dispatch share"] == pytest.approx(0.002 / 0.023)
    row = {"policy": "adaserve", "wall_ms": 50.0, "plan_and_select_share": 0.02} | dict.fromkeys(
        ("plan_ms", "draft_ms", "select_ms", "verify_ms", "commit_ms"), 0.25
    )
    (tmp_path / "share.json").write_text(json.dumps({"rows": [row], "requests": 16, "commit": "c", "machine": "m"}))
    assert modules["adaserve"].host_share("s")({"s": tmp_path}).values == {
        "select share": 0.005, "plan and select share": 0.02
    }  # fmt: skip


def test_a_class_peaks_where_most_of_its_requests_are(modules) -> None:
    at = {"chat": 80.0, "code": 190.0, "summarization": 285.0}
    requests = tuple(
        TraceRequest(float(peak + shift), 1, 1, SLO(), name) for name, peak in at.items() for shift in range(-20, 21)
    )
    found = modules["adaserve"].found_in(Trace("t", "h", tuple(sorted(requests, key=lambda r: r.due_s))))
    assert found.values == {"peaks off, s": pytest.approx(5.0, abs=1.0), "least swing": pytest.approx(6.0)}


@pytest.mark.slow
def test_speedup_is_nearly_that_of_independent_acceptances(modules) -> None:
    """The simulator shares no code with the formula; what it verifies takes longer by a few percent than one token."""
    speedup = modules["acceptance_speedup"]
    assert speedup.formula(0.5, 2, 0.1) == pytest.approx((1 + 0.5 + 0.25) / 1.2)
    rows = speedup.measure(load_machine("qwen-32b"), (0.5, 0.9), 5, requests=3)
    for row in rows:
        assert row.times == pytest.approx(row.formula_times, rel=0.1)
    assert rows[0].draft_share == pytest.approx(4 / 28) and rows[1].times > rows[0].times
    with pytest.raises(ConfigError, match="qwen-32b drafts at most 5, got 6"):
        speedup.measure(load_machine("qwen-32b"), (0.5,), 6)
