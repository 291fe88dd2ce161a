"""What a router does with a request: passed on unchanged, tried elsewhere, cut, refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from adaserve_jax.cluster import forwarding
from adaserve_jax.cluster.forwarding import EventBuffer, RouterMetrics
from adaserve_jax.cluster.router import UNROUTED_PATHS
from adaserve_jax.cluster.router_client import NoAnswer, request_json
from adaserve_jax.cluster.targets import Balancer, TargetSet
from tests.bench.fake_server import STREAM, FakeServer, answer, chunk, stream, token
from tests.cluster.conftest import BODY, HEALTHY, TOKEN, error, events, routed, target, whole
from tests.conftest import ROOT
from tests.documents import rows
from tests.server.conftest import running
from tests.waiting import wait_until

GENERATION = "/v1/completions"


@pytest.fixture(scope="module")
def pair():
    """A real server over a scripted engine, and a router in front of it."""
    with running() as server, routed(server.url) as router:
        yield server, router


def same_but_for_ids(one: httpx.Response, other: httpx.Response) -> bool:
    """What a server answers twice to one request, but for ids and times."""

    def kept(text: str):
        parts = [
            json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line[:7] in ("data: {", text[:7])
        ]
        return [{k: v for k, v in part.items() if k not in ("id", "created", "metrics")} for part in parts]

    kind = one.headers["content-type"] == other.headers["content-type"]
    return one.status_code == other.status_code and kind and kept(one.text) == kept(other.text)


@pytest.mark.parametrize("path, more", [
    (GENERATION, {}),
    (GENERATION, {"stream": True, "n": 2, "slo_tpot_ms": 20}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "stream": True}),
    (GENERATION, {"prompt": 5}),
    (GENERATION, {"slo_class": "unheard of"}),
    ("/tokenize", {}),
    ("/nothing", {}),
])  # fmt: skip
def test_an_answer_is_that_of_the_server(pair, path, more):
    server, router = pair
    assert same_but_for_ids(server.post(path, **BODY | more), router.post(path, **more))


def test_the_responses_api_goes_through_the_router(pair):
    """Its counts are read from the end of the answer, behind all that it repeats of the request."""
    router = pair[1]
    asked = {"input": "hello", "max_output_tokens": 12, "metadata": {"k": "v" * 9000}, "stream": True}
    whole = router.http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 12}).json()
    (target,) = router.router.targets
    before = target.tokens_per_event
    *_, last, done = router.http.post("/v1/responses", json=asked).text.split("\n\n")[:-1]
    named, data = last.split("\n")
    assert (named, done) == ("event: response.incomplete", "data: [DONE]")
    for response in (whole, json.loads(data.removeprefix("data: "))["response"]):
        assert response["output"][0]["content"][0]["text"] == "user: hello\n"
    wait_until(lambda: target.tokens_per_event != before)
    assert router.http.get("/v1/responses/resp_1").json()["error"]["code"] == "not_found"


def test_other_methods_and_paths_reach_the_server(pair):
    server, router = pair
    assert router.http.get("/v1/models").json() == server.http.get("/v1/models").json()
    assert router.http.head("/v1/models").status_code == server.http.head("/v1/models").status_code == 200
    assert router.http.delete("/v1/models").json() == server.http.delete("/v1/models").json()
    assert router.http.post(GENERATION, content=b"{not json").json()["error"]["code"] == "invalid_json"
    assert router.http.options(GENERATION).headers["allow"] == server.http.options(GENERATION).headers["allow"]


def test_keys_are_the_servers_to_check_and_the_request_id_is_one():
    with FakeServer(target(lambda _: whole())) as server, routed(server.url) as router:
        headers = {"authorization": "Bearer sk-of-a-client", "x-request-id": "mine-1", "connection": "close", "te": "x"}
        answered = router.http.post(f"{GENERATION}?a=1", json=BODY, headers=headers)
        sent = next(asked for asked in server.asked if asked.route.startswith(GENERATION))
    assert sent.route == f"{GENERATION}?a=1" and sent.body == BODY
    assert sent.headers["authorization"] == "Bearer sk-of-a-client"
    assert sent.headers["x-request-id"] == answered.headers["x-request-id"] == "mine-1"
    assert sent.headers["host"] == server.url.removeprefix("http://") and "te" not in sent.headers


@pytest.mark.parametrize("kind, body", [("application/json", b"{}"), ("text/event-stream", b"data: [DONE]\n\n")])
def test_headers_of_an_answer_that_come_several_times_pass_each(kind, body):
    script = target(lambda _: answer("200 OK", body, kind, "set-cookie: a=1", "x-of-a-server: 7", "Set-Cookie: b=2, c"))
    with FakeServer(script) as server, routed(server.url) as router:
        answered = router.post()
    assert answered.content == body and answered.headers["x-of-a-server"] == "7"
    assert answered.headers.get_list("set-cookie") == ["a=1", "b=2, c"]


@pytest.mark.parametrize("first", [
    ["close"],
    ["reset"],
    [b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\ncontent-type: application/json\r\n\r\n{", "close"],
    [STREAM, "close"],
    [STREAM, chunk(b"data: {"), "close"],
    error("503 Service Unavailable", "engine_restarting"),
    error("503 Service Unavailable", "shutting_down"),
    error("429 Too Many Requests", "overloaded"),
])  # fmt: skip
def test_what_brought_nothing_is_tried_at_another_target(first):
    asked: list[int] = []

    def each(number: int):
        def generate(_):
            asked.append(number)
            return first if number == asked[0] else whole(f"of {number}")

        return target(generate)

    with (
        FakeServer(each(0)) as one,
        FakeServer(each(1)) as two,
        routed(one.url, two.url, router="round-robin") as router,
    ):
        text = router.post().json()["choices"][0]["text"]
        assert set(asked) == {0, 1} and text == f"of {asked[-1]}"
        router.up(2)  # the one that failed says that it is well, and is used again


def test_a_target_that_an_answer_shows_to_be_down_is_logged(caplog):
    unfit = target(lambda _: error("503 Service Unavailable", "engine_restarting"))
    with FakeServer(unfit) as one, routed(one.url, most_wait=0.0) as router:
        assert router.post().status_code == 503
    assert any(f"target {one.url.removeprefix('http://')} is down" in text for text in caplog.messages), caplog.messages


def test_a_stream_that_is_cut_ends_with_an_error_and_no_half_event():
    cut = [STREAM, chunk(token("whole")), chunk(token("half")[:9]), "close"]
    with FakeServer(target(lambda _: cut)) as server, routed(server.url) as router:
        text = router.post(stream=True).text
        assert router.router.status()["targets"][0]["cuts"] == 1
    first, second, done = text.split("\n\n")[:3]
    assert first + "\n\n" == token("whole").decode() and done == "data: [DONE]"
    failure = json.loads(second.removeprefix("data: "))["error"]
    assert failure["code"] == "target_lost" and failure["type"] == "service_unavailable"


@pytest.mark.parametrize("last", [
    b'data: {"error": {"message": "m", "type": "t", "param": null, "code": "engine_restarting"}}\n\n',
    b'event: response.failed\ndata: {"type":"response.failed"}\n\n',
    b'event: response.failed\ndata: {"instructions":"' + b"x" * 5000 + b'"}\n\n',
])  # fmt: skip
def test_a_stream_that_its_target_ends_with_an_error_counts_as_failed(last):
    broken, whole_one = stream(token("a"), last), events('\\"error\\": {')
    asked: list[int] = []

    def generate(_):
        asked.append(1)
        return broken if len(asked) == 1 else whole_one

    with FakeServer(target(generate)) as server, routed(server.url) as router:
        assert last.decode() in router.post(stream=True).text
        assert router.post(stream=True).status_code == 200
        (shown,) = router.router.status()["targets"]
        assert (shown["failures"], shown["cuts"], shown["state"]) == (1, 0, "up")
        assert "adaserve_router_failures_total" in router.http.get("/metrics").text


def test_the_targets_addresses_are_told_to_prometheus_and_their_restarts_to_whoever_asks():
    healthy = answer("200 OK", b'{"status":"ok","detail":"","restarts":3}')
    script = target(lambda _: whole())
    with (
        FakeServer(lambda it: healthy if it.route == "/health" else script(it)) as server,
        routed(server.url) as router,
    ):
        name = server.url.removeprefix("http://")
        found = router.http.get("/cluster/targets")
        assert found.json() == [{"targets": [name], "labels": {"__scheme__": "http"}}]
        assert found.headers["content-type"] == "application/json"
        assert router.http.get("/cluster").json()["targets"][0]["engine_restarts"] == 3


def test_what_the_router_refuses_itself_is_counted():
    with FakeServer(target(lambda _: whole())) as server, routed(server.url, most_requests=1) as router:
        assert router.http.get("/dashboard").status_code == 404
        assert 'adaserve_router_answers_total{status="404"} 1.0' in router.http.get("/metrics").text


def test_a_bug_in_the_router_counts_as_500(pair, monkeypatch):
    def fails(*_) -> int:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Balancer, "choose", fails)
        assert pair[1].post().status_code == 500
    metrics = pair[1].http.get("/metrics").text
    assert 'adaserve_router_answers_total{status="500"} 1.0' in metrics and 'status="499"' not in metrics


@pytest.mark.parametrize("begun", [[], [STREAM, chunk(token("a"))]])
def test_what_hangs_at_a_target_that_hangs_is_given_up(begun):
    """Meanwhile the target is asked for nothing but its health, which would take its time too."""
    asked: list[int] = []
    silent: list[str] = []

    def each(number: int):
        def generate(_):
            asked.append(number)
            return [*begun, "silence"] if number == asked[0] else whole(f"of {number}")

        alive = target(generate)

        def script(it):
            if asked[:1] != [number]:
                return alive(it)
            if silent or it.route == "/health":
                silent.append(it.route)
            return ["silence"] if it.route == "/health" else alive(it)

        return script

    fast = {"router": "round-robin", "poll_timeout": 0.3}
    with FakeServer(each(0)) as one, FakeServer(each(1)) as two, routed(one.url, two.url, **fast) as router:
        answered = router.post(stream=bool(begun))
        if begun:
            assert json.loads(answered.text.split("\n\n")[1].removeprefix("data: "))["error"]["code"] == "target_lost"
        else:
            assert answered.json()["choices"][0]["text"] == f"of {asked[-1]}" and asked[0] != asked[-1]
    assert set(silent) == {"/health"}


def test_what_goes_on_at_a_target_that_is_slow_to_say_how_it_is_goes_on():
    held = threading.Event()
    script = target(lambda _: [STREAM, *[part for _ in range(20) for part in (chunk(token("a")), 0.1)], b"0\r\n\r\n"])

    def slow(it):
        if it.route != "/health":
            held.set()
        return ["silence"] if it.route == "/health" and held.is_set() else script(it)

    with FakeServer(slow) as server, routed(server.url, poll_timeout=0.8) as router:
        text = router.post(stream=True).text
    assert text == token("a").decode() * 20


@pytest.mark.parametrize("route, said", [
    ("/metrics", b"adaserve_requests_running 1e999\n"),
    ("/metrics", b"adaserve_requests_running 1.2.3\n"),
    ("/version", b"[" * 200_000),
    ("/version", b'{"engine": {"max_requests": Infinity}}'),
    ("/v1/models", b'{"data": [{"baseline_ms": 1e999, "slo_classes": {}}]}'),
    ("/health", b"[" * 200_000),
])  # fmt: skip
def test_whatever_a_target_says_of_itself_it_is_asked_on(route, said):
    down = threading.Event()
    cards = b'{"data": [{"baseline_ms": 10, "slo_classes": {}}]}'

    def script(it):
        if it.route == "/health" and down.is_set():
            return answer("200 OK", said) if route == "/health" else error("503 Service Unavailable", "dead")
        if it.route == "/health":
            return HEALTHY
        return answer("200 OK", said if it.route == route else cards if it.route == "/v1/models" else b"{}")

    with FakeServer(script) as server, routed(server.url) as router:
        wait_until(lambda: [it.route for it in server.asked].count("/metrics") > 1)
        down.set()
        router.up(0)
        down.clear()
        router.up(1)


def test_a_target_that_was_down_is_asked_for_its_classes_again():
    """It may have come back with others. While it is up it is asked once."""
    down = threading.Event()
    card = b'{"data": [{"baseline_ms": 10, "slo_classes": {}}], "engine": {"max_requests": 4}}'

    def script(it):
        if it.route == "/health":
            return error("503 Service Unavailable", "dead") if down.is_set() else HEALTHY
        return answer("200 OK", card)

    with FakeServer(script) as server, routed(server.url) as router:

        def times(route: str) -> int:
            return [it.route for it in server.asked].count(route)

        wait_until(lambda: times("/metrics") > 2)
        assert times("/v1/models") == times("/version") == 1
        down.set()
        router.up(0)
        down.clear()
        router.up(1)
        wait_until(lambda: times("/v1/models") == times("/version") == 2)


def test_a_long_answer_that_is_cut_is_neither_whole_nor_begun_again(monkeypatch, caplog):
    monkeypatch.setattr(forwarding, "MAX_BUFFERED_ANSWER_BYTES", 1000)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\ncontent-type: application/json\r\n\r\n"
    script = target(lambda _: [head + bytes(3000), 0.05, bytes(100), "close"])
    with FakeServer(script) as one, FakeServer(script) as two, routed(one.url, two.url) as router:
        with pytest.raises(httpx.RemoteProtocolError):
            router.post()
        wait_until(lambda: router.router.status()["in_flight"] == 0)
        assert sum(it.route == GENERATION for it in one.asked + two.asked) == 1
        assert sum(each["cuts"] for each in router.router.status()["targets"]) == 1
        assert sum(each["ejections"] for each in router.router.status()["targets"]) == 1
        assert router.http.get("/health").status_code == 200
    assert "without completing" not in caplog.text


def test_a_stream_that_lost_only_its_end_is_whole():
    full = stream(token("a"), b"data: [DONE]\n\n", end=False)
    with FakeServer(target(lambda _: [*full, "close"])) as server, routed(server.url) as router:
        assert router.post(stream=True).text == token("a").decode() + "data: [DONE]\n\n"
        assert router.router.status()["targets"][0]["cuts"] == 0


def test_a_request_that_ends_its_targets_does_not_end_them_all():
    servers = [FakeServer(target(lambda _: ["reset"])) for _ in range(5)]
    for server in servers:
        server.__enter__()
    with routed(*(server.url for server in servers), poll_every=5.0) as router:
        refusal = router.post()
    sent = sum(any(asked.route == GENERATION for asked in server.asked) for server in servers)
    for server in servers:
        server.stop()
    assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "target_lost" and sent == 3
    assert int(refusal.headers["retry-after"]) >= 1


def test_targets_that_refuse_to_begin_are_not_lost_to_a_request():
    """However many stop at once, the one that does not is found."""
    asked: list[int] = []

    def each(number: int):
        def generate(_):
            asked.append(number)
            return error("503 Service Unavailable", "shutting_down") if len(asked) < 5 else whole()

        return target(generate)

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(each(number))) for number in range(5)]
        with routed(*(server.url for server in servers), router="round-robin", poll_every=5.0) as router:
            assert router.post().status_code == 200
    assert len(asked) == len(set(asked)) == 5


@pytest.mark.parametrize("code, sent", [
    ("engine_restarting", 3), ("engine_dead", 3), ("aborted", 3),
    ("not_ready", 5), ("engine_stalled", 5), ("overloaded", 5), ("queue_full", 5),
])  # fmt: skip
def test_a_request_is_given_up_after_three_targets_that_may_have_begun_and_no_others(code, sent):
    """A target that is busy or refuses has not begun, so that every one is asked."""
    status = "429 Too Many Requests" if code in forwarding.BUSY_CODES else "503 Service Unavailable"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(target(lambda _: error(status, code)))) for _ in range(5)]
        with routed(*(server.url for server in servers), poll_every=5.0, most_wait=0.0) as router:
            assert router.post().json()["error"]["code"] == code
    assert sum(asked.route == GENERATION for server in servers for asked in server.asked) == sent


def test_a_router_that_stops_holds_it_against_no_target():
    with FakeServer(target(lambda _: ["silence"])) as server, routed(server.url) as router:
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(router.post()))
        waiting.start()
        wait_until(lambda: any(asked.route == GENERATION for asked in server.asked))
        router.loop.call_soon_threadsafe(router.router.abort_all)
        waiting.join()
        assert answers[0].json()["error"]["code"] == "target_lost"
        (shown,) = router.router.status()["targets"]
        assert (shown["state"], shown["ejections"]) == ("up", 0)


@pytest.mark.parametrize("code, sent", [("overloaded", 2), ("queue_full", 2), ("rate_limited", 1)])
def test_a_429_is_told_once_every_target_that_may_have_room_was_asked(code, sent):
    script = target(lambda _: error("429 Too Many Requests", code))
    with FakeServer(script) as one, FakeServer(script) as two, routed(one.url, two.url) as router:
        refusal = router.post()
        assert refusal.status_code == 429 and refusal.json()["error"]["code"] == code
        assert sum(asked.route == GENERATION for asked in one.asked + two.asked) == sent


def test_without_a_target_a_request_waits_for_one_and_is_refused_then():
    with FakeServer(target(lambda _: whole())) as server, routed("http://127.0.0.1:9", wait=0, most_wait=0.0) as router:
        refusal = router.post()
        assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "no_target"
        assert "no server of the cluster has become ready yet" in refusal.json()["error"]["message"]
        assert router.http.get("/health").json()["status"] == "starting"
        assert router.http.get("/ready").status_code == router.http.get("/ping").status_code == 503
    with (
        FakeServer(target(lambda _: whole())) as server,
        routed("http://127.0.0.1:9", wait=0, most_wait=600.0, token_file=_token_file()) as router,
    ):
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(router.post()))
        waiting.start()
        refused = router.order("targets", targets=server.url)
        assert refused.status_code == 400 and "targets must be a list of URLs, got 'http" in refused.text
        assert router.order("targets", targets=[server.url]).status_code == 200
        waiting.join()
        assert answers[0].json()["choices"][0]["text"] == "x"


def test_a_removed_target_that_hangs_loses_its_requests():
    held = [STREAM, chunk(token("a")), "silence"]
    hangs = threading.Event()
    alive = target(lambda _: held)

    def script(it):
        return ["silence"] if hangs.is_set() and it.route == "/health" else alive(it)

    fast = {"token_file": _token_file(), "poll_timeout": 0.3}
    with (
        FakeServer(script) as one,
        FakeServer(target(lambda _: whole())) as two,
        routed(one.url, **fast) as router,
        router.http.stream("POST", GENERATION, json=BODY | {"stream": True}) as answered,
    ):
        parts = answered.iter_bytes()
        next(parts)
        assert router.order("targets", targets=[two.url]).status_code == 200
        hangs.set()
        assert b'"target_lost"' in b"".join(parts)


def test_a_client_that_goes_away_ends_its_request_at_the_target():
    held = [STREAM, chunk(token("a")), "silence"]
    with FakeServer(target(lambda _: held)) as server, routed(server.url) as router:
        with router.http.stream("POST", GENERATION, json=BODY | {"stream": True}) as answered:
            assert not server.closed_by_client
            next(answered.iter_bytes())
        wait_until(lambda: server.closed_by_client)
        wait_until(lambda: router.router.status()["in_flight"] == 0)


def test_an_idle_connection_that_the_target_closed_is_no_loss():
    with FakeServer(target(lambda _: whole())) as server, routed(server.url, poll_every=60.0) as router:
        for _ in range(3):
            assert router.post().status_code == 200
            server.close_idle()
        assert router.router.status()["targets"][0]["ejections"] == 0


def test_a_drained_target_ends_what_it_has_and_gets_nothing_new():
    held = [STREAM, chunk(token("a")), 0.3, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    scripts = [target(lambda _: held), target(lambda _: whole("other"))]
    with (
        FakeServer(scripts[0]) as one,
        FakeServer(scripts[1]) as two,
        routed(one.url, two.url, token_file=_token_file()) as router,
    ):
        with router.http.stream("POST", GENERATION, json=BODY | {"stream": True}) as answered:
            parts = answered.iter_bytes()
            next(parts)
            assert router.order("drain", target=one.url).json()["targets"][0]["state"] == "drained"
            assert all(router.post().json()["choices"][0]["text"] == "other" for _ in range(4))
            assert b"".join(parts) == b"data: [DONE]\n\n"
        assert router.order("resume", target=one.url).json()["targets"][0]["state"] == "up"


def test_orders_need_the_token():
    with FakeServer(target(lambda _: whole())) as server, routed(server.url, token_file=_token_file()) as router:
        for token_given in ("x", "wrong", TOKEN[:-1]):
            assert router.order("drain", token_given, target=server.url).status_code == 401
        assert (
            router.order("drain", target="elsewhere:1").json()["error"]["message"].startswith("no target 'elsewhere:1'")
        )
        assert router.order("explode").status_code == 404
        wrong = router.order("targets", targets=["http://127.0.0.1:9", "http://ex ample:1"])
        assert wrong.status_code == 400 and list(router.states()) == [server.url], (
            "all of it is carried out, or nothing"
        )
        assert router.http.get("/cluster").status_code == 200  # open, as no API key is asked for
        assert router.states()[server.url] == "up"
    with FakeServer(target(lambda _: whole())) as server, routed(server.url, api_key="sk-operator") as router:
        assert router.http.get("/cluster").status_code == router.http.get("/metrics").status_code == 401
        assert router.http.get("/cluster/targets").status_code == 401
        key = {"authorization": "Bearer sk-operator"}
        assert router.http.get("/cluster", headers=key).status_code == 200
        assert router.http.post("/cluster/drain", json={}, headers=key).status_code == 403  # no token was given
        assert router.post().status_code == 200  # the target's to check


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
def test_the_token_is_told_to_the_certificate_of_the_cluster_only(tmp_path):
    for name in ("own", "other"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
             "2", "-subj", "/CN=example.org", "-keyout", f"{name}.key", "-out", f"{name}.pem"],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
    own, other = str(tmp_path / "own.pem"), str(tmp_path / "other.pem")
    tls = {"tls_cert": own, "tls_key": str(tmp_path / "own.key"), "token_file": _token_file()}
    with FakeServer(target(lambda _: whole())) as server, routed(server.url, **tls) as router:
        url = router.url.replace("http:", "https:") + "/cluster"
        assert request_json(url, token=TOKEN, certificate=own)[1]["status"] == "ok"
        with pytest.raises(NoAnswer, match="CERTIFICATE_VERIFY_FAILED"):
            request_json(url, token=TOKEN, certificate=other)
        with pytest.raises(NoAnswer, match="a token would be told"):
            request_json(url, token=TOKEN)
        assert request_json(url.replace("/cluster", "/health"))[1]["status"] == "ok"  # which is told nothing


@pytest.mark.parametrize(
    "acts", [[b"what\r\n\r\n", "close"], [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "close"]]
)
def test_an_answer_that_is_broken_is_none(acts):
    with FakeServer(lambda _: acts) as server, pytest.raises(NoAnswer, match=f"{server.url} does not answer"):
        request_json(server.url)


@pytest.mark.parametrize("path", UNROUTED_PATHS)
def test_what_belongs_to_one_server_is_refused(pair, path):
    for below in ("", "/x"):
        refusal = pair[1].http.get(path + below)
        assert refusal.status_code == 404 and refusal.json()["error"]["code"] == "not_routed"
        assert pair[1].http.get(f"{path}{below}%0A").status_code == 400


def test_logs_hold_no_prompt_and_no_key(caplog):
    caplog.set_level(logging.DEBUG)
    secret = {"authorization": "Bearer sk-secret-key"}
    with FakeServer(target(lambda _: ["reset"])) as server, routed(server.url, api_key="sk-operator") as router:
        router.http.post(GENERATION, json=BODY | {"prompt": "a secret prompt"}, headers=secret)
    assert not [text for text in ("secret prompt", "sk-secret-key", "sk-operator") if text in caplog.text]


def test_metrics_count_what_happened():
    script = target(lambda asked: events("a", "b") if asked.body.get("stream") else whole())
    with FakeServer(script) as server, routed(server.url) as router:
        router.post(stream=True)
        router.post()
        name = server.url.removeprefix("http://")
        answered = 'adaserve_router_answers_total{status="200"} 2.0'
        wait_until(lambda: answered in router.http.get("/metrics").text)  # counted once the client has it
        text = router.http.get("/metrics").text
    assert f'adaserve_router_requests_total{{target="{name}"}} 2.0' in text
    assert f'adaserve_router_target_up{{target="{name}"}} 1.0' in text


def test_a_body_above_the_limit_is_refused_before_it_is_passed_on():
    with FakeServer(target(lambda _: whole())) as server, routed(server.url, max_body_bytes=100) as router:
        assert router.post(prompt="x" * 200).status_code == 413
        assert not [asked for asked in server.asked if asked.route == GENERATION]


def test_a_stream_whose_lines_end_in_cr_lf_passes_event_by_event_and_is_cut_as_any():
    first, done = (text.replace(b"\n", b"\r\n") for text in (token("a"), b"data: [DONE]\n\n"))
    failing = b"event: response.failed\r\ndata: {}\r\n\r\n"
    scripts = iter([[*stream(first, end=False), "silence"], [STREAM, chunk(first), "close"], stream(failing, done)])
    with FakeServer(target(lambda _: next(scripts))) as server, routed(server.url) as router:
        with router.http.stream("POST", GENERATION, json=BODY | {"stream": True}) as answered:
            assert next(answered.iter_bytes()) == first  # while the target says nothing more
        wait_until(lambda: router.router.status()["in_flight"] == 0)
        text = router.post(stream=True).text
        assert text.startswith(first.decode()) and '"target_lost"' in text
        router.up(1)
        assert router.post(stream=True).content == failing + done
        (shown,) = router.router.status()["targets"]
        assert (shown["cuts"], shown["failures"]) == (1, 1)


def test_a_stream_of_cr_lf_that_lost_only_its_end_is_whole():
    full = stream(b"data: {}\r\n\r\n", b"data: [DONE]\r\n\r\n", end=False)
    with FakeServer(target(lambda _: [*full, "close"])) as server, routed(server.url) as router:
        assert router.post(stream=True).content == b"data: {}\r\n\r\ndata: [DONE]\r\n\r\n"
        assert router.router.status()["targets"][0]["cuts"] == 0


ENDS = (b"\n\n", b"\n\r\n")
DONE_ENDS = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
PIECES = (*DONE_ENDS, b"data: a\n\n", b"data: a\r\n\r\n", b"data: ", b"\n", b"\r", b"x", b"\n\n", b"\r\n\r\n")


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PIECES)), st.data())
def test_only_whole_events_pass_however_they_come(pieces, data):
    text = b"".join(pieces)
    gate, passed, at = EventBuffer(), b"", 0
    while at < len(text):
        size = data.draw(st.integers(1, len(text) - at))
        passed += gate.feed(text[at : at + size])
        at += size
        assert passed == b"" or passed.endswith(ENDS)
    done, rest = gate.done, gate.rest()
    assert passed + rest == text and not any(end in rest for end in ENDS) and done == passed.endswith(DONE_ENDS)


def test_every_metric_and_code_is_documented():
    text = (ROOT / "docs" / "cluster.md").read_text()

    async def exposed() -> dict[str, Metric]:
        metrics = RouterMetrics(TargetSet(["http://127.0.0.1:9"]))
        metrics.answers.labels("200").inc()
        metrics.retries.labels("lost").inc()
        families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
        return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}

    found = {name: family for name, family in asyncio.run(exposed()).items() if not name.endswith("_created")}
    documented = [row.names[0] for row in rows(text) if row.names[0].startswith("adaserve_router_")]
    labels = {name: {label for s in family.samples for label in s.labels} - {"le"} for name, family in found.items()}
    assert sorted(documented) == sorted(
        name + (f"{{{','.join(sorted(labels[name]))}}}" if labels[name] else "") for name in found
    )
    sources = "".join(file.read_text() for file in (ROOT / "adaserve_jax" / "cluster").glob("*.py"))
    for code in ("no_target", "target_lost", "queue_full", "shutting_down", "not_routed"):
        assert f'"{code}"' in sources and f"| `{code}` |" in text


def _token_file() -> str:
    path = Path(tempfile.mkdtemp()) / "token"
    path.write_text(TOKEN)
    return str(path)
