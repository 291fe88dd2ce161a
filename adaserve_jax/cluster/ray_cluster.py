"""A cluster on Ray: a placement group, one named actor per process, and what starts, orders and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from adaserve_jax.cluster.keeper import Keeper, Member, NoAnswer
from adaserve_jax.cluster.plan import ClusterPlan, HeldPort, bracketed, draft_at, free_ports, target_at
from adaserve_jax.cluster.rolling import Replace, RouterOrders, announce, announce_end, restart_members, state_head
from adaserve_jax.cluster.router import router_command, url_of
from adaserve_jax.cluster.run_folder import OrderServer, RunFolder, stop_on_signals
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.server.serve import listen

# Actors of Ray that keep one process each, by the same keeper as on one machine. Needs ray.
#
# Ray starts an actor anew when its worker process dies, on the same machine or another; the process that it
# kept has then ended with it. Addresses are those of the machine where an actor is; ports stay the same where
# they are free.

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


PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
GROUP = "adaserve"
"""Name of the placement group."""
PLACE_LIMIT_S = 60.0
LOOK_EVERY_S = 1.0
STOP_LIMIT_S = 120.0
"""For the members of one kind to end in, where their own limits are not known, or less."""


class RayCluster:
    """One cluster's actors. Raises ConfigError."""

    def __init__(self, plan: ClusterPlan, folder: RunFolder, *, own_address: bool, placement: str):
        if placement not in PLACEMENTS:
            raise ConfigError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
        port = plan.router.port or free_ports(1, plan.router.host)[0]
        self.plan = replace(plan, router=replace(plan.router, port=port))  # the same when its actor is started anew
        self.phase = "starting"
        self.url = ""
        self.ready_s: float | None = None
        self.started_s = time.time()
        self.folder = folder
        self._own_address = own_address
        self._placement = placement
        self._actors: dict[str, Any] = {}
        self._group: Any = None
        self._rolling = asyncio.Lock()
        self.stopping = threading.Event()
        """Once it is set, `start` makes nothing more, and ends."""

    def start(self) -> None:
        """Returns when every target serves. Blocks. Raises AdaServeError; `stop` is to be called then too."""
        began = time.monotonic()
        plan, drafts = self.plan, [f"draft-{i}" for i in range(self.plan.drafts)]
        targets = [f"target-{i}" for i in range(plan.targets)]
        taken = [name for name in (*drafts, *targets, "router") if find_actor(name) is not None]
        if taken:
            raise ConfigError(
                f"a cluster runs on this Ray cluster already (actor {taken[0]!r}); end it with "
                "'adaserve cluster down --address ADDRESS'"
            )
        self._group = placement_group(
            [{"CPU": 1}] * (len(drafts) + len(targets)), strategy=self._placement, name=GROUP, lifetime="detached"
        )
        while not self._group.wait(LOOK_EVERY_S):
            self._go_on()
            if time.monotonic() < began + PLACE_LIMIT_S:
                continue
            raise AdaServeError(
                f"Ray has no room for {len(drafts) + len(targets)} members of one CPU each by {self._placement}; "
                "give it more, or another --placement"
            )
        ports = iter(free_ports(plan.targets + 2 * plan.drafts, plan.member_host))
        for number, name in enumerate(drafts):
            self._create(name, DraftActor, number, self._site((next(ports), next(ports))), number)
        addresses = dict(zip(drafts, self._answers(drafts, "where"), strict=True))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self._make("router", RouterActor, here, self._site(()), targets)
        (self.url,) = self._answers(["router"], "where")
        for number, name in enumerate(targets):
            self._create(name, TargetActor, len(drafts) + number, self._site((next(ports),)), number, addresses)
            if number == 0:
                self._answers([name], "ready")
        self._answers([*drafts, "router", *targets], "ready")
        while self._routed() < plan.targets:
            self._go_on()
            time.sleep(0.1)
        self.ready_s = time.monotonic() - began
        self.phase = "ready"

    def _routed(self) -> int:
        """Targets that the router uses."""
        try:
            return sum(each["state"] == "up" for each in asyncio.run(self._orders().status())["targets"])
        except NoAnswer:
            return 0

    def _orders(self) -> RouterOrders:
        return RouterOrders(self.url, self.folder.token, self.plan.router.tls_cert)

    def _go_on(self) -> None:
        """Raises AdaServeError: the cluster is to end."""
        if self.stopping.is_set():
            raise AdaServeError("the cluster was stopped while it started")

    def _site(self, ports: tuple[int, ...]) -> Site:
        return Site(self.plan, self._own_address, ports, self.folder.token)

    def _create(self, name: str, kind: Callable[..., Any], bundle: int, *arguments: Any) -> None:
        """An actor in its bundle of the placement group."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        self._make(name, kind, strategy, *arguments)

    def _make(self, name: str, kind: Callable[..., Any], strategy: Any, *arguments: Any) -> None:
        self._go_on()
        options = {"num_cpus": int(kind is not RouterActor), "max_restarts": -1, "max_concurrency": 8}
        made = ray.remote(kind).options(
            name=name, namespace=NAMESPACE, lifetime="detached", scheduling_strategy=strategy, **options
        )
        self._actors[name] = made.remote(*arguments)

    def _answers(self, names: list[str], method: str) -> list[str]:
        """What these actors answer, once all of them have. Raises AdaServeError."""
        asked = [getattr(self._actors[name], method).remote() for name in names]
        waited = asked
        try:
            while waited:
                self._go_on()
                done, waited = ray.wait(waited, num_returns=len(waited), timeout=LOOK_EVERY_S)
                ray.get(done)
            return ray.get(asked)
        except RayError as error:
            raise failure_of(error) from error

    async def restart(self, what: str) -> AsyncIterator[str]:
        """As of `restart_members`."""
        actors = dict(self._actors)  # `start` adds to them in another thread
        drafts = {name: _replacing(actor) for name, actor in actors.items() if name.startswith("draft-")}
        async for line in restart_members(
            self, what, self._rolling, self._orders(), drafts=drafts, targets=self._replaceable_targets
        ):
            yield line

    async def _replaceable_targets(self) -> Mapping[str, Replace]:
        """By where they are now, which may be another machine than at the start."""
        names = [name for name in self._actors if name.startswith("target-")]
        urls = await asyncio.to_thread(self._answers, names, "where")
        return {url: _replacing(self._actors[name]) for url, name in zip(urls, names, strict=True)}

    def stop(self) -> None:
        """Drain the router, then end targets, then drafts, then the actors. Blocks."""
        self.phase = "stopping"
        own_s = max(self.plan.target_grace_s, self.plan.router_grace_s, self.plan.patience.grace)
        stop_actors(self._actors, own_s + self.plan.patience.margin)
        if self._group is not None:
            remove_placement_group(self._group)

    def kill(self) -> None:
        """End all processes at once; `stop` is still to be called. Blocks, not long."""
        killed = [actor.kill.remote() for actor in list(self._actors.values())]
        if killed:
            ray.wait(killed, num_returns=len(killed), timeout=LOOK_EVERY_S)

    def write(self) -> None:
        """state.json, as actors describe themselves now; one that is being started anew is left as it was."""
        names = list(self._actors)
        described = ask_all(names, "describe")
        members = [described.get(name) or _silent(name) for name in names]
        self.folder.write(state_head(self, "ray") | {"members": members})


def _replacing(actor: Any) -> Replace:
    async def replace() -> None:
        try:
            await asyncio.to_thread(ray.get, actor.replace.remote())
        except RayError as error:
            raise failure_of(error) from error

    return replace


def _silent(name: str) -> dict[str, Any]:
    return {
        "name": name, "kind": name.partition("-")[0], "address": "", "pid": None, "actor_pid": None,
        "phase": "starting", "detail": "its actor does not answer", "restarts": 0, "replacements": 0, "log": "",
    }  # fmt: skip


def find_actor(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def stop_actors(actors: dict[str, Any], limit_s: float = STOP_LIMIT_S) -> None:
    """The router first, drafts last; actors that do not answer are killed, which ends their processes."""
    for kind in ("router", "target", "draft"):
        chosen = [actor for name, actor in actors.items() if name.startswith(kind)]
        stopping = [actor.stop.remote() for actor in chosen]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=limit_s)
        for actor in chosen:
            ray.kill(actor)


# The program that runs a cluster on Ray until it is to end, and what ends one whose program is gone.
#
# The actors go on when this program dies, as long as their Ray cluster does: one that was started for them ends
# with it.

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
