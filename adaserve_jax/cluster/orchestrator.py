"""Code shared by the local and the Ray orchestrator: state, announcements, signals, rolling restart."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.router_client import NoAnswer, RouterClient
from adaserve_jax.cluster.run_folder import ClusterFolder
from adaserve_jax.errors import AdaServeError

POLL_S = 0.2
ReplaceMember = Callable[[], Awaitable[None]]
"""Replaces one member and returns when the new process is ready."""


class Orchestrator(Protocol):
    """A cluster with what supervises it.

    phase: starting, ready or stopping. url: of the router. started_s: Unix time. ready_s: duration of the start in
    seconds, None before it is over.
    """

    plan: ClusterPlan
    folder: ClusterFolder
    phase: str
    url: str
    started_s: float
    ready_s: float | None


def announce(cluster: Orchestrator, orchestrator: str = "") -> None:
    """Print that the cluster is ready. orchestrator: its name, unless it is this program."""
    assert cluster.ready_s is not None, "a ready cluster has measured its start"
    name = f"{orchestrator}, " if orchestrator else ""
    print(
        f"adaserve cluster: {cluster.plan.targets} targets and {cluster.plan.drafts} drafts serve on {cluster.url} "
        f"after {cluster.ready_s:.1f} s ({name}state: {cluster.folder.state_file})",
        flush=True,
    )


def announce_end() -> None:
    print("adaserve cluster: stops", file=sys.stderr, flush=True)


def cluster_state(cluster: Orchestrator, orchestrator: str) -> dict[str, Any]:
    """Return the fields of state.json that describe the cluster as a whole; no secrets."""
    return {
        "orchestrator": orchestrator, "pid": os.getpid(), "phase": cluster.phase, "url": cluster.url,
        "started_unix_s": cluster.started_s, "ready_after_s": cluster.ready_s,
        "token_file": str(cluster.folder.token_file), "tls_cert": cluster.plan.router.tls_cert,
    }  # fmt: skip


def stop_on_signals(kill: Callable[[], object]) -> asyncio.Event:
    """Return an event that the first SIGINT, SIGTERM or SIGHUP sets; each further signal calls `kill`.

    To be called in the main thread, on its running loop.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


async def rolling_restart(
    cluster: Orchestrator, scope: str, lock: asyncio.Lock, router: RouterClient, *,
    drafts: Mapping[str, ReplaceMember], targets: Callable[[], Awaitable[Mapping[str, ReplaceMember]]],
) -> AsyncIterator[str]:  # fmt: skip
    """Replace the members of a cluster one after another, drafts first, and yield progress lines.

    Args:
        scope: one of run_folder.RESTART_SCOPES.
        lock: held during the restart, so that orders do not overlap.
        drafts: by name.
        targets: by URL; called when their turn comes, because on Ray they may have moved.

    Raises AdaServeError if the cluster is not ready, and whatever a replacement raises.
    """
    if cluster.phase != "ready":
        raise AdaServeError(f"the cluster is {cluster.phase}; order this once it is ready")
    async with lock:
        if scope != "targets":
            for name, replace in drafts.items():  # meanwhile targets decode without it
                yield f"{name}: is replaced"
                await replace()
                yield f"{name}: is used again"
        if scope != "drafts":
            async for line in replace_targets(await targets(), router, drain_s=cluster.plan.target_grace_s):
                yield line


async def replace_targets(
    targets: Mapping[str, ReplaceMember], router: RouterClient, *, drain_s: float
) -> AsyncIterator[str]:
    """Drain, replace and resume each target in turn, and yield progress lines. targets: by URL.

    Each target gets at most `drain_s` seconds for its requests in flight; while it stops it finishes the rest within
    its own limit. If a replacement raises, the target is resumed and the rest stay as they are.
    """
    for url, replace in targets.items():
        yield f"{url}: takes nothing new"
        await router.drain(url)
        try:
            async for left in _draining(url, router, drain_s):
                yield f"{url}: {left} requests left"
            yield f"{url}: is replaced"
            await replace()
        finally:
            await _resume(url, router)
        await _wait_until_up(url, router, drain_s)
        yield f"{url}: is used again"


async def _draining(url: str, router: RouterClient, drain_s: float) -> AsyncIterator[int]:
    """Yield the number of requests left at a target whenever it changes, until it is 0 or the time is up."""
    loop = asyncio.get_running_loop()
    end, before = loop.time() + drain_s, -1
    while loop.time() < end:
        left = (await router.target_status(url)).get("in_flight", 0)
        if not left:
            return
        if left != before:
            yield left
        before = left
        await asyncio.sleep(POLL_S)


async def _resume(url: str, router: RouterClient) -> None:
    """Undo the drain; a router that was restarted meanwhile has forgotten it anyway."""
    try:
        await router.resume(url)
    except NoAnswer:
        return


async def _wait_until_up(url: str, router: RouterClient, limit_s: float) -> None:
    """Wait until the router uses the target, so that the next one is not drained before."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while loop.time() < end:
        try:
            if (await router.target_status(url)).get("state") == "up":
                return
        except NoAnswer:
            pass
        await asyncio.sleep(POLL_S)
    raise AdaServeError(f"the router does not use {url} again after {limit_s:g} s; see 'adaserve cluster status'")
