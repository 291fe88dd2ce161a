"""The link of a target to one draft service: connection, Hello, reconnection, and the circuit breaker.

Messages about sessions go to the owner. A link has no thread and no timer: the owner calls `connect_if_due`, transports
call back in their own threads, and the owner's lock guards all state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, Protocol

from adaserve_jax.star.messages import (
    PROTOCOL_VERSION,
    FromService,
    FromTarget,
    Hello,
    Load,
    Refused,
    Resync,
    Tree,
    Welcome,
    WireError,
)
from adaserve_jax.stats import ServiceState

_log = logging.getLogger(__name__)

WELCOME_S = 10.0
"""Longest wait for the answer to Hello."""
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 10.0
"""First and longest wait before a lost stream is opened again."""
MISMATCH_RETRY_S = 60.0
"""Wait before asking an incompatible service again: nothing changes until somebody replaces it."""
MISMATCHES = frozenset({"protocol_version", "vocabulary", "draft_version", "cells", "unauthenticated"})
REFUSED_RETRY_S = 1.0
"""Wait after any other refusal that names no time."""
BAD_ROUNDS = 3
"""Bad rounds in a row that open a breaker: one may be a pause of the network, three cost three deadlines."""
FIRST_TRIAL_S = 0.5
LAST_TRIAL_S = 30.0
"""First and longest wait before a service that does not answer is tried again."""


class RetryBackoff:
    """Waits that double from `first_s` to `most_s`, each shortened by up to a half at random, so that many targets do
    not come back at once. draw: uniform in [0, 1)."""

    def __init__(self, first_s: float, most_s: float, draw: Callable[[], float]) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._failures = 0

    def next_s(self) -> float:
        """Return the seconds to wait after one more failure."""
        wait_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 60))
        self._failures += 1
        return wait_s * (1.0 - 0.5 * self._draw())

    def reset(self) -> None:
        self._failures = 0


class CircuitBreaker:
    """Circuit breaker of one service. Closed: the service is asked. Open, after BAD_ROUNDS bad rounds in a row: it is
    not. Half open, after a wait: it is asked, and the next round decides. opens: how often it has opened."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.state: Literal["closed", "half_open", "open"] = "closed"
        self.opens = 0
        self._bad = 0
        self._trial_s = 0.0
        self._backoff = RetryBackoff(FIRST_TRIAL_S, LAST_TRIAL_S, draw)

    def allows(self, now: float) -> bool:
        """Return whether the service may be asked; an open breaker becomes half open when its wait is over."""
        if self.state == "open" and now >= self._trial_s:
            self.state = "half_open"
        return self.state != "open"

    def good(self) -> None:
        """Count a round with a valid tree."""
        if self.state != "closed" or self._bad:
            self.state = "closed"
            self._bad = 0
            self._backoff.reset()

    def bad(self, now: float) -> None:
        """Count a round without a valid tree in time."""
        self._bad += 1
        if self.state == "half_open" or self._bad >= BAD_ROUNDS:
            self.state = "open"
            self.opens += 1
            self._trial_s = now + self._backoff.next_s()


OnFrame = Callable[[Sequence[FromService | WireError]], None]
"""on_frame(frame): called in a thread of the transport, one frame after another; must return soon and not raise. A
WireError stands in the place of an invalid message."""
OnLost = Callable[[str], None]
"""on_lost(why): the stream has ended; called once, and no frame follows. why: for the log, without secrets."""


class Stream(Protocol):
    """One open stream of a target, independent of gRPC so that tests can put faults between both sides."""

    def send(self, frame: Sequence[FromTarget]) -> None:
        """Hand a frame over. Return at once and never raise: a broken stream calls `on_lost`."""
        ...

    def close(self) -> None:
        """End the stream; `on_lost` is not called any more. Safe to call twice and from any thread."""
        ...


class Transport(Protocol):
    """Opens streams to one service."""

    @property
    def address(self) -> str:
        """Host and port of the service, for logs and metrics."""
        ...

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> Stream:
        """Begin to connect and return at once. Frames sent before the connection stands are sent once it does."""
        ...


SessionMessage = Tree | Resync | Refused | WireError
Deliver = Callable[["Link", SessionMessage], None]
"""deliver(link, message): called with the lock held."""


class Link:
    """Link to one draft service.

    number: its index among the target's services. generation: counts the streams that were welcomed, so that a session
    knows whether it was opened in the present one. sessions: number of this target's sessions there. lost, refused:
    numbers of streams that ended and of Hellos that were refused.
    """

    def __init__(
        self, number: int, transport: Transport, hello: Hello, lock: AbstractContextManager[object],
        clock: Callable[[], float], draw: Callable[[], float], deliver: Deliver, changed: Callable[[Link], None],
    ) -> None:  # fmt: skip
        self.number = number
        self.transport = transport
        self.breaker = CircuitBreaker(draw)
        self.generation = 0
        self.sessions = 0
        self.lost = 0
        self.refused = 0
        self.load = Load(0.0, 0.0, 0, 0)
        self.welcome: Welcome | None = None
        self._hello = hello
        self._lock = lock
        self._clock = clock
        self._deliver = deliver
        self._changed = changed
        self._backoff = RetryBackoff(FIRST_RETRY_S, LAST_RETRY_S, draw)
        self._state: Literal["idle", "connecting", "ready", "closed"] = "idle"
        self._attempt = 0
        self._stream: Stream | None = None
        self._retry_s = -math.inf
        self._began_s = 0.0
        self._reason = "not connected yet"

    @property
    def ready(self) -> bool:
        return self._state == "ready"

    @property
    def is_idle(self) -> bool:
        """Return whether the link is neither connected nor connecting."""
        return self._state in ("idle", "closed")

    @property
    def address(self) -> str:
        return self.transport.address

    @property
    def retry_s(self) -> float:
        """Clock time at which `connect_if_due` has something to do again; inf: after the service has answered."""
        if self._state == "idle":
            return self._retry_s
        return self._began_s + WELCOME_S if self._state == "connecting" else math.inf

    def state(self) -> ServiceState:
        """Return the present state, for metrics."""
        load, breaker = self.load, self.breaker.state
        reason = "it did not answer in time" if self.ready and breaker == "open" else self._reason
        version = "" if self.welcome is None else self.welcome.draft_version
        return ServiceState(breaker, version, self.sessions, load.busy, load.queue_s, reason, int(self.ready))

    def connect_if_due(self) -> None:
        """Begin to connect if it is time to; return at once. Called without the lock."""
        if self._state in ("ready", "closed"):
            return
        silent = None
        with self._lock:
            now = self._clock()
            if self._state == "connecting" and now >= self._began_s + WELCOME_S:
                silent = self._lose(f"no Welcome within {WELCOME_S:g} s")
            begins = self._state == "idle" and now >= self._retry_s
            if begins:
                self._state, self._began_s = "connecting", now
                self._attempt += 1
            attempt = self._attempt
        if silent is not None:
            silent.close()
        if begins:
            self._begin(attempt)

    def send(self, frame: Sequence[FromTarget]) -> None:
        """Send a frame unless the stream is lost. Called without the lock."""
        stream = self._stream
        if stream is not None:
            stream.send(frame)

    def worked(self) -> None:
        """Count a round with valid trees, which resets the waits. Called with the lock."""
        self.breaker.good()
        self._backoff.reset()

    def close(self) -> None:
        """End the stream for good. Called without the lock."""
        with self._lock:
            stream = self._end("closed", math.inf)
            self._state = "closed"
        if stream is not None:
            stream.close()

    def _begin(self, attempt: int) -> None:
        try:
            stream = self.transport.open(partial(self._received, attempt), partial(self._lost, attempt))
        except Exception as error:  # a transport that cannot even begin counts as a lost stream
            self._lost(attempt, f"{type(error).__name__}: {error}")
            return
        with self._lock:
            present = attempt == self._attempt and self._state == "connecting"
            if present:
                self._stream = stream
        if present:
            stream.send([self._hello])
        else:
            stream.close()

    def _received(self, attempt: int, frame: Sequence[FromService | WireError]) -> None:
        ended = None
        with self._lock:
            for message in frame:
                if attempt != self._attempt:
                    break
                if isinstance(message, Welcome):
                    ended = self._welcomed(message)
                elif isinstance(message, Refused) and message.session == 0:
                    ended = self._refuse(message)
                elif not self.ready:
                    continue
                elif isinstance(message, Load):
                    self.load = message
                else:
                    self._deliver(self, message)
        if ended is not None:
            ended.close()

    def _lost(self, attempt: int, why: str) -> None:
        with self._lock:
            if attempt == self._attempt:
                self._lose(printable(why))

    def _welcomed(self, welcome: Welcome) -> Stream | None:
        """Accept the service, or refuse it and return the stream to be closed."""
        if self._state != "connecting" or self._stream is None:
            return None  # no Hello was sent in this stream
        wanted = self._hello.draft_version
        if welcome.protocol_version != PROTOCOL_VERSION:
            expected = f"expected protocol version {PROTOCOL_VERSION}, got {welcome.protocol_version}"
            return self._refuse(Refused("protocol_version", expected))
        if wanted and welcome.draft_version != wanted:
            expected = f"expected draft {wanted}, got {welcome.draft_version}"
            return self._refuse(Refused("draft_version", expected))
        self.welcome = welcome
        self.generation += 1
        self._state, self._reason = "ready", ""
        self.load = Load(0.0, 0.0, 0, 0)
        level = logging.WARNING if self.generation > 1 else logging.INFO  # a loss was told as a warning
        _log.log(level, "draft service %s: connected, draft %s", self.address, welcome.draft_version)
        self._changed(self)
        return None

    def _refuse(self, refused: Refused) -> Stream | None:
        self.refused += 1
        reason = printable(f"{refused.code}: {refused.message}")
        if not self._reason.startswith(f"{refused.code}: "):  # a full service tells of its load, anew each time
            _log.warning("draft service %s: refused: %s", self.address, reason)
        if refused.code in MISMATCHES:
            wait_s = max(refused.retry_after_s, MISMATCH_RETRY_S)
        else:
            wait_s = refused.retry_after_s or REFUSED_RETRY_S + self._backoff.next_s()
        return self._end(reason, wait_s)

    def _lose(self, why: str) -> Stream | None:
        """Count a lost stream, and return it to be closed."""
        self.lost += 1
        if self._reason != why:
            _log.warning("draft service %s: stream lost: %s", self.address, why)
        return self._end(why, self._backoff.next_s())

    def _end(self, reason: str, retry_after_s: float) -> Stream | None:
        """Drop the stream until `retry_after_s` is over, and return it to be closed."""
        stream, self._stream = self._stream, None
        self._attempt += 1
        if self._state != "closed":
            self._state, self._reason = "idle", reason
        self._retry_s = self._clock() + retry_after_s
        self._changed(self)
        return stream


def printable(text: str) -> str:
    """Return the other side's text without control characters, for one line of a log."""
    return "".join(each if each.isprintable() else " " for each in text)
