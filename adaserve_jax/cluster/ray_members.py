"""Actors of Ray that keep one process each, by the same keeper as on one machine. Needs ray.

Ray starts an actor anew when its worker process dies, on the same machine or another; the process that it kept has then
ended with it. Addresses are those of the machine where an actor is; ports stay the same where they are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from adaserve_jax.cluster.asking import NoAnswer
from adaserve_jax.cluster.keeper import Keeper
from adaserve_jax.cluster.member import Member
from adaserve_jax.cluster.plan import ClusterPlan, HeldPort, bracketed, draft_at, target_at
from adaserve_jax.cluster.rolling import RouterOrders
from adaserve_jax.cluster.router import url_of
from adaserve_jax.cluster.router_command import router_command
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.server.serve import listen

NAMESPACE = "adaserve"
ASK_LIMIT_S = 10.0
REFRESH_S = 1.0
PORT_GRACE_S = 15.0


@dataclass(frozen=True)
class Site:
    """What every actor of a cluster is told. own_address: members listen at the address of their machine, not at the
    plan's; ports: tried first; token: of the router."""

    plan: ClusterPlan
    own_address: bool
    ports: tuple[int, ...]
    token: str

    @property
    def host(self) -> str:
        """Where members on this machine listen."""
        return ray.util.get_node_ip_address() if self.own_address else self.plan.member_host

    def hold_ports(self) -> list[HeldPort]:
        """`ports`, others in the place of those that somebody has here."""
        return [_hold(self.host, port) for port in self.ports]


def _hold(host: str, port: int) -> HeldPort:
    try:
        return HeldPort(host, port)
    except OSError:
        return HeldPort(host)


def log_folder() -> Path:
    """Of this machine, for this user only."""
    path = Path(tempfile.gettempdir()) / f"adaserve-ray-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.getuid():
        raise ConfigError(f"{path} is another user's, and logs cannot be written there")
    return path


class KeeperActor:
    """A keeper on an event loop in a thread of its own, which lives as long as the actor's process."""

    def __init__(self, member: Member, kind: str, address: str):
        self.kind = kind
        self.address = address
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="keeper", daemon=True).start()
        self._keeper = Keeper(member)
        self._loop.call_soon_threadsafe(self._keeper.start)

    def ready(self) -> str:
        """Waits; its address. Raises MemberFailed."""
        self._wait(self._keeper.ready())
        return self.address

    def where(self) -> str:
        """Its address, at once."""
        return self.address

    def replace(self) -> None:
        """Returns when the new process is ready."""
        self._wait(self._keeper.replace())

    def stop(self) -> None:
        """Returns when the process has ended."""
        self._wait(self._keeper.stop())

    def kill(self) -> None:
        """End the process at once."""
        self._loop.call_soon_threadsafe(self._keeper.kill)

    def describe(self) -> dict[str, Any]:
        """As state.json has a member; pid: of the process that is kept, actor_pid: of the one that keeps it."""
        keeper = self._keeper
        return {
            "name": keeper.member.name, "kind": self.kind, "address": self.address, "pid": keeper.pid,
            "actor_pid": os.getpid(), "phase": keeper.phase, "detail": keeper.detail, "restarts": keeper.restarts,
            "replacements": keeper.replacements, "log": str(keeper.member.log),
        }  # fmt: skip

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


class DraftActor(KeeperActor):
    """One draft service."""

    def __init__(self, site: Site, number: int):
        self._ports = site.hold_ports()
        port, http_port = (port.number for port in self._ports)
        placed = draft_at(site.plan, number, site.host, port, http_port, log_folder())
        super().__init__(placed.member, placed.kind, placed.address)


class TargetActor(KeeperActor):
    """One server. drafts: the actors whose services it may ask, with the addresses that they had at first: one that
    does not answer is taken to be where it was."""

    def __init__(self, site: Site, number: int, drafts: dict[str, str]):
        (self._port,) = site.hold_ports()
        self._number, self._drafts, self._site = number, Whereabouts(list(drafts), drafts), site
        placed = self._placed()
        super().__init__(placed.member, placed.kind, placed.url)

    def replace(self) -> None:
        """Also where drafts have other addresses by now: the new process asks those."""
        self._keeper.member = self._placed().member
        super().replace()

    def _placed(self):
        addresses = self._drafts.look()
        return target_at(self._site.plan, self._number, self._site.host, self._port.number, addresses, log_folder())


class RouterActor(KeeperActor):
    """The router. targets: names of the actors whose servers it routes to, wherever they are by then."""

    def __init__(self, site: Site, targets: Sequence[str]):
        token_file = _token_file(site)
        settings = replace(site.plan.router, targets=(), token_file=str(token_file))
        self._token_file = token_file
        self._listener = _listen(settings)
        descriptor = self._listener.fileno()
        command, environment = router_command(settings, descriptor)
        url = url_of(self._listener, settings.server)
        if site.own_address and settings.host in ("0.0.0.0", "::"):
            url = url.replace("127.0.0.1", site.host).replace("[::1]", bracketed(site.host))
        member = Member(
            "router", command, f"{url}/health", log_folder() / "router.log", environment, (descriptor,),
            ("ok", "starting", "no_target"), replace(site.plan.patience, grace=site.plan.router_grace_s),
        )  # fmt: skip
        super().__init__(member, "router", url)
        self._targets = Whereabouts(targets, {})
        self._orders = RouterOrders(url, site.token, settings.tls_cert)
        asyncio.run_coroutine_threadsafe(self._refresh(), self._loop)

    def stop(self) -> None:
        super().stop()
        self._listener.close()
        self._token_file.unlink(missing_ok=True)

    async def _refresh(self) -> None:
        """Tell the router where targets are, as long as it lives: they may move, and it may begin anew."""
        while True:
            try:
                urls = await asyncio.to_thread(self._targets.look)
                known = [each["url"] for each in (await self._orders.status())["targets"]]
                if urls and urls != known:
                    await self._orders.set_targets(urls)
            except (NoAnswer, RayError):
                pass  # it is told the next time
            await asyncio.sleep(REFRESH_S)


def _listen(settings: RouterSettings) -> socket.socket:
    """The router's port, which one that ends just now may hold until its requests are answered. Raises ConfigError."""
    end = time.monotonic() + settings.shutdown_timeout + PORT_GRACE_S
    while True:
        try:
            return listen(settings.server)
        except ConfigError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _token_file(site: Site) -> Path:
    """The token in a file for this user only, at the same place whenever the actor begins anew."""
    path = log_folder() / f"token-{site.plan.router.port}"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(site.token)
    return path


class Whereabouts:
    """Where actors are, or were when they last answered. known: what is known at first, by name."""

    def __init__(self, names: Sequence[str], known: dict[str, str]):
        self._names = names
        self._known = dict(known)

    def look(self) -> list[str]:
        """Ask them; addresses of those that ever answered, in order."""
        self._known |= ask_all(self._names, "where")
        return [self._known[name] for name in self._names if name in self._known]


def ask_all(names: Sequence[str], method: str) -> dict[str, Any]:
    """What the actors answer, by name, all asked at once; those that cannot be reached now are left out."""
    asked: dict[str, Any] = {}
    for name in names:
        with contextlib.suppress(ValueError, RayError):
            asked[name] = getattr(ray.get_actor(name, namespace=NAMESPACE), method).remote()
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ASK_LIMIT_S)
    found: dict[str, Any] = {}
    for name, answer in asked.items():
        with contextlib.suppress(RayError):
            found[name] = ray.get(answer, timeout=0)
    return found


def failure_of(error: Exception) -> AdaServeError:
    """What an actor raised, as it would be raised here."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, AdaServeError) else AdaServeError(str(error).strip().splitlines()[-1])
