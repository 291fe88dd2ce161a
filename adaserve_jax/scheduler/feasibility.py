"""Whether a request's targets are within reach of the machine at all. Knows no queue, and nobody who runs.

A target is infeasible when it is below what the request would get alone on an empty machine, by the tables of cost and
acceptance as they stand. Each target is judged by itself, and once: at admission.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.errors import SLO_INFEASIBLE, RequestError
from adaserve_jax.scheduler.controllers.alone import Alone
from adaserve_jax.scheduler.controllers.base import Controller
from adaserve_jax.scheduler.cost import CostTable
from adaserve_jax.types import Limits, Request

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

    def pursued(self, request: Request) -> Request:
        """`request` without the targets that are out of reach."""
        if self.feasible is not False:
            return request
        return replace(
            request,
            tpot_slo_s=request.tpot_slo_s if self.least_tpot_s is None else None,
            ttft_slo_s=request.ttft_slo_s if self.least_ttft_s is None else None,
        )

    def refusal(self, request: Request) -> RequestError:
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

    def judge(self, request: Request) -> Verdict:
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
