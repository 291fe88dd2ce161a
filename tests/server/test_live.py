"""What the dashboard shows, against sums by hand, against the results' own summary, and over a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, astuple, replace

import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineStats
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.records import CAUSES
from adaserve_jax.server.dashboard.live import KEPT_REQUESTS, DashboardMonitor
from adaserve_jax.server.dashboard.requests import ALL, ChoiceHistory, record_of
from adaserve_jax.server.dashboard.series import KEPT_SAMPLES, EngineHistory, LastMinute
from adaserve_jax.server.metrics import RATIO_EDGES
from adaserve_jax.server.observers import EndedChoice, Origin
from adaserve_jax.server.settings import ServerSettings, SloClass
from adaserve_jax.server.state import ServerState
from adaserve_jax.stats import StepStats
from tests.server.scripted import ByteTokenizer, ScriptedEngine

NOTHING = LastMinute(None, 0.0, None, None)


def ended(
    ending: str = "stop",
    *,
    tokens: int = 11,
    tpot_s: float = 0.01,
    ttft_s: float = 0.1,
    target_s: float | None = None,
    ttft_target_s: float | None = None,
    slo_class: str = "chat",
    error_code: str | None = None,
    **metrics,
) -> EndedChoice:
    """A choice that arrived at 1 s, was scheduled at 1.02 s, and was generated evenly."""
    made = RequestMetrics(
        arrival_s=1.0, first_scheduled_s=1.02, first_token_s=1 + ttft_s,
        last_token_s=1 + ttft_s + tpot_s * (tokens - 1),
        prompt_tokens=5, output_tokens=tokens, tpot_slo_s=target_s, ttft_slo_s=ttft_target_s, slo_class=slo_class,
        **metrics,
    )  # fmt: skip
    known = None if ending == "rejected" else made
    return EndedChoice(Origin("id"), 0, ending, error_code, slo_class, target_s, ttft_target_s, known, ended_unix_s=1e9)


def begun(classes: list[str], **settings) -> ChoiceHistory:
    """Watched since 0 s."""
    choices = ChoiceHistory(classes, **settings)
    choices.begin(0.0)
    return choices


class Clock:
    """now_s is set by the test; the wall clock stands a billion seconds later."""

    def __init__(self):
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return 1e9 + self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(clock) -> Iterator[DashboardMonitor]:
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))
    engine.dead = False
    engine.totals = StepStats()
    engine.stats = lambda: EngineStats(engine.totals)
    state = ServerState(
        engine, ServerSettings(classes=(SloClass("soon", e2e_ms=500),), slo_classes=("fast=20", "chat=100:200"))
    )
    state.become_ready(ByteTokenizer())
    watching = DashboardMonitor(state, clock, clock.wall)
    watching.sample()
    yield watching


def engine_of(live: DashboardMonitor) -> ScriptedEngine:
    return live.state.client


def test_attainment_and_goodput_by_class_and_window(live, clock):
    clock.now_s = 100.0
    live.observe(ended(target_s=0.02, slo_class="fast", tokens=11))  # met
    clock.now_s = 200.0
    live.observe(ended(target_s=0.005, slo_class="fast", tokens=30))  # 10 ms a token against 5
    live.observe(ended(target_s=0.01001, ttft_target_s=0.05, tokens=40))  # TPOT met, TTFT missed
    clock.now_s = 350.0
    live.observe(ended(slo_class="default", tokens=7))  # no target
    live.observe(ended("abort", target_s=1.0, tokens=5))  # in time as far as it came, but cut off
    live.observe(ended(target_s=1.0, ttft_target_s=1.0, tokens=24))  # met
    live.observe(ended("rejected", target_s=1.0))
    live.observe(ended("cancelled", target_s=1.0, tokens=9))  # its client left: neither met nor missed
    clock.now_s = 380.0
    minute, five, quarter = (window.ended for window in live.snapshot().windows)
    rows = {
        window.window_s: {
            a.slo_class: (a.requests, a.with_target, a.met, a.attainment, a.cancelled) for a in window.attainment
        }
        for window in (minute, five, quarter)
    }
    assert rows[60.0] == {
        ALL: (5, 3, 1, 0.333333, 1), "default": (1, 0, 0, None, 0), "fast": (0, 0, 0, None, 0),
        "chat": (4, 3, 1, 0.333333, 1), "soon": (0, 0, 0, None, 0),
    }  # fmt: skip
    assert rows[300.0]["fast"] == rows[900.0]["fast"] == (2, 2, 1, 0.5, 0)
    assert rows[900.0][ALL] == (8, 6, 2, 0.333333, 1)
    assert (minute.covered_s, five.covered_s, quarter.covered_s) == (60.0, 300.0, 330.0)  # watched since 50
    assert (minute.goodput_tps, five.goodput_tps) == (0.4, round((11 + 24) / 300, 3))
    assert quarter.goodput_tps == round((11 + 24) / 330, 3)
    assert minute.causes == {"failed": 1, "rejected": 1}
    assert quarter.causes == {"failed": 1, "rejected": 1, "budget": 1, "prefill": 1}
    assert (minute.ttft_ms.p50, minute.ttft_ms.p99) == (100.0, 100.0)


def test_over_target_counts_up_to_and_including_each_edge():
    choices = begun([])
    for tpot_s in (0.125, 0.5, 0.50390625, 0.75, 5.0, 6.0):  # targets of 0.5 s: halves that floats hold exactly
        choices.add(1.0, record_of(ended(tpot_s=tpot_s, target_s=0.5, ttft_s=0.0)))
    choices.add(1.0, record_of(ended(tokens=1, target_s=0.5)))  # met, and has no TPOT
    found = dict(zip((*RATIO_EDGES, "above"), choices.window(1.0, 60.0).over_target, strict=True))
    assert {edge: count for edge, count in found.items() if count} == {
        0.25: 1,
        1.0: 1,
        1.1: 1,
        1.5: 1,
        10.0: 1,
        "above": 1,
    }


def test_a_window_says_what_the_results_of_a_bench_would_say():
    generator = np.random.default_rng(0)
    choices, records = begun(["chat"]), []
    for _ in range(400):
        target_s, ttft_target_s = (float(x) if x > 0.005 else None for x in generator.uniform(0, 0.03, 2))
        record = record_of(ended(
            str(generator.choice(["stop", "length", "abort", "cancelled", "error", "rejected"])),
            tokens=int(generator.integers(1, 40)), tpot_s=float(generator.uniform(0, 0.03)),
            ttft_s=0.03 + float(generator.uniform(0, 0.03)), target_s=target_s, ttft_target_s=ttft_target_s,
            slo_class=str(generator.choice(["chat", "fast"])), preemptions=int(generator.integers(0, 2)),
            slo_feasible=bool(generator.integers(0, 2)), verify_steps=9, accepted_tokens=4,
        ))  # fmt: skip
        records.append(record)
        choices.add(10.0, record)
    window, oracle = choices.window(10.0, 60.0), {each.slo_class: each for each in summarize(records, wall_s=10.0)}
    for found in window.attainment:
        expected = oracle[found.slo_class]
        assert (found.requests, found.with_target) == (expected.requests, expected.requests_with_slo)
        assert found.attainment == pytest.approx(expected.attainment, abs=1e-6)
    whole = asdict(oracle[ALL])
    assert window.goodput_tps == pytest.approx(whole["goodput_tps"], abs=1e-3)
    assert {name: window.causes.get(name, 0) for name in CAUSES} == {name: whole[f"cause_{name}"] for name in CAUSES}
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert getattr(window.ttft_ms, name) == pytest.approx(1e3 * whole[f"ttft_p{share}_s"], abs=1e-3)
        assert getattr(window.tpot_ms, name) == pytest.approx(1e3 * whole[f"tpot_p{share}_s"], abs=1e-3)
    assert window.mean_accepted == pytest.approx(whole["mean_accepted"], abs=1e-4)


def test_low_acceptance_is_judged_by_the_acceptance_of_all_so_far():
    choices = begun([])
    counts = {"verify_steps": 10, "drafted_tokens": 40}
    good = record_of(ended(target_s=1.0, accepted_tokens=40, **counts))
    assert choices.add(1.0, good) is None
    bad = record_of(ended(target_s=0.005, accepted_tokens=0, **counts))  # 10 ms a step: needs 2 tokens a step
    assert choices.add(1.0, bad) == "low_acceptance"  # at 40 of 80, 1 + 0.5 * 4 = 3 would have come
    for _ in range(3):
        choices.add(1.0, bad)
    assert choices.add(1.0, bad) == "budget"  # at 40 of 240, 1.67


def test_a_target_refused_as_out_of_reach_is_infeasible_and_not_rejected():
    assert begun([]).add(1.0, record_of(ended("rejected", target_s=0.001, error_code="slo_infeasible"))) == "infeasible"
    assert begun([]).add(1.0, record_of(ended("rejected", target_s=0.001, error_code="queue_full"))) == "rejected"


def test_where_more_end_than_are_kept_the_window_covers_less():
    choices = begun([], capacity=4)
    for second in range(1, 21):
        choices.add(float(second), record_of(ended(target_s=1.0, tokens=10)))
    window = choices.window(20.0, 60.0)
    assert (window.attainment[0].requests, window.covered_s, len(choices)) == (8, 7.0, 20)
    assert window.goodput_tps == round(80 / 7, 3)


def test_samples_turn_totals_into_rates_and_shares():
    history = EngineHistory()
    stats = StepStats(
        steps=5, running=2, waiting=1, pages_used=3, pages_total=12, pages_cached=4, extension_used=1,
        extension_cached=2, extension_total=6, generation_tokens=100, draft_resident=True, last_depth=4, last_width=2,
        last_verified_tree_tokens=48, elastic_moves={"expand": 1},
    )  # fmt: skip
    history.add(10.0, 1e9, stats, NOTHING)
    stats.steps, stats.generation_tokens, stats.prompt_tokens = 9, 150, 30
    stats.draft_tokens, stats.accepted_tokens, stats.cache_queried_tokens, stats.cache_hit_tokens = 40, 10, 30, 12
    stats.elastic_moves["reload"] = 2
    history.add(12.0, 1e9 + 2, stats, LastMinute(0.5, 7.0, 20.0, 30.0))
    history.add(13.0, 1e9 + 3, stats, NOTHING)
    series = history.series(1)
    assert series == history.series(1) and series.seq == [2, 3]
    assert (series.generation_tps, series.prompt_tps) == ([25.0, 0.0], [15.0, 0.0])
    assert (series.acceptance_rate, series.cache_hit_rate) == ([0.25, None], [0.4, None])
    assert (series.depth, series.width, series.budget) == ([4, None], [2, None], [48, None])
    assert (series.base_used, series.base_cached, series.base_free) == ([3, 3], [2, 2], [7, 7])
    assert (series.extension_used, series.extension_cached, series.extension_free) == ([1, 1], [2, 2], [3, 3])
    assert series.swaps == [2, 0] and series.attainment == [0.5, None] and series.goodput_tps == [7.0, 0.0]
    window = history.window(13.0, 60.0)
    assert (window.throughput_tps, window.prompt_tps) == (round(50 / 3, 3), 10.0)
    assert (window.acceptance_rate, window.cache_hit_rate) == (0.25, 0.4)
    assert history.window(13.0, 1.0).throughput_tps == 0.0 and history.window(13.0, 1.5).throughput_tps == round(
        50 / 3, 3
    )


def test_an_engine_that_starts_again_counts_from_zero():
    history = EngineHistory()
    history.add(1.0, 0.0, StepStats(steps=90, generation_tokens=1000), NOTHING)
    history.add(2.0, 0.0, StepStats(steps=3, generation_tokens=12), NOTHING)
    assert history.series(0).generation_tps == [0.0, 12.0]


def test_only_what_is_new_is_sent_and_old_samples_go():
    history = EngineHistory()
    for second in range(KEPT_SAMPLES + 5):
        history.add(float(second), 0.0, StepStats(), NOTHING)
    assert history.seq == KEPT_SAMPLES + 5
    assert history.series(0).seq == list(range(6, KEPT_SAMPLES + 6))
    assert history.series(KEPT_SAMPLES + 3).seq == [KEPT_SAMPLES + 4, KEPT_SAMPLES + 5]
    assert history.series(KEPT_SAMPLES + 5).seq == []
    assert len(history.series(KEPT_SAMPLES + 6).seq) == KEPT_SAMPLES  # asked by who knows another server's numbers


def test_a_sample_carries_the_minute_before_it(live, clock):
    clock.now_s = 70.0
    live.observe(ended(target_s=1.0, tokens=100))
    live.observe(ended(target_s=0.001, ttft_s=0.3, tokens=10))
    engine_of(live).totals.generation_tokens = 110
    live.sample()
    clock.now_s = 131.0
    live.sample()
    series = live.snapshot().series
    assert series.attainment == [None, 0.5, None]
    assert series.goodput_tps == [0.0, 5.0, 0.0]
    assert (series.ttft_p50_ms, series.ttft_p99_ms) == ([None, 200.0, None], [None, 298.0, None])
    assert series.unix_s == [1e9 + 50, 1e9 + 70, 1e9 + 131]
    assert series.generation_tps == [0.0, 5.5, 0.0]


def test_the_last_requests_are_the_newest_first_and_few(live):
    for number in range(KEPT_REQUESTS + 3):
        live.observe(
            replace(
                ended(target_s=0.02, e2e_slo_s=0.25, accepted_tokens=6, verify_steps=4, cached_tokens=2), index=number
            )
        )
    last = live.snapshot().last_requests
    assert [request.index for request in last] == list(range(KEPT_REQUESTS + 2, 2, -1))
    assert asdict(last[0]) | {"index": 0} == {
        "ended_unix_s": 1e9, "request_id": "id", "index": 0, "slo_class": "chat", "ending": "stop",
        "error_code": None, "cause": None, "met": True, "prompt_tokens": 5, "cached_tokens": 2, "output_tokens": 11,
        "queue_ms": 20.0, "ttft_ms": 100.0, "ttft_target_ms": None, "tpot_ms": 10.0, "tpot_target_ms": 20.0,
        "e2e_ms": 200.0, "e2e_target_ms": 250.0, "mean_accepted": 1.5,
    }  # fmt: skip


def test_a_snapshot_names_the_server_and_outlives_its_engine(live, clock):
    engine = engine_of(live)
    engine.totals = StepStats(preemptions=2, elastic_moves={"expand": 1}, elastic_s={"expand": 0.5}, arms={"8": "4x2"})
    live.sample()
    first = live.snapshot()
    assert (first.status, first.model, first.policy, first.device) == ("ok", "scripted", "scripted", "cpu")
    assert first.baseline_ms == 10.0
    assert [astuple(each) for each in first.classes] == [
        ("default", None, None, None), ("soon", None, None, 500.0), ("fast", 20.0, None, None),
        ("chat", 100.0, 200.0, None),
    ]  # fmt: skip
    assert (first.preemptions, first.swaps, first.arms, first.seq) == (2, {"expand": 1}, {"8": "4x2"}, 2)

    engine.totals, engine.dead = StepStats(), True
    clock.now_s += 1
    live.sample()
    after = live.snapshot(2)
    assert (after.status, after.model, after.seq, after.series.seq) == ("dead", None, 2, [])
