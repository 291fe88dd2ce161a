"""The joint choice of `adaserve`: depth, width, verify budget and prefill chunk of one step, from predicted cost.

Maximises requests on pace + a * emitted tokens per second + b * prefilled tokens per second. Token edges are searched
coarsely for every shape of the draft, then finely around the best. Before drafting only average f's are known; the
budget is chosen again, from the real ones, after it. Source: docs/equations.md, joint objective.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.alone import Alone
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load
from adaserve_jax.scheduler.controllers.shapes import OUT_OF_REACH, Reach, Shapes
from adaserve_jax.scheduler.controllers.weighing import Choices, Correction, Weighed
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.types import Limits

CHUNK_SHARES = np.array([1.0, 0.5, 0.25])
"""Shares of a step's room beside the roots that prefill may take."""
MIN_CHUNK = 16
"""Fewest prefill tokens of a step while prompts wait: prefill always progresses."""
CATCHUP_STEPS = 32
"""Steps over which the cost of a long catch-up counts when it is weighed against its gain."""
PACE_MARGIN = 0.6
"""Share of the budget that keeping everyone on pace may take when one more request asks to start."""
COARSE_EDGES = 12
"""Token edges that are tried with every shape; those between are tried with the best shapes only (`weighing.py`)."""
REACH_STEPS = 4
"""Steps for which what a shape is expected to bring is taken from the averages once computed."""


class JointController(Controller):
    """Chooses by predicted value; holds no state but the tables that it reads.

    prefill_tokens: of every step while prompts wait; None: chosen with the rest, so that it takes the slack that there
    is. admits_by_pace: whether `sustains` ever refuses.
    """

    def __init__(
        self, limits: Limits, cost: CostTable, acceptance: LearnedAcceptance, objective: Objective,
        *, prefill_tokens: int | None = None, admits_by_pace: bool = True,
    ):  # fmt: skip
        self._limits = limits
        self._cost = cost
        self._acceptance = acceptance
        self._objective = objective
        self._prefill_tokens = prefill_tokens
        self._admits_by_pace = admits_by_pace
        self._shapes = Shapes.of(limits, cost.draft_widths)
        self._edges = np.array(limits.token_edges)
        sizes = np.geomspace(1, self._edges[-1], 2 * COARSE_EDGES).round()
        self._coarse = np.unique(np.searchsorted(self._edges, sizes))
        self._reach: Reach | None = None
        self._reach_age = 0

    @property
    def shapes(self) -> Shapes:
        """Of the draft, that are weighed; shape 0 is none."""
        return self._shapes

    def decide(self, load: Load) -> Decision:
        return self.weigh(load).pick().decision

    def weigh(self, load: Load, correction: Correction | None = None, switch_s: float | None = None) -> Weighed:
        """Every shape at some edges. correction: of what the tables say of shapes; None: they are right. switch_s:
        seconds until drafts that lag have caught up; None: as the tables have it."""
        shapes = np.arange(len(self._shapes.depth) if load.can_speculate.any() else 1)
        low, high = self._edge_range(load, len(shapes))
        all_rows, context = load.num_decode + load.num_prefill, self._cost.context_load(load.context)
        catchup_s = self._catchup_s(load, int(self._edges[high]), context, switch_s)
        draft_s = self._draft_s(all_rows, catchup_s, context)
        verify_s = self._cost.verify_s(all_rows, context)
        edges = _spread(low, high, COARSE_EDGES)

        def look(shapes: np.ndarray, edges: np.ndarray) -> Choices:
            return self._look(load, shapes, edges, draft_s, verify_s, correction)

        def decision(shape: int, prefill: int) -> Decision:
            return self._decision(load, shape, prefill)

        return Weighed(shapes, edges, look(shapes, edges), look if high - low >= len(edges) else None, decision)

    def _decision(self, load: Load, shape: int, prefill: int) -> Decision:
        depth, rows = int(self._shapes.depth[shape]), load.num_decode
        most = min(self._limits.max_tree_tokens, self._limits.max_tokens - prefill)
        feed_draft = self._limits.max_depth > 0 and (depth > 0 or rows == 0)
        return Decision(depth, int(self._shapes.width[shape]), most if depth else rows, prefill, feed_draft)

    def sustains(self, need_rate: np.ndarray, others: int, prefill_tokens: float, *, can_draft: bool = True) -> bool:
        """By the same tables as `decide`, with every request drafting where any can, at the best shape and
        edge for them all. What not even an empty machine would reach counts among the others: it must not keep everyone
        waiting."""
        if not self._admits_by_pace:
            return True
        reach = self._reach_now()
        shapes = np.arange(len(self._shapes.depth) if can_draft else 1)
        feasible = need_rate[need_rate <= self._fastest_alone(reach, shapes)]
        if not len(feasible):
            return True
        rows = len(need_rate) + others
        step_s = self._step_s(rows)[shapes]
        budget = PACE_MARGIN * np.minimum(self._edges[self._coarse] - prefill_tokens, self._limits.max_tree_tokens)
        nodes = reach.nodes_for(feasible, step_s, shapes).sum(axis=2)
        return bool((nodes <= budget - rows).any())

    def _look(
        self, load: Load, shapes: np.ndarray, at: np.ndarray, draft_s: np.ndarray, verify_s: np.ndarray,
        correction: Correction | None,
    ) -> Choices:  # fmt: skip
        """The objective of `shapes` (indices) at the edges `at` (indices), for every share of prefill. draft_s: f64[O],
        of all shapes; verify_s: f64[E], of all edges."""
        rows, reach = load.num_decode, self._reach_now()
        step_s = draft_s[shapes, None] + verify_s[at]
        if correction is not None:
            step_s *= correction.seconds[shapes, None]
        chunk = self._chunks(load, self._edges[at])
        extra = np.minimum(self._edges[at][:, None] - chunk, self._limits.max_tree_tokens) - rows

        with_target = (load.need_rate > 0) & np.isfinite(load.need_rate)
        drafted, plain = (load.need_rate[with_target & rows] for rows in (load.can_speculate, ~load.can_speculate))
        cost = reach.nodes_for(np.sort(drafted), step_s, shapes)
        if len(plain):
            late = plain * step_s[:, :, None] > 1.0
            cost = np.concatenate([np.where(late, OUT_OF_REACH, 0), cost], axis=2)
            cost.sort(axis=2)
        spent = np.cumsum(cost, axis=2, out=cost)
        on_pace = np.empty((*step_s.shape, chunk.shape[1]))
        for share in range(chunk.shape[1]):
            on_pace[:, :, share] = np.count_nonzero(spent <= extra[:, share, None], axis=2)

        speculating = max(int(np.count_nonzero(load.can_speculate)), 1)
        gain = speculating * reach.gain(extra / speculating, shapes)
        emitted = rows + (gain if correction is None else gain * correction.tokens[shapes, None, None])
        weight = self._objective.prefill_weight(load.wait_ratio)
        rate = (self._objective.emit * emitted + weight * chunk) * (self._cost.baseline_s / step_s)[:, :, None]
        return Choices(np.where(extra >= 0, on_pace + rate, -np.inf), on_pace, chunk)

    def _reach_now(self) -> Reach:
        """Computed anew when the averages have moved on by some steps."""
        age = self._acceptance.updates // REACH_STEPS
        if self._reach is None or age != self._reach_age:
            self._reach, self._reach_age = self._shapes.reach(self._acceptance.expected()), age
        return self._reach

    def fastest_alone(self, alone: Alone) -> float:
        """By its own tables, over all shapes."""
        return self._fastest_alone(self._reach_now())

    def _fastest_alone(self, reach: Reach, shapes: np.ndarray | slice = slice(None)) -> float:
        """Expected tokens per second of one request on an empty machine, at the best of `shapes` and edges."""
        nodes = np.minimum(self._edges[self._coarse], self._limits.max_tree_tokens) - 1
        return float(((1.0 + reach.gain(nodes, None)) / self._step_s(1))[shapes].max())

    def _step_s(self, rows: int) -> np.ndarray:
        """f64[O, E] at the coarse edges, seconds of a step in which every row's draft is where it usually is."""
        draft_s = self._draft_s(rows, self._cost.catchup_s(2 * rows))
        return draft_s[:, None] + self._cost.verify_s(rows)[self._coarse]

    def _edge_range(self, load: Load, options: int) -> tuple[int, int]:
        """The first and the last token edge worth considering, as indices."""
        rows = load.num_decode
        largest = int(self._shapes.size[:options].max())
        tree = min(rows * (1 + largest), self._limits.max_tree_tokens)
        least = rows + min(load.prefill_tokens, 1)
        low, high = np.searchsorted(self._edges, [least, max(tree, rows) + load.prefill_tokens])
        return int(low), min(int(high), len(self._edges) - 1)

    def _draft_s(self, rows: int, catchup_s: float, context: float | None = None) -> np.ndarray:
        """f64[O], seconds of a step outside verification, by shape."""
        shapes, cost = self._shapes, self._cost
        draft_s = shapes.depth * cost.level_s(rows, context)[np.maximum(shapes.width, 1) - 1]
        draft_s += catchup_s + cost.overhead_s(True)
        draft_s[0] = cost.overhead_s(False)
        return draft_s

    def _catchup_s(self, load: Load, most_tokens: int, context: float | None, switch_s: float | None) -> float:
        """Seconds of this step's catch-up; what a long lag costs beyond the usual is spread over the steps to come."""
        lag = load.draft_lag[load.can_speculate]
        usual = int(np.minimum(lag, self._limits.max_depth + 1).sum())
        missing = int(lag.sum()) - usual
        usual += min(load.prefill_tokens, max(most_tokens - load.num_decode, 0))
        rest_s = self._cost.catchup_s(missing, context) if switch_s is None else switch_s
        return self._cost.catchup_s(usual, context) + rest_s / CATCHUP_STEPS

    def _chunks(self, load: Load, edges: np.ndarray) -> np.ndarray:
        """i64[E, F], prefill tokens of every edge and share; one share while no prompt waits."""
        room = (edges - load.num_decode)[:, None]
        if not load.prefill_tokens:
            return np.zeros_like(room)
        if self._prefill_tokens is not None:
            return np.minimum(room, min(load.prefill_tokens, self._prefill_tokens))
        shares = np.ceil(room * CHUNK_SHARES).astype(np.int64)
        return np.minimum(np.maximum(shares, np.minimum(MIN_CHUNK, room)), load.prefill_tokens)


def _spread(low: int, high: int, most: int) -> np.ndarray:
    """Indices from `low` to `high`, both included, at most `most` of them, evenly spread. i64[E]."""
    return np.unique(np.linspace(low, high, min(most, high - low + 1)).round().astype(np.int64))
