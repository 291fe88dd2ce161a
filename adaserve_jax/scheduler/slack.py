"""Slack: how long the step loop may do something else without endangering a TPOT target or deadline."""

from __future__ import annotations

import math

import numpy as np

from adaserve_jax.scheduler.planner import Pace

CROWDED_SHARE = 0.5
"""Share of the slots above which the engine counts as loaded."""
HOLD_S = 3.0
"""Seconds for which the engine counts as loaded after the last loaded step."""
TARGET_SHARE = 0.9
"""Share of a TPOT target within which background work must leave a sequence, because chance and arrivals may make
the next tokens slower than the last.
"""
SLACK_SHARE = 0.5
"""Share of the least slack that background work may use before the next step."""
PACE_RATE = 0.1
"""Weight of a new step in the moving averages of its seconds and of its tokens per row."""


def row_slack_s(
    decode_time_s: np.ndarray, tpot_slo_s: np.ndarray, num_decoded: np.ndarray, horizon: np.ndarray, token_s: float
) -> np.ndarray:
    """Return f64[R], seconds that a row may stand still and be on its target again within `horizon` tokens.

    Assumes one token every `token_s`: the slack is 0 where `need_rate` is 1 / token_s. inf without a target, below 0 if
    the row is late anyway.
    """
    return tpot_slo_s * (num_decoded + horizon) - decode_time_s - horizon * token_s


class SlackTracker:
    """Estimate of how long the step loop may do something else without endangering a TPOT target."""

    def __init__(self, capacity: int):
        """Start without steps. capacity: most sequences that can run at once."""
        self._crowded = CROWDED_SHARE * capacity
        self._loaded_s = -math.inf
        self._step_s = self._tokens = 0.0

    def observe(self, now: float, running: int, waiting: int, step_s: float, emitted: np.ndarray) -> None:
        """Take in a step that ended.

        waiting: sequences left without a slot. emitted: i32[num_decode], tokens.
        """
        if waiting or running > self._crowded:
            self._loaded_s = now
        if len(emitted):
            rate = PACE_RATE if self._tokens else 1.0
            self._step_s += rate * (step_s - self._step_s)
            self._tokens += rate * (int(emitted.sum()) / len(emitted) - self._tokens)

    def is_loaded(self, now: float) -> bool:
        """Return whether sequences waited for a slot, or more than half of the slots were taken, less than HOLD_S
        ago.
        """
        return now - self._loaded_s < HOLD_S

    def seconds(self, pace: Pace, now: float) -> float:
        """Return the seconds that the row with the least slack leaves; 0 before the first decode step if a target
        runs.
        """
        if not (np.isfinite(pace.tpot_slo_s) | np.isfinite(pace.deadline_s)).any():
            return math.inf
        if not self._tokens:
            return 0.0
        token_s = self._step_s / self._tokens
        target_s = TARGET_SHARE * pace.tpot_slo_s
        slack = row_slack_s(now - pace.start_s, target_s, pace.num_decoded, pace.horizon, token_s)
        slack = np.minimum(slack, pace.deadline_s - now - pace.tokens_left * token_s)
        return max(SLACK_SHARE * float(slack.min()), 0.0)
