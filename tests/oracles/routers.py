"""Routers that look at every request of every replica at each arrival, one after the other.

K: the replica's requests; E: token edges that are tried; D: depths of draft, 0 to max_depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaserve_jax.routing.fleet import Assigned
from adaserve_jax.scheduler.acceptance import PRIOR_FIRST
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.queue import PATIENCE_S
from adaserve_jax.scheduler.slo import HORIZON_TOKENS, need_rate
from adaserve_jax.types import Limits

PRIOR_OUTPUT_TOKENS, EDGES_TRIED = 256.0, 16


class LeastLoaded:
    """The replica with the fewest seconds of work outstanding; of equals the first.

    A prompt token costs what one more packed token adds to a verification (the slope of the cost table), an output
    token the same and its share of a step's fixed time with all rows in use. Of a request, the prompt is outstanding
    until its first token, and of the output what its class's mean length leaves, at least one token.
    """

    def __init__(self, costs: CostTable, limits: Limits):
        seconds = costs.verify_s(limits.max_requests)
        edges = limits.token_edges
        self.prompt_token_s = float(seconds[-1] - seconds[0]) / max(edges[-1] - edges[0], 1)
        self.output_token_s = self.prompt_token_s + float(seconds[0]) / limits.max_requests
        self._lengths: dict[str, tuple[float, int]] = {}

    def choose(self, request: Assigned, replicas: Sequence[list[Assigned]], now: float) -> int:
        loads = [sum(map(self.work_s, assigned)) for assigned in replicas]
        return min(range(len(loads)), key=loads.__getitem__)

    def ended(self, request: Assigned) -> None:
        total, count = self._lengths.get(request.slo_class, (PRIOR_OUTPUT_TOKENS, 1))
        self._lengths[request.slo_class] = (total + request.received, count + 1)

    def expected_output(self, slo_class: str) -> float:
        """Tokens, mean of the class's outputs that ended."""
        total, count = self._lengths.get(slo_class, (PRIOR_OUTPUT_TOKENS, 1))
        return total / count

    def work_s(self, request: Assigned) -> float:
        """Seconds of a full replica that `request` still takes, as expected."""
        output = max(self.expected_output(request.slo_class) - request.received, 1.0)
        prompt = 0 if request.received else request.prompt_tokens
        return prompt * self.prompt_token_s + output * self.output_token_s


class SloAware:
    """The replica where the request puts the fewest others, or itself, off pace; of equals the one left least full.

    For each step (an edge's packed tokens, a depth) its time follows from the cost table. In that time a request on
    pace needs so many tokens (`need_rate`), hence so many nodes of a chain whose every token is accepted with chance
    PRIOR_FIRST, beside its root; a prompt not yet computed needs its share until its TTFT target. The cheapest go
    first. The step that keeps the most on pace stands for the replica.
    """

    def __init__(self, costs: CostTable, limits: Limits):
        edges = np.asarray(limits.token_edges)
        picks = np.unique(np.linspace(0, len(edges) - 1, EDGES_TRIED).round().astype(int))
        depth = np.arange(limits.max_depth + 1)
        level_s = float(costs.level_s(limits.max_requests)[0]) if limits.max_depth else 0.0
        self._limits = limits
        self._edges = edges[picks].astype(np.float64)  # [E]
        self._depth = depth[:, None].astype(np.float64)  # [D, 1]
        self._step_s = costs.verify_s(limits.max_requests)[picks] + self._depth * level_s  # [D, E]
        most = (1 - PRIOR_FIRST ** (self._depth + 1)) / (1 - PRIOR_FIRST)
        self._most_tokens = np.broadcast_to(most, self._step_s.shape)  # [D, E]

    def choose(self, request: Assigned, replicas: Sequence[list[Assigned]], now: float) -> int:
        def loss(index: int) -> tuple[int, float, int, int]:
            before, _ = self.off_pace(replicas[index], now)
            after, fullness = self.off_pace([*replicas[index], request], now)
            return after - before, fullness, len(replicas[index]), index

        return min(map(loss, range(len(replicas))))[3]

    def ended(self, request: Assigned) -> None:
        return None

    def off_pace(self, assigned: list[Assigned], now: float) -> tuple[int, float]:
        """How many of `assigned` the best step leaves off pace, and how full those on pace make it (packed tokens over
        the edge)."""
        if not assigned:
            return 0, 0.0
        count, limits = len(assigned), self._limits
        rows = min(count, limits.max_requests)
        nodes = np.sort(self._nodes(self._need_rates(assigned, now)), axis=2)[:, :, :rows]  # [D, E, K]
        packed = rows + self._prefill_rate(assigned, now) * self._step_s[:, :, None] + np.cumsum(nodes, axis=2)
        trees = rows + np.cumsum(nodes, axis=2)
        fits = (packed <= self._edges[:, None]) & (trees <= limits.max_tree_tokens)
        on_pace = fits.sum(axis=2)  # [D, E]; a prefix of the sorted
        best = int(on_pace.max())
        if best == 0:
            return count, 1.0
        last = np.take_along_axis(packed, np.maximum(on_pace - 1, 0)[:, :, None], axis=2)[:, :, 0]
        fullness = np.where(on_pace == best, last / self._edges, np.inf)
        return count - best, float(fullness.min())

    def _need_rates(self, assigned: list[Assigned], now: float) -> np.ndarray:
        """f64[K], tokens per second; 0 without a target, inf when it can no longer be reached."""
        decode_s = [0.0 if a.first_token_s is None else now - a.first_token_s for a in assigned]
        targets = [np.inf if a.tpot_slo_s is None else a.tpot_slo_s for a in assigned]
        decoded = [max(a.received - 1, 0) for a in assigned]
        return need_rate(np.array(decode_s), np.array(targets), np.array(decoded), HORIZON_TOKENS)

    def _nodes(self, rates: np.ndarray) -> np.ndarray:
        """f64[D, E, K], chain nodes beside the root that bring rate x step tokens; inf where no depth does."""
        need = rates * self._step_s[:, :, None]
        left = 1 - np.minimum(need, self._most_tokens[:, :, None]) * (1 - PRIOR_FIRST)
        chain = np.ceil(np.log(left) / np.log(PRIOR_FIRST) - 1 - 1e-9)
        return np.where(need <= self._most_tokens[:, :, None] + 1e-9, np.maximum(chain, 0.0), np.inf)

    def _prefill_rate(self, assigned: list[Assigned], now: float) -> float:
        """Prompt tokens per second that bring every first token by its target, or within PATIENCE_S."""
        rate = 0.0
        for waiting in assigned:
            if not waiting.received:
                target_s = PATIENCE_S if waiting.ttft_slo_s is None else waiting.ttft_slo_s
                left_s = waiting.arrival_s + target_s - now
                rate += waiting.prompt_tokens / (left_s if left_s > 0 else PATIENCE_S)
        return rate
