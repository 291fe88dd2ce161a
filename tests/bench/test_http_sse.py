"""Server-sent events however their bytes are cut, against a reader of whole texts."""

from __future__ import annotations

import itertools
import random

import pytest

from adaserve_jax.bench import http_probe as http_sse
from adaserve_jax.bench.http_probe import EventReader, EventTooLarge

ODD = (
    '\ufeff: a comment\n\ndata: {"text":"né\U0001f600"}\r\n\r\ndata:first\ndata: second\n\n'
    "event: ping\nid: 3\nretry: 10\n\ndata\n\ndatabase: no\ndata:  two spaces\r\rdata: [DONE]\r\n\n"
)
EVENTS = ['{"text":"né\U0001f600"}', "first\nsecond", "", " two spaces", "[DONE]"]


def whole(text: str) -> list[str]:
    """By the standard, of a whole text."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    events: list[str] = []
    for has_line, group in itertools.groupby(lines, bool):
        data = [line[5:].removeprefix(" ") if ":" in line else "" for line in group if line.split(":")[0] == "data"]
        if has_line and data:
            events.append("\n".join(data))
    return events


def read(parts: list[bytes]) -> list[str]:
    reader = EventReader()
    return [event.decode() for part in parts for event in reader.feed(part)]


def test_every_cut_in_three_gives_the_same_events():
    assert whole(ODD) == EVENTS
    raw = ODD.encode()
    for low in range(len(raw) + 1):
        for high in range(low, len(raw) + 1, 3):
            assert read([raw[:low], raw[low:high], raw[high:]]) == EVENTS, (low, high)
    assert read([raw[i : i + 1] for i in range(len(raw))]) == EVENTS


def test_random_texts_are_read_as_by_the_standard():
    draws = random.Random(3)
    pieces = ("data:", " ", "x", "\n", "\r\n", "\r", ":", "é", "data: y\n", "\n\n")
    for _ in range(500):
        text = "".join(draws.choices(pieces, k=draws.randrange(30))) + "\n\n"
        raw = text.encode()
        cut = draws.randrange(len(raw))
        assert read([raw[:cut], raw[cut:]]) == whole(text), text


def test_an_event_without_its_last_empty_line_is_given_at_the_end():
    reader = EventReader()
    assert reader.feed(b"data: a\n\ndata: b\ndata: c") == [b"a"]
    assert reader.close() == [b"b\nc"] and reader.close() == []


@pytest.mark.parametrize("part", [b"x", b"data: x\n"])
def test_an_event_that_does_not_end_is_bounded(monkeypatch, part):
    monkeypatch.setattr(http_sse, "MAX_EVENT_BYTES", 100)
    reader = EventReader()
    with pytest.raises(EventTooLarge, match="more than 100 bytes"):
        for _ in range(200):
            reader.feed(part)
    fine = EventReader()
    assert sum(len(fine.feed(b"data: some text\n\n")) for _ in range(200)) == 200
