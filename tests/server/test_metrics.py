"""The Prometheus exposition: names, what is counted, and that it parses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineStats
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.server.metrics import ServerMetrics
from adaserve_jax.server.observers import EndedChoice, Origin
from adaserve_jax.stats import DrafterStats, ServiceState, StepStats
from tests.server.scripted import ScriptedEngine


def samples(metrics: ServerMetrics) -> dict[tuple, float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_the_totals_of_the_engine_are_read_at_each_scrape():
    engine = ScriptedEngine(EngineConfig())
    stats = StepStats(
        steps=9, running=2, waiting=3, pages_used=4, pages_total=16, prompt_tokens=100, generation_tokens=50,
        preemptions=1, spec_steps=7, drafts=12, draft_tokens=40, accepted_tokens=30, accepted_per_position=[20, 10],
        finished={"stop": 5, "length": 6}, verify_s=1.5, wait_s=1.25,
        elastic_moves={"expand": 2, "failed": 1}, elastic_s={"expand": 0.3, "reload": 0.01},
        pages_cached=5, extension_used=2, extension_cached=1, extension_total=4, cache_queried_tokens=90,
        cache_hit_tokens=60,
        calibration_outcomes={"greedy": 70}, calibration_error={"greedy": {"raw": 0.2, "online": 0.01}},
        arms={"32": "off", "8": "4x2"}, arm_regret_s=0.75, draft_resident=True,
    )  # fmt: skip
    engine.stats = lambda: EngineStats(stats, compiles_after_ready=0, step_age_s=0.5)
    found = samples(ServerMetrics(engine, "mine"))
    expected = {
        ("adaserve_requests_running",): 2,
        ("adaserve_requests_waiting",): 3,
        ("adaserve_kv_cache_usage_ratio",): 0.3,
        ("adaserve_kv_pages", ("slab", "base"), ("state", "used")): 4,
        ("adaserve_kv_pages", ("slab", "base"), ("state", "cached")): 4,
        ("adaserve_kv_pages", ("slab", "base"), ("state", "free")): 8,
        ("adaserve_kv_pages", ("slab", "extension"), ("state", "used")): 2,
        ("adaserve_kv_pages", ("slab", "extension"), ("state", "cached")): 1,
        ("adaserve_kv_pages", ("slab", "extension"), ("state", "free")): 1,
        ("adaserve_prefix_cache_queries_total",): 90,
        ("adaserve_prefix_cache_hits_total",): 60,
        ("adaserve_swaps_total", ("kind", "expand")): 2,
        ("adaserve_swaps_total", ("kind", "failed")): 1,
        ("adaserve_swap_seconds_total", ("kind", "reload")): 0.01,
        ("adaserve_prompt_tokens_total",): 100,
        ("adaserve_generation_tokens_total",): 50,
        ("adaserve_preemptions_total",): 1,
        ("adaserve_spec_drafts_total",): 7,
        ("adaserve_spec_trees_total",): 12,
        ("vllm:spec_decode_num_drafts_total", ("engine", "0"), ("model_name", "mine")): 12,
        ("vllm:spec_decode_num_draft_tokens_total", ("engine", "0"), ("model_name", "mine")): 40,
        ("vllm:spec_decode_num_accepted_tokens_total", ("engine", "0"), ("model_name", "mine")): 30,
        (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            ("engine", "0"),
            ("model_name", "mine"),
            ("position", "1"),
        ): 10,
        ("adaserve_spec_draft_tokens_total",): 40,
        ("adaserve_spec_accepted_tokens_total",): 30,
        ("adaserve_spec_accepted_tokens_per_position_total", ("position", "2")): 10,
        ("adaserve_requests_finished_total", ("reason", "length")): 6,
        ("adaserve_calibration_outcomes_total", ("rows", "greedy")): 70,
        ("adaserve_calibration_error", ("prediction", "online"), ("rows", "greedy")): 0.01,
        ("adaserve_step_seconds_total", ("phase", "verify")): 1.5,
        ("adaserve_step_seconds_total", ("phase", "wait")): 1.25,
        ("adaserve_compiles_after_ready_total",): 0,
        ("adaserve_draft_resident",): 1,
        ("adaserve_step_age_seconds",): 0.5,
        ("adaserve_arm", ("arm", "4x2"), ("bucket", "8")): 1,
        ("adaserve_arm", ("arm", "off"), ("bucket", "32")): 1,
        ("adaserve_arm_regret_seconds",): 0.75,
    }
    assert {key: found[key] for key in expected} == expected
    stats.running = 8
    assert samples(ServerMetrics(engine))[("adaserve_requests_running",)] == 8


def test_requests_are_observed_as_they_end():
    engine = ScriptedEngine(EngineConfig())
    metrics = ServerMetrics(engine)
    done = RequestMetrics(
        arrival_s=1.0, first_scheduled_s=1.5, first_token_s=2.0, last_token_s=3.0, output_tokens=11,
        tpot_slo_s=0.2, ttft_slo_s=0.5, slo_class="chat",
    )  # fmt: skip
    ended = EndedChoice(Origin("r"), 0, "stop", None, "chat", 0.2, 0.5, done)
    metrics.observe_end(ended)
    metrics.observe_tokens(0.03, 4)
    for _ in range(3):
        metrics.observe_end(replace(ended, ending="rejected", metrics=None))
    found = samples(metrics)

    def slo(kind: str, outcome: str) -> float:
        return found[("adaserve_slo_requests_total", ("class", "chat"), ("metric", kind), ("outcome", outcome))]

    assert (slo("tpot", "met"), slo("ttft", "missed"), slo("all", "missed")) == (1, 1, 1), "all of them, or missed"
    assert (slo("tpot", "rejected"), slo("ttft", "rejected"), slo("all", "rejected")) == (3, 3, 3)
    sums = {"queue": 0.5, "time_to_first_token": 1.0, "prefill": 0.5, "decode": 1.0, "e2e": 2.0}
    for name, value in sums.items():
        assert found[(f"adaserve_{name}_seconds_sum",)] == pytest.approx(value)
    assert found[("adaserve_tpot_over_target_sum",)] == pytest.approx(0.5)
    assert found[("adaserve_tpot_over_target_bucket", ("le", "1.0"))] == 1
    assert found[("adaserve_inter_token_latency_seconds_count",)] == 4
    assert found[("adaserve_inter_token_latency_seconds_sum",)] == pytest.approx(0.03)


def test_a_target_of_the_thinking_is_counted_by_itself_and_with_that_of_the_answer():
    metrics = ServerMetrics(ScriptedEngine(EngineConfig()))
    done = RequestMetrics(
        arrival_s=1.0, first_token_s=2.0, last_token_s=4.0, output_tokens=11, slo_class="chat",
        tpot_slo_s=0.1, thinking_tpot_slo_s=0.5, thinking_tokens=5, thinking_last_s=3.0,
    )  # fmt: skip
    ended = EndedChoice(Origin("r"), 0, "stop", None, "chat", 0.1, None, done, thinking_tpot_slo_s=0.5)
    metrics.observe_end(ended)
    metrics.observe_end(replace(ended, metrics=replace(done, thinking_tpot_slo_s=0.2, tpot_slo_s=None)))
    metrics.observe_end(replace(ended, ending="rejected", metrics=None, tpot_slo_s=None))
    found = samples(metrics)

    def slo(kind: str, outcome: str) -> float:
        name = "adaserve_slo_requests_total"
        return found.get((name, ("class", "chat"), ("metric", kind), ("outcome", outcome)), 0)

    outcomes = ("met", "missed", "rejected")
    assert [slo("tpot", outcome) for outcome in outcomes] == [0, 2, 1]
    assert [slo("thinking_tpot", outcome) for outcome in outcomes] == [1, 1, 1]
    assert [slo("ttft", outcome) for outcome in outcomes] == [0, 0, 0]
    # the slower part of each: 1 s / 6 over 0.1 s, and 1 s / 4 over 0.2 s
    assert found[("adaserve_tpot_over_target_sum",)] == pytest.approx(10 / 6 + 5 / 4)


def test_each_draft_service_has_its_gauges_and_one_state():
    engine = ScriptedEngine(EngineConfig())
    services = {"a:1": ServiceState("open"), "b:1": ServiceState("closed")}
    engine.stats = lambda: EngineStats(StepStats(), drafter=DrafterStats(services=services))
    found = {key: value for key, value in samples(ServerMetrics(engine)).items() if ("service", "a:1") in key}
    service = ("service", "a:1")
    assert found == {
        ("adaserve_drafter_breaker", service, ("state", "open")): 1,
        ("adaserve_drafter_breaker", service, ("state", "half_open")): 0,
        ("adaserve_drafter_breaker", service, ("state", "closed")): 0,
        ("adaserve_drafter_sessions", service): 0,
        ("adaserve_drafter_busy", service): 0,
        ("adaserve_drafter_queue_seconds", service): 0,
        ("adaserve_drafter_connected", service): 0,
    }


def test_without_an_engine_there_are_still_metrics():
    engine = ScriptedEngine(EngineConfig())

    found = samples(ServerMetrics(engine))
    assert found[("adaserve_e2e_seconds_count",)] == 0 and found[("adaserve_engine_up",)] == 0


@pytest.mark.parametrize(
    ("ending", "error_code", "began", "outcome"),
    [
        ("rejected", "queue_full", False, "rejected"),
        ("rejected", "slo_infeasible", False, "rejected"),
        ("rejected", "engine_restarting", False, "missed"),
        ("error", "engine_dead", True, "missed"),
        ("error", None, True, "missed"),
        ("abort", None, True, "missed"),
        ("cancelled", None, True, "cancelled"),
        ("length", None, True, "met"),
    ],
)
def test_only_what_finished_met_a_target_and_only_what_was_refused_is_rejected(ending, error_code, began, outcome):
    metrics = ServerMetrics(ScriptedEngine(EngineConfig()))
    in_time = RequestMetrics(1.0, 1.0, 2.0, 3.0, output_tokens=11, tpot_slo_s=0.2, ttft_slo_s=5.0, slo_class="chat")
    metrics.observe_end(EndedChoice(Origin("r"), 0, ending, error_code, "chat", 0.2, 5.0, in_time if began else None))
    counted = {key[1:]: count for key, count in samples(metrics).items() if key[0] == "adaserve_slo_requests_total"}
    kinds, outcomes = ("all", "tpot", "ttft"), ("met", "missed", "rejected", "cancelled")
    assert counted == {
        (("class", "chat"), ("metric", kind), ("outcome", each)): each == outcome for kind in kinds for each in outcomes
    }


def test_the_route_serves_what_requests_did(server):
    before = server.http.get("/metrics")
    assert before.headers["content-type"].startswith("text/plain; version=")
    server.post(prompt="count me", max_tokens=7, slo_class="chat", user="secret-user")
    text = server.http.get("/metrics").text
    assert 'adaserve_slo_requests_total{class="chat",metric="tpot",outcome="met"}' in text
    assert "secret-user" not in text and "count me" not in text


def test_a_refusal_after_submit_counts_as_rejected(server):
    def refused() -> float:
        found = re.search(r'refused_choices_total{code="queue_full"} (.*)', server.http.get("/metrics").text)
        return float(found[1]) if found else 0.0

    before = refused()
    server.post(prompt="late-full", slo_class="batch", slo_ttft_ms=50, n=2)
    text = server.http.get("/metrics").text
    assert 'adaserve_slo_requests_total{class="batch",metric="ttft",outcome="rejected"} 2.0' in text
    server.post(prompt="late-full")  # without a target
    assert refused() == before + 3
