"""Which replica a request goes to, decided at its arrival from what a router in front of engines can know.

That is: every request it assigned, with its prompt's length and targets; the tokens streamed back so far; and the
lengths of outputs that have ended. Never the length of an output to come, and never what a step in flight will bring.
The simulator asks these routers, and so does the cluster's router, whose targets are the replicas then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from adaserve_jax.bench.fleet import Assigned
from adaserve_jax.bench.least_loaded import LeastLoaded
from adaserve_jax.bench.slo_aware import SloAware
from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import Limits

__all__ = ["ROUTERS", "Assigned", "LeastLoaded", "RoundRobin", "Router", "SloAware", "find_router"]


class Router(Protocol):
    """Chooses replicas, told of every end."""

    def choose(self, request: Assigned, replicas: Sequence[list[Assigned]], now: float) -> int:
        """Index of the replica that gets `request`. replicas: what each has that has not ended; where it is a `Fleet`,
        routers read its columns instead. now: seconds."""
        ...

    def ended(self, request: Assigned) -> None:
        """A request ended; `received` is then its whole output."""
        ...


class RoundRobin:
    """One after the other, whatever they are."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Assigned, replicas: Sequence[list[Assigned]], now: float) -> int:
        chosen, self._next = self._next % len(replicas), self._next + 1
        return chosen

    def ended(self, request: Assigned) -> None:
        return None


ROUTERS: dict[str, Callable[[CostTable, Limits], Router]] = {
    "round-robin": lambda costs, limits: RoundRobin(),
    "least-loaded": LeastLoaded,
    "slo-aware": SloAware,
}


SAMPLED = "slo-aware:"
"""Beginning of a name that ends with how many replicas, drawn anew for each request, are looked at."""


def find_router(name: str) -> Callable[[CostTable, Limits], Router]:
    """What makes the router called `name`: one of ROUTERS, or `slo-aware:<d>`. Raises ConfigError for another."""
    if name.startswith(SAMPLED):
        number = name.removeprefix(SAMPLED)
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise ConfigError(f"router {SAMPLED}<d>: d is how many replicas are looked at, at least 1, got {number!r}")
        return partial(SloAware, sampled=int(number))
    if name not in ROUTERS:
        raise ConfigError(f"unknown router {name!r}; known routers are {', '.join(ROUTERS)} and {SAMPLED}<d>")
    return ROUTERS[name]
