"""A cluster on Ray: a placement group, one named actor per process, and what starts, orders and stops them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from adaserve_jax.cluster.asking import NoAnswer
from adaserve_jax.cluster.orchestrator import state_head
from adaserve_jax.cluster.plan import ClusterPlan, free_ports
from adaserve_jax.cluster.ray_members import (
    NAMESPACE,
    DraftActor,
    RouterActor,
    Site,
    TargetActor,
    ask_all,
    failure_of,
)
from adaserve_jax.cluster.rolling import Replace, RouterOrders, restart_members
from adaserve_jax.cluster.run_folder import RunFolder
from adaserve_jax.errors import AdaServeError, ConfigError

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
