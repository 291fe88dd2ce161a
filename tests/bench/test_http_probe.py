"""One request to a URL, told by hand what its connection would tell it: what counts, and what comes too late to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from adaserve_jax.bench import http_probe
from adaserve_jax.bench import http_probe as http_sse
from adaserve_jax.bench.http_probe import PreparedRequest, UrlProbe
from adaserve_jax.http_client.connection import HttpConnection
from adaserve_jax.types import SLO
from tests.bench.fake_server import DONE, event, token

PREPARED = PreparedRequest("r", b"POST / HTTP/1.1\r\n\r\n", SLO(), "chat", 8)
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


class Connection:
    """Notes what is done to it."""

    was_idle = False

    def __init__(self) -> None:
        self.did: list[str] = []

    def send(self, message: bytes, answer: UrlProbe) -> None:
        self.did.append("send")

    def close(self) -> None:
        self.did.append("close")

    def close_for(self, answer: UrlProbe) -> None:
        self.did.append("close")


def sent(connection: Connection) -> Callable[[UrlProbe], None]:
    return lambda probe: probe.send(cast(HttpConnection, connection))


def head(status: int = 200, headers: dict[str, str] = STREAM) -> Callable[[UrlProbe], None]:
    return lambda probe: probe.on_head(status, headers)


def body(part: bytes, at_s: float = 1.0) -> Callable[[UrlProbe], None]:
    return lambda probe: probe.on_body(at_s, part)


def end(probe: UrlProbe) -> None:
    probe.on_end(9.0)


def told(*acts: Callable[[UrlProbe], None]) -> UrlProbe:
    """A probe after all of these, each a turn of the loop after the one before. Its end is told once at most."""

    async def tell() -> UrlProbe:
        ends: list[bool] = []
        probe = UrlProbe(PREPARED, 0.0, lambda: ends.append(True))
        for act in acts:
            act(probe)
            await asyncio.sleep(0)
        assert len(ends) == int(probe.ended)
        return probe

    return asyncio.run(tell())


def test_what_comes_after_the_cut_off_changes_nothing():
    connection = Connection()
    begun = [sent(connection), head(), body(token("a")), UrlProbe.cut_off]
    late = [body(token("b", finish="stop")), end, lambda probe: probe.fail("timeout"), UrlProbe.cut_off]
    probe, beside = told(*begun, *late), told(*begun)
    assert probe.outcome == beside.outcome == ("unfinished", None)
    assert probe.ended_at_s is not None and probe.token_times_s == beside.token_times_s == [1.0]
    assert connection.did[:2] == ["send", "close"]


def test_a_request_that_was_cut_off_before_its_connection_was_open_is_not_sent():
    connection = Connection()
    probe = told(UrlProbe.cut_off, sent(connection))
    assert (connection.did, probe.outcome, probe.token_times_s) == (["close"], ("unfinished", None), [])


def test_bytes_behind_the_last_event_change_nothing():
    probe = told(sent(Connection()), head(), body(token("a", finish="stop") + DONE + token("b")), body(b"\xff"), end)
    assert (probe.outcome, probe.token_times_s) == (("finished", None), [1.0])


@pytest.mark.parametrize(
    ("module", "limit", "parts"),
    [
        (http_probe, "MAX_ANSWER_BYTES", [token("a"), token("b") * 9]),
        (http_sse, "MAX_EVENT_BYTES", [token("a"), b"data: " + b"x" * 200]),
    ],
)
def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch, module, limit: str, parts: list[bytes]):
    """What was read before counts."""
    monkeypatch.setattr(module, limit, 150)
    connection = Connection()
    probe = told(sent(connection), head(), *map(body, parts))
    assert (probe.outcome, probe.token_times_s) == (("failed", "answer_too_large"), [1.0])
    assert connection.did == ["send", "close"]


@pytest.mark.parametrize("rest", [b'data: {"choices": [{"te', b'data: "a text"', b": a comment"])
def test_an_event_that_was_cut_off_is_none(rest: bytes):
    probe = told(sent(Connection()), head(), body(token("a") + rest), end)
    assert (probe.outcome, probe.token_times_s) == (("failed", "truncated"), [1.0])


@pytest.mark.parametrize(
    ("raw", "code", "error"),
    [
        (b'{"error": {"message": "busy", "code": "overloaded"}}', "overloaded", "busy"),
        (b'{"error": {"message": "busy", "code": "Not a code!"}}', "http_503", "busy"),
        (b'{"error": {"code": 7}}', "http_503", "{'code': 7}"),
        (b'{"error": null, "message": "no\\n such   model"}', "http_503", "no such model"),
        (b'{"detail": [{"loc": "body"}]}', "http_503", "[{'loc': 'body'}]"),
        (b"{}", "http_503", "{}"),
        (b'["busy"]', "http_503", '["busy"]'),
        (b"[" * 5000, "http_503", "[" * 300),
        (b"\xff", "http_503", "\ufffd"),
        (b"", "http_503", ""),
    ],
)
def test_a_refusal_is_told_in_the_servers_words(raw: bytes, code: str, error: str):
    probe = told(sent(Connection()), head(503, {}), body(raw), end)
    assert (probe.outcome, probe.error) == (("rejected", code), error)


@pytest.mark.parametrize(
    ("status", "headers", "outcome"),
    [
        (200, {"content-type": "application/json"}, ("failed", "not_a_stream")),
        (200, STREAM | {"content-encoding": "gzip"}, ("failed", "not_a_stream")),
        (200, {}, ("failed", "not_a_stream")),
        (302, STREAM, ("failed", "http_302")),
        (404, STREAM, ("rejected", "http_404")),
    ],
)
def test_what_is_no_stream_of_events_is_not_read_as_one(status: int, headers: dict[str, str], outcome):
    probe = told(sent(Connection()), head(status, headers), body(token("a", finish="stop") + DONE), end)
    assert (probe.outcome, probe.token_times_s) == (outcome, [])


def test_an_error_event_ends_the_request_and_the_tokens_before_it_stay():
    failing = event({"error": {"message": "boom", "code": "engine_error"}})
    probe = told(sent(Connection()), head(), body(token("a")), body(failing + token("b"), 2.0), end)
    assert (probe.outcome, probe.error) == (("failed", "engine_error"), "boom")
    assert (probe.token_times_s, probe.ended_at_s) == ([1.0], 2.0)
