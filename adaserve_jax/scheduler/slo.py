"""How many tokens each request must emit to keep its TPOT target. Pure array functions; symbols: docs/equations.md."""

from __future__ import annotations

import numpy as np

HORIZON_TOKENS = 32
"""h: over how many tokens a request may catch up (24 to 48 are good values)."""
CODE_FACTOR = 1.05


def need(decode_time_s: np.ndarray, step_time_s: float, tpot_slo_s: np.ndarray, num_decoded: np.ndarray) -> np.ndarray:
    """A: f64[R], tokens that a request must emit in this step so that it is on its target when the step ends.

    decode_time_s: f64[R], since the first token. tpot_slo_s: f64[R], inf without a target. num_decoded: i64[R], output
    tokens, the first not counted. Source: AdaServe eq. 5, A = (l + t_spec) / tpot_slo - o.
    """
    return (decode_time_s + step_time_s) / tpot_slo_s - num_decoded


def need_capped(need: np.ndarray, depth: int) -> np.ndarray:
    """A_cap: f64[R], no more than a tree of `depth` levels can emit, root counted."""
    return np.minimum(need, depth + 1.0)


def need_of_the_code(need: np.ndarray, depth: int) -> np.ndarray:
    """f64[R], A as the authors' code has it: 5 % more, and between 1 and d + 1."""
    return np.clip(CODE_FACTOR * need, 1.0, depth + 1.0)


def need_rate(
    decode_time_s: np.ndarray, tpot_slo_s: np.ndarray, num_decoded: np.ndarray, horizon: np.ndarray | int
) -> np.ndarray:
    """f64[R], tokens per second that put a request on its target within `horizon` more tokens.

    0 without a target (tpot_slo_s inf); inf when no rate can (hopeless: served best-effort). Times a step's seconds it
    is the horizon form of A: need = h t / (tpot_slo (o + h) - l). Source: docs/equations.md, joint objective.
    """
    time_left_s = tpot_slo_s * (num_decoded + horizon) - decode_time_s
    return np.where(time_left_s > 0, horizon / np.where(time_left_s > 0, time_left_s, 1.0), np.inf)
