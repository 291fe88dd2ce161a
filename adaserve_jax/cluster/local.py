"""A cluster on this machine: starts drafts, targets and the router, keeps them running, takes orders, stops them all.

The router, the drafts and one target start at once; the other targets once that one is ready, whose compiled programs
they find. Requests are answered from the first ready target on. The router's socket is held here, so that clients that
connect while it is started again wait instead of being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from adaserve_jax.cluster.keeper import Keeper, Member
from adaserve_jax.cluster.plan import ClusterPlan, HeldPort, Placed, draft_at, target_at
from adaserve_jax.cluster.rolling import Replace, RouterOrders, announce, announce_end, restart_members, state_head
from adaserve_jax.cluster.router import router_command, url_of
from adaserve_jax.cluster.run_folder import OrderServer, RunFolder, stop_on_signals
from adaserve_jax.server.serve import listen

WRITE_EVERY_S = 0.2


class LocalCluster:
    """One cluster's processes. Made, used and stopped on one event loop, in the main thread."""

    def __init__(self, plan: ClusterPlan, folder: RunFolder):
        """folder: opened. Raises ConfigError (the router's port is taken)."""
        self.plan = plan
        self.started_s = time.time()
        self.ready_s: float | None = None
        """Seconds that the start took."""
        self.serves_s: float | None = None
        """Seconds until the first target was ready."""
        self.folder = folder
        self._listener = listen(plan.router.server)
        self.url = url_of(self._listener, plan.router.server)
        self._drafts, self._targets = self._place()
        self._changed = asyncio.Event()
        self._keepers = {
            placed.member.name: Keeper(placed.member, self._changed.set)
            for placed in (*self._drafts, *self._targets, self._router())
        }
        self.orders = RouterOrders(self.url, folder.token, plan.router.tls_cert)
        self.phase = "starting"
        self._rolling = asyncio.Lock()

    def _place(self) -> tuple[list[Placed], list[Placed]]:
        plan, host, logs = self.plan, self.plan.member_host, self.folder.logs
        self._ports = [HeldPort(host) for _ in range(plan.targets + 2 * plan.drafts)]
        ports = iter([port.number for port in self._ports])
        drafts = [draft_at(plan, i, host, next(ports), next(ports), logs) for i in range(plan.drafts)]
        addresses = [draft.address for draft in drafts]
        return drafts, [target_at(plan, i, host, next(ports), addresses, logs) for i in range(plan.targets)]

    def _router(self) -> Placed:
        settings = replace(
            self.plan.router, targets=tuple(target.url for target in self._targets),
            token_file=str(self.folder.token_file),
        )  # fmt: skip
        descriptor = self._listener.fileno()
        command, environment = router_command(settings, descriptor)
        member = Member(
            "router", command, f"{self.url}/health", self.folder.logs / "router.log", environment, (descriptor,),
            ("ok", "starting", "no_target"), replace(self.plan.patience, grace=self.plan.router_grace_s),
        )  # fmt: skip
        return Placed(member, "router", url=self.url)

    async def start(self) -> None:
        """Returns when requests are served by every target. Raises MemberFailed, and then `stop` is still to be
        called."""
        began = time.monotonic()
        first, *others = (target.member.name for target in self._targets)

        async def targets() -> None:
            await self._up(first)
            self.serves_s = time.monotonic() - began
            await asyncio.gather(*map(self._up, others))

        await asyncio.gather(self._up("router"), *(self._up(each.member.name) for each in self._drafts), targets())
        self.ready_s = time.monotonic() - began
        self.phase = "ready"
        self.write()

    async def _up(self, name: str) -> None:
        """Start it and wait until it is ready. Raises MemberFailed."""
        self._keepers[name].start()
        await self._keepers[name].ready()

    async def run(self, stop: asyncio.Event) -> None:
        """Write down what changes, and take orders, until `stop`."""
        stopping = asyncio.ensure_future(stop.wait())
        async with OrderServer(self.folder.socket, self.restart, stop):
            while not stopping.done():
                self.write()
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({changed, stopping}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                await asyncio.sleep(WRITE_EVERY_S)

    async def stop(self) -> None:
        """Drain the router, then end targets, then drafts. Nothing is left afterwards."""
        self.phase = "stopping"
        await self._down(["router"])
        self._listener.close()  # nobody will answer what would wait there
        await self._down([target.member.name for target in self._targets])
        await self._down([draft.member.name for draft in self._drafts])
        for port in self._ports:
            port.close()

    async def _down(self, names: list[str]) -> None:
        ending = asyncio.gather(*(self._keepers[name].stop() for name in names))
        self.write()
        await ending

    def kill(self) -> None:
        """End all at once; `stop` is still to be awaited."""
        for keeper in self._keepers.values():
            keeper.kill()

    async def restart(self, what: str) -> AsyncIterator[str]:
        """As of `restart_members`."""
        drafts = {draft.member.name: self._keepers[draft.member.name].replace for draft in self._drafts}
        async for line in restart_members(
            self, what, self._rolling, self.orders, drafts=drafts, targets=self._replaceable_targets
        ):
            yield line
        self.write()  # who gave the order finds it done

    async def _replaceable_targets(self) -> Mapping[str, Replace]:
        return {target.url: self._keepers[target.member.name].replace for target in self._targets}

    def state(self) -> dict[str, Any]:
        """For state.json: addresses, processes, phases; no secrets."""
        placed = [*self._drafts, *self._targets]
        members = [self._shown(each.member.name, each.kind, each.url or each.address) for each in placed]
        router = self._shown("router", "router", self.url)
        return state_head(self, "local") | {"serves_after_s": self.serves_s, "members": [router, *members]}

    def _shown(self, name: str, kind: str, address: str) -> dict[str, Any]:
        keeper = self._keepers[name]
        return {
            "name": name, "kind": kind, "address": address, "pid": keeper.pid, "phase": keeper.phase,
            "detail": keeper.detail, "restarts": keeper.restarts, "replacements": keeper.replacements,
            "log": str(keeper.member.log),
        }  # fmt: skip

    def write(self) -> None:
        self.folder.write(self.state())


async def up(plan: ClusterPlan, folder: RunFolder) -> None:
    """Run a cluster until SIGINT, SIGTERM or an order ends it. folder: opened. Raises ConfigError, MemberFailed."""
    cluster = LocalCluster(plan, folder)
    stop = stop_on_signals(cluster.kill)
    running = asyncio.ensure_future(cluster.run(stop))
    starting = asyncio.ensure_future(cluster.start())
    try:
        await asyncio.wait({starting, running}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            announce(cluster)
        await running
    finally:
        stop.set()
        for task in (starting, running):
            if not task.done() and task is starting:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(starting, running, return_exceptions=True)
        announce_end()
        await cluster.stop()


def run_up(plan: ClusterPlan, folder: RunFolder) -> None:
    """`up`, from opening the folder to forgetting it. Raises ConfigError, MemberFailed."""
    folder.open()
    try:
        asyncio.run(up(plan, folder))
    finally:
        folder.close()
