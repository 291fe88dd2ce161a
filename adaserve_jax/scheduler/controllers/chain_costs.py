"""Cost of draft chains for controllers that learn from time: predictions, and the time of a step without its other
work.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Feedback
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import Limits

LEAST_SHARE = 0.1
"""Least share of a step's seconds that its chains account for, however much else the step did."""
FULL_SHARE = 0.85
"""Share of decode rows that must have drafted for a step to say something about its chain."""


class ChainCosts:
    """Predictions for chains of 0 to max_depth tokens, K of them, from the tables that learn while serving."""

    def __init__(self, limits: Limits, cost: CostTable, acceptance: LearnedAcceptance):
        self._limits = limits
        self._cost = cost
        self._acceptance = acceptance
        fewest, most = limits.token_edges[0], limits.token_edges[-1]
        at_ends_s = [cost.step_at_warm_up_s(tokens, 1, 0, 1) for tokens in (fewest, most)]
        self.prompt_token_s = (at_ends_s[1] - at_ends_s[0]) / max(most - fewest, 1)
        """Seconds that one more prompt token adds to a step, whatever its size."""

    @property
    def arms(self) -> int:
        """K."""
        return self._limits.max_depth + 1

    @property
    def max_catchup_tokens(self) -> int:
        """Most tokens that the draft is fed in a step."""
        return self._cost.max_catchup_tokens

    @property
    def fastest_rate(self) -> float:
        """Tokens per second of one row if every chain were accepted whole and cost what plain decoding does."""
        return self.arms / self._cost.baseline_s

    def predicted(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a step and the tokens emitted per row, f64[K] each, with `rows` rows that all draft.

        If the tree budget cannot hold every chain whole, the rows share it.
        """
        seconds, emitted = self.beside_prompts(rows, np.zeros(1, np.int64))
        return seconds[0], emitted

    def beside_prompts(self, rows: int, prompt_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `predicted` with prompts in the step: seconds f64[F, K], and tokens emitted per row, f64[K].

        prompt_tokens: i64[F]. A chain that the step does not hold beside them takes for ever.
        """
        limits, cost = self._limits, self._cost
        depth = np.arange(self.arms)
        nodes = np.minimum(depth, (limits.max_tree_tokens - rows) / rows)
        chance = self._acceptance.expected()[:, 0] if limits.max_depth else np.zeros(0)
        emitted = 1.0 + np.interp(nodes, depth, np.concatenate([[0.0], chance.cumsum()]))
        tokens = (rows * (1 + nodes)).astype(np.int64) + prompt_tokens[:, None]
        verify_s = np.append(cost.verify_s(rows), np.inf)
        seconds = verify_s[np.searchsorted(limits.token_edges, tokens)]
        seconds[:, 0] += cost.overhead_s(False)
        if limits.max_depth:
            fed = np.array([cost.catchup_s(round(rows * each)) for each in emitted[1:]])
            seconds[:, 1:] += depth[1:] * cost.level_s(rows)[0] + fed + cost.overhead_s(True)
        return seconds, emitted

    def decode_s(self, feedback: Feedback, depth: int) -> float:
        """Return the seconds of a step without prompts and without catch-up beyond what the last step emitted.

        A step's verified tokens, prompts included, cost the same each, so that a chain pays for the room that it takes
        from prompts. With a price from the cost table in its place, `nightjar` came to 0.95 of the best fixed chain at
        32 requests, and to 0.98 with this.
        """
        own = feedback.decode_rows + feedback.drafted
        seconds = feedback.step_s * own / max(own + feedback.prefill_tokens, 1)
        usual = feedback.decode_rows * (depth + 1)
        if feedback.catchup_tokens > usual:
            seconds -= self._cost.catchup_s(feedback.catchup_tokens) - self._cost.catchup_s(usual)
        return max(seconds, LEAST_SHARE * feedback.step_s)


def is_of_its_chain(feedback: Feedback, depth: int) -> bool:
    """Return whether a step ran at the depth that was decided: no draft was asked for, or nearly all rows had one.

    Rows near their end, or whose draft still catches up, decode plainly and make a chain look cheap.
    """
    return not depth or (feedback.drafted > 0 and feedback.rows >= FULL_SHARE * feedback.decode_rows)
