"""The way of a request through a router: a target is chosen, and another one as long as the client has seen nothing.

What comes as one body is read to its end before it goes on, so that a target that dies meanwhile costs time only. Of a
stream, whole events go on as they come; one that is cut ends with an event that says so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.types import Message, Receive, Scope, Send

from adaserve_jax.cluster.requests import OF_ONE_HOP, Classes, Exchange, TargetLost, Wanted, read_request, request_bytes
from adaserve_jax.cluster.targets import Chooser, Flight, Target, TargetSet, WholeEvents
from adaserve_jax.server.connection import cut_off, direct_body
from adaserve_jax.server.errors import RETRY_AFTER_S, ApiError
from adaserve_jax.server.streaming import CLIENT_CLOSED_REQUEST

# A request as it passes through a router: what came, what is sent on, and what may be sent back of the answer.

NOT_SENT_ON = frozenset({b"host", b"content-length", b"expect", b"x-request-id"}) | {n.encode() for n in OF_ONE_HOP}
NOT_SENT_BACK = frozenset({"content-length", "date", "server", "x-request-id"})
"""The router has its own; an id is the same as the target's, which it was told."""
BUSY_CODES = frozenset({"queue_full", "overloaded"})
"""Of a 429 that says something of the target alone: another one may have room."""
UNFIT_CODES = frozenset({"not_ready", "engine_restarting", "engine_dead", "engine_stalled", "shutting_down", "aborted"})
"""Of a 503 after which a target gets nothing until it says that it is well."""


@dataclass(frozen=True)
class Passing:
    """One request, whole. wanted: None when it generates nothing."""

    method: str
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    request_id: str
    wanted: Wanted | None

    def message_for(self, target: Target) -> bytes:
        """As it goes to a target: unchanged but for what is between neighbours."""
        own = ((b"host", target.name.encode()), (b"x-request-id", self.request_id.encode()))
        kept = ((name, value) for name, value in self.headers if name not in NOT_SENT_ON)
        return request_bytes(self.method, self.path, (*own, *kept), self.body)


def path_of(scope: Scope) -> bytes:
    """Path and query, as they came."""
    query: bytes = scope["query_string"]
    return scope["raw_path"] + (b"?" + query if query else b"")


async def whole_body(receive: Receive) -> bytes | None:
    """None: the client went away first. Raises ApiError above the limit."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def headers_back(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Those of an answer that go on to the client."""
    return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items() if k not in NOT_SENT_BACK]


@dataclass(frozen=True)
class Whole:
    """An answer that was read to its end before any of it was sent on."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The error's; "" where there is none."""
        if self.status < 400:
            return ""
        try:
            return str(json.loads(self.body)["error"]["code"])
        except (KeyError, TypeError, ValueError):
            return ""

    @property
    def elsewhere(self) -> bool:
        """Whether another target may answer better."""
        return (self.status == 429 and self.code in BUSY_CODES) or self.is_unfit

    @property
    def is_unfit(self) -> bool:
        return self.status == 503 and self.code in UNFIT_CODES

    def messages(self) -> list[dict[str, Any]]:
        """As ASGI has them."""
        headers = [*headers_back(self.headers), (b"content-length", b"%d" % len(self.body))]
        return [
            {"type": "http.response.start", "status": self.status, "headers": headers},
            {"type": "http.response.body", "body": self.body},
        ]


def unavailable(message: str, code: str, retry_after_s: float = RETRY_AFTER_S) -> ApiError:
    """503 with Retry-After."""
    return ApiError(503, message, code=code, headers={"retry-after": str(max(1, round(retry_after_s)))})


def no_target() -> ApiError:
    return unavailable("no server of the cluster can take requests now; retry as Retry-After says", "no_target", 5.0)


def target_lost() -> ApiError:
    return unavailable(
        "the server that worked on this request ended or was cut off, and what it had is lost; send it again",
        "target_lost",
    )


def cut_event() -> bytes:
    """The end of a stream whose target did not end it."""
    return b"data: " + json.dumps(target_lost().body()).encode() + b"\n\ndata: [DONE]\n\n"


# Prometheus metrics of a router, documented in docs/cluster.md. Labels hold names of targets, not what users
# write.

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class RouterMetrics:
    """In a registry of its own; used from the event loop only."""

    def __init__(self, targets: TargetSet):
        self.registry = CollectorRegistry()
        self.registry.register(_TargetCollector(targets))
        self.answers = Counter(
            "adaserve_router_answers", "Requests answered, by status; 499: the client went away first.", ("status",),
            registry=self.registry,
        )  # fmt: skip
        self.retries = Counter(
            "adaserve_router_retries", "Attempts at another target, by the reason why the one before brought nothing.",
            ("reason",), registry=self.registry,
        )  # fmt: skip
        self.choosing = Histogram(
            "adaserve_router_choosing_seconds", "From a request's last byte until a target was chosen.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _TargetCollector(Collector):
    """Reads the targets at each scrape."""

    def __init__(self, targets: TargetSet):
        self._targets = targets

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("adaserve_router_target_up", "1 while the target gets requests.", labels=("target",))
        flying = GaugeMetricFamily(
            "adaserve_router_in_flight", "Requests at the target that came from here.", labels=("target",)
        )
        counters = [
            (CounterMetricFamily(f"adaserve_router_{name}", text, labels=("target",)), name)
            for name, text in (
                ("requests", "Requests sent to the target, each attempt counted."),
                ("ejections", "Times that the target was found unfit after it was fit."),
                ("cuts", "Streams that the target did not end."),
            )
        ]
        for target in self._targets:
            up.add_metric((target.name,), int(target.available))
            flying.add_metric((target.name,), len(target.flights))
            for family, name in counters:
                family.add_metric((target.name,), getattr(target, name))
        yield from (up, flying, *(family for family, _ in counters))

    def describe(self) -> list[Metric]:
        return []


MOST_WHOLE_BYTES = 2**24
"""Of an answer in one body; a longer one goes on while it comes."""
MOST_LOST = 3
"""Attempts of one request that targets may have begun and not ended: a request that ends them must not end them all."""
LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class Failed:
    """An attempt that brought nothing that the client has seen. answer: what to tell it if no other does better."""

    reason: str
    taken: bool
    answer: Whole | None = None


class Forwarder:
    """Passes requests on, each from its first byte to its last. most_wait_s: that it waits for a target at most."""

    def __init__(
        self, targets: TargetSet, chooser: Chooser, metrics: RouterMetrics, classes: Callable[[], Classes],
        *, most_wait_s: float,
    ):  # fmt: skip
        self._targets = targets
        self._chooser = chooser
        self._metrics = metrics
        self._classes = classes
        self._most_wait_s = most_wait_s
        self._stopping = False
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Raises ApiError as long as nothing was sent."""
        self.in_flight += 1
        status = CLIENT_CLOSED_REQUEST

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            body = await whole_body(receive)
            if body is not None:
                wanted = read_request(scope["path"], body, self._classes(), time.monotonic())
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                request_id = scope.get("state", {}).get("request_id", "")
                passing = Passing(method, path_of(scope), tuple(scope["headers"]), body, request_id, wanted)
                await _unless_gone(self._answer(passing, scope, noted), receive)
        except ApiError as error:
            status = error.status_code
            raise
        finally:
            self.in_flight -= 1
            self._metrics.answers.labels(str(status)).inc()

    def abort_all(self) -> None:
        """End what is under way as if its targets had gone."""
        self._stopping = True
        for target in self._targets.all:
            target.give_up("the router stops")
        self._targets.changed()

    async def _answer(self, passing: Passing, scope: Scope, send: Send) -> None:
        """Try targets until one answers. Raises ApiError when none does."""
        began = time.monotonic()
        tried: set[str] = set()
        lost, failed = 0, None
        while True:
            target = self._choose(passing.wanted, tried)
            if target is None:
                left_s = began + self._most_wait_s - time.monotonic()
                busy = failed is not None and failed.answer is not None and not failed.answer.is_unfit
                if self._stopping or busy or left_s <= 0:
                    break
                tried.clear()
                await self._targets.wait(min(left_s, LOOK_AGAIN_S))
                continue
            if failed is None:
                self._metrics.choosing.observe(time.monotonic() - began)
            else:
                self._metrics.retries.labels(failed.reason).inc()
            failed = await self._attempt(target, passing, scope, send)
            if failed is None:
                return
            tried.add(target.url)
            lost += failed.taken
            if self._stopping or lost >= MOST_LOST:
                break
        if failed is None:
            raise no_target()
        if failed.answer is None:
            raise target_lost() if failed.taken else no_target()
        for message in failed.answer.messages():
            await send(message)

    def _choose(self, wanted: Wanted | None, tried: set[str]) -> Target | None:
        """None: there is no target that takes requests and was not tried."""
        fit = [target for target in self._targets if target.available and target.url not in tried]
        if not fit:
            return None
        if wanted is None:
            return min(fit, key=lambda target: len(target.flights))
        now = time.monotonic()
        return fit[self._chooser.choose(wanted.assigned, [target.known(now) for target in fit], now)]

    async def _attempt(self, target: Target, passing: Passing, scope: Scope, send: Send) -> Failed | None:
        """None: the client has its answer, whole or cut."""
        flight = Flight(passing.wanted)
        target.flights.add(flight)
        target.requests += 1
        exchange = Exchange(target.pool, passing.message_for(target))
        target.exchanges.add(exchange)
        try:
            await exchange.head()
            if exchange.headers.get("content-type", "").startswith("text/event-stream"):
                await self._stream(target, flight, exchange, scope, send)
                return None
            return await self._whole(target, flight, exchange, scope, send)
        except TargetLost as gone:
            self._unfit(target, gone.why)
            return Failed("lost" if gone.taken else "unreachable", gone.taken)
        finally:
            target.flights.discard(flight)
            target.exchanges.discard(exchange)
            exchange.close()

    async def _whole(
        self, target: Target, flight: Flight, exchange: Exchange, scope: Scope, send: Send
    ) -> Failed | None:
        """An answer in one body; of one that was cut after a part of it was sent, the client sees its connection end.
        Raises TargetLost as long as nothing was sent."""
        parts, size, started = [], 0, False
        try:
            async for part in exchange.parts():
                size += len(part)
                if size <= MOST_WHOLE_BYTES:
                    parts.append(part)
                    continue
                if not started:
                    started = True
                    await send(_head(exchange))
                    await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except TargetLost as gone:
            if not started:
                raise
            self._cut(target, gone.why)
            cut_off(scope)
            await asyncio.sleep(0)  # the connection learns of its end
            return None
        if started:
            await send({"type": "http.response.body", "body": b""})
            return None
        answer = Whole(exchange.status, exchange.headers, b"".join(parts))
        if answer.elsewhere:
            if answer.is_unfit:
                self._unfit(target, answer.code)
            return Failed(answer.code, answer.is_unfit, answer)
        self._ended(target, flight, answer.body)
        for message in answer.messages():
            await send(message)
        return None

    async def _stream(self, target: Target, flight: Flight, exchange: Exchange, scope: Scope, send: Send) -> None:
        """Events, as they come. Raises TargetLost before the first one."""
        gate, direct, started = WholeEvents(), direct_body(scope), False
        try:
            async for part in exchange.parts():
                passed = gate.feed(part)
                if not passed:
                    continue
                flight.see(gate.events, target.tokens_per_event, time.monotonic())
                if not started:
                    await send(_head(exchange))
                if started and direct is not None and direct.ready:
                    direct.write(passed)
                else:
                    await send({"type": "http.response.body", "body": passed, "more_body": True})
                started = True
            last = gate.rest()
        except TargetLost as gone:
            if not started:
                raise
            last = b""
            if not gate.done:
                self._cut(target, gone.why)
                last = cut_event()
        if not started:
            await send(_head(exchange))
        self._ended(target, flight, gate.tail)
        await send({"type": "http.response.body", "body": last})

    def _ended(self, target: Target, flight: Flight, tail: bytes) -> None:
        """Learn how long outputs are."""
        tokens = target.learn(flight.events, tail)
        if tokens is not None:
            for choice in flight.assigned:
                choice.received = max(round(tokens / len(flight.assigned)), 1)
                self._chooser.ended(choice)

    def _cut(self, target: Target, why: str) -> None:
        """An answer of it that the client has begun to read has no end."""
        target.cuts += 1
        self._unfit(target, why)

    def _unfit(self, target: Target, why: str) -> None:
        """It gets nothing until it says itself that it is well."""
        if not self._stopping:
            self._targets.report(target, False, why)


def _head(exchange: Exchange) -> Message:
    return {"type": "http.response.start", "status": exchange.status, "headers": headers_back(exchange.headers)}


async def _unless_gone(work, receive: Receive) -> None:
    """Run `work`, and stop it when the client goes away. Raises what it raises."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    main, other = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({main, other}, return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            main.result()
    finally:
        main.cancel()
        other.cancel()
        await asyncio.gather(main, other, return_exceptions=True)
