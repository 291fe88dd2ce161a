"""Local orchestrator: start drafts, targets and the router as processes of this machine, supervise and stop them.

The router, the drafts and the first target start at once; the other targets start once the first is ready, so that they
find its compiled programs. Requests are answered from the first ready target on. The router's listening socket is held
here, so that clients wait instead of being refused while the router restarts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Literal

from adaserve_jax.cluster.orchestrator import Cluster, ReplaceMember, announce_end, announce_ready, stop_on_signals
from adaserve_jax.cluster.plan import ClusterPlan, ReservedPort, place_draft, place_router, place_target
from adaserve_jax.cluster.router import url_of
from adaserve_jax.cluster.run_folder import ClusterFolder, OrderServer
from adaserve_jax.cluster.supervisor import Supervisor
from adaserve_jax.server.serve import listen

WRITE_INTERVAL_S = 0.2


class LocalCluster(Cluster):
    """Processes of one cluster. Created, used and stopped on one event loop, in the main thread."""

    orchestrator = "local"

    def __init__(self, plan: ClusterPlan, folder: ClusterFolder):
        """Reserve ports and create supervisors. folder: opened. Raises ConfigError if the router's port is taken."""
        super().__init__(plan, folder)
        self._changed = asyncio.Event()
        self._listener = listen(plan.router.server)
        self.url = url_of(self._listener, plan.router.server)
        host, logs = plan.member_host, folder.logs
        self._ports = [ReservedPort(host) for _ in range(plan.targets + 2 * plan.drafts)]
        ports = iter([port.number for port in self._ports])
        drafts = [place_draft(plan, i, host, next(ports), next(ports), logs) for i in range(plan.drafts)]
        addresses = [draft.address for draft in drafts]
        targets = [place_target(plan, i, host, next(ports), addresses, logs) for i in range(plan.targets)]
        urls = tuple(target.address for target in targets)
        settings = replace(plan.router, targets=urls, token_file=str(folder.token_file))
        router = place_router(plan, settings, self._listener.fileno(), self.url, logs)
        self._supervisors = [Supervisor(member, self._changed.set) for member in (router, *drafts, *targets)]

    def _of(self, kind: str) -> list[Supervisor]:
        return [each for each in self._supervisors if each.member.kind == kind]

    async def start(self) -> None:
        """Start all members and wait until every target serves. Raises MemberFailed; then `stop` is still needed."""
        began = time.monotonic()
        self.announce_start()

        async def start(supervisor: Supervisor) -> None:
            supervisor.start()
            await supervisor.ready()
            announce_ready(supervisor.member.name, time.monotonic() - began)

        async def start_targets() -> None:
            first, *others = self._of("target")
            await start(first)
            await asyncio.gather(*map(start, others))

        await asyncio.gather(*map(start, self._of("router") + self._of("draft")), start_targets())
        self.ready_s = time.monotonic() - began
        self.phase = "ready"
        self.write()

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
        for kind in ("router", "target", "draft"):
            ending = asyncio.gather(*(supervisor.stop() for supervisor in self._of(kind)))
            self.write()
            await ending
            if kind == "router":
                self._listener.close()  # clients that would wait there get no answer any more
        for port in self._ports:
            port.close()

    def kill(self) -> None:
        """Kill all processes at once; `stop` is still to be awaited."""
        for supervisor in self._supervisors:
            supervisor.kill()

    async def restart(self, scope: str) -> AsyncIterator[str]:
        async for line in super().restart(scope):
            yield line
        self.write()  # before the client hears that the order is done

    async def replaceable(self, kind: Literal["draft", "target"]) -> Mapping[str, ReplaceMember]:
        return {each.member.address if kind == "target" else each.member.name: each.replace for each in self._of(kind)}

    def write(self) -> None:
        self.write_state(members=[each.describe() for each in self._supervisors])


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
            cluster.announce()
        await running
    finally:
        stop.set()
        starting.cancel()
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
