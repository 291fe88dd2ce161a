"""What an order to replace members does with stand-ins for them and for the router."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from adaserve_jax.cluster.orchestrator import ReplaceMember, rolling_restart


class AtOnce:
    """A router that has nothing in flight, and uses whatever it is told to use again."""

    def __init__(self, done: list[str]):
        self._done = done

    async def drain(self, url: str) -> None:
        self._done.append(f"drain {url}")

    async def resume(self, url: str) -> None:
        self._done.append(f"resume {url}")

    async def target_status(self, url: str) -> dict:
        return {"in_flight": 0, "state": "up"}


def restarted(*orders: str) -> list[str]:
    """What is done when these are given at once."""
    done: list[str] = []

    def replacing(name: str) -> ReplaceMember:
        async def replace() -> None:
            await asyncio.sleep(0)  # somebody else's turn
            done.append(f"replace {name}")

        return replace

    async def targets() -> Mapping[str, ReplaceMember]:
        done.append("look where targets are")
        return {"http://t": replacing("http://t")}

    async def go() -> None:
        cluster = cast(Any, SimpleNamespace(phase="ready", plan=SimpleNamespace(target_grace_s=9.0)))
        lock, router, drafts = asyncio.Lock(), cast(Any, AtOnce(done)), {"draft-0": replacing("draft-0")}

        async def order(what: str) -> None:
            async for _ in rolling_restart(cluster, what, lock, router, drafts=drafts, targets=targets):
                pass

        await asyncio.gather(*map(order, orders))

    asyncio.run(go())
    return done


TARGETS = ["look where targets are", "drain http://t", "replace http://t", "resume http://t"]
DRAFTS = ["replace draft-0"]


def test_what_is_ordered_is_replaced_drafts_first():
    assert restarted("targets") == TARGETS
    assert restarted("drafts") == DRAFTS
    assert restarted("all") == DRAFTS + TARGETS


def test_one_order_after_the_other():
    assert restarted("targets", "all", "targets") == [*TARGETS, *DRAFTS, *TARGETS, *TARGETS]
