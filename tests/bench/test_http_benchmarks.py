"""Benchmarks of the server: their arithmetic and their client, on made answers and
the scripted engine. The whole runs are benchmarks, and slow tests of the server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaserve_jax.errors import AdaServeError
from tests.bench.scripts import modules_of
from tests.server.conftest import running
from tests.waiting import wait_until

modules = modules_of("server.http_load", "server.front_end", "adaserve.overload", "server.soak")


@pytest.fixture(scope="module")
def port():
    with running() as server:
        yield int(server.url.rsplit(":", 1)[1])


def test_the_client_reads_streams_bodies_and_errors(modules, port):
    load = modules["http_load"]
    asked = {"prompt": "abc", "max_tokens": 10}
    stream = asyncio.run(load.request(port, asked | {"stream": True}))
    body = asyncio.run(load.request(port, asked))
    assert stream.text == body.text == "abcabcabca" and stream.done and len(stream.events) == 4
    assert stream.sent_s <= stream.head_s <= stream.events[0][0] <= stream.end_s
    refused = asyncio.run(load.request(port, asked | {"n": 0}))
    assert (refused.status, refused.error) == (400, "invalid_value")
    assert asyncio.run(load.request(port, {"prompt": "fail", "stream": True})).error == "engine_error"
    assert load.sample(port, "adaserve_kv_pages" + '{slab="base",state="used"}') == 3.0


def test_a_client_can_leave_after_some_events(modules, port):
    load = modules["http_load"]

    async def leave():
        connection = await load.Connection.open(port)
        connection.send(
            "POST", "/v1/completions", json.dumps({"prompt": "slow", "max_tokens": 400, "stream": True}).encode()
        )
        answer = await connection.read(await connection.head(time.monotonic()), 2)
        connection.close()
        return answer

    answer = asyncio.run(leave())
    assert len(answer.events) == 2 and answer.text == "slowsl" and not answer.done


def test_latencies_are_of_each_stamp_and_none_may_be_missing(modules):
    event = b'data: {"choices":[{"index":0,"text":"%.6f ","finish_reason":null}]}\n\n'
    read = [(stream, 0.05 * i + 0.001 * stream, event % (0.05 * i)) for i in range(12) for stream in (1, 2)]
    found = modules["front_end"].latencies(read, 12)
    assert found == pytest.approx([0.001, 0.001, 0.002, 0.002])
    with pytest.raises(SystemExit, match="expected 12 tokens of every stream, got 11"):
        modules["front_end"].latencies(read[:-1], 12)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 x\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\noops",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
    ids=["an error in plain text", "a stream broken off between chunks"],
)
def test_a_soak_goes_on_after_an_answer_of_any_kind(modules, monkeypatch, answer: bytes) -> None:
    soak = modules["soak"]
    monkeypatch.setattr(soak, "ACTIONS", {soak.stream: 1})

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def soaked():
        async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            case = soak.Case({"prompt": "abc"}, "abc", 3)
            one = soak.Soak(port, [case], random.Random(0), time.monotonic() + 0.2)
            await one.client()
        return one

    found = asyncio.run(soaked())
    assert found.counts["failures"] >= found.counts["stream"] > 0


def test_a_soak_reports_a_process_that_ended(modules, port) -> None:
    ended = subprocess.Popen(["true"])
    wait_until(lambda: ") Z " in Path(f"/proc/{ended.pid}/stat").read_text())
    server = SimpleNamespace(port=port, process=SimpleNamespace(pid=os.getpid()), engine_pid=ended.pid)
    soak, memory = asyncio.run(modules["soak"].run(server, 0, 1e-3, 0, None, 0.0))
    ended.wait()
    assert memory == [] and soak.failures == [f"the server or its engine ended, process {os.getpid()} or {ended.pid}"]


def made(load, status: int, took_s: float, *, met: bool = True, headers: dict | None = None):
    slo = {"met": met, "tpot_ms": 5.0, "tpot_target_ms": 6.0, "ttft_target_ms": None}
    metrics = {"slo": slo, "time_to_first_token_ms": 9.0, "queue_time_ms": 1.0}
    body = {"metrics": metrics} if status == 200 else {"error": {"code": "overloaded"}}
    return load.Answer(status, headers or {}, 1.0, 1.0, 1.0 + took_s, body)


def test_overload_is_judged_by_attainment_refusals_and_what_else_came(modules):
    load, overload = modules["http_load"], modules["overload"]
    capacity = overload.summary([made(load, 200, 1.0)] * 20)
    assert capacity["attainment"] == 1.0 and capacity["refused"] == 0
    told = {"retry-after": "2"}
    good = overload.summary(
        [made(load, 200, 1.0)] * 19 + [made(load, 200, 1.0, met=False), made(load, 429, 0.01, headers=told)]
    )
    assert (good["attainment"], good["refused"], good["retry_after_s"]) == (0.95, 1, {2: 1})
    assert good["refusal_ms_p99"] == pytest.approx(10.0) and overload.failures(capacity, good) == []
    bad = overload.summary(
        [
            made(load, 200, 1.0, met=False),
            made(load, 200, 1.0),
            made(load, 429, 0.2, headers=told),
            made(load, 503, 0.1),
        ]
    )
    assert [text.split(" ")[0] for text in overload.failures(capacity, bad)] == ["attainment", "answers", "the"]
    silent = overload.summary([made(load, 200, 1.0), made(load, 429, 0.01)])
    assert overload.failures(capacity, silent) == ["expected refusals, each with Retry-After"]
    with pytest.raises(AdaServeError, match=r"none of 2 requests was served to its end: \{'429 overloaded': 2\}"):
        overload.summary([made(load, 429, 0.01, headers=told)] * 2)


def test_drift_is_between_medians_when_warm_and_at_the_end(modules):
    memory = [50.0] * 10 + [100.0] * 20 + [103.0] * 50
    assert modules["soak"].drift(memory) == (100.0, 103.0)
    assert modules["soak"].drift([7.0]) == (7.0, 7.0)


def test_a_soak_finds_a_text_that_is_not_whole(modules, port):
    """Against the scripted engine: what is right passes, and a lost character does not."""
    soak = modules["soak"]
    draws = random.Random(0)

    def shared(text: str):
        case = soak.Case({"prompt": "abc", "max_tokens": 10}, text, 10)
        return soak.Soak(port, [case], draws, time.monotonic())

    right, wrong = shared("abcabcabca"), shared("abcabcabc")
    for one in (right, wrong):
        for action in (
            soak.stream,
            soak.body,
            soak.not_json,
            soak.bad_target,
            soak.leave_midway,
            soak.leave_in_the_request,
        ):
            asyncio.run(action(one))
    assert right.failures == [] and right.counts["tokens compared"] == 20
    assert len(wrong.failures) >= 2 and "expected 'abcabcabc', got 'abcabcabca'" in wrong.failures[0]
