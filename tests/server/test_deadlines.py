"""Deadlines and waits over HTTP: from a field, a class or a gateway's header, and what answers, records and metrics say
of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.results.record_store import read_records
from adaserve_jax.server.serve import Observability, load_tokenizer
from adaserve_jax.server.settings import ServerSettings, SloClass
from adaserve_jax.types import SLO
from tests.server.conftest import Running, running
from tests.waiting import wait_until

SETTINGS = ServerSettings(
    classes=(SloClass("report", 100.0, e2e_ms=8000.0, max_queue_ms=2000.0),), min_slo_ttft_ms=5.0, trust_gateway=True
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(SETTINGS) as made:
        yield made


@pytest.mark.parametrize(
    ("fields", "headers", "slo", "max_queue_s"),
    [
        ({}, {}, SLO(), 0.0),
        ({"slo_e2e_ms": 4000}, {}, SLO(e2e_ms=4000), 0.0),
        ({"slo_e2e_ms": 1}, {}, SLO(e2e_ms=5), 0.0),
        ({"slo_class": "report"}, {}, SLO(100, e2e_ms=8000), 2.0),
        ({"slo_class": "report", "slo_e2e_ms": 700, "max_queue_ms": 50}, {}, SLO(100, e2e_ms=700), 0.05),
        ({"max_queue_ms": 300}, {"x-slo-e2e-ms": "900"}, SLO(e2e_ms=900), 0.3),
        ({"slo_e2e_ms": 800}, {"x-llm-d-slo-e2e-ms": "900"}, SLO(e2e_ms=800), 0.0),
    ],
)
def test_a_field_comes_before_a_header_and_both_before_a_class(
    server: Running, fields: dict[str, Any], headers: dict[str, str], slo: SLO, max_queue_s: float
) -> None:
    bodies = {
        "/v1/completions": {"prompt": "hello"}, "/v1/responses": {"input": "hello"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    }  # fmt: skip
    for path, body in bodies.items():
        assert server.http.post(path, json={**body, **fields}, headers=headers).status_code == 200
        told = server.engine.submitted[-1]
        assert (told.slo, told.max_queue_s) == (slo, max_queue_s)


def test_the_model_s_card_has_the_deadlines_of_classes(server: Running) -> None:
    classes = server.http.get("/v1/models").json()["data"][0]["slo_classes"]
    assert classes["report"] == {"tpot_ms": 100.0, "ttft_ms": None, "e2e_ms": 8000.0}
    assert "e2e_ms" not in classes["default"]


def test_answers_records_and_metrics_judge_the_deadline(demo_engine: Any, serve_engine: Any, tmp_path: Path) -> None:
    """One that nobody misses, and one that everybody does."""
    settings = ServerSettings(records=str(tmp_path / "records.sqlite"))
    with Observability(settings) as watchers, serve_engine(demo_engine, load_tokenizer("demo"), settings) as served:
        watchers.attach(served.state)
        body = {"prompt": "def total(", "max_tokens": 20, "ignore_eos": True}
        for deadline_ms, met in ((60_000.0, True), (1.0, False)):
            slo = served.post(**body, slo_e2e_ms=deadline_ms).json()["metrics"]["slo"]
            assert (slo["e2e_target_ms"], slo["met"]) == (deadline_ms, met)
            assert slo["e2e_ms"] > 1.0 and slo["tpot_target_ms"] is None
        assert "e2e_ms" not in served.post(**body).json()["metrics"]["slo"]
        wait_until(lambda: len(read_records(tmp_path / "records.sqlite")[0]) == 3)
        records = read_records(tmp_path / "records.sqlite")[0]
        assert [(record.e2e_slo_s, record.e2e_met, record.slo_met) for record in records] == [
            (60.0, True, True), (0.001, False, False), (None, None, None),
        ]  # fmt: skip
        exposed = served.http.get("/metrics").text
        for outcome in ("met", "missed"):
            assert f'adaserve_slo_requests_total{{class="default",metric="e2e",outcome="{outcome}"}} 1.0' in exposed


def test_what_did_not_begin_in_time_is_answered_with_504(demo_engine: Any, serve_engine: Any) -> None:
    """All slots are taken by one request's choices, which go on undisturbed."""
    places = demo_engine.info.max_requests
    with serve_engine(demo_engine, load_tokenizer("demo"), ServerSettings()) as served, ThreadPoolExecutor(1) as others:
        long = {"prompt": "def", "n": places, "max_tokens": 40, "ignore_eos": True}
        running = others.submit(served.post, **long)
        wait_until(lambda: demo_engine.stats().scheduler.running == places)
        answer = served.post(prompt="late", max_tokens=2, max_queue_ms=10)
        assert answer.status_code == 504
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("queue_timeout", "timeout_error")
        assert "had not begun after its max_queue_ms of 10 ms" in error["message"]
        assert running.result().json()["usage"]["completion_tokens"] == 40 * places
        assert served.post(prompt="late", max_tokens=2, max_queue_ms=60_000).status_code == 200
