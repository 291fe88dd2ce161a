"""Targets of a router: how one is chosen, and what is known of its load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from adaserve_jax.cluster.requests import SloClasses, parse_request
from adaserve_jax.cluster.targets import (
    Balancer,
    InFlightRequest,
    RouterTarget,
    TargetPoller,
    TargetSet,
    guessed_machine,
)
from adaserve_jax.routing.routers import Assigned, RoutingPolicy, find_router
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.sim.machines import Machine
from tests.bench.fake_server import Act, Asked, FakeServer, answer

CLASSES = SloClasses({"default": (None, None), "chat": (0.1, 2.0)}, baseline_s=0.01)


def _router_over(machine: Machine, name: str) -> RoutingPolicy:
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


def test_the_policy_is_rebuilt_only_for_a_real_change():
    balancer = Balancer("round-robin", None)  # its turn tells whether it is a new one
    request = Assigned("chat", 20, 1.0, 0.02, None)
    chosen = []
    for baseline_s, requests in ((0.01, 8), (0.011, 8), (0.009, 8), (0.02, 8), (0.02, 16)):
        balancer.learn(baseline_s, requests)
        chosen.append(balancer.choose(request, [[], [], []], 1.0))
    assert chosen == [0, 1, 2, 0, 0]


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


class SilentExchange:
    """An exchange that has been silent for just so long."""

    def __init__(self, quiet_s: float):
        self.quiet_s = quiet_s
        self.given_up = asyncio.Event()

    def give_up(self, reason: str) -> None:
        self.given_up.set()


def test_what_comes_to_a_target_that_hangs_already_is_given_up_after_two_checks_too():
    async def go(url: str) -> None:
        targets = TargetSet([url])
        (target,) = targets.all
        poller = TargetPoller(targets, Balancer("round-robin", None), every_s=0.01, timeout_s=0.1, key=None)
        polling = asyncio.ensure_future(poller.run())
        first, younger = SilentExchange(0.2), SilentExchange(0.19)
        target.exchanges |= {first, younger}
        await first.given_up.wait()
        late = SilentExchange(0.2)
        target.exchanges.add(late)
        await late.given_up.wait()  # more than two checks have failed by now, but two are enough
        assert not younger.given_up.is_set()
        polling.cancel()
        await target.pool.close()

    with FakeServer(lambda _: ["silence"]) as server:
        asyncio.run(go(server.url))


def test_a_health_check_that_times_out_does_not_bring_back_a_target_that_was_ejected_meanwhile(
    caplog: pytest.LogCaptureFixture,
):
    checks: list[str] = []

    def script(asked: Asked) -> list[Act]:
        checks.extend([asked.route] * (asked.route == "/health"))
        return answer("200 OK", b'{"status": "ok"}') if checks == ["/health"] else ["silence"]

    async def go(url: str) -> None:
        targets = TargetSet([url])
        (target,) = targets.all
        poller = TargetPoller(targets, Balancer("round-robin", None), every_s=0.01, timeout_s=1.0, key=None)
        polling = asyncio.ensure_future(poller.run())
        while len(checks) < 2:
            await asyncio.sleep(0.01)
        targets.report(target, False, "disconnected")
        silent = SilentExchange(10.0)
        target.exchanges.add(silent)
        await silent.given_up.wait()  # two checks have timed out
        polling.cancel()
        await targets.close()

    with FakeServer(script) as server:
        asyncio.run(asyncio.wait_for(go(server.url), 20))
    states = [record.getMessage().partition(" is ")[2] for record in caplog.records]
    assert states == ["up: ok", "down: disconnected"]


def test_what_hides_a_target_from_its_router_is_told_once(caplog: pytest.LogCaptureFixture):
    """A target that was never there, and one that refuses the router's key."""

    def script(asked: Asked) -> list[Act]:
        if "/health" in asked.route:
            return answer("200 OK", b'{"status": "ok"}')
        return answer("401 Unauthorized", b'{"error": {"message": "a key"}}')

    async def go(url: str) -> None:
        targets = TargetSet([url, "http://127.0.0.1:9"])
        poller = TargetPoller(targets, Balancer("round-robin", None), every_s=0.01, timeout_s=5.0, key="wrong")
        polling = asyncio.ensure_future(poller.run())
        while len(caplog.records) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        polling.cancel()
        await targets.close()

    with FakeServer(script) as server:
        asyncio.run(asyncio.wait_for(go(server.url), 20))
    told = [record.getMessage() for record in caplog.records]
    expected = "127.0.0.1:9 is down: ", " is up: ok", " refuses this router's key (401): only what comes through this"
    assert len(told) == 3 and all(any(each in line for line in told) for each in expected)


def test_targets_that_serve_different_models_are_told_once(caplog: pytest.LogCaptureFixture):
    def serving(model: str) -> Callable[[Asked], list[Act]]:
        card = b'{"data": [{"id": "%s", "baseline_ms": 10, "slo_classes": {}}]}' % model.encode()
        return lambda asked: answer("200 OK", card if "/v1/models" in asked.route else b'{"status": "ok"}')

    async def go(*urls: str) -> list[str]:
        targets = TargetSet(urls)
        poller = TargetPoller(targets, Balancer("round-robin", None), every_s=0.01, timeout_s=5.0, key=None)
        polling = asyncio.ensure_future(poller.run())
        while not all(target.model for target in targets):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        polling.cancel()
        models = [target.status()["model"] for target in targets]
        await targets.close()
        return models

    with FakeServer(serving("qwen")) as one, FakeServer(serving("llama")) as two, FakeServer(serving("llama")) as three:
        assert asyncio.run(asyncio.wait_for(go(two.url, three.url), 20)) == ["llama", "llama"]
        assert not any("serves" in record.getMessage() for record in caplog.records)
        assert asyncio.run(asyncio.wait_for(go(one.url, two.url), 20)) == ["qwen", "llama"]
    told = [record.getMessage() for record in caplog.records if "serves" in record.getMessage()]
    assert len(told) == 1 and "the router sends any request to either" in told[0]
    assert "'qwen'" in told[0] and "'llama'" in told[0]
