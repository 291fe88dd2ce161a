"""Forwarding of requests: choose a target, and another one as long as the client has not seen any of an answer.

An answer in one body is read to its end before any of it is sent on, so a target that dies meanwhile costs only time.
Of a stream, whole events are sent on as they come; a stream that is cut ends with an error event.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from adaserve_jax.cluster.requests import (
    HOP_BY_HOP_HEADERS,
    ParsedRequest,
    SloClasses,
    TargetExchange,
    TargetLost,
    parse_request,
    request_bytes,
)
from adaserve_jax.cluster.router_client import json_object
from adaserve_jax.cluster.targets import Balancer, InFlightRequest, RouterTarget, TargetSet
from adaserve_jax.http_client.connection import Headers
from adaserve_jax.server.connection import cut_off, direct_body
from adaserve_jax.server.errors import RETRY_AFTER_S, ApiError
from adaserve_jax.server.streaming import CLIENT_CLOSED_REQUEST, finish_first

REQUEST_HEADERS_DROPPED = frozenset(
    {b"host", b"content-length", b"expect", b"x-request-id"} | {name.encode() for name in HOP_BY_HOP_HEADERS}
)
ANSWER_HEADERS_DROPPED = frozenset({"content-length", "date", "server", "x-request-id"})
"""Headers that the router sets itself; the request id is the one that it sent to the target."""
BUSY_CODES = frozenset({"queue_full", "overloaded"})
"""Error codes of a 429 that concern one target only: another one may have a slot."""
UNFIT_CODES = frozenset({"not_ready", "engine_restarting", "engine_dead", "engine_stalled", "shutting_down", "aborted"})
"""Error codes of a 503 after which a target gets nothing until its health check succeeds."""
NEVER_BEGUN_CODES = frozenset({"not_ready", "engine_stalled", "shutting_down"})
"""Name the refusals among UNFIT_CODES: the target has not begun to work on the request."""
MAX_BUFFERED_ANSWER_BYTES = 2**24
"""A longer answer in one body is sent on while it comes."""
MAX_LOST = 3
"""Attempts of one request that targets may have started and lost, so that a request that crashes its target does not
crash all targets."""
RETRY_WAIT_S = 0.5
EVENT_ENDS = (b"\n\n", b"\n\r\n")
"""An empty line, after a line that ends in LF or CR LF."""
DONE = b"data: [DONE]\n\n"
DONE_EVENTS = (DONE, b"data: [DONE]\r\n\r\n")
ERROR_EVENT = re.compile(rb'^(?:data: \{"error": ?\{|event: response\.failed\r?$)', re.MULTILINE)
"""How a target ends a stream that fails: an event of completions or chat, or of the Responses API."""
MAX_EVENT_BYTES = 2**22
"""A longer event is sent on in pieces."""
TAIL_BYTES = 4096
"""End of an answer that is kept; it contains the token counts."""
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class EventBuffer:
    """Lets only whole events through, so that an answer that is cut can end with an error event.

    events: number of events let through. done: whether the last one was [DONE], after which nothing is missing.
    failed: whether any was an error. tail: the last TAIL_BYTES of them.
    """

    def __init__(self) -> None:
        self.events = 0
        self.done = self.failed = False
        self.tail = b""
        self._rest = b""

    def feed(self, part: bytes) -> bytes:
        """Add bytes and return those that may be sent on now."""
        part = self._rest + part if self._rest else part
        end = max((at + len(last) for last in EVENT_ENDS if (at := part.rfind(last)) >= 0), default=0)
        if not end and len(part) > MAX_EVENT_BYTES:
            end = len(part)
        complete, self._rest = part[:end], part[end:]
        if complete:
            self.events += sum(map(complete.count, EVENT_ENDS))
            self.done = complete.endswith(DONE_EVENTS)
            self.failed = self.failed or ERROR_EVENT.search(complete) is not None
            self.tail = (self.tail + complete)[-TAIL_BYTES:]
        return complete

    def rest(self) -> bytes:
        """Return the bytes held back, for an answer that ended properly."""
        rest, self._rest = self._rest, b""
        return rest


class ForwardedRequest:
    """One whole request. parsed: None if it generates nothing."""

    def __init__(self, scope: Scope, body: bytes, classes: SloClasses):
        self.parsed = parse_request(scope["path"], body, classes, time.monotonic())
        self._scope = scope
        self._body = body

    def message_for(self, target: RouterTarget) -> bytes:
        """Return the request's bytes for a target: unchanged except for hop-by-hop headers, host and request id."""
        method, path, query = (self._scope[name] for name in ("method", "raw_path", "query_string"))
        request_id: str = self._scope.get("state", {}).get("request_id", "")
        own = ((b"host", target.name.encode()), (b"x-request-id", request_id.encode()))
        kept = ((name, value) for name, value in self._scope["headers"] if name not in REQUEST_HEADERS_DROPPED)
        path += b"?" + query if query else b""
        return request_bytes("GET" if method == "HEAD" else method, path, (*own, *kept), self._body)


def _answer_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers if k not in ANSWER_HEADERS_DROPPED]


@dataclass(frozen=True)
class BufferedAnswer:
    """An answer that was read to its end before any of it was sent on."""

    status: int
    headers: Headers
    body: bytes

    @property
    def code(self) -> str:
        """Code of the error in the body; "" if there is none."""
        error = (json_object(self.body) or {}).get("error") if self.status >= 400 else None
        return str(error.get("code", "")) if isinstance(error, dict) else ""

    @property
    def is_unfit(self) -> bool:
        """True if the target cannot serve now."""
        return self.status == 503 and self.code in UNFIT_CODES

    @property
    def should_retry(self) -> bool:
        """True if another target may answer better."""
        return (self.status == 429 and self.code in BUSY_CODES) or self.is_unfit

    async def send(self, send: Send) -> None:
        headers = [*_answer_headers(self.headers), (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def unavailable(message: str, code: str, retry_after_s: float = RETRY_AFTER_S) -> ApiError:
    """Build an error 503 with Retry-After."""
    return ApiError(503, message, code=code, headers={"retry-after": str(max(1, round(retry_after_s)))})


def no_target(ever_available: bool) -> ApiError:
    """Build the error of a request that no server can take. ever_available: one could, since the router started."""
    what = "can take requests now" if ever_available else "has become ready yet"
    return unavailable(f"no server of the cluster {what}; retry as Retry-After says", "no_target", 5.0)


def target_lost() -> ApiError:
    return unavailable(
        "the server that worked on this request ended or was cut off, and what it had is lost; send it again",
        "target_lost",
    )


class RouterMetrics:
    """Prometheus metrics of a router in a registry of their own, documented in docs/cluster.md.

    Labels contain names of targets, never text from users. Used on the event loop only.
    """

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

    def count_answer(self, status: int) -> None:
        self.answers.labels(str(status)).inc()


class _TargetCollector(Collector):
    """Collector that reads the targets at each scrape."""

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
                ("cuts", "Answers that the target did not end after a part was sent on."),
                ("failures", "Streams that the target ended with an error."),
            )
        ]
        for target in self._targets:
            up.add_metric((target.name,), int(target.available))
            flying.add_metric((target.name,), len(target.in_flight))
            for family, name in counters:
                family.add_metric((target.name,), getattr(target, name))
        yield from (up, flying, *(family for family, _ in counters))

    def describe(self) -> list[Metric]:
        return []


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt of which the client has seen nothing.

    may_have_started: the target may have begun to work. answer: for the client, if no other target does better.
    """

    reason: str
    may_have_started: bool
    answer: BufferedAnswer | None = None


class Forwarder:
    """ASGI application that forwards requests. most_wait_s: longest wait of a request for a target."""

    def __init__(
        self, targets: TargetSet, balancer: Balancer, metrics: RouterMetrics, classes: Callable[[], SloClasses],
        *, most_wait_s: float,
    ):  # fmt: skip
        self._targets = targets
        self._balancer = balancer
        self._metrics = metrics
        self._classes = classes
        self._most_wait_s = most_wait_s
        self._stopping = False
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request. Raises ApiError as long as nothing was sent, and ClientDisconnect."""
        self.in_flight += 1
        status = CLIENT_CLOSED_REQUEST

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        try:
            request = ForwardedRequest(scope, await Request(scope, receive).body(), self._classes())
            await finish_first(self._answer(request, scope, send_and_note_status), disconnected())
        except ApiError as error:
            status = error.status_code
            raise
        except ClientDisconnect:
            raise
        except Exception:
            if status == CLIENT_CLOSED_REQUEST:
                status = 500  # what the caller answers, as nothing was sent
            raise
        finally:
            self.in_flight -= 1
            self._metrics.count_answer(status)

    def abort_all(self) -> None:
        """End all requests as if their targets had disconnected."""
        self._stopping = True
        for target in self._targets.all:
            target.give_up("the router stops")
        self._targets.notify()

    async def _answer(self, request: ForwardedRequest, scope: Scope, send: Send) -> None:
        """Try targets until one answers. Raises ApiError if none does."""
        began = time.monotonic()
        tried: set[str] = set()
        lost, failed = 0, None
        while True:
            target = self._choose(request.parsed, tried)
            if target is None:
                left_s = began + self._most_wait_s - time.monotonic()
                busy = failed is not None and failed.answer is not None and not failed.answer.is_unfit
                if self._stopping or busy or left_s <= 0:
                    break
                tried.clear()
                await self._targets.wait(min(left_s, RETRY_WAIT_S))
                continue
            if failed is None:
                self._metrics.choosing.observe(time.monotonic() - began)
            else:
                self._metrics.retries.labels(failed.reason).inc()
            failed = await self._attempt(target, request, scope, send)
            if failed is None:
                return
            tried.add(target.url)
            lost += failed.may_have_started
            if self._stopping or lost >= MAX_LOST:
                break
        if failed is None:
            raise no_target(self._targets.ever_available)
        if failed.answer is None:
            raise target_lost() if failed.may_have_started else no_target(self._targets.ever_available)
        await failed.answer.send(send)

    def _choose(self, parsed: ParsedRequest | None, tried: set[str]) -> RouterTarget | None:
        """Return an available target that was not tried, or None."""
        available = [target for target in self._targets if target.available and target.url not in tried]
        if not available:
            return None
        if parsed is None:
            return min(available, key=lambda target: len(target.in_flight))
        now = time.monotonic()
        return available[self._balancer.choose(parsed.assigned, [target.load(now) for target in available], now)]

    async def _attempt(
        self, target: RouterTarget, request: ForwardedRequest, scope: Scope, send: Send
    ) -> FailedAttempt | None:
        """Send the request to one target. Returns None once the client has its answer, whole or cut."""
        in_flight = InFlightRequest(request.parsed)
        target.in_flight.add(in_flight)
        target.requests += 1
        exchange = TargetExchange(target.pool, request.message_for(target))
        target.exchanges.add(exchange)
        try:
            await exchange.head()
            if dict(exchange.headers).get("content-type", "").startswith("text/event-stream"):
                await self._forward_stream(target, in_flight, exchange, scope, send)
                return None
            return await self._forward_body(target, in_flight, exchange, scope, send)
        except TargetLost as lost:
            self._mark_unfit(target, lost.reason)
            return FailedAttempt("lost" if lost.may_have_started else "unreachable", lost.may_have_started)
        finally:
            target.in_flight.discard(in_flight)
            target.exchanges.discard(exchange)
            exchange.close()

    async def _forward_body(
        self, target: RouterTarget, in_flight: InFlightRequest, exchange: TargetExchange, scope: Scope, send: Send
    ) -> FailedAttempt | None:
        """Forward an answer in one body. Raises TargetLost as long as nothing was sent.

        If a long answer is cut after a part of it was sent, the client's connection is closed.
        """
        parts, size, started = [], 0, False
        try:
            async for part in exchange.parts():
                size += len(part)
                if size <= MAX_BUFFERED_ANSWER_BYTES:
                    parts.append(part)
                    continue
                if not started:
                    started = True
                    await send(_head(exchange))
                    await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except TargetLost as lost:
            if not started:
                raise
            self._count_cut(target, lost.reason)
            cut_off(scope)
            await asyncio.sleep(0)  # lets the server see that the connection is closed
            return None
        if started:
            await send({"type": "http.response.body", "body": b""})
            return None
        answer = BufferedAnswer(exchange.status, exchange.headers, b"".join(parts))
        if answer.should_retry:
            if answer.is_unfit:
                self._mark_unfit(target, answer.code)
            may_have_started = answer.is_unfit and answer.code not in NEVER_BEGUN_CODES
            return FailedAttempt(answer.code, may_have_started, answer)
        self._learn_length(target, in_flight, answer.body)
        await answer.send(send)
        return None

    async def _forward_stream(
        self, target: RouterTarget, in_flight: InFlightRequest, exchange: TargetExchange, scope: Scope, send: Send
    ) -> None:
        """Forward events as they come. Raises TargetLost before the first one."""
        buffer, direct, started = EventBuffer(), direct_body(scope), False
        try:
            async for part in exchange.parts():
                complete = buffer.feed(part)
                if not complete:
                    continue
                in_flight.count_events(buffer.events, target.tokens_per_event, time.monotonic())
                if not started:
                    await send(_head(exchange))
                if started and direct is not None and direct.ready:
                    direct.write(complete)
                else:
                    await send({"type": "http.response.body", "body": complete, "more_body": True})
                started = True
            last = buffer.rest()
            target.failures += buffer.failed
        except TargetLost as lost:
            if not started:
                raise
            last = b""
            if not buffer.done:
                self._count_cut(target, lost.reason)
                last = b"data: " + json.dumps(target_lost().body()).encode() + b"\n\n" + DONE
        if not started:
            await send(_head(exchange))
        self._learn_length(target, in_flight, buffer.tail)
        await send({"type": "http.response.body", "body": last})

    def _learn_length(self, target: RouterTarget, in_flight: InFlightRequest, tail: bytes) -> None:
        """Tell the balancer how long the output was, if the answer says it."""
        tokens = target.learn(in_flight.events, tail)
        if tokens is not None:
            for choice in in_flight.assigned:
                choice.received = max(round(tokens / len(in_flight.assigned)), 1)
                self._balancer.ended(choice)

    def _count_cut(self, target: RouterTarget, reason: str) -> None:
        target.cuts += 1
        self._mark_unfit(target, reason)

    def _mark_unfit(self, target: RouterTarget, reason: str) -> None:
        """Send the target nothing until its next successful health check."""
        if not self._stopping:
            self._targets.report(target, False, reason)


def _head(exchange: TargetExchange) -> Message:
    return {"type": "http.response.start", "status": exchange.status, "headers": _answer_headers(exchange.headers)}
