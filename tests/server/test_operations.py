"""Health, models, tokens, keys, request ids, caps, back-pressure, disconnects, draining, death of the engine."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.server.settings import ServerSettings
from tests.server.scripted import ScriptedEngine
from tests.waiting import wait_until


def code_of(response) -> str:
    return response.json()["error"]["code"]


def test_health_models_version_tokens(server):
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.get("/ready").status_code == 200
    with server.openai_client() as client:
        (model,) = client.models.list().data
        assert client.models.retrieve("scripted") == model
    assert (model.id, model.owned_by, model.max_model_len, model.baseline_ms) == ("scripted", "adaserve", 512, 10.0)
    version = server.http.get("/version").json()
    assert version["version"] == "0.1.0" and version["engine"]["policy"] == "scripted"
    tokens = server.post("/tokenize", prompt="hé").json()
    assert tokens == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 512}
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "hé"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "a"}]).json()
    assert bytes(chat["tokens"]).decode() == "user: a\nassistant:"
    assert server.post("/tokenize", prompt="").json()["tokens"] == []


def test_request_ids_are_echoed_when_fit(server):
    assert server.http.get("/health", headers={"x-request-id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for unfit in ("x" * 200, "a b", "a;b"):
        given = server.http.get("/health", headers={"x-request-id": unfit}).headers["x-request-id"]
        assert given != unfit and len(given) == 32


def test_bodies_over_the_cap_are_refused_declared_or_not(start_server):
    with start_server(ServerSettings(max_body_bytes=1000)) as server:
        fits = json.dumps({"prompt": "x" * 400, "max_tokens": 1}).encode()
        too_large = json.dumps({"prompt": "x" * 990}).encode()
        headers = {"content-type": "application/json"}
        assert server.http.post("/v1/completions", content=fits, headers=headers).status_code == 200
        for content in (too_large, iter([too_large[:600], too_large[600:]])):
            response = server.http.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413 and code_of(response) == "request_too_large"
        assert server.http.post("/v1/completions", content=iter([fits]), headers=headers).status_code == 200


def test_no_room_is_429_before_tokenising_and_counts_as_rejected(start_server):
    with start_server(ServerSettings(max_inflight=3)) as server:
        body = {"prompt": "slow", "max_tokens": 400, "n": 2, "stream": True}
        request = server.http.build_request("POST", "/v1/completions", json=body)
        held = server.http.send(request, stream=True)
        encoded = []
        tokenizer = server.state.tokenizer
        server.state._tokenizer = type("Counting", (), {"encode": lambda _, text: encoded.append(text)})()
        refused = server.post(prompt="x", n=2, slo_class="interactive")
        assert (refused.status_code, code_of(refused)) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert encoded == []
        server.state._tokenizer = tokenizer
        assert server.post(prompt="x").status_code == 200
        text = server.http.get("/metrics").text
        assert 'adaserve_slo_requests_total{class="interactive",metric="tpot",outcome="rejected"} 2.0' in text
        held.close()
        wait_until(lambda: server.state.slots.used == 0)
        assert server.post(prompt="x", n=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(server, stream):
    before = len(server.engine.aborted)
    body = json.dumps({"prompt": ["slow one", "slow two"], "max_tokens": 400, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        wait_until(lambda: server.state.slots.used == 2)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: len(server.engine.aborted) == before + 2)
    wait_until(lambda: server.state.slots.used == 0 and not server.state.in_flight)
    assert server.post(prompt="next", max_tokens=4).json()["choices"][0]["text"] == "next"


def test_before_the_engine_is_ready(start_server):
    with start_server(ready=False) as server:
        assert server.http.get("/health").json()["status"] == "starting"
        ready = server.http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "starting")
        assert server.http.get("/ping").status_code == 503, "a hosting service would send requests"
        assert int(ready.headers["retry-after"]) >= 1
        for response in (server.post(prompt="x"), server.http.get("/v1/models"), server.post("/tokenize", prompt="x")):
            assert (response.status_code, code_of(response)) == (503, "not_ready")
            assert "retry-after" in response.headers


def test_the_death_of_the_engine_is_told_to_everyone(start_server):
    with start_server() as server:
        results = {}

        def slow(stream: bool) -> None:
            results[stream] = server.post(prompt="slow", max_tokens=400, stream=stream)

        threads = [threading.Thread(target=slow, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.state.slots.used == 2)
        dying = server.post(prompt="die now")
        assert (dying.status_code, code_of(dying)) == (503, "engine_dead")
        for thread in threads:
            thread.join()
        assert (results[False].status_code, code_of(results[False])) == (503, "engine_dead")
        assert '"code": "engine_dead"' in results[True].text and results[True].text.endswith("data: [DONE]\n\n")
        after = server.post(prompt="x")
        assert (after.status_code, code_of(after)) == (503, "engine_dead")
        assert {server.http.get(path).status_code for path in ("/health", "/ready", "/ping")} == {503}
        assert server.http.get("/metrics").status_code == 200


def test_draining_takes_nothing_new_and_an_abort_is_told(start_server):
    with start_server() as server:
        results = []
        thread = threading.Thread(target=lambda: results.append(server.post(prompt="slow", max_tokens=400)))
        thread.start()
        wait_until(lambda: server.state.slots.used == 1)
        server.state.drain()
        refused = server.post(prompt="x")
        assert (refused.status_code, code_of(refused)) == (503, "shutting_down")
        assert server.http.get("/ready").status_code == 503 and server.http.get("/health").status_code == 200
        assert server.http.get("/ping").status_code == 200
        server.state.abort_all()
        thread.join()
        assert (results[0].status_code, code_of(results[0])) == (503, "aborted")


def test_a_bug_in_a_route_is_a_500_and_the_server_goes_on(start_server):
    with start_server() as server:
        good, server.state._tokenizer = server.state._tokenizer, object()
        response = server.post(prompt="x")
        assert (response.status_code, code_of(response)) == (500, "internal_error")
        assert "AttributeError" not in response.text
        server.state._tokenizer = good
        assert server.post(prompt="x").status_code == 200
        assert server.state.slots.used == 0


def test_before_the_engine_has_started_requests_are_told_so(serve_engine):
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))  # never started, so that it has no info
    with serve_engine(engine, None, ServerSettings()) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
        ):
            response = server.http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
