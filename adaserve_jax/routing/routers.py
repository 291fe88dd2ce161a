"""Routing policies: choose the replica of a request at its arrival.

A policy knows what a router in front of engines can know: every request it assigned, with prompt length and SLO
targets, the tokens streamed back so far, and the lengths of outputs that have ended. It knows neither the length of an
output to come nor the result of a step in flight. The simulator and the cluster's router use the same policies.
R: replicas; K: places of a replica; C: classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.routing.fleet import FREE, Assigned, Fleet
from adaserve_jax.scheduler.acceptance import PRIOR_FIRST
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.queue import PATIENCE_S
from adaserve_jax.scheduler.slo import HORIZON_TOKENS, deadline_rate, need_rate
from adaserve_jax.types import Limits

PRIOR_OUTPUT_TOKENS = 256.0
"""Prior output length of a class; it counts as one output that ended."""
EDGES_TRIED = 16
"""Token edges, of all that a replica has, for which `SloAware` computes a step."""
SAMPLED_PREFIX = "slo-aware:"
"""Prefix of the policy `slo-aware:<d>`, which looks at d replicas drawn anew for each request."""


Replicas = Fleet | Sequence[list[Assigned]]
"""Open requests of each replica. Of a `Fleet`, policies read the columns."""


class RoutingPolicy(Protocol):
    """Chooses replicas and is told of every end."""

    def choose(self, request: Assigned, replicas: Replicas, now: float) -> int:
        """Return the index of the replica that gets `request`. now: seconds."""
        ...

    def ended(self, request: Assigned) -> None:
        """Note the end of a request; its `received` is then its whole output."""


class RoundRobin(RoutingPolicy):
    """Policy that takes the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Assigned, replicas: Replicas, now: float) -> int:
        chosen, self._next = self._next % len(replicas), self._next + 1
        return chosen


class LeastLoaded(RoutingPolicy):
    """Policy that takes the replica with the fewest seconds of outstanding work; the first of equals.

    A prompt token costs what one more packed token adds to a verification (the slope of the cost table). An output
    token costs the same plus its share of a step's fixed time with all rows in use. The prompt of a request is
    outstanding until its first token; of its output, the rest of the class's mean length is, at least one token.

    Token counts per replica are kept, so that an arrival costs time only for the replicas that changed since the last
    one, and a few operations on [R, C].
    """

    def __init__(self, costs: CostTable, limits: Limits):
        seconds = costs.verify_s(limits.max_requests)
        edges = limits.token_edges
        self.prompt_token_s = float(seconds[-1] - seconds[0]) / max(edges[-1] - edges[0], 1)
        self.output_token_s = self.prompt_token_s + float(seconds[0]) / limits.max_requests
        self._lengths: dict[str, tuple[float, int]] = {}
        self._fleet: Fleet | None = None
        self._short = np.zeros(0)
        """f64[C]: received tokens from which on a request is expected to have one token left."""
        self._prompts = self._others = np.zeros(0, np.int64)
        self._counts = np.zeros((0, 0), np.int64)

    def choose(self, request: Assigned, replicas: Replicas, now: float) -> int:
        return int(np.argmin(self.loads_s(Fleet.of(replicas))))

    def ended(self, request: Assigned) -> None:
        total, count = self._lengths.get(request.slo_class, (PRIOR_OUTPUT_TOKENS, 1))
        self._lengths[request.slo_class] = (total + request.received, count + 1)

    def expected_output(self, slo_class: str) -> float:
        """Return the mean length, in tokens, of the class's outputs that ended."""
        total, count = self._lengths.get(slo_class, (PRIOR_OUTPUT_TOKENS, 1))
        return total / count

    def loads_s(self, fleet: Fleet) -> np.ndarray:
        """Return f64[R]: expected seconds of a full replica that its requests still take."""
        means = np.array([self.expected_output(name) for name in fleet.kinds])
        short = np.ceil(means - 1)
        if fleet is not self._fleet or not np.array_equal(short, self._short):
            self._fleet, self._short = fleet, short
            self._prompts, self._others = (np.zeros(len(fleet), np.int64) for _ in range(2))
            self._counts = np.zeros((len(fleet), len(means)), np.int64)
            self._count(fleet, np.arange(len(fleet)))
        elif fleet.changed:
            self._count(fleet, np.fromiter(fleet.changed, np.int64, len(fleet.changed)))
        fleet.changed.clear()
        return self._prompts * self.prompt_token_s + (self._counts @ means + self._others) * self.output_token_s

    def _count(self, fleet: Fleet, rows: np.ndarray) -> None:
        """Count outstanding tokens of the replicas `rows`.

        Counted are prompt tokens; by class, requests with more than one token to come, each of which has its class's
        mean less what it received left; and the sum of all terms that do not depend on a mean.
        """
        if not len(self._short):
            return
        kind, received = fleet.kind[rows], fleet.received[rows]
        taken = kind != FREE
        more = taken & (received < self._short[kind])
        self._prompts[rows] = (fleet.prompt[rows] * (taken & (received == 0))).sum(axis=1)
        self._others[rows] = taken.sum(axis=1) - more.sum(axis=1) - (received * more).sum(axis=1)
        self._counts[rows] = (more[:, :, None] & (kind[:, :, None] == np.arange(len(self._short)))).sum(axis=1)


class SloAware(RoutingPolicy):
    """Policy that takes the replica where a request puts the fewest requests, itself included, off pace.

    Of equals it takes the one left least full, then the one with the fewest requests. sampled: number of replicas that
    it looks at, drawn anew for each request (seeded, so that simulations repeat); 0: all.

    The time of a step (an edge's packed tokens, a depth) follows from the cost table. In that time a request on pace
    needs a number of tokens (`need_rate`, and PRIOR_OUTPUT_TOKENS by its deadline), hence a number of nodes beside the
    root of a chain whose every token is accepted with probability PRIOR_FIRST; a prompt not yet computed needs its
    share until its TTFT target. The cheapest requests go first. The step that keeps the most on pace represents the
    replica.

    A chain of m nodes is enough for a rate of at most its expected tokens over the step's time: a fixed table of rates
    by (D, E, M). So a replica only has to say how many requests are below each rate, and one more request adds one to
    the counts above its own rate.

    N: replicas looked at; K: places of a replica; E: token edges tried; D: depths of draft, 0 to max_depth; M: nodes of
    a chain beside its root, 0 to max_depth.
    """

    def __init__(self, costs: CostTable, limits: Limits, sampled: int = 0):
        edges = np.asarray(limits.token_edges)
        picks = np.unique(np.linspace(0, len(edges) - 1, EDGES_TRIED).round().astype(int))
        depth, nodes = np.arange(limits.max_depth + 1)[:, None, None], np.arange(limits.max_depth + 1)
        level_s = float(costs.level_s(limits.max_requests)[0]) if limits.max_depth else 0.0
        self._limits, self._sampled, self._drawing = limits, sampled, random.Random(0)
        self._edges = edges[picks].astype(np.float64)  # [E]
        self._step_s = costs.verify_s(limits.max_requests)[picks] + depth[:, :, 0] * level_s  # [D, E]
        brings = np.where(nodes < depth, _tokens(nodes + 1e-9), _tokens(depth) + 1e-9)  # [D, 1, M]
        rates = brings / self._step_s[:, :, None]  # [D, E, M]; nodes beyond the depth add nothing
        self._rates, self._at = np.unique(rates, return_inverse=True)
        self._at = self._at.reshape(rates.shape)
        self._nodes = nodes.astype(np.float64)

    def choose(self, request: Assigned, replicas: Replicas, now: float) -> int:
        asked = self._asked(len(replicas))
        if not isinstance(replicas, Fleet):  # make columns only of the replicas looked at
            replicas, rows = Fleet.of([replicas[index] for index in asked]), np.arange(len(asked))
        else:
            rows = np.array(asked)
        before, _ = self.off_pace(replicas, rows, now)
        after, fullness = self.off_pace(replicas, rows, now, request)
        return asked[int(np.lexsort((replicas.open_counts[rows], fullness, after - before))[0])]

    def off_pace(
        self, fleet: Fleet, rows: np.ndarray, now: float, request: Assigned | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return i64[N], the requests (with `request`, if given) that each replica's best step leaves off pace, and
        f64[N], how full those on pace make that step (packed tokens over the edge)."""
        below, prefill_rate, count = self._below(fleet, rows, now)
        if request is not None:
            alone = Fleet.of([[request]])
            one, one_rate, _ = self._below(alone, np.zeros(1, np.int64), now)
            below, prefill_rate, count = below + one, prefill_rate + one_rate, count + 1
        return self._best(below, prefill_rate, count)

    def _asked(self, replicas: int) -> list[int]:
        if not 0 < self._sampled < replicas:
            return list(range(replicas))
        return sorted(self._drawing.sample(range(replicas), self._sampled))

    def _below(self, fleet: Fleet, rows: np.ndarray, now: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return i64[N, rates], the requests whose rate is at most each; f64[N], the prompt tokens per second that
        bring every first token by its target, or within PATIENCE_S; and i64[N], the requests."""
        taken = fleet.kind[rows] != FREE
        received, first_s = fleet.received[rows], fleet.first_s[rows]
        decode_s = np.where(np.isfinite(first_s), now - first_s, 0.0)
        rates = need_rate(decode_s, fleet.tpot_s[rows], np.maximum(received - 1, 0), HORIZON_TOKENS)
        tokens_left = np.maximum(PRIOR_OUTPUT_TOKENS - received, 1)
        rates = np.maximum(rates, deadline_rate(now, fleet.deadline_s[rows], tokens_left))
        width = len(self._rates) + 1
        place = np.searchsorted(self._rates, rates) + np.arange(len(rows))[:, None] * width
        counts = np.bincount(place[taken], minlength=len(rows) * width).reshape(len(rows), width)
        ttft_s = fleet.ttft_s[rows]
        left_s = fleet.arrival_s[rows] + np.where(np.isnan(ttft_s), PATIENCE_S, ttft_s) - now
        share = fleet.prompt[rows] / np.where(left_s > 0, left_s, PATIENCE_S)
        waiting = taken & (received == 0)
        return np.cumsum(counts, axis=1)[:, :-1], np.where(waiting, share, 0.0).sum(axis=1), fleet.open_counts[rows]

    def _best(self, below: np.ndarray, prefill_rate: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.minimum(count, self._limits.max_requests)[:, None, None]  # [N, 1, 1]
        packed = rows + prefill_rate[:, None, None] * self._step_s  # [N, D, E]
        room = np.floor(np.minimum(self._edges - packed, self._limits.max_tree_tokens - rows))
        at_most = np.minimum(below[:, self._at], rows[:, :, :, None])  # [N, D, E, M]
        exactly = np.diff(at_most, axis=3, prepend=0)
        nodes = exactly * self._nodes
        left = room[..., None] - np.cumsum(nodes, axis=3) + nodes  # for chains of m nodes, after the cheaper ones
        fit = np.clip(np.floor(left / np.maximum(self._nodes, 0.5)), 0, exactly)
        fit[..., 0] = np.where(room >= 0, exactly[..., 0], 0)
        on_pace = fit.sum(axis=3)  # [N, D, E]
        best = on_pace.max(axis=(1, 2))
        full = (packed + (fit * self._nodes).sum(axis=3)) / self._edges
        fullness = np.where(on_pace == best[:, None, None], full, np.inf).min(axis=(1, 2))
        return count - best.astype(np.int64), np.where(best > 0, fullness, np.where(count > 0, 1.0, 0.0))


def _tokens(nodes: np.ndarray) -> np.ndarray:
    """Return the expected tokens of a chain of so many nodes beside its root."""
    return (1 - PRIOR_FIRST ** (nodes + 1)) / (1 - PRIOR_FIRST)


ROUTERS: dict[str, Callable[[CostTable, Limits], RoutingPolicy]] = {
    "round-robin": lambda costs, limits: RoundRobin(),
    "least-loaded": LeastLoaded,
    "slo-aware": SloAware,
}


def find_router(name: str) -> Callable[[CostTable, Limits], RoutingPolicy]:
    """Return the factory of a policy: one of ROUTERS, or `slo-aware:<d>`. Raises ConfigError for another name."""
    if name.startswith(SAMPLED_PREFIX):
        number = name.removeprefix(SAMPLED_PREFIX)
        if not (number.isascii() and number.isdecimal() and len(number) <= 9) or int(number) < 1:
            raise ConfigError(
                f"router {SAMPLED_PREFIX}<d>: d is how many replicas are looked at, at least 1, got {number!r}"
            )
        return partial(SloAware, sampled=int(number))
    if name not in ROUTERS:
        raise ConfigError(f"unknown router {name!r}; known routers are {', '.join(ROUTERS)} and {SAMPLED_PREFIX}<d>")
    return ROUTERS[name]
