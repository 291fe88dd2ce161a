"""What an order to replace members does with stand-ins for them and for the router."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from adaserve_jax.cluster.orchestrator import Cluster, ReplaceMember
from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.router_client import RouterClient
from adaserve_jax.cluster.run_folder import ClusterFolder
from adaserve_jax.cluster.settings import RouterSettings


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


class StandIns(Cluster):
    """A ready cluster of a draft and a target, which notes what is done to them."""

    orchestrator = "test"

    def __init__(self, folder: Path):
        super().__init__(ClusterPlan(1, 1, RouterSettings()), ClusterFolder(folder))
        self.phase = "ready"
        self.done: list[str] = []

    @property
    def router_client(self) -> RouterClient:
        return cast(RouterClient, AtOnce(self.done))

    async def replaceable(self, kind: str) -> Mapping[str, ReplaceMember]:
        if kind == "target":
            self.done.append("look where targets are")

        async def replace() -> None:
            await asyncio.sleep(0)  # somebody else's turn
            self.done.append(f"replace {name}")

        name = {"draft": "draft-0", "target": "http://t"}[kind]
        return {name: replace}


def restarted(folder: Path, *orders: str) -> list[str]:
    """What is done when these are given at once."""

    async def go() -> list[str]:
        cluster = StandIns(folder)

        async def order(what: str) -> None:
            async for _ in cluster.restart(what):
                pass

        await asyncio.gather(*map(order, orders))
        return cluster.done

    return asyncio.run(go())


TARGETS = ["look where targets are", "drain http://t", "replace http://t", "resume http://t"]
DRAFTS = ["replace draft-0"]


def test_what_is_ordered_is_replaced_drafts_first(tmp_path):
    assert restarted(tmp_path, "targets") == TARGETS
    assert restarted(tmp_path, "drafts") == DRAFTS
    assert restarted(tmp_path, "all") == DRAFTS + TARGETS


def test_one_order_after_the_other(tmp_path):
    assert restarted(tmp_path, "targets", "all", "targets") == [*TARGETS, *DRAFTS, *TARGETS, *TARGETS]
