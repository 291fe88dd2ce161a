"""What the client finds out of a server before it measures it, and what it says when that is no server for it."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adaserve_jax.bench.engine import Ask
from adaserve_jax.bench.http_load import UrlEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Lengths, WorkloadItem
from adaserve_jax.workloads.prompt_text import about_tokens
from tests.bench import fake_server as fake
from tests.bench.fake_server import Act, Asked, FakeServer, stream, token


def models(card: dict[str, Any] | None = None) -> list[Act]:
    return fake.answer("200 OK", json.dumps({"data": [card]} if card else fake.MODELS).encode())


def opened(server: FakeServer, on_note: Callable[[str], None] | None = None, **settings: Any) -> UrlEngine:
    engine = UrlEngine(UrlSettings(server.url, **settings), on_note=on_note)
    engine.close()
    return engine


@pytest.mark.parametrize(
    ("refused", "left"),
    [
        ((), {"include_usage": True, "continuous_usage_stats": True}),
        (("continuous_usage_stats",), {"include_usage": True}),
        (("continuous_usage_stats", "include_usage"), None),
    ],
)
def test_the_best_count_that_is_not_refused_is_asked_for(refused, left):
    def script(request: Asked) -> Sequence[Act]:
        if request.route == "/v1/models":
            return models()
        if any(name in request.body.get("stream_options", {}) for name in refused):
            return fake.answer("400 Bad Request", b'{"error": {"message": "unknown field", "code": 400}}')
        return fake.plain(request.body["max_tokens"])

    with FakeServer(script) as server:
        opened(server, baseline_s=0.01)
        assert server.asked[-1].body.get("stream_options") == left
        assert [request.body.get("max_tokens") for request in server.asked if request.body] == [2] * (len(refused) + 1)


def test_the_baseline_is_measured_one_request_at_a_time():
    def script(request: Asked) -> Sequence[Act]:
        if request.route == "/v1/models":
            return models()
        texts = [act for _ in range(request.body["max_tokens"] - 1) for act in (0.004, token("x"))]
        return stream(token("x"), *texts, token("", finish="length"), fake.usage(request.body["max_tokens"]), fake.DONE)

    with FakeServer(script) as server:
        engine = opened(server)
        assert 0.004 <= engine.about.baseline_s < 0.1
        assert [r.body["max_tokens"] for r in server.asked if r.body] == [2, 32, 32, 32]
        assert {r.body["temperature"] for r in server.asked if r.body} == {0.0}
        assert engine.about.system == server.url.removeprefix("http://") and engine.about.device == "unknown"
        assert engine.about.target == "fake-model" and (engine.about.max_requests, engine.about.max_context) == (0, 0)


def test_without_a_baseline_relative_targets_are_refused():
    def script(request: Asked) -> Sequence[Act]:  # never two tokens
        return models() if request.route == "/v1/models" else stream(token("x", finish="stop"), fake.DONE)

    told: list[str] = []
    with FakeServer(script) as server:
        engine = opened(server, system="theirs", on_note=told.append)
        assert len(told) == 1 and told[0].startswith("theirs: it is sent no cache salt")
        item = WorkloadItem("p", (), 4, "chat", SLO(relative=2.0), 0.0, 0, None)
        assert (engine.about.system, engine.about.policies) == ("theirs", ("theirs",))
        with pytest.raises(ConfigError, match="relative target needs a baseline, and none could be measured"):
            engine.prepare(Ask("r", item, 0, item.slo, "", 4))


def test_a_server_of_this_package_is_told_salts_and_targets_and_says_its_baseline():
    card = {"id": "ours", "owned_by": "adaserve", "baseline_ms": 8.0, "max_model_len": 512}
    version = {"version": "1", "engine": {"device": "tpu", "policy": "adaserve", "target": "t", "draft": "d",
               "jax_version": "0.10", "max_requests": 64, "deterministic": True}}  # fmt: skip

    def script(request: Asked) -> Sequence[Act]:
        if request.route == "/v1/models":
            return models(card)
        return fake.answer("200 OK", json.dumps(version).encode()) if request.route == "/version" else fake.plain(2)

    told: list[str] = []
    with FakeServer(script) as server:
        engine = opened(server, on_note=told.append)
        about = engine.about
        assert not told
        assert (about.system, about.policies, about.target, about.draft) == ("adaserve_jax", ("adaserve",), "t", "d")
        assert (about.device, about.jax_version, about.max_requests, about.max_context) == ("tpu", "0.10", 64, 512)
        assert about.baseline_s == 0.008 and about.deterministic
        item = WorkloadItem("p", (), 4, "chat", SLO(relative=2.0, ttft_ms=50.0), 0.0, 0, None)
        body = json.loads(engine.prepare(Ask("r", item, 3, item.slo, "salt", 4)).message.partition(b"\r\n\r\n")[2])
        assert (body["slo_tpot_ms"], body["slo_ttft_ms"], body["cache_salt"]) == (16.0, 50.0, "salt")
        assert (body["top_k"], body["min_p"], body["seed"]) == (0, 0.0, 3) and "ignore_eos" not in body
        known = replace(item, prompt=None, lengths=Lengths(70, 4))  # as of a trace: a text is made, and its length kept
        body = json.loads(engine.prepare(Ask("r", known, 3, item.slo, "", 4)).message.partition(b"\r\n\r\n")[2])
        assert about_tokens(body["prompt"]) == 70 and body["ignore_eos"] is True


@pytest.mark.parametrize(
    ("acts", "settings", "message"),
    [
        (fake.answer("404 Not Found", b"{}"), {}, "GET /v1/models answered 404; name the model"),
        (fake.answer("401 Unauthorized", b"{}"), {"model": "m"}, "answered 401; give the API key"),
        (fake.answer("403 Forbidden", b"{}"), {"model": "m"}, "answered 403; give the API key"),
        (fake.answer("200 OK", b"<html>"), {"model": "m"}, "must answer with a JSON object"),
        (fake.answer("200 OK", b"[" * 200_000), {"model": "m"}, "must answer with a JSON object"),
        (fake.answer("200 OK", b'{"data": 3}'), {}, "lists no model; name the model"),
        (fake.answer("200 OK", b"[]"), {}, "must answer with a JSON object"),
        (fake.answer("200 OK", b'{"data": []}'), {}, "lists no model; name the model"),
        (["close"], {}, "failed .*closed connection.*; is the server running"),
        ([b"nonsense\r\n\r\n", "close"], {}, "failed .*nonsense"),
        (["silence"], {"silence_timeout_s": 0.1}, "got no answer in 0.1 s; is it the right server"),
    ],
)
def test_a_server_that_lists_no_models(acts, settings, message):
    with FakeServer(lambda _: acts) as server, pytest.raises(ConfigError, match=message):
        opened(server, **settings)


def test_a_server_without_a_list_is_measured_by_the_named_model():
    def script(request: Asked) -> Sequence[Act]:
        return fake.answer("404 Not Found", b"{}") if request.route == "/v1/models" else fake.plain(2)

    with FakeServer(script) as server:
        assert opened(server, model="mine", baseline_s=1.0).about.target == "mine"


@pytest.mark.parametrize(("name", "context"), [("second", 64), (None, 32), ("unlisted", 0)])
def test_of_several_models_the_named_one_is_measured_or_else_the_first(name, context):
    """What is no entry of a model is passed over."""
    cards = [
        None,
        {"max_model_len": 16},
        {"id": 7},
        {"id": "first", "max_model_len": 32},
        {"id": "second", "max_model_len": 64},
    ]

    def script(request: Asked) -> Sequence[Act]:
        listed = fake.answer("200 OK", json.dumps({"data": cards}).encode())
        return listed if request.route == "/v1/models" else fake.plain(2)

    with FakeServer(script) as server:
        about = opened(server, model=name, baseline_s=1.0).about
        assert (about.target, about.max_context) == (name or "first", context)
        assert server.asked[-1].body["model"] == (name or "first")


@pytest.mark.parametrize(("owner", "said", "given_s", "found_s"), [
    ("adaserve", 8, None, 0.008), ("adaserve", 8.0, 0.5, 0.5), ("somebody", 8.0, None, None),
    ("adaserve", True, None, None), ("adaserve", -8.0, None, None), ("adaserve", "8", None, None),
])  # fmt: skip
def test_a_baseline_is_the_given_one_or_what_our_own_server_says_or_else_measured(owner, said, given_s, found_s):
    """None: measured, by three requests after the one that finds how the server counts."""
    card = {"id": "m", "owned_by": owner, "baseline_ms": said}

    def script(request: Asked) -> Sequence[Act]:
        if request.route == "/version":
            return fake.answer("200 OK", b"{}")
        return models(card) if request.route == "/v1/models" else fake.plain(request.body["max_tokens"])

    with FakeServer(script) as server:
        about = opened(server, baseline_s=given_s).about
        assert sum(bool(request.body) for request in server.asked) == (4 if found_s is None else 1)
        assert found_s is None or about.baseline_s == found_s


def test_a_baseline_is_measured_where_no_tokens_are_counted():
    def script(request: Asked) -> Sequence[Act]:
        if request.route == "/v1/models":
            return models()
        return stream(token("x"), 0.05, token("x"), 0.05, token("x", finish="length"), fake.DONE)

    with FakeServer(script) as server:
        assert opened(server).about.baseline_s > 0


@pytest.mark.parametrize(("acts", "times"), [
    (fake.answer("422 Unprocessable Entity", b"{}"), 3),
    (fake.answer("404 Not Found", b"{}"), 3),
    (fake.answer("500 Internal Server Error", b"oops"), 1),
    (stream(token("x"), fake.event({"error": {"message": "boom", "code": "engine_error"}})), 1),
])  # fmt: skip
def test_what_a_server_refuses_is_asked_for_with_less_and_a_failure_ends_the_search(acts, times):
    with FakeServer(lambda request: models() if request.route == "/v1/models" else acts) as server:
        with pytest.raises(ConfigError, match="must answer a request for 2 tokens of model 'fake-model' with a stream"):
            opened(server)
        assert sum(bool(request.body) for request in server.asked) == times


@pytest.mark.parametrize(
    ("acts", "message"),
    [
        (fake.answer("200 OK", b'{"choices": []}'), "with a stream, got not_a_stream"),
        (fake.answer("404 Not Found", b'{"detail": "no model x"}'), "got http_404: no model x; the endpoint or"),
        (fake.answer("500 Internal Server Error", b"oops"), "got http_500: oops"),
        (["close"], "got disconnected"),
    ],
)
def test_a_server_that_does_not_stream(acts, message):
    with (
        FakeServer(lambda request: models() if request.route == "/v1/models" else acts) as server,
        pytest.raises(ConfigError, match=message),
    ):
        opened(server)


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=r"failed .*Connection refused.*; is the server running"):
        UrlEngine(UrlSettings(f"http://127.0.0.1:{port}", connect_timeout_s=1.0))


def test_without_its_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httptools", None)
    with pytest.raises(ConfigError, match=r"needs httptools, .*pip install 'adaserve-jax\[client\]'"):
        UrlEngine(UrlSettings("http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "must be like http://127.0.0.1:8000"),
        ({"url": "ftp://host"}, "got 'ftp://host'"),
        ({"url": "http://user:word@host"}, "without a user"),
        ({"url": "http://host/?a=1"}, "a query"),
        ({"url": "http://host:99999"}, "must be like"),
        ({"url": "http://[::1"}, "must be like"),
        ({"url": "http://a b"}, "must be like"),
        ({"endpoint": "responses"}, "endpoint must be one of auto, completions, chat, got 'responses'"),
        ({"silence_timeout_s": 0.0}, "silence_timeout_s must be a finite number of seconds above 0, got 0.0"),
        ({"baseline_s": float("inf")}, "baseline_s must be"),
        ({"spare_connections": -1}, "spare_connections must be an integer from 0 to 1024, got -1"),
        ({"headers": (("a b", "c"),)}, "a header must be a name and one line"),
        ({"headers": (("a", "b\r\nc: d"),)}, "a header must be"),
        ({"api_key": "se\ncret"}, "got 'authorization' with its value"),
        (
            {"extra_body": {"stream": False}},
            "extra_body must leave out model, prompt, messages, stream, max_tokens, got 'stream'",
        ),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message) as told:
        UrlSettings(**{"url": "http://host", **settings})
    assert "se\ncret" not in str(told.value)


def test_routes_below_a_url_with_and_without_the_version():
    for url, route in (
        ("http://h", "/v1/models"),
        ("https://h/v1/", "/v1/models"),
        ("http://h:1/api", "/api/v1/models"),
    ):
        assert UrlSettings(url).route("v1/models") == route
    assert (UrlSettings("https://h").port, UrlSettings("http://[::1]:80").host) == (443, "::1")
