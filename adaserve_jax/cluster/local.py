"""Local orchestrator: start drafts, targets and the router as processes of this machine, supervise and stop them.

The router, the drafts and the first target start at once; the other targets start once the first is ready, so that they
find its compiled programs. Requests are answered from the first ready target on. The router's listening socket is held
here, so that clients wait instead of being refused while the router restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from adaserve_jax.cluster.orchestrator import (
    ReplaceMember,
    announce,
    announce_end,
    cluster_state,
    rolling_restart,
    stop_on_signals,
)
from adaserve_jax.cluster.plan import ClusterPlan, PlacedMember, ReservedPort, place_draft, place_router, place_target
from adaserve_jax.cluster.router import url_of
from adaserve_jax.cluster.router_client import RouterClient
from adaserve_jax.cluster.run_folder import ClusterFolder, OrderServer
from adaserve_jax.cluster.supervisor import Supervisor
from adaserve_jax.server.serve import listen

WRITE_INTERVAL_S = 0.2


class LocalCluster:
    """Processes of one cluster. Created, used and stopped on one event loop, in the main thread."""

    def __init__(self, plan: ClusterPlan, folder: ClusterFolder):
        """Reserve ports and create supervisors. folder: opened. Raises ConfigError if the router's port is taken."""
        self.plan = plan
        self.folder = folder
        self.phase = "starting"
        self.started_s = time.time()
        self.ready_s: float | None = None
        """Duration of the start in seconds."""
        self.serves_s: float | None = None
        """Seconds from the start until the first target was ready."""
        self._listener = listen(plan.router.server)
        self.url = url_of(self._listener, plan.router.server)
        self._drafts, self._targets = self._place()
        self._changed = asyncio.Event()
        self._supervisors = {
            placed.member.name: Supervisor(placed.member, self._changed.set)
            for placed in (*self._drafts, *self._targets, self._router())
        }
        self._router_client = RouterClient(self.url, folder.token, plan.router.tls_cert)
        self._restart_lock = asyncio.Lock()

    def _place(self) -> tuple[list[PlacedMember], list[PlacedMember]]:
        plan, host, logs = self.plan, self.plan.member_host, self.folder.logs
        self._ports = [ReservedPort(host) for _ in range(plan.targets + 2 * plan.drafts)]
        ports = iter([port.number for port in self._ports])
        drafts = [place_draft(plan, i, host, next(ports), next(ports), logs) for i in range(plan.drafts)]
        addresses = [draft.address for draft in drafts]
        return drafts, [place_target(plan, i, host, next(ports), addresses, logs) for i in range(plan.targets)]

    def _router(self) -> PlacedMember:
        settings = replace(
            self.plan.router, targets=tuple(target.url for target in self._targets),
            token_file=str(self.folder.token_file),
        )  # fmt: skip
        return place_router(self.plan, settings, self._listener.fileno(), self.url, self.folder.logs)

    async def start(self) -> None:
        """Start all members and wait until every target serves. Raises MemberFailed; then `stop` is still needed."""
        began = time.monotonic()
        first, *others = (target.member.name for target in self._targets)

        async def start_targets() -> None:
            await self._start_member(first)
            self.serves_s = time.monotonic() - began
            await asyncio.gather(*map(self._start_member, others))

        drafts = (self._start_member(draft.member.name) for draft in self._drafts)
        await asyncio.gather(self._start_member("router"), *drafts, start_targets())
        self.ready_s = time.monotonic() - began
        self.phase = "ready"
        self.write()

    async def _start_member(self, name: str) -> None:
        """Start a member and wait until it is ready. Raises MemberFailed."""
        self._supervisors[name].start()
        await self._supervisors[name].ready()

    async def run(self, stop: asyncio.Event) -> None:
        """Write state changes and take orders until `stop` is set."""
        stopping = asyncio.ensure_future(stop.wait())
        async with OrderServer(self.folder.socket, self.restart, stop):
            while not stopping.done():
                self.write()
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({changed, stopping}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                await asyncio.sleep(WRITE_INTERVAL_S)

    async def stop(self) -> None:
        """Drain the router, then stop targets, then drafts. No process is left afterwards."""
        self.phase = "stopping"
        await self._stop_members(["router"])
        self._listener.close()  # clients that would wait there get no answer any more
        await self._stop_members([target.member.name for target in self._targets])
        await self._stop_members([draft.member.name for draft in self._drafts])
        for port in self._ports:
            port.close()

    async def _stop_members(self, names: list[str]) -> None:
        ending = asyncio.gather(*(self._supervisors[name].stop() for name in names))
        self.write()
        await ending

    def kill(self) -> None:
        """Kill all processes at once; `stop` is still to be awaited."""
        for supervisor in self._supervisors.values():
            supervisor.kill()

    async def restart(self, scope: str) -> AsyncIterator[str]:
        """Restart members as `rolling_restart` does."""
        drafts = {draft.member.name: self._supervisors[draft.member.name].replace for draft in self._drafts}
        async for line in rolling_restart(
            self, scope, self._restart_lock, self._router_client, drafts=drafts, targets=self._replaceable_targets
        ):
            yield line
        self.write()  # before the client hears that the order is done

    async def _replaceable_targets(self) -> Mapping[str, ReplaceMember]:
        return {target.url: self._supervisors[target.member.name].replace for target in self._targets}

    def state(self) -> dict[str, Any]:
        """Return the content of state.json: addresses, processes, phases; no secrets."""
        placed = [*self._drafts, *self._targets]
        members = [self._member_state(each.member.name, each.kind, each.url or each.address) for each in placed]
        router = self._member_state("router", "router", self.url)
        return cluster_state(self, "local") | {"serves_after_s": self.serves_s, "members": [router, *members]}

    def _member_state(self, name: str, kind: str, address: str) -> dict[str, Any]:
        supervisor = self._supervisors[name]
        return {
            "name": name, "kind": kind, "address": address, "pid": supervisor.pid, "phase": supervisor.phase,
            "detail": supervisor.detail, "restarts": supervisor.restarts, "replacements": supervisor.replacements,
            "log": str(supervisor.member.log),
        }  # fmt: skip

    def write(self) -> None:
        self.folder.write(self.state())


async def up(plan: ClusterPlan, folder: ClusterFolder) -> None:
    """Run a cluster until a signal or the order `down` ends it. folder: opened. Raises ConfigError, MemberFailed."""
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
        if not starting.done():
            starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(starting, running, return_exceptions=True)
        announce_end()
        await cluster.stop()


def run_up(plan: ClusterPlan, folder: ClusterFolder) -> None:
    """Open the folder, run a cluster in it, and close it. Raises ConfigError, MemberFailed."""
    folder.open()
    try:
        asyncio.run(up(plan, folder))
    finally:
        folder.close()
