"""The port of `/health` and `/metrics`: whoever asks, however, it stays open for others."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Iterator

import httpx
import pytest

from adaserve_jax.star.service import main as http
from adaserve_jax.star.service.main import StatusServer
from tests.star.streams import HANG_S, until


@pytest.fixture
def status() -> Iterator[StatusServer]:
    server = StatusServer("127.0.0.1:0", lambda: (True, {"status": "ok"}))
    try:
        yield server
    finally:
        server.close()


def connected(status: StatusServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", status.port), timeout=HANG_S)


def answers(status: StatusServer) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{status.port}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_who_asks_a_byte_at_a_time_is_cut_off(status: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TIMEOUT_S", 0.3)
    with connected(status) as slow:

        def is_cut() -> bool:
            threading.Event().wait(0.05)  # a pause in which it says something again: no timeout of silence
            try:
                slow.sendall(b"G")
            except OSError:
                return True
            return False

        until(is_cut)
    assert answers(status)


def test_many_connections_are_not_more_threads(status: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TIMEOUT_S", HANG_S)
    held = [connected(status) for _ in range(http.MOST_CONNECTIONS)]
    with connected(status) as surplus:
        assert surplus.recv(1) == b"", "closed unanswered"
    for each in held:
        each.close()
    until(lambda: answers(status))


def test_who_leaves_before_the_answer_is_no_error(
    status: StatusServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    asked, gone, done = threading.Event(), threading.Event(), threading.Event()

    def metrics() -> bytes:
        asked.set()
        assert gone.wait(HANG_S)
        done.set()
        return b"x" * 2**24

    status.metrics = metrics
    with connected(status) as leaving:
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leaving.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asked.wait(HANG_S)
    gone.set()
    assert done.wait(HANG_S)
    until(lambda: status._server._free._value == http.MOST_CONNECTIONS)  # type: ignore[attr-defined]
    assert capfd.readouterr().err == "" and not caplog.records


def test_an_error_of_ours_is_logged_and_the_port_stays_open(
    status: StatusServer, caplog: pytest.LogCaptureFixture
) -> None:
    def metrics() -> bytes:
        raise RuntimeError("of a bug")

    status.metrics = metrics
    with caplog.at_level(logging.ERROR), pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{status.port}/metrics")
    until(lambda: len(caplog.records) == 1)
    assert caplog.records[0].getMessage() == "/health or /metrics failed: RuntimeError" and answers(status)
