"""How long the step loop may do something else without putting a target in danger. Knows pace and load, not what for.

Symbols: docs/equations.md, as of slo.py.
"""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.scheduler.planning import Pace

CROWDED_SHARE = 0.5
"""Share of the rows above which there is no time for anything else."""
HOLD_S = 3.0
"""For so long after the last such step."""
TARGET_SHARE = 0.9
"""What is left of a target for those who spend the rest: chance and arrivals make the next tokens dearer than the last.
"""
SLACK_SHARE = 0.5
"""Share of the least slack that may be spent before the next step."""
PACE_RATE = 0.1
"""Weight of a new step in the moving averages of its seconds and of its tokens per row."""


def slack_s(
    decode_time_s: np.ndarray, tpot_slo_s: np.ndarray, num_decoded: np.ndarray, horizon: np.ndarray, token_s: float
) -> np.ndarray:
    """f64[R], by how many seconds a request may stand still and be on its target again within `horizon` more tokens,
    one every `token_s`: where `need_rate` is 1 / token_s. inf without a target, below 0 where it is late anyway."""
    return tpot_slo_s * (num_decoded + horizon) - decode_time_s - horizon * token_s


class SpareTime:
    """Told of every step, asked between steps. capacity: most requests that can run at once."""

    def __init__(self, capacity: int):
        self._crowded = CROWDED_SHARE * capacity
        self._loaded_s = -math.inf
        self._step_s = self._tokens = 0.0

    def observe(self, now: float, running: int, waiting: int, step_s: float, emitted: np.ndarray) -> None:
        """A step has ended. waiting: requests that it left without a slot. emitted: i32[num_decode], tokens."""
        if waiting or running > self._crowded:
            self._loaded_s = now
        if len(emitted):
            rate = PACE_RATE if self._tokens else 1.0
            self._step_s += rate * (step_s - self._step_s)
            self._tokens += rate * (int(emitted.sum()) / len(emitted) - self._tokens)

    def is_loaded(self, now: float) -> bool:
        """Whether requests waited for a slot, or more than half of the slots were taken, less than HOLD_S ago."""
        return now - self._loaded_s < HOLD_S

    def seconds(self, pace: Pace, now: float) -> float:
        """That the request with the least slack leaves; 0 where a target runs and no step has decoded yet."""
        if not np.isfinite(pace.tpot_slo_s).any():
            return math.inf
        if not self._tokens:
            return 0.0
        token_s = self._step_s / self._tokens
        target_s = TARGET_SHARE * pace.tpot_slo_s
        slack = slack_s(now - pace.first_token_s, target_s, pace.num_decoded, pace.horizon, token_s)
        return max(SLACK_SHARE * float(slack.min()), 0.0)
