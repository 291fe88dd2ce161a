"""The URL client against a server that does every odd thing: each request ends, with the status and the tokens that it
must have, and what follows on other connections is as before."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from adaserve_jax.bench.engine import Ask, AtPoint, Due
from adaserve_jax.bench.http_load import SWITCH_S, UrlEngine
from adaserve_jax.bench.http_probe import UrlProbe
from adaserve_jax.errors import ConfigError
from adaserve_jax.http_client import pool as http_pool
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Message, WorkloadItem
from tests.bench import fake_server as fake
from tests.bench.fake_server import Act, Asked, FakeServer, chunk, event, stream, token
from tests.waiting import PATIENCE_S, wait_until

OVERLOADED = b'{"error": {"message": "busy", "code": "overloaded"}}'
CHAT = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
FACE = event({"choices": [{"index": 0, "text": "\U0001f600é", "finish_reason": None}]})


def said(content: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]})


SCRIPTS: dict[str, Sequence[Act]] = {
    "plain": fake.plain(3),
    "slow headers": [fake.STREAM[:20], 0.06, fake.STREAM[20:], chunk(token("a", finish="stop")), chunk(fake.DONE),
                     b"0\r\n\r\n"],
    "byte by byte": fake.bytewise(stream(FACE, token("x", finish="stop"), fake.DONE)),
    "comments and crlf": stream(b": ping\r\n\r\n", token("a").replace(b"\n", b"\r\n"), b":\n\n",
                                token("b", finish="stop"), fake.DONE),
    "several events a read": stream(b"".join([token("a", count=1), token("b", count=2)]), 0.02,
                                    token("c", count=3, finish="stop") + fake.DONE),
    "several tokens an event": stream(token("abc", count=3), 0.06, token("de", count=5, finish="length"),
                                      fake.usage(5), fake.DONE),
    "counts at the end": stream(token("abc"), 0.06, token("def"), token("", finish="stop"), fake.usage(6), fake.DONE),
    "no usage": stream(token("a"), token("b"), token("c", finish="stop"), fake.DONE),
    "finish twice": stream(token("a"), token("b", finish="stop"), token("", finish="stop"), fake.usage(2), fake.DONE),
    "no done": stream(token("a"), token("b", finish="length")),
    "no end after the finish": [*stream(token("a", finish="stop"), end=False), "close"],
    "until closed": [fake.BARE, token("a"), token("b", finish="stop"), fake.DONE, "close"],
    "late after done": stream(token("a", finish="stop"), fake.DONE, token("b"), fake.usage(9)),
    "no last empty line": stream(token("a"), token("b", finish="stop").rstrip()),
    "role first": stream(event(CHAT), said("a"), said("b", "stop"), fake.DONE),
    "no text": stream(token("", finish="stop"), fake.usage(1), fake.DONE),
    "truncated": stream(token("a"), token("b")),
    "reset": [*stream(token("a"), 0.05, end=False), "reset"],
    "closed at once": ["close"],
    "half an event": [*stream(token("a"), b'data: {"cho', end=False), "silence"],
    "silent": ["silence"],
    "silent after the finish": [*stream(token("a", finish="stop"), end=False), "silence"],
    "429": fake.answer("429 Too Many Requests", OVERLOADED, "application/json", "retry-after: 7"),
    "500": fake.answer("500 Internal Server Error", b"<html><body>oops</body></html>", "text/html"),
    "html": fake.answer("200 OK", b"<html>welcome</html>", "text/html"),
    "json": fake.answer("200 OK", b'{"choices": []}'),
    "detail": fake.answer("422 Unprocessable Entity", b'{"detail": "no such field"}'),
    "bad json": stream(token("a"), b"data: {oops\n\n", end=False),
    "error event": stream(token("a"), event({"error": {"message": "boom", "code": "engine_error"}}), fake.DONE),
    "infeasible": stream(event({"error": {"message": "too fast", "code": "slo_infeasible"}})),
    "not http": [b"SSH-2.0-OpenSSH_9.6\r\n", "close"],
    "other protocol": [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", "close"],
    "continue first": [b"HTTP/1.1 100 Continue\r\n\r\n", *fake.plain(2)],
    "bad chunk": [fake.STREAM, b"zz\r\n", "close"],
    "endless head": [b"HTTP/1.1 200 OK\r\n", *[b"x-%d: %s\r\n" % (i, b"y" * 4000) for i in range(40)], "silence"],
    "endless": [fake.STREAM, *[chunk(token("z")), 0.01] * 100_000],
}  # fmt: skip


def script(request: Asked) -> Sequence[Act]:
    if request.route == "/v1/models":
        return fake.answer("200 OK", json.dumps(fake.MODELS).encode())
    return SCRIPTS.get(request.body.get("prompt", "plain"), fake.plain(request.body["max_tokens"]))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(script) as running:
        yield running


@pytest.fixture(scope="module")
def engine(server: FakeServer) -> Iterator[UrlEngine]:
    made = UrlEngine(UrlSettings(server.url, silence_timeout_s=0.25, baseline_s=0.01), keep_texts=True)
    yield made
    made.close()


def item(prompt: str | None, slo: SLO | None = None, **more) -> WorkloadItem:
    messages = (Message("user", "hello"),) if prompt is None else ()
    return WorkloadItem(prompt, messages, more.get("max_tokens", 8), "chat", slo or SLO(), 0.0, None, None)


def due(
    engine: UrlEngine, *prompts: str | None, gap_s: float = 0.0, slo: SLO | None = None, first_s: float = 0.0
) -> list[Due]:  # fmt: skip
    asks = [Ask(f"r{i}", item(p, slo), 11, slo or SLO(), "salt", 8) for i, p in enumerate(prompts)]
    return [Due(first_s + i * gap_s, engine.prepare(ask)) for i, ask in enumerate(asks)]


def drive(engine: UrlEngine, *prompts: str | None, drain_s: float = 5.0, slo: SLO | None = None) -> list[RequestRecord]:
    loop = engine.drive(due(engine, *prompts, slo=slo), drain_s=drain_s)
    about = {"run_id": "run", "point": "p", "policy": "fake", "rate_rps": 1.0, "baseline_s": 0.01}
    return [probe.record(AtPoint(start_s=loop.start_s, **about)) for probe in loop.probes]


EXPECTED: dict[str, tuple[str, str | None, int, str]] = {
    "plain": ("finished", None, 3, "usage_spread"),
    "slow headers": ("finished", None, 1, "events"),
    "byte by byte": ("finished", None, 2, "events"),
    "comments and crlf": ("finished", None, 2, "events"),
    "several events a read": ("finished", None, 3, "usage"),
    "several tokens an event": ("finished", None, 5, "usage"),
    "counts at the end": ("finished", None, 6, "usage_spread"),
    "no usage": ("finished", None, 3, "events"),
    "finish twice": ("finished", None, 2, "usage_spread"),
    "no done": ("finished", None, 2, "events"),
    "no end after the finish": ("finished", None, 1, "events"),
    "until closed": ("finished", None, 2, "events"),
    "late after done": ("finished", None, 1, "events"),
    "no last empty line": ("finished", None, 2, "events"),
    "role first": ("finished", None, 2, "events"),
    "no text": ("finished", None, 1, "usage_spread"),
    "truncated": ("failed", "truncated", 2, "events"),
    "reset": ("failed", "disconnected", 1, "events"),
    "closed at once": ("failed", "disconnected", 0, ""),
    "half an event": ("failed", "timeout", 1, "events"),
    "silent": ("failed", "timeout", 0, ""),
    "silent after the finish": ("finished", None, 1, "events"),
    "429": ("rejected", "overloaded", 0, ""),
    "500": ("failed", "http_500", 0, ""),
    "html": ("failed", "not_a_stream", 0, ""),
    "json": ("failed", "not_a_stream", 0, ""),
    "detail": ("rejected", "http_422", 0, ""),
    "bad json": ("failed", "malformed_event", 1, "events"),
    "error event": ("failed", "engine_error", 1, "events"),
    "infeasible": ("rejected", "slo_infeasible", 0, ""),
    "not http": ("failed", "malformed_http", 0, ""),
    "other protocol": ("failed", "malformed_http", 0, ""),
    "continue first": ("finished", None, 2, "usage_spread"),
    "bad chunk": ("failed", "malformed_http", 0, ""),
    "endless head": ("failed", "malformed_http", 0, ""),
}
"""By script: status, code, tokens, and how they are known."""


def ending(record: RequestRecord) -> tuple[str, str | None, int]:
    return record.status, record.error_code, record.output_tokens


def test_all_of_them_at_once_do_not_disturb_each_other(engine):
    records = drive(engine, *EXPECTED)
    assert {name: ending(record) for name, record in zip(EXPECTED, records, strict=True)} == {
        name: expected[:3] for name, expected in EXPECTED.items()
    }
    assert engine.token_source == "events", "the least sure"


def probe_of(engine: UrlEngine, name: str) -> UrlProbe:
    probe = engine.drive(due(engine, name), drain_s=5.0).probes[0]
    assert isinstance(probe, UrlProbe)
    return probe


def test_what_the_server_said_is_kept_for_messages_and_never_for_rows(engine):
    assert probe_of(engine, "429").error == "busy"
    assert probe_of(engine, "detail").error == "no such field"
    assert probe_of(engine, "500").error == "<html><body>oops</body></html>"
    assert "".join(text for _, text in probe_of(engine, "byte by byte").texts) == "\U0001f600éx"


def test_tokens_have_the_time_that_their_bytes_came(engine):
    times = probe_of(engine, "several tokens an event").token_times_s
    assert times[0] == times[1] == times[2] < times[3] == times[4]
    times = probe_of(engine, "counts at the end").token_times_s
    assert times[0] == times[1] == times[2] < times[3] == times[4] == times[5]


def test_targets_are_judged_by_the_clients_clock(engine):
    # two events 60 ms apart, five tokens: 15 ms a token
    for slo, met in ((SLO(tpot_ms=4.0), False), (SLO(relative=50.0), True), (SLO(), None)):
        (record,) = drive(engine, "several tokens an event", slo=slo)
        assert record.slo_met is met and record.tpot_s is not None and record.tpot_s > 0.004
    (record,) = drive(engine, "429", slo=SLO(tpot_ms=900.0))
    assert record.slo_met is False, "a refused request meets no target"
    (record,) = drive(engine, "slow headers", slo=SLO(ttft_ms=20.0))
    assert record.ttft_s is not None and record.ttft_s > 0.04 and record.ttft_met is False


def test_what_is_left_at_the_cut_off_is_unfinished_and_its_connection_closed(server, engine):
    before = server.closed_by_client
    records = drive(engine, "endless", "plain", "silent", drain_s=0.2)
    assert [r.status for r in records] == ["unfinished", "finished", "unfinished"]
    assert records[0].output_tokens < 100_000 and records[0].slo_met is None
    wait_until(lambda: server.closed_by_client >= before + 2)


def test_requests_are_sent_when_they_are_due_whatever_the_server_does(server, engine):
    number = len(server.asked)
    loop = engine.drive(due(engine, *["silent"] * 10, gap_s=0.01), drain_s=0.5)
    assert [p.record(AtPoint("", "", "", 1.0, start_s=loop.start_s, baseline_s=1.0)).due_s
            for p in loop.probes] == pytest.approx([0.01 * i for i in range(10)], abs=1e-5)  # fmt: skip
    assert len(server.asked) - number == 10 and loop.late_max_s < 0.05
    assert engine.drive([], drain_s=1.0).probes == ()


def test_connections_are_used_again_and_a_closed_one_is_replaced(server, engine):
    drive(engine, *["plain"] * 4)
    number = server.connections
    for _ in range(5):
        drive(engine, "plain")
    assert server.connections == number and engine.notes[0].startswith("tokens of 1 of 1")
    server.close_idle()
    assert [r.status for r in drive(engine, *["plain"] * 3)] == ["finished"] * 3
    assert server.connections > number


def test_idle_connections_that_the_server_closes_are_opened_again_before_they_are_needed(monkeypatch):
    monkeypatch.setattr(http_pool, "MIN_LIFE_S", 0.0)
    with FakeServer(script) as server:
        engine = UrlEngine(UrlSettings(server.url, baseline_s=0.01, spare_connections=3))
        drive(engine, "plain")
        number = server.connections
        server.close_idle()
        wait_until(lambda: server.connections >= number + 3)
        drive(engine, "plain")
        assert not any("new connection" in note for note in engine.notes)
        engine.close()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Leave all to the garbage collector in a test, and exempt it again as `tests/conftest.py` does."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_nothing_else_of_the_process_disturbs_a_drive_and_all_is_as_before_afterwards(engine, nothing_frozen: None):
    def state() -> tuple[bool, bool, float]:
        return gc.isenabled(), gc.get_freeze_count() > 0, sys.getswitchinterval()

    before, during = state(), []
    engine.drive(due(engine, "plain"), drain_s=5.0, on_progress=lambda _: during.append(state()))
    assert during == [(False, True, pytest.approx(SWITCH_S))] * 2 and state() == before


def test_ctrl_c_cuts_off_and_says_so(engine):
    begun = threading.Event()

    def interrupt() -> None:
        """Once the drive is under way: while garbage is collected before it, some libraries would swallow it."""
        begun.wait(PATIENCE_S)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        threading.Thread(target=interrupt).start()
        asks = due(engine, *["endless"] * 3) + due(engine, "endless", first_s=PATIENCE_S)
        loop = engine.drive(asks, drain_s=PATIENCE_S, on_progress=lambda _: begun.set())
    finally:
        signal.signal(signal.SIGINT, before)
    assert loop.interrupted and 1 <= len(loop.probes) <= 3, "what was not sent yet is not of the run"
    assert {p.outcome[0] for p in loop.probes} == {"unfinished"}  # type: ignore[attr-defined]
    assert not engine.drive(due(engine, "plain"), drain_s=5.0).interrupted


def test_a_request_onto_a_connection_that_was_just_closed_is_sent_again():
    turns: dict[int, int] = {}

    def closes_on_the_second(request: Asked) -> Sequence[Act]:
        if request.route == "/v1/models":
            return script(request)
        turns[request.connection] = turns.get(request.connection, 0) + 1
        return fake.plain(2) if turns[request.connection] == 1 else ["close"]

    with FakeServer(closes_on_the_second) as server:
        engine = UrlEngine(UrlSettings(server.url, baseline_s=0.01, spare_connections=1))
        again = False
        while not again and len(server.asked) < 50:  # a connection whose last bytes come late is not used twice
            assert [r.status for r in drive(engine, "one", "two")] == ["finished"] * 2
            again = any("sent again" in note for note in engine.notes)
        assert again
        engine.close()


def test_without_spare_connections_each_request_has_its_own(server):
    engine = UrlEngine(UrlSettings(server.url, baseline_s=0.01, spare_connections=0))
    number = server.connections
    assert [r.status for r in drive(engine, *["plain"] * 3)] == ["finished"] * 3
    assert server.connections == number + 3 and server.asked[-1].headers["connection"] == "close"
    assert engine.notes[0] == "3 of 3 requests waited for a new connection, and their times hold it"
    engine.close()


def test_a_server_that_dies_ends_the_run():
    with FakeServer(script) as server:
        engine = UrlEngine(UrlSettings(server.url, baseline_s=0.01, connect_timeout_s=1.0))
        assert not engine.drive(due(engine, "plain"), drain_s=5.0).engine_died
        server.stop()
        loop = engine.drive(due(engine, "plain", "plain", gap_s=0.01), drain_s=5.0)
        assert loop.engine_died and {p.outcome for p in loop.probes} == {("failed", "connection_refused")}  # type: ignore[attr-defined]
        engine.close()
        engine.close()


def test_a_server_that_dies_as_the_last_requests_drain_ends_the_run():
    """No request finds it gone: those in flight are only cut."""
    with FakeServer(script) as server:
        engine = UrlEngine(UrlSettings(server.url, baseline_s=0.01, connect_timeout_s=1.0, spare_connections=0))
        asks, before = due(engine, "endless"), len(server.asked)

        def stop() -> None:
            wait_until(lambda: len(server.asked) > before)
            server.stop()

        stopping = threading.Thread(target=stop)
        stopping.start()
        loop = engine.drive(asks, drain_s=PATIENCE_S)
        stopping.join()
        assert loop.engine_died and [p.outcome for p in loop.probes] == [("failed", "disconnected")]  # type: ignore[attr-defined]
        engine.close()


def test_the_bytes_of_a_request(server, engine):
    drive(engine, "plain", None, slo=SLO(tpot_ms=5.0))
    completion, chat = server.asked[-2:]
    assert (completion.route, chat.route) == ("/v1/completions", "/v1/chat/completions")
    assert completion.body == {
        "model": "fake-model", "prompt": "plain", "stream": True, "max_tokens": 8, "temperature": 0.0, "top_p": 1.0,
        "seed": 11, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    assert chat.body["messages"] == [{"role": "user", "content": "hello"}] and "prompt" not in chat.body
    assert "authorization" not in chat.headers


def test_keys_headers_targets_and_further_fields_are_sent_as_asked(server):
    settings = UrlSettings(
        server.url + "/v1/", model="other", api_key="secret-key", headers=(("X-Team", "blue"),), endpoint="chat",
        send_slo=True, baseline_s=0.01, extra_body={"ignore_eos": True, "temperature": 0.5},
    )  # fmt: skip
    engine = UrlEngine(settings, policy="theirs")
    drive(engine, "plain", slo=SLO(relative=2.0, ttft_ms=90.0))
    asked = server.asked[-1]
    assert asked.route == "/v1/chat/completions" and asked.body["messages"] == [{"role": "user", "content": "plain"}]
    assert (asked.headers["authorization"], asked.headers["x-team"]) == ("Bearer secret-key", "blue")
    body = asked.body
    assert (body["slo_tpot_ms"], body["slo_ttft_ms"], body["ignore_eos"], body["temperature"]) == (
        20.0,
        90.0,
        True,
        0.5,
    )
    assert body["model"] == "other" and "secret-key" not in repr(engine.settings)
    assert engine.about.policies == ("theirs",) and engine.about.target == "other"
    with pytest.raises(ConfigError, match="keeps its own policy: expected theirs, got 'ar'"):
        engine.set_policy("ar")
    engine.close()


def test_what_cannot_be_sent_is_refused_ahead(server, engine):
    with pytest.raises(ConfigError, match="lengths only needs a made prompt"):
        engine.prepare(Ask("r", WorkloadItem(None, (), 4, "c", SLO(), 0.0, 0, None), 0, SLO(), "", 4))
    completions = UrlEngine(UrlSettings(server.url, baseline_s=0.01, endpoint="completions"))
    with pytest.raises(ConfigError, match="messages cannot be sent to completions"):
        due(completions, None)
    completions.close()
