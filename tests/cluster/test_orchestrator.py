"""What an order to replace members does with stand-ins for them and for the router."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from adaserve_jax.cluster.orchestrator import Cluster, ReplaceMember
from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.router_client import NoAnswer, RouterClient
from adaserve_jax.cluster.run_folder import ClusterFolder
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.cluster.supervisor import SupervisorTiming


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

    def __init__(self, folder: Path, plan: ClusterPlan | None = None, router: AtOnce | None = None):
        super().__init__(plan or ClusterPlan(1, 1, RouterSettings()), ClusterFolder(folder))
        self.phase = "ready"
        self.done: list[str] = []
        self.router = router or AtOnce(self.done)

    @property
    def router_client(self) -> RouterClient:
        return cast(RouterClient, self.router)

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


class Deaf(AtOnce):
    """A router that drains and says nothing, and answers only the third order to resume."""

    def __init__(self, loses_drain: bool):
        super().__init__([])
        self.state, self.deaf_for, self.loses_drain = "up", 2, loses_drain

    async def drain(self, url: str) -> None:
        self.state = "drained"
        if self.loses_drain:
            raise NoAnswer("the answer to the drain was lost")

    async def resume(self, url: str) -> None:
        if self.deaf_for:
            self.deaf_for -= 1
            raise NoAnswer("the router is busy")
        self.state = "up"

    async def target_status(self, url: str) -> dict:
        return {"in_flight": 0, "state": self.state}


def order_targets(cluster: Cluster) -> None:
    async def go() -> None:
        async for _ in cluster.restart("targets"):
            pass

    asyncio.run(go())


def test_a_router_that_does_not_answer_at_once_resumes_a_replaced_target(tmp_path):
    cluster = StandIns(tmp_path, router=Deaf(loses_drain=False))
    order_targets(cluster)
    assert cluster.router.state == "up" and cluster.done == ["look where targets are", "replace http://t"]


def test_a_target_whose_drain_was_not_answered_is_resumed_and_not_replaced(tmp_path):
    cluster = StandIns(tmp_path, router=Deaf(loses_drain=True))
    with pytest.raises(NoAnswer, match="the answer to the drain was lost"):
        order_targets(cluster)
    assert cluster.router.state == "up" and cluster.done == ["look where targets are"]


def test_an_order_that_is_cancelled_tries_to_resume_once(tmp_path):
    """The cluster ends then, and waits for nobody."""

    async def go() -> int:
        router = Deaf(loses_drain=False)
        router.deaf_for = 10**9
        cluster = StandIns(tmp_path, router=router)

        async def order() -> None:
            async for line in cluster.restart("targets"):
                if line.endswith("is replaced"):
                    asyncio.current_task().cancel()

        with pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(order())
        return 10**9 - router.deaf_for

    assert asyncio.run(go()) == 1


def test_a_router_that_looks_at_its_targets_seldom_has_the_time_to_see_a_new_one(tmp_path):
    """Its interval counts beyond the time that the target itself gets, here none."""

    class Seldom(AtOnce):
        looks = 0

        async def target_status(self, url: str) -> dict:
            self.looks += 1
            return {"in_flight": 0, "state": "down" if self.looks < 3 else "up"}

    usual = ClusterPlan(1, 1, RouterSettings(poll_every=60.0))
    plan = replace(usual, timing=SupervisorTiming(grace_margin_s=usual.timing.grace_margin_s - usual.target_grace_s))
    assert plan.target_grace_s == 0.0
    cluster = StandIns(tmp_path, plan, Seldom([]))
    order_targets(cluster)
    assert cluster.router.looks == 3


def test_a_router_that_misses_a_question_while_a_target_drains_is_asked_again(tmp_path):
    class Forgetful(AtOnce):
        answers = iter([2, None, 1, 0])

        async def target_status(self, url: str) -> dict:
            left = next(self.answers, 0)
            if left is None:
                raise NoAnswer("the router is busy")
            return {"in_flight": left, "state": "up"}

    cluster = StandIns(tmp_path)
    cluster.router = Forgetful(cluster.done)

    async def go() -> list[str]:
        return [line async for line in cluster.restart("targets") if line.endswith("left")]

    assert asyncio.run(go()) == ["http://t: 2 requests left", "http://t: 1 requests left"]
    assert cluster.done == TARGETS
