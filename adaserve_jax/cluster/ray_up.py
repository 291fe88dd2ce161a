"""The program that runs a cluster on Ray until it is to end, and what ends one whose program is gone.

The actors go on when this program dies, as long as their Ray cluster does: one that was started for them ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, remove_placement_group

from adaserve_jax.cluster.control import OrderServer
from adaserve_jax.cluster.orchestrator import announce, announce_end
from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.ray_cluster import GROUP, LOOK_EVERY_S, RayCluster, find_actor, stop_actors
from adaserve_jax.cluster.ray_members import NAMESPACE
from adaserve_jax.cluster.run_folder import RunFolder
from adaserve_jax.cluster.signals import stop_on_signals
from adaserve_jax.errors import ConfigError

START_ENDS_S = 20.0
"""That a start which is given up may take for that."""


def connect(address: str | None, members: int) -> None:
    """To a running Ray cluster, or to one that is started here with room for so many members. Raises ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    if address is None:
        options |= {"num_cpus": members, "include_dashboard": False}
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"address must be that of a running Ray cluster, got {address!r}: {error}") from error


def run_up_on_ray(plan: ClusterPlan, folder: RunFolder, address: str | None, placement: str) -> None:
    """Run a cluster until SIGINT, SIGTERM or an order ends it. Raises AdaServeError."""
    folder.open()
    connected = False
    try:
        connect(address, plan.targets + plan.drafts)
        connected = True
        asyncio.run(_run(RayCluster(plan, folder, own_address=address is not None, placement=placement), folder))
    finally:
        folder.close()
        if connected:
            ray.shutdown()


async def _run(cluster: RayCluster, folder: RunFolder) -> None:
    loop = asyncio.get_running_loop()
    stop = stop_on_signals(lambda: loop.run_in_executor(None, cluster.kill))
    starting = asyncio.ensure_future(asyncio.to_thread(cluster.start))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        async with OrderServer(folder.socket, cluster.restart, stop):
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                announce(cluster, "Ray")
            while not stopping.done():
                await asyncio.to_thread(cluster.write)
                await asyncio.wait({stopping}, timeout=LOOK_EVERY_S)
    finally:
        stopping.cancel()
        announce_end()
        cluster.stopping.set()
        await asyncio.wait({starting}, timeout=START_ENDS_S)
        await asyncio.to_thread(cluster.stop)
        await asyncio.gather(starting, return_exceptions=True)


def down_on_ray(address: str) -> int:
    """End a cluster whose `up` is gone; how many actors there were. Raises ConfigError."""
    connect(address, 0)
    try:
        listed: Any = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in listed if each["namespace"] == NAMESPACE]
        stop_actors({name: actor for name in names if (actor := find_actor(name)) is not None})
        with contextlib.suppress(ValueError):  # there is none
            remove_placement_group(get_placement_group(GROUP))
        return len(names)
    finally:
        ray.shutdown()
