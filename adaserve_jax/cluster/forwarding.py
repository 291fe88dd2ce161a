"""The way of a request through a router: a target is chosen, and another one as long as the client has seen nothing.

What comes as one body is read to its end before it goes on, so that a target that dies meanwhile costs time only. Of a
stream, whole events go on as they come; one that is cut ends with an event that says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from adaserve_jax.cluster.choosing import Chooser
from adaserve_jax.cluster.events import WholeEvents
from adaserve_jax.cluster.exchange import Exchange, TargetLost
from adaserve_jax.cluster.passing import (
    Passing,
    Whole,
    cut_event,
    headers_back,
    no_target,
    path_of,
    target_lost,
    whole_body,
)
from adaserve_jax.cluster.requests import Classes, Wanted, read_request
from adaserve_jax.cluster.router_metrics import RouterMetrics
from adaserve_jax.cluster.targets import Flight, Target, TargetSet
from adaserve_jax.server.connection import cut_off, direct_body
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.streaming import CLIENT_CLOSED_REQUEST

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
