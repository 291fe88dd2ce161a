"""The router that knows how many requests each replica's steps can keep on pace.

N: replicas that are asked; K: places of a replica; E: token edges that are tried; D: depths of draft, 0 to max_depth;
M: nodes of a chain beside its root, 0 to max_depth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from adaserve_jax.bench.fleet import FREE, Assigned, Fleet
from adaserve_jax.scheduler.acceptance import PRIOR_FIRST
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.scheduler.queue import PATIENCE_S
from adaserve_jax.scheduler.slo import HORIZON_TOKENS, need_rate
from adaserve_jax.types import Limits

EDGES_TRIED = 16
"""Token edges, of all that a replica has, for which the router works out a step."""


class SloAware:
    """The replica where the request puts the fewest others, or itself, off pace; of equals the one left least full,
    then the one with the fewest requests. sampled: it looks at so many replicas, drawn anew for each request (seeded,
    so that a simulation repeated is the same); 0: at all.

    For each step (an edge's packed tokens, a depth) its time follows from the cost table. In that time a request on
    pace needs so many tokens (`need_rate`), hence so many nodes of a chain whose every token is accepted with chance
    PRIOR_FIRST, beside its root; a prompt not yet computed needs its share until its TTFT target. The cheapest go
    first. The step that keeps the most on pace stands for the replica.

    A chain of m nodes is enough for a rate that is at most what it brings over the step's time: a fixed table of rates,
    by (D, E, M). So of a replica only this is asked, how many requests are below each, and one more request is one more
    below those above its own rate.
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
        rates = brings / self._step_s[:, :, None]  # [D, E, M]; beyond the depth as of the depth
        self._rates, self._at = np.unique(rates, return_inverse=True)
        self._at = self._at.reshape(rates.shape)
        self._nodes = nodes.astype(np.float64)

    def choose(self, request: Assigned, replicas: Sequence[list[Assigned]], now: float) -> int:
        asked = self._asked(len(replicas))
        if not isinstance(replicas, Fleet):  # only what is looked at becomes columns
            replicas, rows = Fleet.of([replicas[index] for index in asked]), np.arange(len(asked))
        else:
            rows = np.array(asked)
        before, _ = self.off_pace(replicas, rows, now)
        after, fullness = self.off_pace(replicas, rows, now, request)
        return asked[int(np.lexsort((replicas.open_counts[rows], fullness, after - before))[0])]

    def ended(self, request: Assigned) -> None:
        return None

    def off_pace(
        self, fleet: Fleet, rows: np.ndarray, now: float, request: Assigned | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """i64[N], how many requests of each replica (and `request`, where it is given) the best step leaves off pace,
        and f64[N], how full those on pace make it (packed tokens over the edge)."""
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
        """i64[N, rates], requests whose rate is at most each; f64[N], prompt tokens per second that bring every first
        token by its target, or within PATIENCE_S; i64[N], requests."""
        taken = fleet.kind[rows] != FREE
        received, first_s = fleet.received[rows], fleet.first_s[rows]
        decode_s = np.where(np.isfinite(first_s), now - first_s, 0.0)
        rates = need_rate(decode_s, fleet.tpot_s[rows], np.maximum(received - 1, 0), HORIZON_TOKENS)
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
        left = room[..., None] - np.cumsum(nodes, axis=3) + nodes  # for those of m nodes, after the cheaper ones
        fit = np.clip(np.floor(left / np.maximum(self._nodes, 0.5)), 0, exactly)
        fit[..., 0] = np.where(room >= 0, exactly[..., 0], 0)
        on_pace = fit.sum(axis=3)  # [N, D, E]
        best = on_pace.max(axis=(1, 2))
        full = (packed + (fit * self._nodes).sum(axis=3)) / self._edges
        fullness = np.where(on_pace == best[:, None, None], full, np.inf).min(axis=(1, 2))
        return count - best.astype(np.int64), np.where(best > 0, fullness, np.where(count > 0, 1.0, 0.0))


def _tokens(nodes: np.ndarray) -> np.ndarray:
    """Expected of a chain of so many nodes, root counted."""
    return (1 - PRIOR_FIRST ** (nodes + 1)) / (1 - PRIOR_FIRST)
