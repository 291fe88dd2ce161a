"""The parts of a router alone: events, what is read of a request, how a target is chosen, how much is held."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from adaserve_jax.cluster.forwarding import EventBuffer, RouterMetrics
from adaserve_jax.cluster.requests import MAX_BUFFERED_BYTES, SloClasses, TargetExchange, TargetLost, parse_request
from adaserve_jax.cluster.targets import Balancer, InFlightRequest, RouterTarget, TargetSet, guessed_machine
from adaserve_jax.routing.routers import Assigned, Router, find_router
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.sim.machines import Machine
from tests.conftest import ROOT
from tests.documents import rows

CLASSES = SloClasses({"default": (None, None), "chat": (0.1, 2.0)}, baseline_s=0.01)


@given(st.lists(st.sampled_from([b"data: a\n\n", b"data: [DONE]\n\n", b"data: ", b"\n", b"x", b"\n\n"])), st.data())
def test_only_whole_events_pass_however_they_come(pieces, data):
    text = b"".join(pieces)
    gate, passed, at = EventBuffer(), b"", 0
    while at < len(text):
        size = data.draw(st.integers(1, len(text) - at))
        passed += gate.feed(text[at : at + size])
        at += size
        assert passed == b"" or passed.endswith(b"\n\n")
    done, rest = gate.done, gate.rest()
    assert passed + rest == text and b"\n\n" not in rest and done == passed.endswith(b"data: [DONE]\n\n")


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


def test_messages_count_their_contents():
    messages = [
        {"role": "user", "content": "12345678"},
        {"role": "user", "content": [{"type": "text", "text": "1234"}]},
    ]
    wanted = parse_request("/v1/chat/completions", json.dumps({"messages": messages}).encode(), CLASSES, 0.0)
    assert wanted is not None and wanted.assigned.prompt_tokens == 3


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_what_cannot_be_read_is_for_the_target_to_refuse(body):
    assert parse_request("/v1/completions", body, CLASSES, 0.0) is None
    assert parse_request("/tokenize", b'{"prompt": "x"}', CLASSES, 0.0) is None


def _router_over(machine: Machine, name: str) -> Router:
    limits = machine.limits()
    return find_router(name)(CostTable(machine.samples(limits), limits), limits)


@pytest.mark.parametrize("name", ["slo-aware", "least-loaded", "round-robin"])
def test_the_choice_is_the_simulators(name):
    balancer = Balancer(name, None)
    balancer.learn(0.01, 8)
    busy = [Assigned("chat", 50, 0.0, 0.012, None, 10, 0.5) for _ in range(8)]
    idle = [Assigned("chat", 50, 0.0, 0.5, None, 10, 0.5)]
    request = Assigned("chat", 20, 1.0, 0.02, None)
    router = _router_over(guessed_machine(0.01, 8), name)
    for targets in ([busy, idle], [idle, busy], [[], idle], [busy, busy, []]):
        assert balancer.choose(request, targets, 1.0) == router.choose(request, targets, 1.0)
    best = {"round-robin": [0, 1, 0]}.get(name, [1, 1, 1])
    balancer = Balancer(name, None)
    assert [balancer.choose(request, [busy, idle], 1.0) for _ in range(3)] == best


def test_a_router_is_built_anew_only_for_what_really_changed(monkeypatch):
    built: list[float] = []
    build = Balancer._build
    monkeypatch.setattr(Balancer, "_build", lambda self, machine: built.append(1) or build(self, machine))
    balancer = Balancer("slo-aware", None)
    for baseline_s, requests in ((0.01, 8), (0.011, 8), (0.009, 8), (0.02, 8), (0.02, 16)):
        balancer.learn(baseline_s, requests)
    assert len(built) == 1 + 3


def test_what_is_known_of_a_target_follows_its_streams():
    async def go() -> None:
        target = RouterTarget("http://127.0.0.1:9")
        wanted = parse_request("/v1/completions", b'{"prompt": "x", "stream": true, "n": 2}', CLASSES, 1.0)
        flight = InFlightRequest(wanted)
        target.in_flight.add(flight)
        target.other_choices = 3
        assert [each.received for each in target.load(2.0)] == [0, 0, 1, 1, 1]
        flight.count_events(4, target.tokens_per_event, 2.0)  # two tokens an event, over two choices
        assert [(each.received, each.first_token_s) for each in target.load(2.5)][:2] == [(4, 2.0)] * 2
        whole = InFlightRequest(parse_request("/v1/completions", b'{"prompt": "x", "slo_tpot_ms": 100}', CLASSES, 1.0))
        target.in_flight = {whole}
        assert target.load(2.0)[0].received == 11  # on pace
        tail = b'{"choices":[],"metrics":{"speculative":{"verify_steps":10,"accepted_tokens":30,"mean_accepted":3.0}}}'
        assert target.learn(10, tail) == 40 and target.tokens_per_event == pytest.approx(2.0 + 0.1 * 2.0)
        assert target.learn(10, b"data: [DONE]\n\n") is None
        await target.pool.close()

    asyncio.run(go())


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
        exchange.on_head(200, {"connection": "keep-alive", "x": "y"})
        assert exchange.headers == {"x": "y"}
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


def test_what_may_have_ended_a_target_counts_as_taken_by_it():
    async def go() -> None:
        connection: Any = StandIn()
        connection.was_idle = True
        exchange = TargetExchange(connection, b"")
        exchange.on_lost(0.0, "disconnected", False)  # sent again at once; nobody listens any more
        with pytest.raises(TargetLost) as lost:
            await exchange.head()
        assert lost.value.may_have_started

    asyncio.run(go())


def test_every_metric_and_code_is_documented():
    text = (ROOT / "docs" / "cluster.md").read_text()

    async def exposed() -> dict[str, Metric]:
        metrics = RouterMetrics(TargetSet(["http://127.0.0.1:9"]))
        metrics.answers.labels("200").inc()
        metrics.retries.labels("lost").inc()
        families = text_string_to_metric_families(metrics.text().decode())
        return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}

    found = {name: family for name, family in asyncio.run(exposed()).items() if not name.endswith("_created")}
    documented = [row.names[0] for row in rows(text) if row.names[0].startswith("adaserve_router_")]
    labels = {name: {label for s in family.samples for label in s.labels} - {"le"} for name, family in found.items()}
    assert sorted(documented) == sorted(
        name + (f"{{{','.join(sorted(labels[name]))}}}" if labels[name] else "") for name in found
    )
    sources = "".join(file.read_text() for file in (ROOT / "adaserve_jax" / "cluster").glob("*.py"))
    for code in ("no_target", "target_lost", "queue_full", "shutting_down", "not_routed"):
        assert f'"{code}"' in sources and f"| `{code}` |" in text
