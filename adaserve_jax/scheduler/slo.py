"""How many tokens each request must emit to keep its TPOT target. Pure array functions; symbols: docs/equations.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.errors import SLO_INFEASIBLE, RequestError
from adaserve_jax.scheduler.controllers.base import Alone, Controller
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import Limits, Sequence

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


# Whether a request's targets are within reach of the machine at all. Knows no queue, and nobody who runs.
#
# A target is infeasible when it is below what the request would get alone on an empty machine, by the tables of
# cost and acceptance as they stand. Each target is judged by itself, and once: at admission.

TOLERANCE = 0.1
"""Share by which a target must be below the estimate before it counts as infeasible: the tables hold averages over
recent requests and steps, which move by some percent from step to step, and a wrong no costs more than a wrong yes."""
MESSAGE_STEP_MS = 0.1
"""The least feasible target is rounded up to a multiple of this."""


@dataclass(frozen=True)
class Verdict:
    """least_tpot_s, least_ttft_s: the estimate that an infeasible target is below, seconds; None: feasible, or no such
    target. judged: whether the request carries a target."""

    judged: bool
    least_tpot_s: float | None = None
    least_ttft_s: float | None = None

    @property
    def feasible(self) -> bool | None:
        """None without a target."""
        return self.least_tpot_s is None and self.least_ttft_s is None if self.judged else None

    def pursued(self, request: Sequence) -> Sequence:
        """`request` without the targets that are out of reach."""
        if self.feasible is not False:
            return request
        return replace(
            request,
            tpot_slo_s=request.tpot_slo_s if self.least_tpot_s is None else None,
            ttft_slo_s=request.ttft_slo_s if self.least_ttft_s is None else None,
        )

    def refusal(self, request: Sequence) -> RequestError:
        """The error that says what the least feasible target is; only of an infeasible request."""
        targets = (
            ("slo_tpot_ms", request.tpot_slo_s, self.least_tpot_s),
            ("slo_ttft_ms", request.ttft_slo_s, self.least_ttft_s),
        )
        wrong = [(name, asked, least) for name, asked, least in targets if asked is not None and least is not None]
        said = " and ".join(
            f"{name} must be at least {_rounded_up_ms(least):g} ms, which is what this request would get alone on the "
            f"empty machine, got {asked * 1e3:g} ms"
            for name, asked, least in wrong
        )
        return RequestError(f"{said}; ask for a longer time, or for none", param=wrong[0][0], code=SLO_INFEASIBLE)


class Feasibility:
    """Judges requests by a controller's own speed alone, and by the cost of computing a prompt alone.

    max_prefill: most prompt tokens of one step.
    """

    def __init__(self, limits: Limits, cost: CostTable, controller: Controller, alone: Alone, *, max_prefill: int):
        self._cost = cost
        self._controller = controller
        self._alone = alone
        self._edges = np.array(limits.token_edges)
        self._chunks = np.unique(np.minimum(self._edges, max_prefill))
        self._least_tpot_s: float | None = None

    def forget(self) -> None:
        """The tables have learned: estimate again when next asked."""
        self._least_tpot_s = None

    def judge(self, request: Sequence) -> Verdict:
        """A request of one token has no time per token to miss."""
        tpot_s, ttft_s = request.tpot_slo_s, request.ttft_slo_s
        if tpot_s is None and ttft_s is None:
            return Verdict(judged=False)
        least_tpot_s = None if tpot_s is None or request.sampling.max_tokens == 1 else self.least_tpot_s()
        least_ttft_s = None if ttft_s is None else self.least_ttft_s(len(request.prompt_ids))
        return Verdict(True, _if_below(tpot_s, least_tpot_s), _if_below(ttft_s, least_ttft_s))

    def least_tpot_s(self) -> float:
        """Seconds per token of one request alone."""
        if self._least_tpot_s is None:
            self._least_tpot_s = 1.0 / self._controller.fastest_alone(self._alone)
        return self._least_tpot_s

    def least_ttft_s(self, prompt_tokens: int) -> float:
        """Seconds to compute a prompt alone, in chunks of the best size; the rest of a step counts as free."""
        verify_s = self._cost.verify_s(1)
        whole, rest = np.divmod(prompt_tokens, self._chunks)
        rest_s = np.where(rest > 0, verify_s[np.searchsorted(self._edges, rest)], 0.0)
        return float((whole * verify_s[np.searchsorted(self._edges, self._chunks)] + rest_s).min())


def _if_below(target_s: float | None, least_s: float | None) -> float | None:
    if target_s is None or least_s is None or target_s >= (1 - TOLERANCE) * least_s:
        return None
    return least_s


def _rounded_up_ms(seconds: float) -> float:
    return round(math.ceil(seconds * 1e3 / MESSAGE_STEP_MS) * MESSAGE_STEP_MS, 6)


# Whether a prompt can be served at all, by its length: what a context and a pool of KV pages hold.


def check_not_empty(prompt_tokens: int) -> None:
    """Raise RequestError for a prompt of no tokens."""
    if prompt_tokens == 0:
        raise RequestError("prompt must have at least one token, got none", param="prompt", code="empty_prompt")


def check_prompt(prompt_tokens: int, max_context: int, param: str = "prompt") -> None:
    """Raise RequestError unless a prompt has a token, and leaves room for one in the context. param: the field that the
    prompt is of."""
    check_not_empty(prompt_tokens)
    if prompt_tokens >= max_context:
        raise RequestError(
            f"prompt must leave room for one token in a context of {max_context}, got {prompt_tokens} tokens; "
            "shorten it",
            param=param,
            code="context_length_exceeded",
        )


def fit(prompt_tokens: int, max_tokens: int, limits: Limits) -> int:
    """Most tokens of a request, prompt and output, whatever else runs. Raises RequestError when not even one output
    token fits."""
    check_prompt(prompt_tokens, limits.max_context)
    total = min(prompt_tokens + max_tokens, limits.max_context)
    if -(-total // limits.page_size) > limits.num_pages:
        raise RequestError(
            f"prompt and max_tokens must fit the KV cache of {limits.num_pages * limits.page_size} tokens, got "
            f"{prompt_tokens} + {total - prompt_tokens}; shorten the prompt or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return total
