"""benchmarks/nightjar/engine.py and offload.py: requests, rounds that go on, and how they are judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaserve_jax.bench.local_client import LocalBenchEngine
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from scripts.results_nightjar import nightjar_tables
from tests.bench.scripts import modules_of

NAMES = tuple(f"nightjar.{name}" for name in ("engine", "offload", "judged", "requests", "rounds", "points"))


modules = modules_of(*NAMES, left_out="nightjar_")


@pytest.fixture(scope="module")
def requests(modules):
    """Their texts are of this very file."""
    quick, sources = modules["requests"].QUICK, [Path(__file__).read_text()]
    return modules["requests"].Requests(None, resolve_folder("demo", "target"), quick, sources)


def test_requests_have_the_segments_lengths_and_texts_of_their_own(modules, requests) -> None:
    tokenizer = Tokenizer.from_folder(resolve_folder("demo", "target"))
    low = requests.workload("low", 40.0, 0)
    assert low == requests.workload("low", 40.0, 0)
    assert len(low.items) == 15, "a quarter of 40 a second, for 1.5 s"
    assert max(item.max_tokens for item in low.items) <= modules["requests"].QUICK_OUTPUT
    lengths = [len(tokenizer.encode(item.prompt)) for item in low.items]
    assert min(lengths) >= 5 and max(lengths) <= 100  # 100 to 1000 tokens over 13; texts may be cut in a token
    assert len({item.prompt for item in low.items}) > 10
    assert {item.prompt for item in low.items}.isdisjoint(
        item.prompt for item in requests.workload("low", 40.0, 1).items
    )
    dynamic = requests.workload("dynamic", 20.0, 0)
    assert dynamic.items[-1].arrival_s <= 1.5 and 15 <= len(dynamic.items) <= 25  # 15 a second
    assert {item.arrival_s for item in requests.saturating().items} == {0.0}


@pytest.mark.slow
def test_policies_take_turns_and_what_is_there_is_not_run_again(
    modules, requests, make_bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_bench("ar")
    sizes = replace(modules["requests"].QUICK, span_s=0.1)
    rounds = modules["rounds"].Rounds(tmp_path, 5.0, sizes, {}, commit="c")
    monkeypatch.setattr("adaserve_jax.results.provenance.source_commit", lambda: "c")
    wanted = {"policies": ("ar", "spec:2", "nightjar"), "loads": ("dynamic",), "most_rounds": 2}
    result = modules["engine"].measure(engine, requests, rounds, **wanted)
    played = [
        policy
        for index, policy in enumerate(engine.client.policies)
        if index and policy != engine.client.policies[index - 1]
    ]
    assert played == ["spec:2", "nightjar"] * 2 + ["ar"], "after the capacity, which `ar` is measured by"
    assert [(p["load"], p["policy"]) for p in result["points"]] == [
        (load, policy) for load in wanted["loads"] for policy in wanted["policies"]
    ]
    assert all(len(point["rounds"]) == 2 for point in result["points"])
    assert json.loads(json.dumps(result)) == result
    submitted = len(engine.client.submitted)
    again = modules["engine"].measure(engine, requests, replace(rounds, rows={}, swaps={}), **wanted)
    assert (again, len(engine.client.submitted)) == (result, submitted)
    other = modules["rounds"].Rounds(tmp_path, 1e-9, sizes, {}, commit="d")
    assert other.measure(0, "low", "ar", "ar", lambda: pytest.fail("no time"), engine) is None


def test_a_run_of_other_settings_or_of_an_edited_source_is_made_again(
    modules, requests, make_bench, tmp_path: Path
) -> None:
    engine, sizes = make_bench("ar"), replace(modules["requests"].QUICK, span_s=0.1)

    def measured(commit: str, minutes: float = 5.0, **settings: str) -> bool:
        rounds = modules["rounds"].Rounds(tmp_path, minutes, sizes, settings, commit=commit)
        row = rounds.measure(0, "low", "ar", "ar", lambda: requests.workload("low", 100.0, 0), engine)
        return row is not None and rounds.swaps[0, "low", "ar"] == {}

    assert measured("c", pages="64") and measured("c", minutes=0.0, pages="64"), "kept"
    assert not measured("c", minutes=0.0, pages="96") and not measured("d", minutes=0.0, pages="64")
    assert measured("c-dirty") and not measured("c-dirty", minutes=0.0)


def test_a_run_that_is_not_valid_is_refused(modules, requests, make_bench, tmp_path: Path) -> None:
    rounds = modules["rounds"].Rounds(tmp_path, 5.0, replace(modules["requests"].QUICK, span_s=0.1), {}, commit="c")
    engine = make_bench("ar", dies_after=2)
    with pytest.raises(ConfigError, match="ar of round 1 is not valid: engine died; run it again"):
        rounds.measure(0, "low", "ar", "ar", lambda: requests.workload("low", 100.0, 0), engine)


def test_a_load_has_the_mean_rate_of_its_rounds(modules, tmp_path: Path) -> None:
    rates = {(number, "low", "ar"): SimpleNamespace(rate_rps=rate) for number, rate in enumerate((2.0, 2.5, 9.0))}
    rounds = modules["rounds"].Rounds(tmp_path, 5.0, modules["requests"].QUICK, {}, commit="c", rows=rates)
    assert rounds.rate_rps("low", "ar", (0, 1)) == 2.25


def rounds_of(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"throughput_tps": tps, "busy_throughput_tps": 2 * tps, "e2e_mean_s": latency} for tps, latency in pairs]


def test_points_are_judged_by_medians_and_ratios_of_the_same_round(modules) -> None:
    judged = modules["judged"]
    points = judged.judged("low", 0.5, {
        "ar": rounds_of((100.0, 4.0), (80.0, 5.0), (50.0, 6.0)),
        "spec:2": rounds_of((110.0, 2.0), (88.0, 2.5), (55.0, 4.0)),
        "nightjar": rounds_of((120.0, 2.0), (104.0, 3.0), (60.0, 3.0)),
    })  # fmt: skip
    ours = points[-1]
    assert ours["throughput_tps"]["median"] == 104.0
    assert ours["times_plain"]["throughput_tps"] == {"median": pytest.approx(1.2), "low": 1.2, "high": 1.3}
    assert ours["times_plain"]["e2e_mean_s"]["median"] == pytest.approx(0.5)
    assert ours["best_fixed"] == {"throughput_tps": "spec:2", "e2e_mean_s": "spec:2"}
    assert ours["times_best_fixed"]["throughput_tps"]["median"] == pytest.approx(120 / 110)
    first, second = judged.aims(points)
    assert first.endswith("times `ar` by tokens/s while busy; the aim is 1.2: met")
    assert "1.09 (1.09 to 1.18) times the best fixed length (spec:2)" in second


def test_results_show_ratios_with_their_intervals(modules) -> None:
    points = modules["judged"].judged("low", 0.5, {
        "ar": rounds_of((100.0, 4.0), (50.0, 6.0)), "nightjar": rounds_of((120.0, 2.0), (65.0, 4.5)),
    })  # fmt: skip
    about = {
        "commit": "c0ffee", "machine": "m", "device": "cpu", "jax_version": "0", "max_requests": 32, "span_s": 45.0,
        "target_params": 105_400_000, "draft_params": 630_000, "capacity_rps": 1.9,
    }  # fmt: skip
    text = nightjar_tables({"kind": "engine", "points": points, **about})
    ratio, best = "1.25 (1.20 to 1.30)", "0.62 (0.50 to 0.75)"
    row = (
        f"| low | 0.50 | 0.26 | `nightjar` | 92.5 | {ratio} | {ratio} | 3.25 | {best} | {ratio}, `ar` | {best}, `ar` |"
    )
    assert row in text
    assert "target of 105.4M parameters, draft of 0.6M, at most 32 requests at once; 45 s of arrivals a round;" in text
    assert "medians of 2 rounds, least and largest ratio of the 2 rounds in brackets; capacity 1.9 requests/s" in text
    off, on = ({name: {"median": value} for name, value in zip(modules["offload"].SHOWN, values, strict=True)}
               for values in ((16.0, 200.0, 9.0), (20.0, 230.0, 7.0)))  # fmt: skip
    times = {name: {"median": 1.15, "low": 1.1, "high": 1.2} for name in modules["offload"].SHOWN}
    pressed = {"share": 1.5, "rate_rps": 2.8, "policy": "nightjar", "off": off, "on": on, "times": times}
    pages = {"num_pages": 64, "extension_pages": 16, "page_size": 64}
    text = nightjar_tables({"kind": "offload", "points": [pressed | {"swaps": [{"expand": 2}, {}]}], **about, **pages})
    assert "| 2.80 | 1.47 | `nightjar` | 16.0 | 20.0 | 200.0 | 230.0 | 1.15 (1.10 to 1.20) |" in text
    assert "| 2, 0 |" in text


@pytest.mark.slow
def test_elastic_memory_is_measured_on_real_engines(modules, requests, tmp_path: Path) -> None:
    """Both engines serve; whether the draft leaves at so small a size is not the question."""
    config = EngineConfig(
        max_requests=16, max_context=512, page_size=16, num_pages=64, max_depth=4, max_width=3, max_tree_tokens=64,
        token_edges=(16, 64), row_edges=(16,),
    )  # fmt: skip
    engines = {side: LocalBenchEngine(replace(config, elastic=side)) for side in ("off", "on")}
    try:
        rounds = modules["rounds"].Rounds(tmp_path, 5.0, modules["requests"].QUICK, {})
        result = modules["offload"].measure(
            engines, requests, rounds, policies=("nightjar",), shares=(2.0,), most_rounds=1
        )
    finally:
        for engine in engines.values():
            engine.client.close()
    (point,) = result["points"]
    assert result["extension_pages"] > 0 and result["num_pages"] == 64
    assert min(point[side]["throughput_tps"]["median"] for side in ("off", "on")) > 0
    assert len(point["swaps"]) == 1
