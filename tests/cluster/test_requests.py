"""Requests at the router: the fields that it reads, and the exchange with a target."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from adaserve_jax.cluster.requests import MAX_BUFFERED_BYTES, SloClasses, TargetExchange, TargetLost, parse_request
from adaserve_jax.http_client.connection import STALE_S

CLASSES = SloClasses({"default": (None, None), "chat": (0.1, 2.0)}, baseline_s=0.01)


@pytest.mark.parametrize("body, tpot_s, ttft_s, slo_class, tokens, choices", [
    ({"prompt": "12345678"}, None, None, "default", 2, 1),
    ({"prompt": [1, 2, 3]}, None, None, "default", 3, 1),
    ({"prompt": ["1234", "123456"], "n": 2}, None, None, "default", 3, 4),
    ({"prompt": [[1, 2], [3]]}, None, None, "default", 3, 2),
    ({"prompt": "x", "slo_class": "chat"}, 0.1, 2.0, "chat", 1, 1),
    ({"prompt": "x", "service_tier": "chat", "slo_ttft_ms": 500}, 0.1, 0.5, "chat", 1, 1),
    ({"prompt": "x", "slo_class": "chat", "slo_tpot_ms": 30}, 0.03, 2.0, "chat", 1, 1),
    ({"prompt": "x", "slo_relative": 1.5}, 0.015, None, "default", 1, 1),
    ({"prompt": "x", "slo_class": "unknown", "slo_tpot_ms": "fast", "n": -3}, None, None, "default", 1, 1),
    ({"prompt": "x", "slo_tpot_ms": True, "slo_ttft_ms": 1e300}, None, None, "default", 1, 1),
])  # fmt: skip
def test_what_a_router_reads_of_a_request(body, tpot_s, ttft_s, slo_class, tokens, choices):
    wanted = parse_request("/v1/completions", json.dumps(body).encode(), CLASSES, 7.0)
    assert wanted is not None
    found = wanted.assigned
    assert (found.tpot_slo_s, found.ttft_slo_s) == (pytest.approx(tpot_s), pytest.approx(ttft_s))
    assert (found.slo_class, found.prompt_tokens, wanted.choices, found.arrival_s) == (slo_class, tokens, choices, 7.0)


def test_a_body_of_very_many_values_counts_by_its_length_and_is_not_parsed():
    """The router has one thread for all clients; the target refuses the body."""
    body = b'{"slo_class": "chat", "messages": [' + b"{}," * 40_000 + b"{}]"  # not even JSON
    wanted = parse_request("/v1/chat/completions", body, CLASSES, 7.0)
    assert wanted is not None and (wanted.choices, wanted.stream) == (1, False)
    assert (wanted.assigned.prompt_tokens, wanted.assigned.slo_class) == (len(body) // 4, "default")


def test_a_router_reads_the_deadline_of_a_request():
    body = json.dumps({"prompt": "x", "slo_e2e_ms": 4000}).encode()
    wanted = parse_request("/v1/completions", body, CLASSES, 7.0)
    assert wanted is not None and wanted.per_choice()[0].e2e_slo_s == 4.0


def test_messages_count_their_contents():
    messages = [
        {"role": "user", "content": "12345678"},
        {"role": "user", "content": [{"type": "text", "text": "1234"}]},
    ]
    wanted = parse_request("/v1/chat/completions", json.dumps({"messages": messages}).encode(), CLASSES, 0.0)
    assert wanted is not None and wanted.assigned.prompt_tokens == 3


def test_instructions_and_items_count_their_texts():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "12345678"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "1234"},
        {"type": "function_call_output", "call_id": "1", "output": "12345"},
    ]
    for given, tokens in (({"input": items, "instructions": "12345678"}, 7), ({"input": "1234"}, 1)):
        wanted = parse_request("/v1/responses", json.dumps(given | {"slo_class": "chat"}).encode(), CLASSES, 0.0)
        assert wanted is not None and wanted.assigned.prompt_tokens == tokens
        assert (wanted.assigned.slo_class, wanted.assigned.tpot_slo_s) == ("chat", 0.1)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 20_000, b"null"])
def test_what_cannot_be_read_is_for_the_target_to_refuse(body):
    assert parse_request("/v1/completions", body, CLASSES, 0.0) is None
    assert parse_request("/tokenize", b'{"prompt": "x"}', CLASSES, 0.0) is None


def test_a_prompt_that_is_nested_too_deeply_counts_as_one_token():
    prompt: object = "12345678"
    for _ in range(700):
        prompt = {"content": prompt}
    wanted = parse_request("/v1/completions", json.dumps({"prompt": prompt}).encode(), CLASSES, 0.0)
    assert wanted is not None and wanted.assigned.prompt_tokens == 1


class StandIn:
    """A pool whose one connection writes nothing and notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.was_idle = False

    def acquire(self, on_ready: Any, on_failed: Any, *, fresh: bool = False) -> bool:
        if fresh:
            on_failed("connection_refused")
        else:
            on_ready(self)
        return fresh

    def send(self, message: bytes, answer: Any) -> None:
        self.asked.append("send")

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def close_for(self, answer: Any) -> None:
        self.asked.append("close")


def test_a_target_that_is_faster_than_its_client_waits():
    async def go() -> None:
        connection: Any = StandIn()
        exchange = TargetExchange(connection, b"")
        exchange.on_head(200, [("connection", "keep-alive"), ("x", "y"), ("x", "z")])
        assert exchange.headers == [("x", "y"), ("x", "z")]
        part = bytes(MAX_BUFFERED_BYTES // 2)
        for _ in range(3):
            exchange.on_body(0.0, part)
        assert connection.asked == ["send", "pause"]
        parts = exchange.parts()
        assert [len(await anext(parts)) for _ in range(3)] == [len(part)] * 3
        assert connection.asked == ["send", "pause"]  # until all is taken
        later = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0)
        assert connection.asked == ["send", "pause", "resume"]
        exchange.on_body(0.0, b"last")
        assert await later == b"last"
        exchange.on_end(0.0)
        assert [each async for each in parts] == []
        exchange.close()
        assert "close" not in connection.asked

    asyncio.run(go())


@pytest.mark.parametrize(("after_s", "reason"), [(0.0, "connection_refused"), (STALE_S + 1.0, "disconnected")])
def test_what_may_have_ended_a_target_counts_as_taken_by_it(after_s: float, reason: str):
    """Lost at once after an idle time it is sent again, and nobody listens any more; lost later it is not."""

    async def go() -> None:
        connection: Any = StandIn()
        connection.was_idle = True
        exchange = TargetExchange(connection, b"")
        exchange.on_lost(time.monotonic() + after_s, "disconnected", False)
        with pytest.raises(TargetLost) as lost:
            await exchange.head()
        assert lost.value.may_have_started and lost.value.reason == reason

    asyncio.run(go())
