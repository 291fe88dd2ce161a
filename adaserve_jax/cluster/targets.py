"""The targets of a router: which may get requests now, what each has in flight, what it said of its load.

Used from one event loop. Sends nothing by itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from adaserve_jax.cluster.requests import Classes, Exchange, TargetLost, Wanted, request_bytes
from adaserve_jax.errors import ConfigError
from adaserve_jax.http_client.pool import ConnectionPool
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.routing.routers import Assigned, Router, find_router
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.sim.machines import Machine, load_machine

# What a router sees of a stream that passes through it: where events end, how far the answer is, whether it is
# whole.
#
# Nothing is decoded while it passes: events are counted, and a response's own counts are read from its end.

EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
MOST_HELD_BYTES = 2**22
"""Of one event; what is longer passes in pieces."""
TAIL_BYTES = 4096
"""Of the end of an answer, which has its counts."""
_COUNTS = re.compile(rb'"verify_steps":\s*(\d+),\s*"accepted_tokens":\s*(\d+)')


class WholeEvents:
    """Lets pass whole events only, so that an answer that is cut can end with an event that says so.

    events: how many have passed. done: whether the last one did, after which nothing is missing.
    """

    def __init__(self) -> None:
        self.events = 0
        self.done = False
        self.tail = b""
        self._rest = b""

    def feed(self, part: bytes) -> bytes:
        """What may pass now."""
        part = self._rest + part if self._rest else part
        end = part.rfind(EVENT_END) + len(EVENT_END)
        if end < len(EVENT_END):
            end = 0 if len(part) <= MOST_HELD_BYTES else len(part)
        passed, self._rest = part[:end], part[end:]
        if passed:
            self.events += passed.count(EVENT_END)
            self.done = passed.endswith(DONE)
            self.tail = (self.tail + passed)[-TAIL_BYTES:]
        return passed

    def rest(self) -> bytes:
        """What was held back, for an answer that ended as it should."""
        rest, self._rest = self._rest, b""
        return rest


def counts_of(tail: bytes) -> tuple[int, int] | None:
    """Output tokens and verifications, as the end of an answer of this package's servers has them; None: it has not."""
    found = _COUNTS.findall(tail)
    if not found:
        return None
    steps, accepted = map(int, found[-1])
    return steps + accepted, steps


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


# Which target a request goes to: the routers of the simulator (`routing/routers.py`) over what is known of real
# servers.
#
# The seconds of a step, which they reckon with, are those of a measured profile; without one, a guess around
# the time of one token that a target says of itself.

GUESSED_BASELINE_S = 0.02
GUESSED_REQUESTS = 16
TOKENS_THAT_DOUBLE_A_STEP = 64
"""A guess: a step of so many packed tokens takes twice as long as one of a single token."""
LEVEL_SHARE = 0.1
"""A guess: of the time of one token, what a level of the draft's search takes."""
GUESSED_DEPTH = 4
REAL_CHANGE = 0.25
"""Of the time of one token, by its share; less is how it scatters from start to start."""


def guessed_machine(baseline_s: float, max_requests: int) -> Machine:
    """A machine that takes baseline_s for one token, and otherwise what is guessed above."""
    tokens = max(max_requests * (GUESSED_DEPTH + 1), TOKENS_THAT_DOUBLE_A_STEP)
    most = -(-tokens // TOKENS_THAT_DOUBLE_A_STEP) * TOKENS_THAT_DOUBLE_A_STEP
    base_ms = baseline_s * 1e3
    return Machine(
        name="guessed", about="from the time of one token",
        verify_ms={1: base_ms, most: base_ms * (1 + most / TOKENS_THAT_DOUBLE_A_STEP)},
        draft_level_ms=LEVEL_SHARE * base_ms, max_depth=GUESSED_DEPTH, max_width=1, max_requests=max_requests,
        max_tree_tokens=most, max_batch_tokens=most, token_step=16, max_context=2**15, acceptance={"default": 0.7},
    )  # fmt: skip


class Chooser:
    """A router by name, over targets that may come and go. profile: path of a measured one, or None. Raises
    ConfigError."""

    def __init__(self, name: str, profile: str | None):
        self._name = name
        self._machine = None if profile is None else load_machine(profile)
        self._learned: tuple[float, int] | None = None
        self._router = self._build(self._machine or guessed_machine(GUESSED_BASELINE_S, GUESSED_REQUESTS))

    def learn(self, baseline_s: float, max_requests: int) -> None:
        """What a target says of itself, both above 0; without effect where there is a measured profile, and where it is
        what was said before but for how such times scatter: a new router has forgotten how long outputs are."""
        if self._machine is not None:
            return
        before_s, before = self._learned or (0.0, 0)
        if max_requests != before or abs(baseline_s - before_s) > REAL_CHANGE * before_s:
            self._learned = (baseline_s, max_requests)
            self._router = self._build(guessed_machine(baseline_s, max_requests))

    def choose(self, request: Assigned, targets: Sequence[list[Assigned]], now: float) -> int:
        """Index of the target that gets `request`. targets: what each has, at least one of them."""
        return 0 if len(targets) == 1 else self._router.choose(request, targets, now)

    def ended(self, request: Assigned) -> None:
        """received: its whole output."""
        self._router.ended(request)

    def _build(self, machine: Machine) -> Router:
        limits = machine.limits()
        return find_router(self._name)(CostTable(machine.samples(limits), limits), limits)


# Asks targets how they are: health decides who gets requests, load is what routers reckon with.
#
# `/health` needs no key. `/version`, `/v1/models` and `/metrics` may: without one, what they would say is not
# known, and the router goes by what it sent itself.

MOST_BYTES = 2**22
MOST_LATE = 2
"""Looks that may bring no answer in time, one after another."""
_LOAD = re.compile(rb"^adaserve_requests_(?:running|waiting) ([0-9.eE+]+)$", re.MULTILINE)
MOST_SECONDS = 3600.0
MOST_REQUESTS = 2**16
"""What a target may say of itself and be believed."""
_log = logging.getLogger(__name__)


async def get(target: Target, path: str, key: str | None = None) -> tuple[int, bytes]:
    """Status and body. Raises TargetLost."""
    headers = [(b"host", target.name.encode()), (b"connection", b"keep-alive")]
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    exchange = Exchange(target.pool, request_bytes("GET", path.encode(), headers, b""))
    body = b""
    try:
        await exchange.head()
        async for part in exchange.parts():
            body += part
            if len(body) > MOST_BYTES:
                raise TargetLost(f"{path} is longer than {MOST_BYTES} bytes", taken=False)
    finally:
        exchange.close()
    return exchange.status, body


class Poller:
    """Looks at every target each `every_s` seconds, each on its own. classes: what requests' classes stand for."""

    def __init__(self, targets: TargetSet, chooser: Chooser, *, every_s: float, timeout_s: float, key: str | None):
        self.classes = Classes({}, 0.02)
        self._targets = targets
        self._chooser = chooser
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._key = key
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._odd: set[str] = set()
        """Targets of which it was logged already that what they say cannot be read."""

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                known = {target.url: target for target in self._targets}
                for url in [url for url in self._tasks if url not in known]:
                    self._tasks.pop(url).cancel()
                for url, target in known.items():
                    if url not in self._tasks:
                        self._tasks[url] = asyncio.ensure_future(self._watch(target))
                await self._targets.wait(self._every_s)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _watch(self, target: Target) -> None:
        late = 0
        while True:
            was_healthy = target.healthy
            try:
                async with asyncio.timeout(self._timeout_s):
                    healthy, why = await self._health(target)
                late = 0
            except TimeoutError:
                late += 1
                healthy, why = was_healthy and late < MOST_LATE, f"no answer within {self._timeout_s:g} s"
            except TargetLost as lost:
                late = late + 1 if lost.why == "connect_timeout" else 0
                healthy, why = False, lost.why
            if late >= MOST_LATE:  # it hangs, or its machine is gone: nothing that it had will end by itself
                target.give_up(why, late * self._timeout_s)
            if healthy != was_healthy:
                _log.warning("target %s is %s: %s", target.name, "up" if healthy else "down", why)
            self._targets.report(target, healthy, why)
            if healthy:
                try:
                    await self._learn(target, facts=not was_healthy)
                except Exception:  # whatever it says of itself, its health is asked on
                    if target.url not in self._odd:
                        _log.exception(
                            "target %s says of itself what cannot be read; its load is not known", target.name
                        )
                    self._odd.add(target.url)
            await asyncio.sleep(self._every_s)

    async def _health(self, target: Target) -> tuple[bool, str]:
        """Whether it takes requests now, and in what state it says it is. Raises TargetLost."""
        status, body = await get(target, "/health")
        said = _json(body)
        state = said.get("status") if status in (200, 503) else None
        return status == 200 and state == "ok", str(state or f"/health answered {status}")[:80]

    async def _learn(self, target: Target, facts: bool) -> None:
        """Load, and what it is, where that may have changed. What it does not say stays as it was."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if facts:
                    await self._learn_facts(target)
                status, body = await get(target, "/metrics", self._key)
        except (TimeoutError, TargetLost):
            return
        found = _LOAD.findall(body) if status == 200 else []
        if found:
            target.others = max(round(sum(map(float, found))) - target.choices, 0)

    async def _learn_facts(self, target: Target) -> None:
        """Raises TargetLost."""
        status, body = await get(target, "/v1/models", self._key)
        cards = _json(body).get("data") if status == 200 else None
        card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        status, body = await get(target, "/version", self._key)
        engine = _json(body).get("engine") if status == 200 else None
        try:
            baseline_s = float(card["baseline_ms"]) / 1e3
            engine_requests = int(engine["max_requests"]) if isinstance(engine, dict) else 0
            targets = {
                str(name): (_seconds(slo["tpot_ms"]), _seconds(slo["ttft_ms"]))
                for name, slo in card["slo_classes"].items()
            }
            if not 0 < baseline_s < MOST_SECONDS:
                return
            self.classes = Classes(targets, baseline_s)
            if 0 < engine_requests <= MOST_REQUESTS:
                self._chooser.learn(baseline_s, engine_requests)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return  # another server, or one that asks for a key


def _seconds(milliseconds: Any) -> float | None:
    """Raises ValueError for what is no time."""
    if milliseconds is None:
        return None
    seconds = float(milliseconds) / 1e3
    if not 0 < seconds < MOST_SECONDS:
        raise ValueError(milliseconds)
    return seconds


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
