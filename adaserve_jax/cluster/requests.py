"""Requests at the router: the fields that routing needs, and the exchange of one request with one target."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adaserve_jax.cluster.router_client import json_object
from adaserve_jax.http_client.connection import STALE_S, Headers, HttpConnection
from adaserve_jax.http_client.pool import ConnectionPool
from adaserve_jax.routing.fleet import Assigned
from adaserve_jax.server.json_size import excess
from adaserve_jax.server.settings import DEFAULT_CLASS, USUAL_TIERS

PROMPT_FIELDS = {
    "/v1/completions": ("prompt",), "/v1/chat/completions": ("messages",), "/v1/responses": ("instructions", "input"),
}  # fmt: skip
"""Fields that hold the prompt, by the path of each route that generates."""
_TEXT_FIELDS = ("content", "text", "output", "arguments")
BYTES_PER_TOKEN = 4
"""Estimate for text; lists of token ids are counted."""
MAX_VALUES, MAX_PARTS = 2**18, 2**15
"""Most values, and lists, objects and named members among them, of a body that is parsed: the router serves all
clients in one thread."""
MAX_CHOICES = 64
"""Choices of one request that are counted."""
MAX_BUFFERED_BYTES = 2**18
"""Bytes of an answer that may wait for the client; above it the router stops reading from the target."""
HOP_BY_HOP_HEADERS = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade",
})  # fmt: skip
"""Headers that concern one connection only (RFC 9110, 7.6.1)."""


@dataclass(frozen=True)
class SloClasses:
    """SLO classes as a target reports them.

    targets: TPOT and TTFT in seconds (None: no target) by class. baseline_s: the factor of `slo_relative`.
    """

    targets: Mapping[str, tuple[float | None, float | None]]
    baseline_s: float

    def of(self, name: str) -> tuple[float | None, float | None]:
        """Return the targets of a class; none for an unknown one."""
        return self.targets.get(name, (None, None))


@dataclass(frozen=True)
class ParsedRequest:
    """A generation request as routing sees it. choices: number of answers, each of which takes a slot."""

    assigned: Assigned
    choices: int
    stream: bool

    def per_choice(self) -> list[Assigned]:
        """Return one entry per choice; only the first has the prompt's tokens to compute."""
        others = [replace(self.assigned, prompt_tokens=1) for _ in range(self.choices - 1)]
        return [replace(self.assigned), *others]


def parse_request(path: str, body: bytes, classes: SloClasses, now: float) -> ParsedRequest | None:
    """Read what routing needs from a request's body; None if it generates nothing, so that any target will do.

    The body is not validated: the target does that, and a field that cannot be read counts as absent. One that holds
    very many values is not even parsed, and counts by its length. now: seconds.
    """
    if path in PROMPT_FIELDS and excess(body, MAX_VALUES, MAX_PARTS):
        tokens = len(body) // BYTES_PER_TOKEN
        return ParsedRequest(Assigned(DEFAULT_CLASS, tokens, now, *classes.of(DEFAULT_CLASS)), 1, False)
    fields = json_object(body) if path in PROMPT_FIELDS else None
    if fields is None:
        return None
    name = fields.get("slo_class")
    if not isinstance(name, str):
        tier = fields.get("service_tier")
        name = USUAL_TIERS.get(tier, tier) if isinstance(tier, str) else DEFAULT_CLASS
    tpot_s, ttft_s = classes.of(name)
    relative = _number(fields.get("slo_relative"))
    own_tpot_s, own_ttft_s = _seconds(fields.get("slo_tpot_ms")), _seconds(fields.get("slo_ttft_ms"))
    if own_tpot_s is None and relative is not None:
        own_tpot_s = relative * classes.baseline_s
    try:
        prompt_tokens = max(sum(_tokens(fields.get(name)) for name in PROMPT_FIELDS[path]), 1)
    except RecursionError:  # the target says what is wrong with it
        prompt_tokens = 1
    assigned = Assigned(
        slo_class=name if name in classes.targets else DEFAULT_CLASS,
        prompt_tokens=prompt_tokens,
        arrival_s=now,
        tpot_slo_s=tpot_s if own_tpot_s is None else own_tpot_s,
        ttft_slo_s=ttft_s if own_ttft_s is None else own_ttft_s,
        e2e_slo_s=_seconds(fields.get("slo_e2e_ms")),
    )
    choices = min(_prompts(fields) * _count(fields.get("n")), MAX_CHOICES)
    return ParsedRequest(assigned, choices, fields.get("stream") is True)


def _number(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
    return float(value) if ok else None


def _seconds(milliseconds: Any) -> float | None:
    number = _number(milliseconds)
    return None if number is None else number / 1e3


def _count(value: Any) -> int:
    return min(value, MAX_CHOICES) if isinstance(value, int) and value > 0 else 1


def _prompts(fields: Mapping[str, Any]) -> int:
    prompt = fields.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1


def _tokens(value: Any) -> int:
    """Estimate the number of tokens: ids are counted, text is divided by BYTES_PER_TOKEN."""
    if isinstance(value, str):
        return math.ceil(len(value.encode(errors="replace")) / BYTES_PER_TOKEN)
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            return len(value)
        return sum(map(_tokens, value))
    if isinstance(value, dict):
        return sum(_tokens(value.get(name)) for name in _TEXT_FIELDS)
    return 0


class TargetLost(Exception):
    """The target will send no (further) answer. may_have_started: it may have begun to work on the request."""

    def __init__(self, reason: str, *, may_have_started: bool):
        super().__init__(reason)
        self.reason = reason
        self.may_have_started = may_have_started


def request_bytes(method: str, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Return a whole HTTP/1.1 request. headers: without content-length, which is added if there is a body."""
    lines = [method.encode() + b" " + path + b" HTTP/1.1", *(name + b": " + value for name, value in headers)]
    if body or method not in ("GET", "OPTIONS"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join((*lines, b"", body))


class TargetExchange:
    """One request to one target and its answer, with a bound on bytes read ahead of the client.

    The request is sent as soon as there is a connection. Await `head`, then iterate `parts`; call `close` in any case.
    If the server had closed an idle connection just before, the request is sent again on a new one. The bytes go
    through the bench's HTTP client; docs/dependencies.md says why not aiohttp.
    """

    def __init__(self, pool: ConnectionPool, message: bytes):
        self.status = 0
        self.headers: Headers = ()
        """Without hop-by-hop headers."""
        self._pool = pool
        self._message = message
        self._parts: deque[bytes] = deque()
        self._buffered = 0
        self._paused = self._ended = self._closed = self._resent = False
        self._lost: TargetLost | None = None
        self._changed = asyncio.Event()
        self._heard_s = time.monotonic()
        """Time when the last bytes came, or the request was sent, or waits to be."""
        self._connection: HttpConnection | None = None
        pool.acquire(self._send, self._not_connected)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last bytes came; 0 while the client is the slower side."""
        return 0.0 if self._paused else time.monotonic() - self._heard_s

    async def head(self) -> None:
        """Wait until status and headers are there. Raises TargetLost."""
        while not self.status:
            if self._lost is not None:
                raise self._lost
            await self._wait()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. If it ends too early, raise TargetLost after all that came."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._buffered -= len(part)
                yield part
            if self._paused and self._connection is not None:
                self._paused, self._heard_s = False, time.monotonic()
                self._connection.resume()
            elif self._ended:
                return
            elif self._lost is not None:
                raise self._lost
            else:
                await self._wait()

    def give_up(self, reason: str) -> None:
        if not self._ended and self._lost is None:
            self.close()
            self._lose(TargetLost(reason, may_have_started=True))

    def close(self) -> None:
        """End the exchange; if the answer is not over, the target sees its client disconnect."""
        self._closed = True
        if self._connection is not None and not self._ended:
            self._connection.close_for(self)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _send(self, connection: HttpConnection) -> None:
        if self._closed:
            connection.close()
            return
        self._connection, self._heard_s = connection, time.monotonic()
        connection.send(self._message, self)

    def _not_connected(self, code: str) -> None:
        self._lose(TargetLost(code, may_have_started=self._resent))  # the first attempt may have crashed the target

    def _lose(self, lost: TargetLost) -> None:
        self._lost = lost
        self._changed.set()

    # ---- called by the connection (http_client.connection.ResponseHandler) ----

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self._heard_s = status, time.monotonic()
        self.headers = [(name, value) for name, value in headers if name not in HOP_BY_HOP_HEADERS]
        self._changed.set()

    def on_body(self, at_s: float, part: bytes) -> None:
        self._heard_s = at_s
        self._parts.append(part)
        self._buffered += len(part)
        if self._buffered > MAX_BUFFERED_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause()
        self._changed.set()

    def on_end(self, at_s: float) -> None:
        if self._paused and self._connection is not None:  # it may carry the next request
            self._connection.resume()
            self._paused = False
        self._ended = True
        self._changed.set()

    def on_lost(self, at_s: float, code: str, heard: bool) -> None:
        stale = self._connection is not None and self._connection.was_idle and not heard
        stale = stale and at_s - self._heard_s <= STALE_S
        self._connection = None
        if stale and not self._closed:
            self._resent = True
            self._pool.acquire(self._send, self._not_connected, fresh=True)
        else:
            self._lose(TargetLost(code, may_have_started=True))
