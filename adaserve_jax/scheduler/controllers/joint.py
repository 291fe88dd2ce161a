"""The joint choice of `adaserve`: depth, width, verify budget and prefill chunk of one step, from predicted cost.

Maximises requests on pace + a * emitted tokens per second + b * prefilled tokens per second over every option at once.
Before drafting only average f's are known; the budget is chosen again, from the real ones, after it.
Source: docs/equations.md, joint objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.types import Limits

CHUNK_SHARES = (1.0, 0.5, 0.25)
"""Shares of a step's room beside the roots that prefill may take."""
MIN_CHUNK = 16
"""Fewest prefill tokens of a step while prompts wait: prefill always progresses."""
CATCHUP_STEPS = 32
"""Steps over which the cost of a long catch-up counts when it is weighed against its gain."""
GRID = 16
"""Steps per token of the table that turns expected tokens into nodes."""
UNREACHABLE = 1 << 24
PACE_MARGIN = 0.6
"""Share of the budget that keeping everyone on pace may take when one more request asks to start."""


@dataclass(frozen=True)
class Shapes:
    """The options of the draft, O of them; the first is depth 0. depth, width: i64[O]; mask: bool[O, max nodes]."""

    depth: np.ndarray
    width: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, limits: Limits, widths: tuple[int, ...]) -> Shapes:
        widths = tuple(width for width in widths if width <= limits.max_width)
        pairs = [(0, 0)] + [(depth, width) for depth in range(1, limits.max_depth + 1) for width in widths]
        depth = np.array([pair[0] for pair in pairs])
        width = np.array([pair[1] for pair in pairs])
        levels = np.arange(limits.max_depth)[:, None]
        ranks = np.arange(limits.max_width)[None, :]
        mask = (levels < depth[:, None, None]) & (ranks < width[:, None, None])
        return cls(depth, width, mask.reshape(len(pairs), -1))


class JointController(Controller):
    """Chooses by predicted value; holds no state but the tables that it reads."""

    def __init__(self, limits: Limits, cost: CostTable, acceptance: LearnedAcceptance, objective: Objective):
        self._limits = limits
        self._cost = cost
        self._acceptance = acceptance
        self._objective = objective
        self._shapes = Shapes.of(limits, cost.draft_widths)
        self._edges = np.array(limits.token_edges)

    def decide(self, load: Load) -> Decision:
        rows = load.num_decode
        options = len(self._shapes.depth) if load.can_speculate.any() else 1
        reached = self._reached(options)
        edges, step_s = self._edges_and_times(load, options)
        chunk = self._chunks(load, edges)
        budget = np.minimum(edges[:, None] - chunk, self._limits.max_tree_tokens)
        extra = budget - rows

        with_target = (load.need_rate > 0) & np.isfinite(load.need_rate)
        drafted, plain = (load.need_rate[with_target & rows] for rows in (load.can_speculate, ~load.can_speculate))
        nodes_used = _nodes_for_pace(drafted, plain, reached, step_s)
        on_pace = (nodes_used[:, :, None, :] <= extra[None, :, :, None]).sum(axis=3)
        emitted = rows + self._expected_gain(load, reached, extra)
        weight = self._objective.prefill_weight(load.wait_ratio)
        rate = (self._objective.emit * emitted + weight * chunk) * (self._cost.baseline_s / step_s)[:, :, None]
        value = np.where(extra >= 0, on_pace + rate, -np.inf)

        shape, edge, share = np.unravel_index(int(np.argmax(value)), value.shape)
        depth = int(self._shapes.depth[shape])
        prefill = int(chunk[edge, share])
        most = min(self._limits.max_tree_tokens, self._limits.max_tokens - prefill)
        feed_draft = self._limits.max_depth > 0 and (depth > 0 or rows == 0)
        return Decision(depth, int(self._shapes.width[shape]), most if depth else rows, prefill, feed_draft)

    def sustains(self, need_rate: np.ndarray, others: int, prefill_tokens: float) -> bool:
        """By the same tables as `decide`, with every request drafting, at the best shape and edge for them all. What
        not even an empty machine would reach counts among the others: it must not keep everyone waiting."""
        reached = self._reached(len(self._shapes.depth))
        feasible = need_rate[need_rate <= self._fastest_alone(reached)]
        if not len(feasible):
            return True
        rows = len(need_rate) + others
        budget = PACE_MARGIN * np.minimum(self._edges - prefill_tokens, self._limits.max_tree_tokens)
        nodes = _nodes_for_pace(feasible, feasible[:0], reached, self._step_s(rows))[:, :, -1]
        return bool((nodes <= budget - rows).any())

    def _fastest_alone(self, reached: np.ndarray) -> float:
        """Expected tokens per second of one request on an empty machine, at its best shape and edge."""
        nodes = np.minimum(np.minimum(self._edges, self._limits.max_tree_tokens) - 1, reached.shape[1] - 1)
        return float(((1.0 + reached[:, nodes]) / self._step_s(1)).max())

    def _step_s(self, rows: int) -> np.ndarray:
        """f64[O, E], seconds of a step in which every row's draft is where it usually is."""
        draft_s = self._draft_s(len(self._shapes.depth), rows, self._cost.catchup_s(2 * rows))
        return draft_s[:, None] + self._cost.verify_s(rows)[None, :]

    def _reached(self, options: int) -> np.ndarray:
        """f64[O, 1 + K]: expected tokens beyond the root with the best 0, 1, ... nodes of each shape."""
        chance = np.where(self._shapes.mask[:options], self._acceptance.expected().ravel(), 0.0)
        chance.sort(axis=1)
        reached = np.zeros((options, chance.shape[1] + 1))
        np.cumsum(chance[:, ::-1], axis=1, out=reached[:, 1:])
        return reached

    def _edges_and_times(self, load: Load, options: int) -> tuple[np.ndarray, np.ndarray]:
        """The token edges worth considering, i64[E], and the seconds of a step f64[O, E]."""
        rows = load.num_decode
        least = rows + min(load.prefill_tokens, 1)
        tree = min(rows * (1 + int(self._shapes.mask[:options].sum(axis=1).max())), self._limits.max_tree_tokens)
        low, high = np.searchsorted(self._edges, [least, max(tree, rows) + load.prefill_tokens])
        high = min(int(high), len(self._edges) - 1)
        edges = self._edges[low : high + 1]
        all_rows = rows + load.num_prefill
        context = self._cost.context_load(load.context)
        verify_s = self._cost.verify_s(all_rows, context)[low : high + 1]
        draft_s = self._draft_s(options, all_rows, self._catchup_s(load, int(edges[-1]), context), context)
        return edges, draft_s[:, None] + verify_s[None, :]

    def _draft_s(self, options: int, rows: int, catchup_s: float, context: float | None = None) -> np.ndarray:
        """f64[O], seconds of a step outside verification."""
        depth, width = self._shapes.depth[:options], self._shapes.width[:options]
        draft_s = depth * self._cost.level_s(rows, context)[np.maximum(width, 1) - 1]
        draft_s = draft_s + np.where(depth > 0, catchup_s, 0.0)
        return draft_s + np.where(depth > 0, self._cost.overhead_s(True), self._cost.overhead_s(False))

    def _catchup_s(self, load: Load, most_tokens: int, context: float | None) -> float:
        """Seconds of this step's catch-up; what a long lag costs beyond the usual is spread over the steps to come."""
        lag = load.draft_lag[load.can_speculate]
        usual = int(np.minimum(lag, self._limits.max_depth + 1).sum())
        usual += min(load.prefill_tokens, max(most_tokens - load.num_decode, 0))
        missing = int(lag.sum()) - int(np.minimum(lag, self._limits.max_depth + 1).sum())
        return self._cost.catchup_s(usual, context) + self._cost.catchup_s(missing, context) / CATCHUP_STEPS

    def _chunks(self, load: Load, edges: np.ndarray) -> np.ndarray:
        """i64[E, F], prefill tokens of every edge and share."""
        room = (edges - load.num_decode)[:, None]
        shares = np.ceil(room * np.array(CHUNK_SHARES)[None, :]).astype(np.int64)
        least = np.minimum(MIN_CHUNK, room)
        return np.minimum(np.maximum(shares, least), load.prefill_tokens)

    def _expected_gain(self, load: Load, reached: np.ndarray, extra: np.ndarray) -> np.ndarray:
        """f64[O, E, F]: expected tokens beyond the roots when `extra` nodes are spread over the speculating rows."""
        speculating = max(int(load.can_speculate.sum()), 1)
        each = np.clip(extra / speculating, 0, reached.shape[1] - 1)
        whole = each.astype(np.int64)
        above = np.minimum(whole + 1, reached.shape[1] - 1)
        return speculating * (reached[:, whole] + (reached[:, above] - reached[:, whole]) * (each - whole))


def _nodes_for_pace(drafted: np.ndarray, plain: np.ndarray, reached: np.ndarray, step_s: np.ndarray) -> np.ndarray:
    """i64[O, E, R']: nodes spent when the cheapest 1, 2, ... requests with a target are put on pace.

    drafted, plain: need rates of the rows that speculate and of those that cannot; reached: f64[O, 1 + K]; step_s:
    f64[O, E].
    """
    drafted = np.sort(drafted)
    gain = drafted[None, None, :] * step_s[:, :, None] - 1.0
    steps = int(reached[:, -1].max() * GRID) + 2
    levels = np.arange(steps) / GRID
    nodes = np.count_nonzero(reached[:, None, :] < levels[None, :, None], axis=2)
    nodes = np.where(nodes >= reached.shape[1], UNREACHABLE, nodes)
    index = np.minimum(np.ceil(np.maximum(gain, 0.0) * GRID), steps - 1).astype(np.int64)
    index += (np.arange(len(reached)) * steps)[:, None, None]
    cost = nodes.ravel()[index]
    if len(plain):
        late = plain[None, None, :] * step_s[:, :, None] > 1.0
        cost = np.concatenate([np.where(late, UNREACHABLE, 0), cost], axis=2)
        cost.sort(axis=2)
    return np.cumsum(cost, axis=2)
