"""Targets of the thinking over HTTP: from a field or a class, bounded, refused without marks, and what answers, records
and metrics say of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.results.record_store import read_records
from adaserve_jax.server.serve import Observability, load_tokenizer
from adaserve_jax.server.settings import KeySettings, ServerSettings, SloClass
from adaserve_jax.types import SLO
from tests.server.conftest import Running, running
from tests.server.test_reasoning import MarkedTokenizer
from tests.server.test_thinking import marked_tokenizer
from tests.waiting import wait_until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
SETTINGS = ServerSettings(
    classes=(SloClass("both", 100.0, None, 30.0), SloClass("thinks", thinking_tpot_ms=40.0), SloClass("fast", 50.0)),
    min_slo_tpot_ms=5.0, max_slo_tpot_ms=1000.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def marked() -> Iterator[Running]:
    with running(SETTINGS, MarkedTokenizer()) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """A server of a model without marks."""
    with running(SETTINGS) as server:
        yield server


def targets(server: Running, path: str = CHAT, **fields: Any) -> SLO:
    """The targets that the engine was told."""
    body = {CHAT: MESSAGES, COMPLETIONS: {"prompt": "hello", "max_tokens": 4}, RESPONSES: {"input": "hello"}}[path]
    answer = server.post(path, **body, **fields)
    assert answer.status_code == 200, answer.text
    return server.engine.submitted[-1].slo


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, SLO()),
        ({"slo_thinking_tpot_ms": 20}, SLO(thinking_tpot_ms=20)),
        ({"slo_thinking_tpot_ms": 20, "slo_tpot_ms": 50}, SLO(50, thinking_tpot_ms=20)),
        ({"slo_thinking_tpot_ms": 20, "slo_relative": 2.0}, SLO(relative=2.0, thinking_tpot_ms=20)),
        ({"slo_class": "both"}, SLO(100, thinking_tpot_ms=30)),
        ({"slo_class": "thinks"}, SLO(thinking_tpot_ms=40)),
        ({"slo_class": "fast"}, SLO(50)),
        ({"slo_class": "both", "slo_thinking_tpot_ms": 20}, SLO(100, thinking_tpot_ms=20)),
        ({"slo_class": "both", "slo_tpot_ms": 70}, SLO(70, thinking_tpot_ms=30)),
        ({"slo_thinking_tpot_ms": 1}, SLO(thinking_tpot_ms=5)),
        ({"slo_thinking_tpot_ms": 1e9}, SLO(thinking_tpot_ms=1000)),
    ],
)
def test_a_field_comes_before_a_class_and_both_are_bounded(marked: Running, fields: dict[str, Any], told: SLO) -> None:
    for path in (CHAT, RESPONSES):
        assert targets(marked, path, **fields) == told


def test_without_marks_a_class_says_nothing_of_the_thinking(marked: Running, plain: Running) -> None:
    for name, told in (("both", SLO(100)), ("thinks", SLO())):
        for path in (CHAT, COMPLETIONS, RESPONSES):
            assert targets(plain, path, slo_class=name) == told
        assert targets(marked, COMPLETIONS, slo_class=name) == told


def test_without_marks_a_request_s_own_target_is_refused(marked: Running, plain: Running) -> None:
    for path, body in ((CHAT, MESSAGES), (RESPONSES, {"input": "hello"})):
        answer = plain.post(path, **body, slo_thinking_tpot_ms=20)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (
            400, "slo_thinking_tpot_ms", "unsupported_parameter",
        )  # fmt: skip
        assert error["message"].startswith(
            "slo_thinking_tpot_ms must be absent from a request whose thinking has no marks, got 20"
        )
        assert plain.post(path, **body, slo_thinking_tpot_ms=None).status_code == 200
    for server in (marked, plain):
        error = server.post(prompt="hello", slo_thinking_tpot_ms=20).json()["error"]
        assert (error["param"], error["code"]) == ("slo_thinking_tpot_ms", "unsupported_parameter")
        assert error["message"].endswith("only null is accepted; only chats have thinking.")


def test_what_is_no_target_is_refused(marked: Running) -> None:
    for value in (0, -1, "fast", True):
        answer = marked.post(CHAT, **MESSAGES, slo_thinking_tpot_ms=value)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "slo_thinking_tpot_ms", value
    answer = marked.post(CHAT, **MESSAGES, slo_thinking_tpot_ms=-1).json()["error"]
    assert answer["message"] == "slo_thinking_tpot_ms must be a finite number above 0, got -1"
    assert answer["code"] == "invalid_slo"


def test_a_key_bounds_it_too() -> None:
    keys = (KeySettings("slow", "secret", min_slo_tpot_ms=60.0),)
    with running(ServerSettings(keys=keys), MarkedTokenizer()) as server:
        body = {**MESSAGES, "slo_thinking_tpot_ms": 20}
        answer = server.http.post(CHAT, json=body, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert server.engine.submitted[-1].slo == SLO(thinking_tpot_ms=60)


def test_the_model_s_card_has_those_of_classes_that_have_one(marked: Running) -> None:
    classes = marked.http.get("/v1/models").json()["data"][0]["slo_classes"]
    assert classes["both"] == {"tpot_ms": 100.0, "ttft_ms": None, "thinking_tpot_ms": 30.0}
    assert classes["fast"] == {"tpot_ms": 50.0, "ttft_ms": None}


@pytest.fixture(scope="module")
def opened(demo_engine: Any, serve_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """The embedded pair with a template that opens the thinking, and the file of its records."""
    folder = marked_tokenizer(tmp_path_factory.mktemp("marks") / "model", opens=True)
    records = tmp_path_factory.mktemp("records") / "records.sqlite"
    settings = ServerSettings(records=str(records), max_slo_tpot_ms=1e6)
    tokenizer = load_tokenizer(str(folder))
    with Observability(settings) as watchers, serve_engine(demo_engine, tokenizer, settings) as server:
        watchers.attach(server.state)
        yield server, records


def test_answers_records_and_metrics_have_both_parts(opened: tuple[Running, Path]) -> None:
    """Whole and streamed: a target that nobody misses, and one that everybody does."""
    server, path = opened
    body = {**MESSAGES, "max_tokens": 24, "max_thinking_tokens": 12, "ignore_eos": True, "seed": 3}
    asked = ((60_000.0, 60_000.0), (60_000.0, 0.1), (0.1, 60_000.0), (0.1, None), (None, 60_000.0))
    found = []
    for thinking_ms, answer_ms in asked:
        fields = {"slo_thinking_tpot_ms": thinking_ms, "slo_tpot_ms": answer_ms}
        whole = server.post(CHAT, **body, **fields).json()
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
        lines = server.post(CHAT, **body, **fields, stream=True).text.splitlines()
        last = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))
        for slo in (whole["metrics"]["slo"], last["metrics"]["slo"]):
            assert slo.get("thinking_tpot_target_ms") == thinking_ms and slo["tpot_target_ms"] == answer_ms
            if thinking_ms is None:
                assert not {"thinking_tpot_ms", "answer_tpot_ms"} & set(slo)
            else:
                # 12 tokens after the first up to the mark, 11 behind it
                assert 23 * slo["tpot_ms"] == pytest.approx(
                    12 * slo["thinking_tpot_ms"] + 11 * slo["answer_tpot_ms"], rel=0.01
                )
        found.append(whole["metrics"]["slo"]["met"])
    assert found == [True, False, False, False, True]
    wait_until(lambda: len(read_records(path)[0]) == 2 * len(asked))
    records = read_records(path)[0]
    for record, (thinking_ms, answer_ms) in zip(records[::2], asked, strict=True):
        assert record.thinking_tpot_slo_s == (thinking_ms and thinking_ms / 1e3)
        assert record.tpot_slo_s == (answer_ms and answer_ms / 1e3)
        assert (record.thinking_tpot_s is None) == (record.answer_tpot_s is None) == (thinking_ms is None)
    assert [record.tpot_met for record in records[::2]] == found
    exposed = server.http.get("/metrics").text
    counts = {"tpot": (4, 6), "thinking_tpot": (4, 4)}
    for metric, (met, missed) in counts.items():
        for outcome, count in (("met", met), ("missed", missed)):
            labels = f'class="default",metric="{metric}",outcome="{outcome}"'
            assert f"adaserve_slo_requests_total{{{labels}}} {float(count)}" in exposed


def test_a_target_out_of_reach_is_judged_by_itself(opened: tuple[Running, Path]) -> None:
    server, _ = opened
    slo = server.post(CHAT, **MESSAGES, slo_thinking_tpot_ms=0.1, slo_tpot_ms=60_000).json()["metrics"]["slo"]
    assert slo["feasible"] is False
    slo = server.post(CHAT, **MESSAGES, slo_thinking_tpot_ms=60_000, slo_tpot_ms=60_000).json()["metrics"]["slo"]
    assert slo["feasible"] is True
