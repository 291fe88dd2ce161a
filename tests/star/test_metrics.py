"""The port of `/health` and `/metrics`: it stays open, however clients behave."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adaserve_jax.errors import ConfigError
from adaserve_jax.star.service.metrics import MAX_CONNECTIONS, StatusServer
from tests.star.streams import HANG_S, until


class Scripted(Collector):
    """One gauge, whose documentation is the test's."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def collect(self) -> Iterator[Metric]:
        self.asked.set()
        assert self.go_on.wait(HANG_S)
        if not self.text:
            raise RuntimeError("of a bug")
        yield GaugeMetricFamily("a_gauge", self.text, value=1)


@pytest.fixture
def status(request: pytest.FixtureRequest) -> Iterator[StatusServer]:
    server = StatusServer("127.0.0.1:0", lambda: (True, {"status": "ok"}), **getattr(request, "param", {}))
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


def test_health_is_answered_from_the_start_and_metrics_once_there_are_any(status: StatusServer) -> None:
    status.health = lambda: (False, {"status": "starting"})
    with httpx.Client(base_url=f"http://127.0.0.1:{status.port}") as client:
        assert client.get("/metrics").status_code == 404
        answer = client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "starting"})
        status.health = lambda: (True, {"status": "ok"})
        status.serve_metrics(Scripted("help"))
        assert client.get("/health?x=1").status_code == 200
        assert "\na_gauge 1.0\n" in client.get("/metrics").text
        assert client.head("/metrics").text == "" and client.get("/").status_code == 404
        assert client.post("/health").status_code == 405
    with pytest.raises(ConfigError, match="choose another address with --http"):
        StatusServer(f"127.0.0.1:{status.port}", status.health)


@pytest.mark.parametrize("status", [{"timeout_s": 0.3}], indirect=True)
def test_who_asks_a_byte_at_a_time_is_cut_off(status: StatusServer) -> None:
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


@pytest.mark.parametrize("status", [{"timeout_s": HANG_S}], indirect=True)
def test_many_connections_are_not_more_threads(status: StatusServer) -> None:
    held = [connected(status) for _ in range(MAX_CONNECTIONS)]
    with connected(status) as surplus:
        assert surplus.recv(1) == b"", "closed unanswered"
    for each in held:
        each.close()
    until(lambda: answers(status))


@pytest.mark.parametrize("status", [{"max_connections": 1}], indirect=True)
def test_a_connection_for_which_no_thread_starts_takes_no_room(
    status: StatusServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with connected(status) as refused:
            assert refused.recv(1) == b""
    assert [each.getMessage() for each in caplog.records] == ["an HTTP request failed: RuntimeError"]
    until(lambda: answers(status))


@pytest.mark.parametrize("status", [{"max_connections": 1}], indirect=True)
def test_who_leaves_before_the_answer_is_no_error(
    status: StatusServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    collector = Scripted("x" * 2**24)
    collector.go_on.clear()
    status.serve_metrics(collector)
    with connected(status) as leaving:
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leaving.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert collector.asked.wait(HANG_S)
    collector.go_on.set()
    until(lambda: answers(status))
    assert capfd.readouterr().err == "" and not [each for each in caplog.records if each.name.startswith("adaserve")]


def test_an_error_of_ours_is_logged_and_the_port_stays_open(
    status: StatusServer, caplog: pytest.LogCaptureFixture
) -> None:
    status.serve_metrics(Scripted())
    with caplog.at_level(logging.ERROR):
        assert httpx.get(f"http://127.0.0.1:{status.port}/metrics").status_code == 500
    assert [each.getMessage() for each in caplog.records] == ["/health or /metrics failed: RuntimeError"]
    assert answers(status)
