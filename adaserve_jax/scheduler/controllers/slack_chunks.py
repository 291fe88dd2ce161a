"""Controllers that never speculate and size prefill chunks by the slack of the sequences that decode: Niyama's dynamic
chunks, and SlidingServe's, planned over two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import Limits

LEAST_CHUNK = 128
"""Fewest prefill tokens of a step while prompts wait, whatever the slack. Source: the search space in Niyama's code."""


@dataclass(frozen=True)
class SlackChunks(Controller):
    """Niyama (arXiv 2503.22562, later QoServe; policy `niyama`): the largest chunk whose step ends before the next
    token of any decode row is due.

    The paper predicts a step by a random forest over profiles; here the cost table does. A row is due by its TPOT
    target counted from its first token, as attainment is judged here, where the paper counts from the TTFT target. A
    chunk is at least LEAST_CHUNK, or as much as is left, also where the slack holds less.
    """

    reads_due: ClassVar[bool] = True
    limits: Limits
    cost: CostTable

    def decide(self, load: Load) -> Decision:
        room, step_s = self._options(load)
        fits = room[step_s <= self._least(load.due_s)]
        return self._decision(load, int(fits[-1]) if len(fits) else 0)

    def _options(self, load: Load) -> tuple[np.ndarray, np.ndarray]:
        """Return, by token edge, the chunk that it holds beside the decode rows, i64[E], and the seconds of the step,
        f64[E]; edges that hold no chunk are left out.
        """
        context = self.cost.context_load(load.context)
        step_s = self.cost.verify_s(load.num_decode + load.num_prefill, context) + self.cost.overhead_s(False)
        room = np.array(self.limits.token_edges) - load.num_decode
        return room[room > 0], step_s[room > 0]

    def _decision(self, load: Load, chunk: int) -> Decision:
        rows = load.num_decode
        most = min(load.prefill_tokens, self.limits.max_tokens - rows)
        return Decision(0, 0, rows, min(max(chunk, LEAST_CHUNK), most), feed_draft=False)

    @staticmethod
    def _least(seconds: np.ndarray | None) -> float:
        return np.inf if seconds is None else float(seconds.min(initial=np.inf))


@dataclass(frozen=True)
class SlidingChunks(SlackChunks):
    """SlidingServe (arXiv 2606.05933; policy `slidingserve`): the chunks of this step and the next, chosen together.

    The pair of most prefilled tokens per second of both steps, of those whose first step ends before the next token of
    any decode row is due, and whose second ends before the one after it is; of equals the one that does more now. A
    greedy first chunk that spends the slack of both is so refused. Without such a pair, or where it begins with less,
    the chunk is LEAST_CHUNK.

    The paper maximises over the pair by ternary search, which assumes one peak; times are staircases here and edges are
    few, so all pairs are tried. Its objective is taken to be tokens per second. Its batch constructor, a knapsack over
    prompts in danger, is left to the queue, which sends them behind the others.
    """

    def decide(self, load: Load) -> Decision:
        room, step_s = self._options(load)
        second_due_s = None if load.due_s is None or load.tpot_slo_s is None else load.due_s + load.tpot_slo_s
        both_s = step_s[:, None] + step_s
        fits = (step_s <= self._least(load.due_s))[:, None] & (both_s <= self._least(second_due_s))
        if not fits.any():
            return self._decision(load, LEAST_CHUNK)
        rate = np.minimum(room[:, None] + room, load.prefill_tokens) / both_s
        best = np.where(fits, rate, -1.0).max(axis=1)
        return self._decision(load, int(room[best == best.max()][-1]))
