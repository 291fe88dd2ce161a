"""Asks targets how they are: health decides who gets requests, load is what routers reckon with.

`/health` needs no key. `/version`, `/v1/models` and `/metrics` may: without one, what they would say is not known, and
the router goes by what it sent itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

from adaserve_jax.cluster.choosing import Chooser
from adaserve_jax.cluster.exchange import Exchange, TargetLost, request_bytes
from adaserve_jax.cluster.requests import Classes
from adaserve_jax.cluster.targets import Target, TargetSet

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
