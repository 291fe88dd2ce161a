"""What a router reads of a request's body: what routing needs to know, and nothing that it would have to check.

A body that is wrong is the target's to refuse: what cannot be read here counts as not given.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adaserve_jax.http_client.connection import HttpConnection
from adaserve_jax.http_client.pool import ConnectionPool
from adaserve_jax.routing.routers import Assigned
from adaserve_jax.server.settings import DEFAULT_CLASS, USUAL_TIERS

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
BYTES_PER_TOKEN = 4
"""Of text, as tokenizers have it about; lists of token ids are counted."""
MOST_CHOICES = 64
"""Of one request, that are counted one by one."""


@dataclass(frozen=True)
class Classes:
    """What a target says of itself, as far as requests' targets depend on it. targets: by class, TPOT and TTFT in
    seconds, None without one. baseline_s: what slo_relative multiplies."""

    targets: Mapping[str, tuple[float | None, float | None]]
    baseline_s: float


@dataclass(frozen=True)
class Wanted:
    """What a request asks for. choices: how many answers it wants, each of which takes room."""

    assigned: Assigned
    choices: int
    stream: bool

    def fresh(self) -> list[Assigned]:
        """What a router counts, one per choice; the first choice has the prompt's tokens to compute."""
        others = [replace(self.assigned, prompt_tokens=1) for _ in range(self.choices - 1)]
        return [replace(self.assigned), *others]


def read_request(path: str, body: bytes, classes: Classes, now: float) -> Wanted | None:
    """None: the request generates nothing, and any target will do. now: seconds."""
    if path not in GENERATION_PATHS:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    name = fields.get("slo_class")
    if not isinstance(name, str):
        tier = fields.get("service_tier")
        name = USUAL_TIERS.get(tier, tier) if isinstance(tier, str) else DEFAULT_CLASS
    tpot_s, ttft_s = classes.targets.get(name, (None, None))
    relative = _number(fields.get("slo_relative"))
    own_s = _seconds(fields.get("slo_tpot_ms"))
    if own_s is None and relative is not None:
        own_s = relative * classes.baseline_s
    assigned = Assigned(
        slo_class=name if name in classes.targets else DEFAULT_CLASS,
        prompt_tokens=_prompt_tokens(fields),
        arrival_s=now,
        tpot_slo_s=tpot_s if own_s is None else own_s,
        ttft_slo_s=ttft_s if (own := _seconds(fields.get("slo_ttft_ms"))) is None else own,
    )
    return Wanted(assigned, min(_prompts(fields) * _count(fields.get("n")), MOST_CHOICES), fields.get("stream") is True)


def _number(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
    return float(value) if ok else None


def _seconds(value: Any) -> float | None:
    number = _number(value)
    return None if number is None else number / 1e3


def _count(value: Any) -> int:
    return min(value, MOST_CHOICES) if isinstance(value, int) and value > 0 else 1


def _prompts(fields: Mapping[str, Any]) -> int:
    prompt = fields.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1


def _prompt_tokens(fields: Mapping[str, Any]) -> int:
    return max(_tokens(fields.get("messages") if "messages" in fields else fields.get("prompt")), 1)


def _tokens(value: Any) -> int:
    """About how many tokens: ids are counted, text is divided."""
    if isinstance(value, str):
        return math.ceil(len(value.encode(errors="replace")) / BYTES_PER_TOKEN)
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            return len(value)
        return sum(map(_tokens, value))
    if isinstance(value, dict):
        return _tokens(value.get("content", value.get("text")))
    return 0


# One request to one target and what comes back, with a limit on what is read before somebody takes it.
#
# Stands on the bench's client (`http_client/connection.py`, `http_client/pool.py`): one HTTP parser for both.
# Runs on one event loop. Knows nothing of what the bodies mean.

MOST_HELD_BYTES = 2**18
"""Read and not taken; a target that sends more waits."""
OF_ONE_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade",
})  # fmt: skip
"""Headers that are between two neighbours (RFC 9110, 7.6.1)."""


class TargetLost(Exception):
    """There will be no answer, or no more of it. taken: whether the target may have begun to work on the request."""

    def __init__(self, why: str, *, taken: bool):
        super().__init__(why)
        self.why = why
        self.taken = taken


def request_bytes(method: str, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A whole request as it is sent. headers: without content-length, which is added where there is a body."""
    lines = [method.encode() + b" " + path + b" HTTP/1.1", *(name + b": " + value for name, value in headers)]
    if body or method not in ("GET", "OPTIONS"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join((*lines, b"", body))


class Exchange:
    """Sends a request as soon as there is a connection. Await `head`, then take `parts`; `close` in any case.

    An idle connection that its server closed just then is no loss: the request goes again, on a new one.
    """

    def __init__(self, pool: ConnectionPool, message: bytes):
        self.status = 0
        self.headers: dict[str, str] = {}
        """By lower-case name, without those of one hop."""
        self._pool = pool
        self._message = message
        self._parts: deque[bytes] = deque()
        self._held = 0
        self._paused = self._ended = self._closed = self._resent = False
        self._lost: TargetLost | None = None
        self._changed = asyncio.Event()
        self._heard_s = time.monotonic()
        """When anything came last, or it began."""
        self._connection: HttpConnection | None = None
        pool.acquire(self._send, self._not_connected)

    @property
    def quiet_s(self) -> float:
        """Seconds since anything came; 0 while nobody takes what came."""
        return 0.0 if self._paused else time.monotonic() - self._heard_s

    async def head(self) -> None:
        """Wait until status and headers are there. Raises TargetLost."""
        while not self.status:
            if self._lost is not None:
                raise self._lost
            await self._wait()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises TargetLost where it ends too early, after all that came before."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._held -= len(part)
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

    def give_up(self, why: str) -> None:
        """End it now, as lost, whatever the target does."""
        if not self._ended and self._lost is None:
            self.close()
            self._lose(TargetLost(why, taken=True))

    def close(self) -> None:
        """Stop it; where the answer has not ended, the target sees its client go away."""
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
        self._connection = connection
        connection.send(self._message, self)

    def _not_connected(self, code: str) -> None:
        self._lose(TargetLost(code, taken=self._resent))  # what was sent first may be what ended it

    def _lose(self, lost: TargetLost) -> None:
        self._lost = lost
        self._changed.set()

    # ---- what the connection calls ----

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self._heard_s = status, time.monotonic()
        self.headers = {name: value for name, value in headers.items() if name not in OF_ONE_HOP}
        self._changed.set()

    def on_body(self, at_s: float, part: bytes) -> None:
        self._heard_s = at_s
        self._parts.append(part)
        self._held += len(part)
        if self._held > MOST_HELD_BYTES and not self._paused and self._connection is not None:
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
        self._connection = None
        if stale and not self._closed:
            self._resent = True
            self._pool.acquire(self._send, self._not_connected, fresh=True)
        else:
            self._lose(TargetLost(code, taken=True))
