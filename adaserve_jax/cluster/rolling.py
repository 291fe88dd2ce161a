"""Rolling replacement: one target after another gets nothing new, finishes what it has, is replaced, and is used again.

The same for both orchestrators: how a member is replaced is theirs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from adaserve_jax.cluster.keeper import NoAnswer, ask
from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.run_folder import RunFolder
from adaserve_jax.errors import AdaServeError

# What is said of a cluster, whatever runs it: on the terminal and at the head of state.json. Starts nothing.


class Orchestrator(Protocol):
    """A cluster and what keeps it running. phase: starting, ready or stopping. url: of its router. started_s: Unix
    time; ready_s: seconds that the start took, None before it is over."""

    plan: ClusterPlan
    folder: RunFolder
    phase: str
    url: str
    started_s: float
    ready_s: float | None


def announce(cluster: Orchestrator, by: str = "") -> None:
    """Print that it is ready. by: what runs it, where that is not this program."""
    assert cluster.ready_s is not None, "a cluster that is ready knows how long that took"
    print(
        f"adaserve cluster: {cluster.plan.targets} targets and {cluster.plan.drafts} drafts serve on {cluster.url} "
        f"after {cluster.ready_s:.1f} s ({by and f'{by}, '}state: {cluster.folder.state_file})",
        flush=True,
    )


def announce_end() -> None:
    print("adaserve cluster: stops", file=sys.stderr, flush=True)


def state_head(cluster: Orchestrator, orchestrator: str) -> dict[str, Any]:
    """What state.json says of the cluster as a whole; no secrets."""
    return {
        "orchestrator": orchestrator, "pid": os.getpid(), "phase": cluster.phase, "url": cluster.url,
        "started_unix_s": cluster.started_s, "ready_after_s": cluster.ready_s,
        "token_file": str(cluster.folder.token_file), "tls_cert": cluster.plan.router.tls_cert,
    }  # fmt: skip


POLL_S = 0.2
Replace = Callable[[], Awaitable[None]]
"""Replaces one member, and returns when the new one is ready."""


class RouterOrders:
    """Orders to a running router, by its token. certificate: file of the router's, where it has one."""

    def __init__(self, url: str, token: str, certificate: str | None):
        self.url = url
        self._token = token
        self._certificate = certificate

    async def status(self) -> dict:
        """Raises NoAnswer."""
        return await self._ask("/cluster", None)

    async def drain(self, target: str) -> None:
        await self._ask("/cluster/drain", {"target": target})

    async def resume(self, target: str) -> None:
        await self._ask("/cluster/resume", {"target": target})

    async def set_targets(self, targets: list[str]) -> None:
        await self._ask("/cluster/targets", {"targets": targets})

    async def find(self, target: str) -> dict:
        """What it says of one target; {} when it does not know it. Raises NoAnswer."""
        status = await self.status()
        return next((each for each in status["targets"] if each["url"] == target), {})

    async def _ask(self, path: str, body: dict | None) -> dict:
        """Raises NoAnswer, also when it refuses."""
        status, answer = await ask(self.url + path, body=body, token=self._token, certificate=self._certificate)
        if status != 200:
            raise NoAnswer(f"the router refused {path} with status {status}: {answer.get('error', answer)}")
        return answer


async def restart_members(
    cluster: Orchestrator, what: str, lock: asyncio.Lock, router: RouterOrders, *, drafts: Mapping[str, Replace],
    targets: Callable[[], Awaitable[Mapping[str, Replace]]],
) -> AsyncIterator[str]:  # fmt: skip
    """Replace the targets, the drafts or all of these, drafts first, one after another; what is done, as it is done.

    what: one of control.REPLACED. lock: held meanwhile. drafts: by name. targets: by URL, asked for once their turn
    comes. Raises AdaServeError: it is not ready, and what replacing raises.
    """
    if cluster.phase != "ready":
        raise AdaServeError(f"the cluster is {cluster.phase}; order this once it is ready")
    async with lock:
        if what != "targets":
            async for line in replace_drafts(drafts):
                yield line
        if what != "drafts":
            async for line in replace_in_turn(await targets(), router, drain_s=cluster.plan.target_grace_s):
                yield line


async def replace_in_turn(
    targets: Mapping[str, Replace], router: RouterOrders, *, drain_s: float
) -> AsyncIterator[str]:
    """What is done, as it is done. targets: by URL.

    Each gets at most `drain_s` seconds for what it has; a server finishes what is left while it stops, within its own
    limit. Raises what replacing raises; then the target is used again if it recovers, and the rest stay as they are.
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
        await _up(url, router, drain_s)
        yield f"{url}: is used again"


async def replace_drafts(drafts: Mapping[str, Replace]) -> AsyncIterator[str]:
    """What is done, as it is done; targets decode without a draft that is not there. drafts: by name. Raises what
    replacing raises."""
    for name, replace in drafts.items():
        yield f"{name}: is replaced"
        await replace()
        yield f"{name}: is used again"


async def _draining(url: str, router: RouterOrders, drain_s: float) -> AsyncIterator[int]:
    """How many requests are left, whenever that changes, until none is or the time is up."""
    loop = asyncio.get_running_loop()
    end, before = loop.time() + drain_s, -1
    while loop.time() < end:
        left = (await router.find(url)).get("in_flight", 0)
        if not left:
            return
        if left != before:
            yield left
        before = left
        await asyncio.sleep(POLL_S)


async def _resume(url: str, router: RouterOrders) -> None:
    """Take the drain back; a router that died meanwhile knows of none."""
    try:
        await router.resume(url)
    except NoAnswer:
        return


async def _up(url: str, router: RouterOrders, limit_s: float) -> None:
    """Wait until the router uses it, so that the next one is not drained while this one does not serve yet."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while loop.time() < end:
        try:
            if (await router.find(url)).get("state") == "up":
                return
        except NoAnswer:
            pass
        await asyncio.sleep(POLL_S)
    raise AdaServeError(f"the router does not use {url} again after {limit_s:g} s; see 'adaserve cluster status'")
