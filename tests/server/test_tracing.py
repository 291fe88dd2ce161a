"""Spans of a server: ids, times, attributes, what a collector gets over HTTP, and that a dead one costs nothing."""

from __future__ import annotations

import gzip
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.record_store import RecordStore, read_records
from adaserve_jax.results.records import ServedRecord
from adaserve_jax.server.records import Recorder, Retention
from adaserve_jax.server.serve import Observability
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.tracing import SpanMaker, Tracer, open_exporter
from tests.conftest import ROOT
from tests.results.made import begun, made, refused
from tests.server.scripted import ByteTokenizer, ScriptedEngine
from tests.slow import slow_after
from tests.waiting import wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def traced(start_server):
    """A server whose spans are kept in memory; they are there once the block has ended."""

    @contextmanager
    def start() -> Iterator:
        exporter = InMemorySpanExporter()
        with start_server() as server:
            tracer = Tracer(server.state, exporter, every_s=0.01)
            server.state.observers.append(tracer.observe)
            yield server, exporter
            tracer.close()

    return start


def span_of(choice: ServedRecord) -> ReadableSpan:
    span = SpanMaker().make(choice, operation="chat", traceparent="")
    assert span is not None
    return span


def dropped(server) -> float:
    return server.state.metrics.registry.get_sample_value("adaserve_spans_dropped_total")


def test_a_span_per_choice_continues_the_callers_trace(traced):
    begin_ns = time.time_ns()
    with traced() as (server, exporter):
        conversation = {"messages": [{"role": "user", "content": "a secret"}]}
        for path, body in (("completions", {"prompt": "a secret"}), ("chat/completions", conversation)):
            server.http.post(
                f"/v1/{path}",
                json=body | {"max_tokens": 7, "slo_class": "chat"},
                headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"},
            )
    end_ns = time.time_ns()
    text, chat = exporter.get_finished_spans()
    assert (text.name, chat.name) == ("text_completion scripted", "chat scripted")
    for span in (text, chat):
        assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
        assert span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
        assert begin_ns <= span.start_time <= span.end_time <= end_ns
        names = [event.name for event in span.events]
        assert names == ["queued", "first_scheduled", "first_token", "last_token", "ended"]
        times = [event.timestamp for event in span.events]
        assert times[0] == span.start_time and times[-1] == span.end_time
        assert times[:1] + times[2:] == sorted(times[:1] + times[2:])
        assert span.attributes["adaserve.request_id"] == "mine"
        assert span.attributes["gen_ai.usage.output_tokens"] == 7
        assert "secret" not in span.to_json()
    assert text.context.span_id != chat.context.span_id


def test_without_a_caller_the_request_id_is_the_trace(traced):
    with traced() as (server, exporter):
        made_id = server.post(prompt="x", n=2, max_tokens=1).headers["x-request-id"]
        server.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
        server.http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": "00-bad-worse-01"})
        server.http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    spans = exporter.get_finished_spans()
    assert len(spans) == 4  # the last caller did not want it sampled
    assert [f"{span.context.trace_id:032x}" for span in spans[:2]] == [made_id, made_id]
    assert {span.attributes["adaserve.choice"] for span in spans[:2]} == {0, 1}
    assert all(span.parent is None for span in spans)
    assert len({span.context.trace_id for span in spans}) == 3


def test_a_request_of_an_adapter_is_traced_and_recorded_by_its_name(serve_engine, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    engine = ScriptedEngine(EngineConfig(target="models/scripted", lora=(f"sql={tmp_path}",)))
    engine.start()
    exporter = InMemorySpanExporter()
    with serve_engine(engine, ByteTokenizer(), ServerSettings()) as server:
        tracer = Tracer(server.state, exporter, every_s=0.01)
        recorder = Recorder(server.state, RecordStore.open(tmp_path / "records"), Retention(3600.0, 1 << 30))
        server.state.observers += [tracer.observe, recorder.observe]
        for model in ("sql", None):
            assert server.post(prompt="x", model=model, max_tokens=1).status_code == 200
        tracer.close()
        recorder.close()
    found, _ = read_records(tmp_path / "records")
    assert [each.model for each in found] == ["sql", "scripted"]
    engine.close()
    named, plain = exporter.get_finished_spans()
    for span, model in ((named, "sql"), (plain, "scripted")):
        assert span.name == f"text_completion {model}"
        assert span.attributes["gen_ai.request.model"] == span.attributes["gen_ai.response.model"] == model


def test_times_and_attributes_are_those_of_the_choice():
    choice = made()[1]
    span = span_of(choice)
    assert (span.start_time, span.end_time) == (1001 * 10**9, 1003 * 10**9)
    assert [(event.name, event.timestamp / 1e9) for event in span.events] == [
        ("queued", 1001.0), ("first_scheduled", 1001.75), ("first_token", 1002.0), ("last_token", 1003.0),
        ("ended", 1003.0),
    ]  # fmt: skip
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "adaserve", "gen_ai.request.model": "served",
        "gen_ai.response.model": "served", "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 0,
        "adaserve.request_id": "b", "adaserve.choice": 0, "adaserve.key": "", "adaserve.policy": "adaserve",
        "adaserve.queue_s": 0.75, "adaserve.ttft_s": 1.0, "adaserve.tpot_s": 0.5,
        "adaserve.verify_steps": 2, "adaserve.drafted_tokens": 4, "adaserve.accepted_tokens": 0,
        "adaserve.preemptions": 0, "adaserve.slo.class": "chat", "adaserve.slo.tpot_target_s": 0.125,
        "adaserve.slo.tpot_met": False, "adaserve.slo.met": False, "adaserve.slo.feasible": True,
        "adaserve.slo.cause": "budget",
    }  # fmt: skip
    assert dict(span.attributes) == expected


def test_a_refusal_is_an_error_without_length():
    span = span_of(refused("c", 1004.0, "queue_full"))
    assert span.start_time == span.end_time == 1004 * 10**9
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "queue_full")
    assert span.attributes["error.type"] == "queue_full"
    assert [event.name for event in span.events] == ["queued", "ended"]


def test_attributes_are_those_of_the_conventions_and_documented():
    modules = (gen_ai_attributes, error_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    text = (ROOT / "docs" / "records.md").read_text()
    aborted = begun("e", 1.0, ended=2.0, ttft=0.5, last=0.5, tokens=1, ttft_slo=1.0, ending="abort")
    for choice in (made()[0], made()[1], aborted):
        span = span_of(choice)
        for name in span.attributes:
            assert f"`{name}`" in text
            assert name in known or name.startswith("adaserve.") or name == "gen_ai.usage.cache_read.input_tokens"
        for event in span.events:
            assert f"`{event.name}`" in text


def test_the_environment_names_the_service(monkeypatch):
    assert span_of(made()[0]).resource.attributes["service.name"] == "adaserve"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "blue")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    named = span_of(made()[0]).resource.attributes
    assert (named["service.name"], named["deployment.environment.name"]) == ("blue", "test")


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """A collector on a loopback port: its URL, and (path, body) of what it got."""
    got: list[tuple[str, ExportTraceServiceRequest]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", got
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("suffix", slow_after(2, ["", "/v1/traces/", "/", "/v1/traces"]))
def test_a_collector_gets_spans_over_http(start_server, suffix):
    with collector() as (url, got):
        settings = ServerSettings(otlp_endpoint=url + suffix)
        with Observability(settings) as watchers, start_server(settings) as server:
            watchers.attach(server.state)
            caller = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            server.http.post("/v1/completions", json={"prompt": "x"}, headers=caller)
        assert dropped(server) == 0
    ((path, request),) = got
    assert path == "/v1/traces"
    (sent,) = request.resource_spans
    assert {a.key: a.value.string_value for a in sent.resource.attributes}["service.name"] == "adaserve"
    (span,) = sent.scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "text_completion scripted" and len(span.events) == 5


def test_a_dead_collector_costs_a_counter(start_server, caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    exporter = open_exporter(url)
    with start_server() as server, caplog.at_level(logging.WARNING):
        tracer = Tracer(server.state, exporter, every_s=0.01, limit=2)
        server.state.observers.append(tracer.observe)
        for _ in range(6):
            assert server.post(prompt="x", max_tokens=1).status_code == 200
        wait_until(lambda: dropped(server) >= 4)
        exporter.shutdown()
        tracer.close()
        wait_until(lambda: dropped(server) == 6)
    said = [each for each in caplog.records if "opentelemetry" in each.name or each.name.endswith("tracing")]
    assert len(said) == 1 and "the server goes on" in said[0].getMessage()


@pytest.mark.parametrize("module", ["opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk"])
def test_it_says_how_to_install_what_is_missing(monkeypatch, module: str):
    monkeypatch.delitem(sys.modules, "adaserve_jax.server.tracing")
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"needs the package .*; run: pip install 'adaserve-jax\[otel\]'"):
        Observability(ServerSettings(otlp_endpoint="http://127.0.0.1:4318"))
