"""Streams over real sockets whose parts go straight to the connection: in order, whole, and with no byte too many."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest, OutputChunk, Sink
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.server import streaming
from adaserve_jax.server.connection import DIRECT_BODY
from adaserve_jax.server.formatting import CompletionFormatter
from adaserve_jax.server.generation import Generation
from adaserve_jax.server.schema import StreamOptions
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.streaming import EventStream, EventWriter
from adaserve_jax.types import SamplingParams
from tests.server.conftest import Running, serving
from tests.server.scripted import ByteTokenizer, ScriptedEngine
from tests.waiting import wait_until

DONE = RequestMetrics(arrival_s=0.0, first_scheduled_s=0.0, first_token_s=0.1, last_token_s=0.2)


class Puppet(ScriptedEngine):
    """Says what a test makes it say."""

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self.submitted.append(request)
        self.sink = sink

    def abort(self, request_id: str) -> None:
        """What it is about to say comes all the same."""

    def say(self, text: str = "", reason=None, choice: int = 0, **more) -> None:
        metrics = DONE if reason in ("stop", "length") else None
        self.sink(OutputChunk(self.submitted[-1].request_id, choice, text, [65], reason, metrics, **more))


@pytest.fixture(scope="module")
def puppet() -> Iterator[Running]:
    engine = Puppet(EngineConfig())
    engine.start()
    with serving(engine, ByteTokenizer(), ServerSettings()) as server:
        yield server
    engine.close()


@pytest.fixture
def direct(monkeypatch) -> list[bytes]:
    """What went straight to a connection."""
    written: list[bytes] = []
    write = streaming.DirectBody.write
    monkeypatch.setattr(streaming.DirectBody, "write", lambda self, data: (written.append(data), write(self, data)))
    return written


@pytest.fixture
def ask() -> Iterator[Callable[..., socket.socket]]:
    """ask(server, version, **fields): a connection whose request the engine has."""
    opened: list[socket.socket] = []

    def ask(server: Running, version: str = "1.1", **more) -> socket.socket:
        before = len(server.engine.submitted)
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 500} | more).encode()
        opened.append(socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20))
        opened[-1].sendall(
            b"POST /v1/completions HTTP/%s\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (version.encode(), len(body), body)
        )
        wait_until(lambda: len(server.engine.submitted) > before)
        return opened[-1]

    yield ask
    for connection in opened:
        connection.close()


def events(body: bytes) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n")]
    assert lines[-2:] == ["[DONE]", ""]
    return [json.loads(line) for line in lines[:-2]]


def read(connection: socket.socket) -> bytes:
    """The body of a whole response, by a client that checks chunks."""
    with http.client.HTTPResponse(connection) as response:
        response.begin()
        assert response.getheader("transfer-encoding") == "chunked"
        return response.read()


def delivered(server: Running) -> float:
    """Return the tokens that came so far after the first of their choice."""
    return server.state.metrics.registry.get_sample_value("adaserve_inter_token_latency_seconds_count")


def texts(body: bytes, choice: int = 0) -> str:
    return "".join(c["text"] for event in events(body) for c in event.get("choices", ()) if c["index"] == choice)


def test_parts_take_the_short_way_in_order(puppet, ask, direct):
    connection = ask(puppet, n=2)
    puppet.engine.say("first ")
    for number in range(50):
        if number == 1:
            wait_until(lambda: puppet.state.in_flight)
        puppet.engine.say(f"{number} é\n\n", choice=number % 2)
        time.sleep(0.002)
    puppet.engine.say("last", "stop")
    puppet.engine.say("other", choice=1)  # comes while the end of the first may be on its way
    puppet.engine.say("", "length", choice=1)
    body = read(connection)
    assert texts(body) == "first " + "".join(f"{i} é\n\n" for i in range(0, 50, 2)) + "last"
    assert texts(body, 1) == "".join(f"{i} é\n\n" for i in range(1, 50, 2)) + "other"
    assert len(direct) > 20, "hardly anything went the short way"


def test_a_client_that_does_not_read_is_waited_for_and_loses_nothing(puppet, ask, direct):
    connection = ask(puppet)
    puppet.engine.say("first")
    time.sleep(0.05)
    long = "abcdefgh" * 4096
    before = delivered(puppet)
    for number in range(400):  # 12 MiB: more than all buffers between
        puppet.engine.say(f"{number} {long}")
    wait_until(lambda: delivered(puppet) == before + 400)
    time.sleep(0.1)
    kept = len(direct)
    assert kept < 300, "nothing was held back for a client that does not read"
    reader: list[bytes] = []
    thread = threading.Thread(target=lambda: reader.append(read(connection)))
    thread.start()
    time.sleep(0.05)
    for number in range(400, 420):
        puppet.engine.say(f"{number} {long}")
        time.sleep(0.01)
    puppet.engine.say("", "stop")
    thread.join(20)
    assert texts(reader[0]) == "first" + "".join(f"{number} {long}" for number in range(420))


def test_after_an_error_nothing_more_is_written_and_the_connection_serves_on(puppet, ask, direct):
    connection = ask(puppet, n=2)
    for number in range(5):
        puppet.engine.say(f"{number}")
        time.sleep(0.01)
    puppet.engine.say("", "error", error="it broke", error_code="engine_error")
    time.sleep(0.1)
    puppet.engine.say("later yet", choice=1)
    body = read(connection)
    *_, last = events(body)
    assert last["error"]["message"] == "it broke" and b"later yet" not in body and direct
    time.sleep(0.05)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with http.client.HTTPResponse(connection) as response:
        response.begin()
        assert response.status == 200 and json.loads(response.read())["status"] == "ok"


def test_an_old_client_gets_a_body_without_chunks(puppet, ask, direct):
    connection = ask(puppet, version="1.0")
    for number in range(5):
        puppet.engine.say(f"{number}")
        time.sleep(0.01)
    puppet.engine.say("", "stop")
    head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and texts(body) == "01234" and not direct


def test_a_fault_on_the_short_way_is_told_on_the_long_one(puppet, ask, direct):
    connection = ask(puppet)
    puppet.engine.say("a")
    time.sleep(0.05)
    puppet.engine.say(5)  # no text
    *_, last = events(read(connection))
    assert last["error"]["code"] == "internal_error"
    assert puppet.http.get("/health").json()["status"] == "ok"


class Unhurried:
    """A generation of two choices and the stream of it, on an event loop; `send` waits until it may go on."""

    def __init__(self):
        self.sink: Sink | None = None
        state = MagicMock()
        state.mailbox.post = lambda loop, call, *arguments: call(*arguments)
        state.client.submit = lambda request, sink: setattr(self, "sink", sink)
        request = GenerateRequest("r", [1], SamplingParams(n=2))
        self.generation = Generation(state, [request], MagicMock())
        self.generation.start()
        self.stream = EventStream(EventWriter(self.generation, CompletionFormatter("m"), StreamOptions()), {})
        self.sent: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    def say(self, text: str, reason=None, choice: int = 0) -> None:
        self.sink(OutputChunk("r", choice, text, [65], reason, DONE if reason else None))

    async def send(self, message) -> None:
        await self.go_on.wait()
        self.sent.append(message.get("body", b"").decode())

    async def run(self, script: Callable[[], Awaitable[None]]) -> list[str]:
        """The texts in the order in which they were written, by either way."""
        direct = SimpleNamespace(ready=True, closed=False, write=lambda data: self.sent.append(data.decode()))
        self.direct = direct
        scope = {"http_version": "1.1", "method": "POST", "extensions": {DIRECT_BODY: direct}}
        responding = asyncio.ensure_future(self.stream(scope, asyncio.Event().wait, self.send))
        await script()
        await responding
        found = "".join(self.sent).split("\n\n")
        return [json.loads(line[6:])["choices"][0]["text"] for line in found if line.startswith("data: {")]


def test_nothing_overtakes_what_waits_to_be_sent():
    async def main() -> list[str]:
        world = Unhurried()

        async def script() -> None:
            world.say("a")
            await asyncio.sleep(0.01)
            world.go_on.clear()
            world.say("b", "stop")
            await asyncio.sleep(0.01)  # taken from the queue, and held by the connection
            world.say("c", choice=1)
            await asyncio.sleep(0.01)
            world.go_on.set()
            world.say("d", choice=1)
            await asyncio.sleep(0.01)
            world.say("e", "stop", choice=1)

        return await world.run(script)

    assert asyncio.run(main()) == ["a", "b", "c", "d", "e"]


def test_nothing_overtakes_an_end_of_the_same_step():
    async def main() -> list[str]:
        world = Unhurried()

        async def script() -> None:
            world.say("a")
            await asyncio.sleep(0.01)
            world.say("b", "stop")
            world.say("c", choice=1)
            await asyncio.sleep(0.01)
            world.say("d", "stop", choice=1)

        return await world.run(script)

    assert asyncio.run(main()) == ["a", "b", "c", "d"]


def test_behind_a_lost_connection_nothing_is_written():
    """Ends of choices come in one turn of the loop, before the server hears that the client is gone."""

    async def main() -> list[str]:
        world = Unhurried()

        async def script() -> None:
            world.say("a")
            await asyncio.sleep(0.01)
            world.direct.ready, world.direct.closed = False, True
            world.say("b", "stop")
            world.say("c", "stop", choice=1)

        return await world.run(script)

    assert asyncio.run(main()) == ["a"]
