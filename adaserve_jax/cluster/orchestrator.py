"""Code shared by the local and the Ray orchestrator: state, announcements, signals, rolling restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, ClassVar, Literal

from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.router_client import NoAnswer, RouterClient
from adaserve_jax.cluster.run_folder import ClusterFolder
from adaserve_jax.errors import AdaServeError

POLL_S = 0.2
ReplaceMember = Callable[[], Awaitable[None]]
"""Replaces one member and returns when the new process is ready."""


class Cluster(ABC):
    """A cluster with what supervises it.

    phase: starting, ready or stopping. url: of the router. ready_s: duration of the start in seconds, None before it is
    over.
    """

    orchestrator: ClassVar[str]

    def __init__(self, plan: ClusterPlan, folder: ClusterFolder):
        self.plan = plan
        self.folder = folder
        self.phase = "starting"
        self.url = ""
        self.ready_s: float | None = None
        self._restart_lock = asyncio.Lock()

    @abstractmethod
    async def replaceable(self, kind: Literal["draft", "target"]) -> Mapping[str, ReplaceMember]:
        """Return the replacement of each member of a kind: of drafts by name, of targets by URL."""

    @property
    def router_client(self) -> RouterClient:
        return RouterClient(self.url, self.folder.token, self.plan.router.tls_cert)

    @property
    def members(self) -> str:
        """Return how many targets and draft services there are, in words."""
        counts = ((self.plan.targets, "target"), (self.plan.drafts, "draft service"))
        return " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)

    def write_state(self, **more: Any) -> None:
        """Write state.json: the cluster as a whole, and the fields in `more`; no secrets."""
        self.folder.write({
            "orchestrator": self.orchestrator, "pid": os.getpid(), "phase": self.phase, "url": self.url,
            "token_file": str(self.folder.token_file), "tls_cert": self.plan.router.tls_cert, **more,
        })  # fmt: skip

    @property
    def logs(self) -> str:
        """Where the logs of the processes are, in words."""
        return str(self.folder.logs)

    def announce_start(self) -> None:
        """Print what is started, and where to look meanwhile."""
        print(
            f"adaserve cluster: starts {self.members}; a first start compiles, which takes minutes (logs: {self.logs})",
            file=sys.stderr,
            flush=True,
        )

    def announce(self) -> None:
        """Print that the cluster is ready, and its address."""
        assert self.ready_s is not None, "a ready cluster has measured its start"
        print(
            f"adaserve cluster: serves on {self.url} with {self.members} after {self.ready_s:.1f} s "
            f"({self.orchestrator}, state: {self.folder.state_file})",
            flush=True,
        )

    async def restart(self, scope: str) -> AsyncIterator[str]:
        """Replace members one after another, drafts first, and yield progress lines. Orders do not overlap.

        scope: one of run_folder.RESTART_SCOPES. Raises AdaServeError if the cluster is not ready, and whatever a
        replacement raises.
        """
        if self.phase != "ready":
            raise AdaServeError(f"the cluster is {self.phase}; order this once it is ready")
        async with self._restart_lock:
            if scope != "targets":
                for name, replace in (await self.replaceable("draft")).items():  # meanwhile targets decode without it
                    yield f"{name}: is replaced"
                    await replace()
                    yield f"{name}: is used again"
            if scope != "drafts":
                look_s = self.plan.router.poll_every + self.plan.router.poll_timeout
                for url, replace in (await self.replaceable("target")).items():
                    progress = replace_target(url, replace, self.router_client, self.plan.target_grace_s, look_s)
                    async for line in progress:
                        yield line


async def replace_target(
    url: str, replace: ReplaceMember, router: RouterClient, limit_s: float, look_s: float
) -> AsyncIterator[str]:
    """Drain, replace and resume a target, and yield progress lines.

    It gets at most `limit_s` seconds for its requests in flight; while it stops it finishes the rest within its own
    limit. It is resumed even if the draining or the replacement raises. look_s: seconds in which the router looks at a
    target once at least.
    """
    yield f"{url}: takes nothing new"
    try:
        await router.drain(url)  # which may raise although it was done
        async for left in _draining(url, router, limit_s):
            yield f"{url}: {left} requests left"
        yield f"{url}: is replaced"
        await replace()
    finally:
        await _resume(url, router, limit_s)
    await _wait_until_up(url, router, limit_s + look_s)  # so that the next one is not drained before
    yield f"{url}: is used again"


async def _draining(url: str, router: RouterClient, limit_s: float) -> AsyncIterator[int]:
    """Yield the number of requests left at a target whenever it changes, until it is 0 or the time is up."""
    loop = asyncio.get_running_loop()
    end, left = loop.time() + limit_s, -1
    while loop.time() < end:
        before = left
        with contextlib.suppress(NoAnswer):
            left = (await router.target_status(url)).get("in_flight", 0)
        if not left:
            return
        if left != before:
            yield left
        await asyncio.sleep(POLL_S)


async def _resume(url: str, router: RouterClient, limit_s: float) -> None:
    """Resume a target; while the router does not answer, try again until the time is up, or the order is cancelled."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    end = loop.time() + limit_s
    while True:
        with contextlib.suppress(NoAnswer):
            await router.resume(url)
            return
        if loop.time() >= end or (task is not None and task.cancelling()):  # cancelled: the cluster ends
            return
        await asyncio.sleep(POLL_S)


async def _wait_until_up(url: str, router: RouterClient, limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while loop.time() < end:
        with contextlib.suppress(NoAnswer):
            if (await router.target_status(url)).get("state") == "up":
                return
        await asyncio.sleep(POLL_S)
    raise AdaServeError(f"the router does not use {url} again after {limit_s:g} s; see 'adaserve cluster status'")


def announce_ready(name: str, after_s: float) -> None:
    """Print that a member has become ready."""
    print(f"adaserve cluster: {name} is ready after {after_s:.1f} s", file=sys.stderr, flush=True)


def announce_end() -> None:
    print("adaserve cluster: stops", file=sys.stderr, flush=True)


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
