"""The targets of a router: which may get requests now, what each has in flight, what it said of its load.

Used from one event loop. Sends nothing by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from adaserve_jax.bench.http_pool import ConnectionPool
from adaserve_jax.bench.http_settings import UrlSettings
from adaserve_jax.bench.routers import Assigned
from adaserve_jax.cluster.events import counts_of
from adaserve_jax.cluster.exchange import Exchange
from adaserve_jax.cluster.requests import Wanted
from adaserve_jax.errors import ConfigError

SPARE_CONNECTIONS = 4
CONNECT_TIMEOUT_S = 3.0
PACE_S = 0.05
"""Assumed of a request without a target, per token, where its answer comes as one body."""
TOKENS_PER_EVENT = 2.0
"""Assumed of a target until answers have said it."""
LEARNING_RATE = 0.1


class Flight:
    """One request at one target, from when it is chosen for it to its end. wanted: None: it generates nothing."""

    def __init__(self, wanted: Wanted | None):
        self.assigned = [] if wanted is None else wanted.fresh()
        self._is_stream = wanted is not None and wanted.stream
        self.events = 0

    def see(self, events: int, tokens_per_event: float, now: float) -> None:
        """So many events of the stream have come so far."""
        if events == self.events or not self.assigned:
            return
        self.events = events
        each = max(round(events * tokens_per_event / len(self.assigned)), 1)
        for choice in self.assigned:
            choice.first_token_s = now if choice.first_token_s is None else choice.first_token_s
            choice.received = each

    def suppose(self, now: float) -> None:
        """Of an answer that comes as one body nothing is seen until its end: it is taken to be on pace."""
        if self._is_stream:
            return
        for choice in self.assigned:
            pace_s = choice.tpot_slo_s or PACE_S
            choice.first_token_s = choice.arrival_s
            choice.received = 1 + int((now - choice.arrival_s) / pace_s)


class Target:
    """One server. healthy: it said so when it was last asked. drained: it is to get nothing new, by order."""

    def __init__(self, url: str):
        self.url = url
        self.name = url.partition("://")[2]
        settings = UrlSettings(url, spare_connections=SPARE_CONNECTIONS, connect_timeout_s=CONNECT_TIMEOUT_S)
        self.pool = ConnectionPool(settings)
        self.healthy = False
        self.drained = False
        self.why = "not asked yet"
        self.flights: set[Flight] = set()
        self.exchanges: set[Exchange] = set()
        """Of the flights, as they go on."""
        self.others = 0
        """Choices there that came from elsewhere, as it last said."""
        self.tokens_per_event = TOKENS_PER_EVENT
        self.requests = 0
        self.ejections = 0
        self.cuts = 0

    @property
    def available(self) -> bool:
        return self.healthy and not self.drained

    @property
    def choices(self) -> int:
        """In flight from here."""
        return sum(len(flight.assigned) for flight in self.flights)

    def known(self, now: float) -> list[Assigned]:
        """What a router knows of what it has."""
        for flight in self.flights:
            flight.suppose(now)
        own = [choice for flight in self.flights for choice in flight.assigned]
        return own + [Assigned("default", 1, now, None, None, 1, now) for _ in range(self.others)]

    def learn(self, events: int, tail: bytes) -> int | None:
        """Learn from the end of an answer; its output tokens, None where it does not say them."""
        counts = counts_of(tail)
        if counts is None:
            return None
        if events > 1 and counts[0]:
            self.tokens_per_event += LEARNING_RATE * (counts[0] / events - self.tokens_per_event)
        return counts[0]

    def give_up(self, why: str, quiet_s: float = 0.0) -> None:
        """End, as lost, what is under way and has brought nothing for so many seconds."""
        for exchange in [each for each in self.exchanges if each.quiet_s >= quiet_s]:
            exchange.give_up(why)

    def status(self) -> dict[str, Any]:
        """For /cluster."""
        state = "drained" if self.drained else "up" if self.healthy else "down"
        return {
            "url": self.url, "state": state, "detail": self.why, "in_flight": len(self.flights),
            "choices": self.choices, "other_choices": self.others, "requests": self.requests,
            "ejections": self.ejections, "cuts": self.cuts,
        }  # fmt: skip


class TargetSet:
    """All of them by URL, in order."""

    def __init__(self, urls: Iterable[str]):
        self._by_url: dict[str, Target] = {}
        self._changed = asyncio.Event()
        self._going: set[Target] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self.ever_available = False
        self.exchange(urls)

    def __iter__(self):
        return iter(self._by_url.values())

    def __len__(self) -> int:
        return len(self._by_url)

    @property
    def all(self) -> list[Target]:
        """With those that go and have something left."""
        return [*self, *self._going]

    def find(self, name: str) -> Target:
        """By URL or host:port. Raises ConfigError."""
        for target in self:
            if name in (target.url, target.name):
                return target
        known = ", ".join(self._by_url) or "none"
        raise ConfigError(f"no target {name!r}; targets are {known}")

    def exchange(self, urls: Iterable[str]) -> None:
        """These from now on. Those that stay keep all; those that go finish what they have and get nothing new."""
        urls = list(urls)
        for url in [url for url in self._by_url if url not in urls]:
            gone = self._by_url.pop(url)
            gone.drained = True
            self._going.add(gone)
            task = asyncio.ensure_future(self._close_when_idle(gone))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._by_url = {url: self._by_url.get(url) or Target(url) for url in urls}
        self.changed()

    def report(self, target: Target, healthy: bool, why: str) -> None:
        """What was found of a target's health."""
        was = target.available
        target.ejections += target.healthy and not healthy
        target.healthy, target.why = healthy, why
        if was != target.available:
            self.changed()

    def drain(self, target: Target, drained: bool) -> None:
        """Give it nothing new from now on, or take that back."""
        target.drained = drained
        self.changed()

    def changed(self) -> None:
        self.ever_available = self.ever_available or any(target.available for target in self)
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until something of the targets changes, or the time is up."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        for target in self.all:
            await target.pool.close()

    async def _close_when_idle(self, target: Target) -> None:
        while target.flights:
            await asyncio.sleep(0.1)
        self._going.discard(target)
        await target.pool.close()
