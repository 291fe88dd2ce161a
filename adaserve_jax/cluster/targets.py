"""Targets of a router: which may get requests now, what each has in flight, and which one a request goes to."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from adaserve_jax.cluster.requests import ParsedRequest, SloClasses, TargetExchange, TargetLost, request_bytes
from adaserve_jax.cluster.router_client import json_object
from adaserve_jax.errors import ConfigError
from adaserve_jax.http_client.pool import ConnectionPool
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.routing.fleet import Assigned
from adaserve_jax.routing.routers import RoutingPolicy, find_router
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.sim.machines import Machine, load_machine

SPARE_CONNECTIONS = 4
CONNECT_TIMEOUT_S = 3.0
ASSUMED_TPOT_S = 0.05
"""Pace assumed of a request without a TPOT target whose answer comes as one body."""
TOKENS_PER_EVENT = 2.0
"""First estimate for a target, until its answers tell."""
LEARNING_RATE = 0.1
GUESSED_BASELINE_S = 0.02
GUESSED_REQUESTS = 16
GUESSED_DEPTH = 4
TOKENS_THAT_DOUBLE_A_STEP = 64
"""Guess: a step of so many packed tokens takes twice as long as one of a single token."""
LEVEL_SHARE = 0.1
"""Guess: a level of the draft's search takes this share of the time of one token."""
BASELINE_TOLERANCE = 0.25
"""Relative change of a target's baseline that counts; less is scatter from start to start."""
MAX_ANSWER_BYTES = 2**22
MAX_MODEL_NAME = 200
MAX_TIMEOUTS = 2
"""Health checks in a row that may time out before a target counts as down, and loses the requests that have been silent
for as long."""
NOT_ASKED = "not asked yet"
MAX_SECONDS = 3600.0
MAX_REQUESTS = 2**16
"""Bounds on what a target's self-description may claim."""
_COUNTS = re.compile(rb'"verify_steps":\s*(\d+),\s*"accepted_tokens":\s*(\d+)')
_LOAD = re.compile(rb"^adaserve_requests_(?:running|waiting) ([0-9.eE+]+)$", re.MULTILINE)
_log = logging.getLogger(__name__)


class InFlightRequest:
    """One request at one target, from the choice of the target to its end. parsed: None if it generates nothing."""

    def __init__(self, parsed: ParsedRequest | None):
        self.assigned = [] if parsed is None else parsed.per_choice()
        self.events = 0
        self._is_stream = parsed is not None and parsed.stream

    def count_events(self, events: int, tokens_per_event: float, now: float) -> None:
        """Update the received tokens from the number of stream events so far."""
        if events == self.events or not self.assigned:
            return
        self.events = events
        each = max(round(events * tokens_per_event / len(self.assigned)), 1)
        for choice in self.assigned:
            choice.first_token_s = now if choice.first_token_s is None else choice.first_token_s
            choice.received = each

    def extrapolate(self, now: float) -> None:
        """Assume an unstreamed answer, of which nothing is seen until its end, to be exactly on pace."""
        if self._is_stream:
            return
        for choice in self.assigned:
            choice.first_token_s = choice.arrival_s
            choice.received = 1 + int((now - choice.arrival_s) / (choice.tpot_slo_s or ASSUMED_TPOT_S))


class RouterTarget:
    """One server behind the router.

    healthy: result of the last health check. drained: gets nothing new, by order. other_choices: choices in flight
    that came from elsewhere, as of the last check. engine_restarts: how often its engine was started again, as it says.
    model: name of the model that it serves, as it says; "" until it does.
    """

    def __init__(self, url: str):
        self.url = url
        self.name = url.partition("://")[2]
        settings = UrlSettings(url, spare_connections=SPARE_CONNECTIONS, connect_timeout_s=CONNECT_TIMEOUT_S)
        self.pool = ConnectionPool(settings)
        self.healthy = False
        self.drained = False
        self.detail = NOT_ASKED
        self.refuses_key = False
        self.in_flight: set[InFlightRequest] = set()
        self.exchanges: set[TargetExchange] = set()
        self.other_choices = 0
        self.tokens_per_event = TOKENS_PER_EVENT
        self.engine_restarts = 0
        self.model = ""
        self.requests = self.ejections = self.cuts = self.failures = 0

    @property
    def available(self) -> bool:
        return self.healthy and not self.drained

    @property
    def choices(self) -> int:
        """Number of choices in flight that came through this router."""
        return sum(len(request.assigned) for request in self.in_flight)

    def load(self, now: float) -> list[Assigned]:
        """Return all choices in flight as the balancer sees them."""
        for request in self.in_flight:
            request.extrapolate(now)
        own = [choice for request in self.in_flight for choice in request.assigned]
        return own + [Assigned("default", 1, now, None, None, 1, now) for _ in range(self.other_choices)]

    def learn(self, events: int, tail: bytes) -> int | None:
        """Read the output tokens from the end of an answer (None: not given) and update `tokens_per_event`.

        Only servers of this package give them, as counts of verify steps and accepted tokens.
        """
        found = _COUNTS.findall(tail)
        if not found:
            return None
        tokens = sum(map(int, found[-1]))
        if events > 1 and tokens:
            self.tokens_per_event += LEARNING_RATE * (tokens / events - self.tokens_per_event)
        return tokens

    def give_up(self, reason: str, quiet_s: float = 0.0) -> None:
        """End exchanges that have received nothing for at least `quiet_s` seconds with TargetLost."""
        for exchange in [each for each in self.exchanges if each.quiet_s >= quiet_s]:
            exchange.give_up(reason)

    def status(self) -> dict[str, Any]:
        """Return the target's entry in the answer of /cluster."""
        state = "drained" if self.drained else "up" if self.healthy else "down"
        return {
            "url": self.url, "state": state, "detail": self.detail, "in_flight": len(self.in_flight),
            "choices": self.choices, "other_choices": self.other_choices, "requests": self.requests,
            "ejections": self.ejections, "cuts": self.cuts, "failures": self.failures,
            "engine_restarts": self.engine_restarts, "model": self.model,
        }  # fmt: skip


class TargetSet:
    """All targets of a router, in order; used on one event loop."""

    def __init__(self, urls: Iterable[str]):
        self.ever_available = False
        self._by_url: dict[str, RouterTarget] = {}
        self._changed = asyncio.Event()
        self._removed: dict[RouterTarget, asyncio.Task[None]] = {}
        """Removed targets that still finish requests, with the tasks that close them."""
        self.replace(urls)

    def __iter__(self):
        return iter(self._by_url.values())

    def __len__(self) -> int:
        return len(self._by_url)

    @property
    def all(self) -> list[RouterTarget]:
        """Current targets and removed ones that still finish requests."""
        return [*self, *self._removed]

    def find(self, name: str) -> RouterTarget:
        """Return a target by URL or host:port. Raises ConfigError."""
        for target in self:
            if name in (target.url, target.name):
                return target
        known = ", ".join(self._by_url) or "none"
        raise ConfigError(f"no target {name!r}; targets are {known}")

    def replace(self, urls: Iterable[str]) -> None:
        """Use these targets from now on. Known ones keep their state; removed ones finish what they have.

        Raises ConfigError, and nothing has changed: a URL cannot be asked.
        """
        wanted = {url: self._by_url.get(url) or RouterTarget(url) for url in urls}
        for url in self._by_url.keys() - wanted.keys():
            removed = self._by_url[url]
            removed.drained = True
            self._removed[removed] = asyncio.ensure_future(self._close_when_idle(removed))
        self._by_url = wanted
        self.notify()

    def report(self, target: RouterTarget, healthy: bool, detail: str) -> None:
        """Record the health of a target."""
        was = target.available
        if healthy != target.healthy or target.detail == NOT_ASKED:
            _log.warning("target %s is %s: %s", target.name, "up" if healthy else "down", detail)
        target.ejections += target.healthy and not healthy
        target.healthy, target.detail = healthy, detail
        if was != target.available:
            self.notify()

    def drain(self, target: RouterTarget, drained: bool) -> None:
        """Stop or resume sending new requests to a target."""
        target.drained = drained
        self.notify()

    def notify(self) -> None:
        """Wake up whoever waits for a change."""
        self.ever_available = self.ever_available or any(target.available for target in self)
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Wait until a target changes, or the time is up."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    async def close(self) -> None:
        for task in self._removed.values():
            task.cancel()
        for target in self.all:
            await target.pool.close()

    async def _close_when_idle(self, target: RouterTarget) -> None:
        while target.in_flight:
            await asyncio.sleep(0.1)
        await target.pool.close()
        del self._removed[target]


def guessed_machine(baseline_s: float, max_requests: int) -> Machine:
    """Return a machine that takes `baseline_s` for one token; the rest follows from this module's guesses."""
    tokens = max(max_requests * (GUESSED_DEPTH + 1), TOKENS_THAT_DOUBLE_A_STEP)
    most = -(-tokens // TOKENS_THAT_DOUBLE_A_STEP) * TOKENS_THAT_DOUBLE_A_STEP
    base_ms = baseline_s * 1e3
    return Machine(
        name="guessed", about="from the time of one token",
        verify_ms={1: base_ms, most: base_ms * (1 + most / TOKENS_THAT_DOUBLE_A_STEP)},
        draft_level_ms=LEVEL_SHARE * base_ms, max_depth=GUESSED_DEPTH, max_width=1, max_requests=max_requests,
        max_tree_tokens=most, max_batch_tokens=most, token_step=16, max_context=2**15, acceptance={"default": 0.7},
    )  # fmt: skip


class Balancer:
    """Chooses a target by a routing policy of `adaserve_jax.routing`, the same as in the simulator.

    policy: its name. profile: path of a measured profile with step costs; None: guess them from the time of one token
    that targets report. Raises ConfigError.
    """

    def __init__(self, policy: str, profile: str | None):
        self._name = policy
        self._machine = None if profile is None else load_machine(profile)
        self._learned: tuple[float, int] | None = None
        self._policy = self._build(self._machine or guessed_machine(GUESSED_BASELINE_S, GUESSED_REQUESTS))

    def learn(self, baseline_s: float, max_requests: int) -> None:
        """Rebuild the policy from a target's self-description; both values above 0.

        Nothing happens with a measured profile, or if the values changed by no more than their usual scatter: a new
        policy has forgotten the lengths of outputs.
        """
        if self._machine is not None:
            return
        before_s, before = self._learned or (0.0, 0)
        if max_requests != before or abs(baseline_s - before_s) > BASELINE_TOLERANCE * before_s:
            self._learned = (baseline_s, max_requests)
            self._policy = self._build(guessed_machine(baseline_s, max_requests))

    def choose(self, request: Assigned, targets: Sequence[list[Assigned]], now: float) -> int:
        """Return the index of the target for `request`. targets: choices in flight at each of at least one target."""
        return 0 if len(targets) == 1 else self._policy.choose(request, targets, now)

    def ended(self, request: Assigned) -> None:
        """Record the end of a choice; its `received` is its whole output."""
        self._policy.ended(request)

    def _build(self, machine: Machine) -> RoutingPolicy:
        limits = machine.limits()
        return find_router(self._name)(CostTable(machine.samples(limits), limits), limits)


async def get(target: RouterTarget, path: str, key: str | None = None) -> tuple[int, bytes]:
    """Send a GET request to a target and return status and body. Raises TargetLost."""
    headers = [(b"host", target.name.encode()), (b"connection", b"keep-alive")]
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    exchange = TargetExchange(target.pool, request_bytes("GET", path.encode(), headers, b""))
    body = b""
    try:
        await exchange.head()
        async for part in exchange.parts():
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise TargetLost(f"{path} is longer than {MAX_ANSWER_BYTES} bytes", may_have_started=False)
    finally:
        exchange.close()
    return exchange.status, body


class TargetPoller:
    """Checks health and load of each target every `every_s` seconds, each in a task of its own.

    `/health` needs no key. `/version`, `/v1/models` and `/metrics` may; without one, only requests through this router
    count as load. classes: SLO classes as last reported.
    """

    def __init__(self, targets: TargetSet, balancer: Balancer, *, every_s: float, timeout_s: float, key: str | None):
        self.classes = SloClasses({}, GUESSED_BASELINE_S)
        self._targets = targets
        self._balancer = balancer
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._key = key
        self._tasks: dict[RouterTarget, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                known = self._targets.all  # a removed one that hangs must lose its requests too
                for target in self._tasks.keys() - set(known):
                    self._tasks.pop(target).cancel()
                for target in known:
                    if target not in self._tasks:
                        self._tasks[target] = asyncio.ensure_future(self._poll(target))
                await self._targets.wait(self._every_s)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _poll(self, target: RouterTarget) -> None:
        timeouts, was_unreadable, needs_facts = 0, False, True
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    healthy, detail = await self._health(target)
                timeouts = 0
            except TimeoutError:
                timeouts += 1
                healthy = target.healthy and timeouts < MAX_TIMEOUTS  # it may have been ejected meanwhile
                detail = f"no answer within {self._timeout_s:g} s"
            except TargetLost as lost:
                timeouts = timeouts + 1 if lost.reason == "connect_timeout" else 0
                healthy, detail = False, lost.reason
            if timeouts >= MAX_TIMEOUTS:  # it hangs, or its machine is gone: its exchanges would never end
                target.give_up(detail, MAX_TIMEOUTS * self._timeout_s)
            self._targets.report(target, healthy, detail)
            needs_facts = needs_facts or not healthy  # it may come back as another server
            if healthy and not timeouts:
                try:
                    needs_facts = not await self._learn(target, facts=needs_facts)
                except Exception:  # health checks go on whatever a target reports
                    if not was_unreadable:
                        _log.exception(
                            "target %s says of itself what cannot be read; its load is not known", target.name
                        )
                    was_unreadable = True
            await asyncio.sleep(0 if timeouts else self._every_s)  # what did not answer is asked again at once

    async def _health(self, target: RouterTarget) -> tuple[bool, str]:
        """Return whether the target takes requests, and the state it reports. Raises TargetLost."""
        status, body = await get(target, "/health")
        said = (json_object(body) or {}) if status in (200, 503) else {}
        state, restarts = said.get("status"), said.get("restarts")
        if isinstance(restarts, int):
            target.engine_restarts = restarts
        return status == 200 and state == "ok", str(state or f"/health answered {status}")[:80]

    async def _learn(self, target: RouterTarget, facts: bool) -> bool:
        """Read the target's load, and with `facts` also its self-description. What it does not say stays as it was.

        Returns False if the self-description is still to be asked for, since no answer came in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                if facts:
                    await self._learn_facts(target)
                    facts = False
                status, body = await get(target, "/metrics", self._key)
        except (TimeoutError, TargetLost):
            return not facts
        refuses = status in (401, 403)
        if refuses and not target.refuses_key:
            _log.warning(
                "target %s refuses this router's key (%d): only what comes through this router counts as its load; set "
                "--api-key, or ADASERVE_API_KEY, to the key of an operator", target.name, status,
            )  # fmt: skip
        target.refuses_key = refuses
        found = _LOAD.findall(body) if status == 200 else []
        if found:
            target.other_choices = max(round(sum(map(float, found))) - target.choices, 0)
        return True

    async def _learn_facts(self, target: RouterTarget) -> None:
        """Read SLO classes, baseline and size from /v1/models and /version. Raises TargetLost."""
        _, models = await get(target, "/v1/models", self._key)
        _, version = await get(target, "/version", self._key)
        try:
            card = json.loads(models)["data"][0]
            self._learn_model(target, str(card.get("id", ""))[:MAX_MODEL_NAME])
            targets = {
                str(name): (_seconds(slo["tpot_ms"]), _seconds(slo["ttft_ms"]))
                for name, slo in card["slo_classes"].items()
            }
            baseline_s = _seconds(card["baseline_ms"])
            if baseline_s is None:
                return
            self.classes = SloClasses(targets, baseline_s)
            engine_requests = int(json.loads(version)["engine"]["max_requests"])
            if 0 < engine_requests <= MAX_REQUESTS:
                self._balancer.learn(baseline_s, engine_requests)
        except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
            return  # not a server of this package, or one that asks for a key

    def _learn_model(self, target: RouterTarget, model: str) -> None:
        """Record what a target serves, and warn if another target serves something else."""
        if model != target.model:
            target.model = model
            other = next((each for each in self._targets if each.model not in ("", target.model)), None)
            if other is not None:
                _log.warning(
                    "target %s serves %r, target %s serves %r: the router sends any request to either; give each model "
                    "a router of its own", target.name, target.model, other.name, other.model,
                )  # fmt: skip


def _seconds(milliseconds: Any) -> float | None:
    """Convert a reported time. Raises ValueError if it is out of bounds."""
    if milliseconds is None:
        return None
    seconds = float(milliseconds) / 1e3
    if not 0 < seconds < MAX_SECONDS:
        raise ValueError(milliseconds)
    return seconds
