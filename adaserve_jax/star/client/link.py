"""The link of a target to one draft service: connects, introduces itself, and connects again when the stream is lost.

Knows nothing of sessions: what concerns them goes to its owner. Has no thread and no timer: `keep` is called when there
is something to ask, transports call back in their own threads, and one lock, the owner's, holds for all of it.
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

# When to leave a service alone: a breaker per service, and waits that grow. No clock, no thread: times are
# given.

BAD_ROUNDS = 3
"""In a row, until a breaker opens: one may be a pause of the network, three cost three deadlines."""
FIRST_TRIAL_S = 0.5
LAST_TRIAL_S = 30.0
"""After how long a service that does not answer is tried again, at first and in the end."""


class Backoff:
    """Waits that double from `first_s` to `most_s`, each shortened by up to a half at random, so that many targets do
    not come back at once. draw: uniform in [0, 1)."""

    def __init__(self, first_s: float, most_s: float, draw: Callable[[], float]) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._failures = 0

    def next_s(self) -> float:
        """Seconds to wait after one more failure."""
        wait_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 60))
        self._failures += 1
        return wait_s * (1.0 - 0.5 * self._draw())

    def reset(self) -> None:
        self._failures = 0


class Breaker:
    """Closed: the service is asked. Open, after BAD_ROUNDS bad rounds in a row: it is not. Half open, once a wait is
    over: it is asked, and the next round decides. opens: how often it has opened."""

    def __init__(self, draw: Callable[[], float], bad_rounds: int = BAD_ROUNDS) -> None:
        self.state: Literal["closed", "half_open", "open"] = "closed"
        self.opens = 0
        self._most = bad_rounds
        self._bad = 0
        self._trial_s = 0.0
        self._backoff = Backoff(FIRST_TRIAL_S, LAST_TRIAL_S, draw)

    def allows(self, now: float) -> bool:
        """Whether the service may be asked; half opens when its time has come."""
        if self.state == "open" and now >= self._trial_s:
            self.state = "half_open"
        return self.state != "open"

    def good(self) -> None:
        """A round brought something."""
        if self.state != "closed" or self._bad:
            self.state = "closed"
            self._bad = 0
            self._backoff.reset()

    def bad(self, now: float) -> None:
        """A round brought nothing in time."""
        self._bad += 1
        if self.state == "half_open" or self._bad >= self._most:
            self.state = "open"
            self.opens += 1
            self._trial_s = now + self._backoff.next_s()


# How frames travel between a target and a draft service, apart from gRPC: so that tests put faults between the
# two.

Received = Callable[[Sequence[FromService | WireError]], None]
"""received(frame): called in a thread of the transport, one frame after another; must return soon and not raise. A
WireError stands where a message made no sense."""
Lost = Callable[[str], None]
"""lost(why): the stream has ended; called once, nothing is received after it. why: for the log, without secrets."""


class Stream(Protocol):
    """One open stream of a target."""

    def send(self, frame: Sequence[FromTarget]) -> None:
        """Hand a frame over; returns at once and never raises: a stream that is broken says so by `lost`."""
        ...

    def close(self) -> None:
        """End it; `lost` is not called any more. Safe to call twice and from any thread."""
        ...


class Transport(Protocol):
    """Opens streams to one service."""

    @property
    def address(self) -> str:
        """host:port, for logs and metrics."""
        ...

    def open(self, received: Received, lost: Lost) -> Stream:
        """Begin to connect; returns at once. What is sent before the connection stands goes once it does."""
        ...


_log = logging.getLogger(__name__)

WELCOME_S = 10.0
"""Longest wait for the answer to Hello."""
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 10.0
"""After how long a lost stream is opened again, at first and in the end."""
MISMATCH_RETRY_S = 60.0
"""After how long a service that is of another kind is asked again: until somebody replaces it, nothing changes."""
MISMATCHES = frozenset({"protocol_version", "vocabulary", "draft_version", "cells", "unauthenticated"})
REFUSED_RETRY_S = 1.0
"""After how long one that refused for another reason is asked again, where it does not say."""

AboutSession = Tree | Resync | Refused | WireError
Deliver = Callable[["Link", AboutSession], None]
"""deliver(link, message): called with the lock held."""


class Link:
    """One draft service. number: its place among those of the target; generation: counts the streams in which it said
    Welcome, so that sessions know whether theirs is the present one. sessions: of this target there. lost, refused:
    streams that ended and Hellos that got no Welcome, counted."""

    def __init__(
        self, number: int, transport: Transport, hello: Hello, lock: AbstractContextManager[object],
        clock: Callable[[], float], draw: Callable[[], float], deliver: Deliver, changed: Callable[[Link], None],
    ) -> None:  # fmt: skip
        self.number = number
        self.transport = transport
        self.breaker = Breaker(draw)
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
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, draw)
        self._state: Literal["idle", "connecting", "ready", "closed"] = "idle"
        self._attempt = 0
        self._stream: Stream | None = None
        self._retry_s = -math.inf
        self._began_s = 0.0
        self._version = ""
        self._reason = "not connected yet"

    @property
    def ready(self) -> bool:
        return self._state == "ready"

    @property
    def is_idle(self) -> bool:
        """Neither connected nor trying."""
        return self._state in ("idle", "closed")

    @property
    def address(self) -> str:
        return self.transport.address

    @property
    def reason(self) -> str:
        """Why the service is not asked; "" where it is."""
        if self._state != "ready":
            return self._reason
        return "" if self.breaker.state != "open" else "it did not answer in time"

    @property
    def retry_s(self) -> float:
        """When `keep` has something to do again, on the clock; inf: when the service has answered."""
        if self._state == "idle":
            return self._retry_s
        return self._began_s + WELCOME_S if self._state == "connecting" else math.inf

    def state(self) -> ServiceState:
        """As of now, for metrics."""
        load = self.load
        return ServiceState(self.breaker.state, self._version, self.sessions, load.busy, load.queue_s, self.reason)

    def keep(self) -> None:
        """Begin to connect if it is time to; returns at once. Called without the lock."""
        if self._state in ("ready", "closed"):
            return
        silent = None
        with self._lock:
            now = self._clock()
            if self._state == "connecting" and now >= self._began_s + WELCOME_S:
                silent = self._end(f"no Welcome within {WELCOME_S:g} s", self._backoff.next_s())
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
        """Hand a frame over, unless the stream is lost. Called without the lock."""
        stream = self._stream
        if stream is not None:
            stream.send(frame)

    def worked(self) -> None:
        """A round brought trees: the next loss is a first one again. Called with the lock."""
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
        except Exception as error:  # a transport that cannot even begin is a service that is not there
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
                elif isinstance(message, (Tree, Resync, Refused, WireError)):
                    self._deliver(self, message)
                else:
                    self._deliver(self, WireError(f"a message must be one of a draft service, got {type(message)}"))
        if ended is not None:
            ended.close()

    def _lost(self, attempt: int, why: str) -> None:
        with self._lock:
            if attempt != self._attempt:
                return
            self.lost += 1
            why = printable(why)
            if self._reason != why:
                _log.warning("draft service %s: stream lost: %s", self.address, why)
            self._end(why, self._backoff.next_s())

    def _welcomed(self, welcome: Welcome) -> Stream | None:
        """Ready, or refused by this side; then the stream, to be closed."""
        if self._state != "connecting" or self._stream is None:
            return None  # nobody has said Hello
        wanted = self._hello.draft_version
        if welcome.protocol_version != PROTOCOL_VERSION:
            expected = f"expected protocol version {PROTOCOL_VERSION}, got {welcome.protocol_version}"
            return self._refuse(Refused("protocol_version", expected))
        if wanted and welcome.draft_version != wanted:
            expected = f"expected draft {wanted}, got {welcome.draft_version}"
            return self._refuse(Refused("draft_version", expected))
        self.welcome, self._version = welcome, welcome.draft_version
        self.generation += 1
        self._state, self._reason = "ready", ""
        self.load = Load(0.0, 0.0, 0, 0)
        _log.info("draft service %s: connected, draft %s", self.address, welcome.draft_version)
        self._changed(self)
        return None

    def _refuse(self, refused: Refused) -> Stream | None:
        self.refused += 1
        reason = printable(f"{refused.code}: {refused.message}")
        if self._reason != reason:
            _log.warning("draft service %s: refused: %s", self.address, reason)
        if refused.code in MISMATCHES:
            wait_s = max(refused.retry_after_s, MISMATCH_RETRY_S)
        else:
            wait_s = refused.retry_after_s or REFUSED_RETRY_S + self._backoff.next_s()
        return self._end(reason, wait_s)

    def _end(self, reason: str, retry_after_s: float) -> Stream | None:
        """Be without a stream until then; the one that was, to be closed."""
        stream, self._stream = self._stream, None
        self._attempt += 1
        if self._state != "closed":
            self._state, self._reason = "idle", reason
        self._retry_s = self._clock() + retry_after_s
        self._changed(self)
        return stream


def printable(said: str) -> str:
    """What the other side says, in one line of a log: without control characters."""
    return "".join(each if each.isprintable() else " " for each in said)
