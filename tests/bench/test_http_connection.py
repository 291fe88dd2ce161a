"""One connection of the client, over a transport that notes what is done to it: what answers hear of odd servers."""

from __future__ import annotations

import pytest

from adaserve_jax.http_client.connection import Headers, HttpConnection

BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Transport:
    """Takes everything; `closed` once it was aborted."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def write(self, data: bytes) -> None:
        self.did.append("write")

    def abort(self) -> None:
        self.did.append("abort")

    def pause_reading(self) -> None:
        self.did.append("pause")

    def resume_reading(self) -> None:
        self.did.append("resume")


class Heard:
    """What an answer heard, in order."""

    def __init__(self) -> None:
        self.all: list[object] = []

    def on_head(self, status: int, headers: Headers) -> None:
        self.all.append(status)

    def on_body(self, at_s: float, part: bytes) -> None:
        self.all.append(part)

    def on_end(self, at_s: float) -> None:
        self.all.append("end")

    def on_lost(self, at_s: float, code: str, heard: bool) -> None:
        self.all.append((code, heard))


class Case:
    """A connection; who was told that it is idle, or closed."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.connection = HttpConnection(lambda _: self.told.append("idle"), lambda _: self.told.append("closed"))
        self.transport = Transport()

    def ask(self) -> Heard:
        if not self.connection.is_open:
            self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        heard = Heard()
        self.connection.send(b"GET / HTTP/1.1\r\n\r\n", heard)
        return heard


@pytest.fixture
def case() -> Case:
    return Case()


def test_bytes_that_nobody_asked_for_close_it(case: Case) -> None:
    case.ask()
    case.connection.data_received(BODY)
    case.connection.data_received(BODY)
    assert case.transport.did == ["write", "abort"] and not case.connection.is_open


@pytest.mark.parametrize("more", [BODY.replace(b"hi", b"no"), b"no HTTP", b"\r\n\0"])
def test_more_than_was_asked_for_is_not_heard_and_ends_its_use(case: Case, more: bytes) -> None:
    heard = case.ask()
    case.connection.data_received(BODY + more)
    assert heard.all == [200, b"hi", "end"]
    assert case.told == [] and case.transport.did == ["write", "abort"]


@pytest.mark.parametrize(
    ("first", "broken", "expected"),
    [
        (b"", False, [("disconnected", False)]),
        (b"HTTP/1.1 200", False, [("disconnected", True)]),
        (BODY[:-1], False, [200, b"h", ("disconnected", True)]),
        (b"HTTP/1.1 200 OK\r\n\r\nhi", False, [200, b"hi", "end"]),
        (b"HTTP/1.1 200 OK\r\n\r\nhi", True, [200, b"hi", ("disconnected", True)]),
    ],
    ids=["silent", "in the head", "in the body", "a body without length ends so", "unless it was cut off"],
)
def test_the_server_closes(case: Case, first: bytes, broken: bool, expected: list[object]) -> None:
    heard = case.ask()
    if first:
        case.connection.data_received(first)
    case.connection.connection_lost(ConnectionResetError() if broken else None)
    assert heard.all == expected and case.told == ["closed"]


def test_who_closes_for_an_answer_closes_for_that_one_only(case: Case) -> None:
    heard = case.ask()
    case.connection.close_for(Heard())
    assert case.connection.is_open
    case.connection.close_for(heard)
    case.connection.close()
    assert case.transport.did == ["write", "abort"] and heard.all == []


def test_a_slow_reader_stops_the_server_while_the_connection_is_there(case: Case) -> None:
    case.connection.pause()
    case.connection.resume()
    case.ask()
    case.connection.pause()
    case.connection.resume()
    case.connection.close()
    case.connection.pause()
    case.connection.resume()
    assert case.transport.did == ["write", "pause", "resume", "abort"]
