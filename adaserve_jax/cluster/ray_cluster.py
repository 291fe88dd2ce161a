"""Ray orchestrator: a placement group with one named actor per process.

Each actor supervises its process as the local orchestrator does. Ray restarts an actor when its worker process dies, on
the same machine or another; the actor's process has then ended with it. Members listen at the address of the machine
where their actor runs, and keep their ports where these are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from adaserve_jax.cluster.orchestrator import Cluster, ReplaceMember, announce_end, stop_on_signals
from adaserve_jax.cluster.plan import (
    ClusterPlan,
    ReservedPort,
    bracketed,
    free_ports,
    place_draft,
    place_router,
    place_target,
)
from adaserve_jax.cluster.router import url_of
from adaserve_jax.cluster.router_client import NoAnswer, RouterClient
from adaserve_jax.cluster.run_folder import ClusterFolder, OrderServer
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.cluster.supervisor import Member, Supervisor
from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.results.whole_file import PRIVATE, write_whole
from adaserve_jax.server.serve import listen

NAMESPACE = "adaserve"
GROUP = "adaserve"
"""Name of the placement group."""
PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
PLACEMENT_TIMEOUT_S = 60.0
POLL_S = 1.0
REFRESH_S = 1.0
CALL_TIMEOUT_S = 10.0
PORT_GRACE_S = 15.0
STOP_TIMEOUT_S = 120.0
"""Time for the members of one kind to stop, if their own limits are unknown."""
START_ABORT_S = 20.0
"""Time for an aborted start to return."""


@dataclass(frozen=True)
class ActorContext:
    """Settings that every actor of a cluster gets.

    own_address: listen at the machine's address instead of the plan's. ports: tried first. token: the router's.
    """

    plan: ClusterPlan
    own_address: bool
    ports: tuple[int, ...]
    token: str

    @property
    def host(self) -> str:
        """Address where members on this machine listen."""
        return ray.util.get_node_ip_address() if self.own_address else self.plan.member_host

    def reserve(self, port: int) -> ReservedPort:
        """Reserve a port, or any free one if it is taken here."""
        try:
            return ReservedPort(self.host, port)
        except OSError:
            return ReservedPort(self.host)


def log_folder() -> Path:
    """Return this machine's log folder for this user only. Raises ConfigError if it is another user's."""
    path = Path(tempfile.gettempdir()) / f"adaserve-ray-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.getuid():
        raise ConfigError(f"{path} is another user's, and logs cannot be written there")
    return path


class MemberActor:
    """Actor that supervises one process, on an event loop in a thread that lives as long as the actor."""

    def __init__(self, member: Member):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="supervisor", daemon=True).start()
        self._supervisor = Supervisor(member)
        self._loop.call_soon_threadsafe(self._supervisor.start)

    def ready(self) -> None:
        """Wait until the process is ready. Raises MemberFailed."""
        self._wait(self._supervisor.ready())

    def address(self) -> str:
        return self._supervisor.member.address

    def replace(self) -> None:
        self._wait(self._supervisor.replace())

    def stop(self) -> None:
        self._wait(self._supervisor.stop())

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self._supervisor.kill)

    def describe(self) -> dict[str, Any]:
        """Return the member's entry in state.json. pid: of the process, actor_pid: of this actor."""
        return self._supervisor.describe() | {"actor_pid": os.getpid()}

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


class DraftActor(MemberActor):
    """Actor of one draft service."""

    def __init__(self, context: ActorContext, number: int):
        self._ports = [context.reserve(port) for port in context.ports]
        port, http_port = (port.number for port in self._ports)
        super().__init__(place_draft(context.plan, number, context.host, port, http_port, log_folder()))


class TargetActor(MemberActor):
    """Actor of one server. drafts: initial addresses by name of the draft actors whose services it may use."""

    def __init__(self, context: ActorContext, number: int, drafts: dict[str, str]):
        self._port = context.reserve(*context.ports)
        self._context, self._number, self._drafts = context, number, drafts
        super().__init__(self._place())

    def replace(self) -> None:
        """Replace the process; the new one gets the current addresses of the drafts."""
        self._supervisor.member = self._place()
        super().replace()

    def _place(self) -> Member:
        self._drafts |= call_actors(list(self._drafts), "address")  # one that does not answer has not moved
        addresses, context = self._drafts.values(), self._context
        return place_target(context.plan, self._number, context.host, self._port.number, addresses, log_folder())


class RouterActor(MemberActor):
    """Actor of the router. targets: names of the target actors; the router follows them when they move."""

    def __init__(self, context: ActorContext, targets: Sequence[str]):
        self._token_file = _write_token(context)
        settings = replace(context.plan.router, targets=(), token_file=str(self._token_file))
        self._listener = _listen(settings)
        url = url_of(self._listener, settings.server)
        if context.own_address and settings.host in ("0.0.0.0", "::"):
            url = url.replace("127.0.0.1", context.host).replace("[::1]", bracketed(context.host))
        super().__init__(place_router(context.plan, settings, self._listener.fileno(), url, log_folder()))
        self._targets = targets
        self._router_client = RouterClient(url, context.token, settings.tls_cert)
        asyncio.run_coroutine_threadsafe(self._update_targets(), self._loop)

    def stop(self) -> None:
        super().stop()
        self._listener.close()
        self._token_file.unlink(missing_ok=True)

    async def _update_targets(self) -> None:
        """Send the router its targets' addresses periodically: targets may move, and the router may be restarted."""
        by_name: dict[str, str] = {}
        while True:
            with contextlib.suppress(NoAnswer, RayError):  # tried again the next time
                by_name |= await asyncio.to_thread(call_actors, self._targets, "address")
                urls = [by_name[name] for name in self._targets if name in by_name]
                known = [each["url"] for each in (await self._router_client.status())["targets"]]
                if urls and urls != known:
                    await self._router_client.set_targets(urls)
            await asyncio.sleep(REFRESH_S)


def _listen(settings: RouterSettings) -> socket.socket:
    """Bind the router's port, waiting while a router that is draining still holds it. Raises ConfigError."""
    end = time.monotonic() + settings.shutdown_timeout + PORT_GRACE_S
    while True:
        try:
            return listen(settings.server)
        except ConfigError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _write_token(context: ActorContext) -> Path:
    """Write the token to a file for this user only, at the same path whenever the actor is restarted."""
    path = log_folder() / f"token-{context.plan.router.port}"
    write_whole(path, context.token, mode=PRIVATE)
    return path


def call_actors(names: Sequence[str], method: str) -> dict[str, Any]:
    """Call a method of all actors at once; return the answers by name, without actors that cannot be reached now."""
    calls: dict[str, Any] = {}
    for name in names:
        with contextlib.suppress(RayError):
            if (actor := find_actor(name)) is not None:
                calls[name] = getattr(actor, method).remote()
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=CALL_TIMEOUT_S)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        with contextlib.suppress(RayError):
            found[name] = ray.get(call, timeout=0)
    return found


def _error_from(error: Exception) -> AdaServeError:
    """Convert an error that an actor raised to the one to raise here."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, AdaServeError) else AdaServeError(str(error).strip().splitlines()[-1])


class RayCluster(Cluster):
    """Actors of one cluster. Raises ConfigError for an unknown placement."""

    orchestrator = "ray"

    def __init__(self, plan: ClusterPlan, folder: ClusterFolder, *, own_address: bool, placement: str):
        if placement not in PLACEMENTS:
            raise ConfigError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
        port = plan.router.port or free_ports(1, plan.router.host)[0]
        plan = replace(plan, router=replace(plan.router, port=port))  # fixed, for restarts of the router's actor
        super().__init__(plan, folder)
        self.stopping = threading.Event()
        """Setting it aborts `start`."""
        self._own_address = own_address
        self._placement = placement
        self._actors: dict[str, Any] = {}
        self._group: Any = None

    @property
    def logs(self) -> str:
        return f"{log_folder()}, of each machine its own"

    def start(self) -> None:
        """Start all actors and block until every target serves. Raises AdaServeError; then `stop` is still needed."""
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
        while not self._group.wait(POLL_S):
            self._check_not_stopping()
            if time.monotonic() < began + PLACEMENT_TIMEOUT_S:
                continue
            raise AdaServeError(
                f"Ray has no room for {len(drafts) + len(targets)} members of one CPU each by {self._placement}; "
                "give it more, or another --placement"
            )
        ports = iter(free_ports(plan.targets + 2 * plan.drafts, plan.member_host))
        for number, name in enumerate(drafts):
            self._create(name, DraftActor, (next(ports), next(ports)), number, bundle=number)
        addresses = dict(zip(drafts, self._call(drafts, "address"), strict=True))
        self._create("router", RouterActor, (), targets)
        (self.url,) = self._call(["router"], "address")
        for number, name in enumerate(targets):
            self._create(name, TargetActor, (next(ports),), number, addresses, bundle=len(drafts) + number)
            if number == 0:
                self._call([name], "ready")
        self._call([*drafts, "router", *targets], "ready")
        while self._targets_up() < plan.targets:
            self._check_not_stopping()
            time.sleep(0.1)
        self.ready_s = time.monotonic() - began
        self.phase = "ready"

    def _targets_up(self) -> int:
        """Return the number of targets that the router uses."""
        try:
            return sum(each["state"] == "up" for each in asyncio.run(self.router_client.status())["targets"])
        except NoAnswer:
            return 0

    def _check_not_stopping(self) -> None:
        if self.stopping.is_set():
            raise AdaServeError("the cluster was stopped while it started")

    def _create(
        self, name: str, kind: Callable[..., Any], ports: tuple[int, ...], *arguments: Any, bundle: int | None = None
    ) -> None:
        """Create an actor in its bundle of the placement group; None: on this machine, where that is possible."""
        self._check_not_stopping()
        if bundle is None:
            strategy: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        else:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor: Any = ray.remote(kind).options(
            name=name, namespace=NAMESPACE, lifetime="detached", scheduling_strategy=strategy,
            num_cpus=int(bundle is not None), max_restarts=-1, max_concurrency=8,
        )  # fmt: skip
        context = ActorContext(self.plan, self._own_address, ports, self.folder.token)
        self._actors[name] = actor.remote(context, *arguments)

    def _call(self, names: list[str], method: str) -> list[str]:
        """Call a method of these actors and wait for all answers. Raises AdaServeError."""
        calls = [getattr(self._actors[name], method).remote() for name in names]
        pending = calls
        try:
            while pending:
                self._check_not_stopping()
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
                ray.get(done)
            return ray.get(calls)
        except RayError as error:
            raise _error_from(error) from error

    async def replaceable(self, kind: Literal["draft", "target"]) -> Mapping[str, ReplaceMember]:
        names = [name for name in self._actors if name.startswith(kind)]
        shown = await asyncio.to_thread(self._call, names, "address") if kind == "target" else names
        return {each: _replacement(self._actors[name]) for each, name in zip(shown, names, strict=True)}

    def stop(self) -> None:
        """Drain the router, stop targets, then drafts, then the actors. Blocks."""
        self.phase = "stopping"
        own_s = max(self.plan.target_grace_s, self.plan.router_grace_s, self.plan.timing.termination_grace_s)
        stop_actors(self._actors, own_s + self.plan.timing.grace_margin_s)
        if self._group is not None:
            remove_placement_group(self._group)

    def kill(self) -> None:
        """Kill all processes at once; `stop` is still needed. Blocks briefly."""
        calls = [actor.kill.remote() for actor in list(self._actors.values())]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=POLL_S)

    def write(self) -> None:
        names = list(self._actors)
        described = call_actors(names, "describe")
        self.write_state(members=[described.get(name) or _unreachable_member(name) for name in names])


def _replacement(actor: Any) -> ReplaceMember:
    async def replace() -> None:
        try:
            await asyncio.to_thread(ray.get, actor.replace.remote())
        except RayError as error:
            raise _error_from(error) from error

    return replace


def _unreachable_member(name: str) -> dict[str, Any]:
    return {
        "name": name, "kind": name.partition("-")[0], "address": "", "pid": None, "actor_pid": None,
        "phase": "starting", "detail": "its actor does not answer", "restarts": 0, "replacements": 0, "log": "",
    }  # fmt: skip


def find_actor(name: str) -> Any:
    """Return the actor of that name, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def stop_actors(actors: dict[str, Any], limit_s: float = STOP_TIMEOUT_S) -> None:
    """Stop the router, then targets, then drafts. Actors that do not answer are killed, which ends their processes."""
    for kind in ("router", "target", "draft"):
        chosen = [actor for name, actor in actors.items() if name.startswith(kind)]
        calls = [actor.stop.remote() for actor in chosen]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=limit_s)
        for actor in chosen:
            ray.kill(actor)


def connect(address: str | None, members: int) -> None:
    """Connect to a running Ray cluster, or start one here with one CPU per member. Raises ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    if address is None:
        options |= {"num_cpus": members, "include_dashboard": False}
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"address must be that of a running Ray cluster, got {address!r}: {error}") from error


def run_up_on_ray(plan: ClusterPlan, folder: ClusterFolder, address: str | None, placement: str) -> None:
    """Run a cluster until a signal or the order `down` ends it. Raises AdaServeError.

    If this program dies, the actors go on as long as their Ray cluster does; one that was started for them ends too.
    """
    folder.open()
    try:
        connect(address, plan.targets + plan.drafts)
        asyncio.run(_run(RayCluster(plan, folder, own_address=address is not None, placement=placement)))
    finally:
        folder.close()
        ray.shutdown()


async def _run(cluster: RayCluster) -> None:
    loop = asyncio.get_running_loop()
    stop = stop_on_signals(lambda: loop.run_in_executor(None, cluster.kill))
    cluster.announce_start()
    starting = asyncio.ensure_future(asyncio.to_thread(cluster.start))
    stopping = asyncio.ensure_future(stop.wait())
    writing = asyncio.ensure_future(_write_until_started(cluster, starting))
    try:
        async with OrderServer(cluster.folder.socket, cluster.restart, stop):
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                cluster.announce()
            while not stopping.done():
                await asyncio.to_thread(cluster.write)
                await asyncio.wait({stopping}, timeout=POLL_S)
    finally:
        stopping.cancel()
        writing.cancel()
        announce_end()
        cluster.stopping.set()
        await asyncio.wait({starting}, timeout=START_ABORT_S)
        await asyncio.to_thread(cluster.stop)
        await asyncio.gather(starting, writing, return_exceptions=True)


async def _write_until_started(cluster: RayCluster, starting: asyncio.Future[None]) -> None:
    """Write the state while the cluster starts; apart from `_run`, as actors that are being placed answer late."""
    while not starting.done():
        await asyncio.to_thread(cluster.write)
        await asyncio.wait({starting}, timeout=POLL_S)


def down_on_ray(address: str) -> int:
    """End a cluster whose `up` program is gone; return the number of its actors. Raises ConfigError."""
    connect(address, 0)
    try:
        listed: Any = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in listed if each["namespace"] == NAMESPACE]
        stop_actors({name: actor for name in names if (actor := find_actor(name)) is not None})
        with contextlib.suppress(ValueError):  # no such group
            remove_placement_group(get_placement_group(GROUP))
        return len(names)
    finally:
        ray.shutdown()
