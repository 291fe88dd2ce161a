"""One request to a URL: its server-sent events, the times of its tokens, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from typing import cast

import pytest

from adaserve_jax.bench import http_probe
from adaserve_jax.bench.http_probe import (
    CompletionEvent,
    EventReader,
    EventTooLarge,
    PreparedRequest,
    SeenEvent,
    UrlProbe,
    event_of,
    token_times,
    worst,
)
from adaserve_jax.http_client.connection import STALE_S, HttpConnection
from adaserve_jax.types import SLO
from tests.bench.fake_server import DONE, token

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
    return lambda probe: probe.on_head(status, list(headers.items()))


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
        (http_probe, "MAX_EVENT_BYTES", [token("a"), b"data: " + b"x" * 200]),
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


ODD = (
    '\ufeff: a comment\n\ndata: {"text":"né\U0001f600"}\r\n\r\ndata:first\ndata: second\n\n'
    "event: ping\nid: 3\nretry: 10\n\ndata\n\ndatabase: no\ndata:  two spaces\r\rdata: [DONE]\r\n\n"
)
EVENTS = ['{"text":"né\U0001f600"}', "first\nsecond", "", " two spaces", "[DONE]"]


def standard_events(text: str) -> list[str]:
    """By the standard, of a whole text."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    events: list[str] = []
    for has_line, group in itertools.groupby(lines, bool):
        data = [line[5:].removeprefix(" ") if ":" in line else "" for line in group if line.split(":")[0] == "data"]
        if has_line and data:
            events.append("\n".join(data))
    return events


def read_events(parts: list[bytes]) -> list[str]:
    reader = EventReader()
    return [event.decode() for part in parts for event in reader.feed(part)]


def test_every_cut_in_three_gives_the_same_events():
    assert standard_events(ODD) == EVENTS
    raw = ODD.encode()
    for low in range(len(raw) + 1):
        for high in range(low, len(raw) + 1, 3):
            assert read_events([raw[:low], raw[low:high], raw[high:]]) == EVENTS, (low, high)
    assert read_events([raw[i : i + 1] for i in range(len(raw))]) == EVENTS


def test_random_texts_are_read_as_by_the_standard():
    draws = random.Random(3)
    pieces = ("data:", " ", "x", "\n", "\r\n", "\r", ":", "é", "data: y\n", "\n\n")
    for _ in range(500):
        text = "".join(draws.choices(pieces, k=draws.randrange(30))) + "\n\n"
        raw = text.encode()
        cut = draws.randrange(len(raw))
        assert read_events([raw[:cut], raw[cut:]]) == standard_events(text), text


@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n"])
def test_an_event_without_its_last_empty_line_is_given_at_the_end(end: bytes):
    reader = EventReader()
    assert reader.feed(b"data: a\n\ndata: b\ndata: c" + end) == [b"a"]
    assert reader.close() == [b"b\nc"] and reader.close() == []


@pytest.mark.parametrize("part", [b"x", b"data: x\n"])
def test_an_event_that_does_not_end_is_bounded(monkeypatch, part):
    monkeypatch.setattr(http_probe, "MAX_EVENT_BYTES", 100)
    reader = EventReader()
    with pytest.raises(EventTooLarge, match="more than 100 bytes"):
        for _ in range(200):
            reader.feed(part)
    fine = EventReader()
    assert sum(len(fine.feed(b"data: some text\n\n")) for _ in range(200)) == 200


def seen(*events: tuple[float, int, int | None]) -> list[SeenEvent]:
    return [SeenEvent(*each) for each in events]


def test_counts_in_every_event_are_exact():
    events = seen((1.0, 4, 1), (2.0, 9, 4), (3.0, 0, 5))
    assert token_times(events, 5) == ([1.0, 2.0, 2.0, 2.0, 3.0], "usage")
    assert token_times(events, 6) == ([1.0, 2.0, 2.0, 2.0, 3.0, 3.0], "usage")  # counted after the last text
    assert token_times(events[:1], None) == ([1.0], "usage")


def test_a_final_count_is_spread_by_the_length_of_the_texts():
    # one token each, and the three that are left to 2 : 6 : 4 letters, rounded so that they stay three
    events = seen((1.0, 2, None), (2.0, 6, None), (3.0, 4, None))
    assert token_times(events, 6) == ([1.0, 2.0, 2.0, 2.0, 3.0, 3.0], "usage_spread")
    assert token_times(events, 3) == ([1.0, 2.0, 3.0], "usage_spread")


def test_fewer_tokens_than_texts_keep_the_first_and_the_last():
    events = seen(*((float(i), 1, None) for i in range(5)))
    assert token_times(events, 3) == ([0.0, 2.0, 4.0], "usage_spread")
    assert token_times(events, 1) == ([0.0], "usage_spread")
    assert token_times(events, 0) == ([], "usage_spread")


def test_a_count_with_the_last_event_only_is_spread_too():
    events = seen((1.0, 3, None), (2.0, 3, None), (3.0, 0, 4))
    assert token_times(events, 4) == ([1.0, 1.0, 2.0, 2.0], "usage_spread")


def test_without_counts_each_text_is_a_token():
    assert token_times(seen((1.0, 3, None), (2.0, 0, None), (4.0, 1, None)), None) == ([1.0, 4.0], "events")
    assert token_times([], None) == ([], "events") and token_times([], 0) == ([], "usage")


@pytest.mark.parametrize("events", [seen((1.0, 3, None), (2.0, 7, None), (5.0, 1, None)), seen((1.0, 0, None))])
def test_any_total_is_kept_in_order(events):
    for total in range(40):
        times, _ = token_times(events, total)
        assert len(times) == total and times == sorted(times), total
        assert set(times) <= {each.at_s for each in events}, total


def test_events_of_the_servers_that_there_are():
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    completion = {"choices": [{"index": 0, "text": "ab", "finish_reason": None}], "usage": usage}
    assert event_of(completion) == CompletionEvent("ab", None, 2, 7, has_choice=True)
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    assert event_of(role) == CompletionEvent("", has_choice=True)
    thinking = {"choices": [{"index": 0, "delta": {"content": None, "reasoning_content": "so"}}]}
    assert event_of(thinking).text == "so"
    timings = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": {"predicted_n": 9}}
    assert event_of(timings) == CompletionEvent("", "stop", 9, has_choice=True)
    assert event_of({"choices": [], "usage": usage}) == CompletionEvent(count=2, prompt_tokens=7)
    other = {"choices": [{"index": 1, "text": "of another choice"}]}
    assert event_of(other) == CompletionEvent()
    assert event_of({"error": {"message": "no"}}).error == {"message": "no"}


@pytest.mark.parametrize(
    "body",
    [
        *(None, 3, [], {}, {"choices": None}, {"choices": [None]}, {"choices": {}}, {"choices": [3], "usage": []}),
        *({"usage": {"completion_tokens": count}} for count in (True, -1, 10**30, "5")),
        *({"usage": 4}, {"timings": {"predicted_n": 1.5}}),
    ],
)
def test_what_is_not_as_expected_says_nothing(body):
    assert event_of(body) == CompletionEvent()


def test_the_least_sure_source_counts():
    assert worst(["usage", "events", "usage_spread"]) == "events"
    assert worst(["usage", "usage_spread"]) == "usage_spread" and worst([]) is None


@pytest.mark.parametrize(("after_s", "again"), [(0.0, True), (STALE_S + 1.0, False)])
def test_a_request_is_sent_again_where_an_idle_connection_is_lost_at_once(after_s: float, again: bool):
    """Lost later, the server may have worked on it: that is a failure of the server."""

    async def go() -> tuple[int, bool]:
        asked: list[UrlProbe] = []
        connection = Connection()
        connection.was_idle = True
        probe = UrlProbe(PREPARED, 0.0, lambda: None, asked.append)
        sent(connection)(probe)
        probe.on_lost(time.monotonic() + after_s, "disconnected", heard=False)
        await asyncio.sleep(0)
        return len(asked), probe.ended

    assert asyncio.run(go()) == (int(again), not again)
