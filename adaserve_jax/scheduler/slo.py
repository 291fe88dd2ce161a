"""TPOT and TTFT targets: tokens that a sequence must emit to keep its target, and whether a target is feasible at all.

Symbols: docs/equations.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.errors import SLO_INFEASIBLE, ConfigError, RequestError
from adaserve_jax.sampling import is_finite
from adaserve_jax.scheduler.controllers.base import Controller, SoloSpeed
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import Limits, Sequence

HORIZON_TOKENS = 32
"""h: tokens within which a sequence may catch up with its target (24 to 48 are good values)."""
CODE_FACTOR = 1.05
"""Factor on A in the code of AdaServe's authors."""
DEMANDING_SHARE = 0.75
"""Share of the speed of one sequence alone above which a pace is demanding: it forces steps so short that prompts
hardly advance beside it.
"""
RESERVE = 0.01
"""Share of a TPOT target that pacing keeps in reserve. Steps vary, and a sequence paced exactly at its target ends as
often just above it as below. In simulation this much raises attainment and goodput, and more raises neither, since it
takes time from prompts.
"""
TOLERANCE = 0.1
"""Share by which a target must be below the estimate before it counts as infeasible. The tables hold averages over
recent requests and steps, which move by some percent from step to step, and a wrong no costs more than a wrong yes.
"""
MESSAGE_STEP_MS = 0.1
"""Multiple, in milliseconds, to which error messages round the tightest feasible target up."""


def need(
    decode_time_s: np.ndarray, step_time_s: float | np.ndarray, tpot_slo_s: np.ndarray, num_decoded: np.ndarray
) -> np.ndarray:
    """Return A, f64[R]: tokens that a sequence must emit in this step to be on its target when the step ends.

    Source: AdaServe eq. 5, A = (l + t_spec) / tpot_slo - o, with l the seconds since the first token, t_spec those of
    the step, tpot_slo inf without a target, and o the output tokens after the first.
    """
    return (decode_time_s + step_time_s) / tpot_slo_s - num_decoded


def need_capped(need: np.ndarray, depth: int) -> np.ndarray:
    """Return A_cap, f64[R]: A, but no more than a tree of `depth` levels can emit, root counted."""
    return np.minimum(need, depth + 1.0)


def need_of_the_code(need: np.ndarray, depth: int) -> np.ndarray:
    """Return A as the code of AdaServe's authors has it, f64[R]: 5 % more, and between 1 and depth + 1."""
    return np.clip(CODE_FACTOR * need, 1.0, depth + 1.0)


def need_rate(
    decode_time_s: np.ndarray, tpot_slo_s: np.ndarray, num_decoded: np.ndarray, horizon: np.ndarray | int
) -> np.ndarray:
    """Return f64[R], tokens per second that put a sequence on its target within `horizon` more tokens.

    0 without a target (tpot_slo_s inf); inf if no rate can (hopeless: served best-effort). Times a step's seconds t it
    is the horizon form of A: h t / (tpot_slo (o + h) - l). Source: docs/equations.md, joint objective.
    """
    return _rate(horizon, tpot_slo_s * (num_decoded + horizon) - decode_time_s)


def is_demanding(tpot_slo_s: float, least_tpot_s: float) -> bool:
    """Return whether a TPOT target takes more than DEMANDING_SHARE of the speed that one sequence has alone."""
    return least_tpot_s > DEMANDING_SHARE * tpot_slo_s


def paced_tpot_s(tpot_slo_s: float) -> float:
    """Return a TPOT target less the reserve that pacing keeps; inf without a target (inf)."""
    return (1 - RESERVE) * tpot_slo_s


def deadline_rate(now: float, deadline_s: np.ndarray, tokens_left: np.ndarray) -> np.ndarray:
    """Return f64[R], tokens per second that end a sequence by its deadline: 0 without one (inf), inf if it passed."""
    return _rate(tokens_left, deadline_s - now)


def _rate(tokens: np.ndarray | int, left_s: np.ndarray) -> np.ndarray:
    """Return f64[R], tokens per second; inf where no time is left."""
    return np.divide(tokens, left_s, out=np.full(left_s.shape, np.inf), where=left_s > 0)


@dataclass(frozen=True)
class FeasibilityVerdict:
    """Judgement of one sequence's targets.

    judged: the sequence carries a target. least_tpot_s, least_ttft_s, least_thinking_tpot_s: the estimate that an
    infeasible target is below, in seconds; None if that target is feasible or absent. least_e2e_s: likewise, of a
    deadline that not even the fewest tokens of the output can keep. prompt_s: seconds that its prompt takes alone, less
    what is cached; 0 where no target bounds the wait for the first token. token_s: seconds per token that it would get
    alone; 0 without a target per token.
    """

    judged: bool
    least_tpot_s: float | None = None
    least_ttft_s: float | None = None
    least_thinking_tpot_s: float | None = None
    least_e2e_s: float | None = None
    prompt_s: float = 0.0
    token_s: float = 0.0

    @property
    def feasible(self) -> bool | None:
        """True if every target is feasible; None without a target."""
        if not self.judged:
            return None
        least = (self.least_tpot_s, self.least_ttft_s, self.least_thinking_tpot_s, self.least_e2e_s)
        return all(each is None for each in least)

    def without_infeasible(self, sequence: Sequence) -> Sequence:
        """Return `sequence` without the targets that are out of reach."""
        if self.feasible is not False:
            return sequence
        return replace(
            sequence,
            tpot_slo_s=sequence.tpot_slo_s if self.least_tpot_s is None else None,
            ttft_slo_s=sequence.ttft_slo_s if self.least_ttft_s is None else None,
            thinking_tpot_slo_s=sequence.thinking_tpot_slo_s if self.least_thinking_tpot_s is None else None,
            e2e_slo_s=sequence.e2e_slo_s if self.least_e2e_s is None else None,
        )

    def refusal(self, sequence: Sequence) -> RequestError:
        """Return the error that names the tightest feasible targets of an infeasible sequence."""
        targets = (
            ("slo_tpot_ms", sequence.tpot_slo_s, self.least_tpot_s),
            ("slo_ttft_ms", sequence.ttft_slo_s, self.least_ttft_s),
            ("slo_thinking_tpot_ms", sequence.thinking_tpot_slo_s, self.least_thinking_tpot_s),
            ("slo_e2e_ms", sequence.e2e_slo_s, self.least_e2e_s),
        )
        wrong = [(name, asked, least) for name, asked, least in targets if asked is not None and least is not None]
        said = " and ".join(
            f"{name} must be at least {_rounded_up_ms(least):g} ms, which is what this request would get alone on the "
            f"empty machine, got {asked * 1e3:g} ms"
            for name, asked, least in wrong
        )
        return RequestError(f"{said}; ask for a longer time, or for none", param=wrong[0][0], code=SLO_INFEASIBLE)


class Feasibility:
    """Judge of targets, once per sequence at admission and each target by itself.

    A target is infeasible if it is below what the sequence would get alone on an empty machine, by the tables of cost
    and acceptance as they stand.
    """

    def __init__(self, limits: Limits, cost: CostTable, controller: Controller, alone: SoloSpeed, *, max_prefill: int):
        """Set up for one controller, whose own estimate of the speed of one sequence is the bound on TPOT.

        alone: speed of one sequence by the shape of its trees. max_prefill: most prompt tokens of one step.
        """
        self._cost = cost
        self._controller = controller
        self._alone = alone
        self._edges = np.array(limits.token_edges)
        self._chunks, self._scored_chunks = (
            np.unique(np.minimum(self._edges, most)) for most in (max_prefill, min(max_prefill, limits.max_tree_tokens))
        )
        self._least_tpot_s: float | None = None

    def forget(self) -> None:
        """Drop the cached estimate after the tables have learned."""
        self._least_tpot_s = None

    def judge(self, sequence: Sequence, cached_tokens: int) -> FeasibilityVerdict:
        """Return the verdict on a sequence. cached_tokens: tokens of its prompt that need not be computed."""
        tpot_s, ttft_s, thinking_s = sequence.tpot_slo_s, sequence.ttft_slo_s, sequence.thinking_tpot_slo_s
        e2e_s = sequence.e2e_slo_s
        if tpot_s is None and ttft_s is None and thinking_s is None and e2e_s is None:
            return FeasibilityVerdict(judged=False)
        rest = max(sequence.sampling.min_tokens, 1) - 1  # tokens behind the first that must come before a deadline
        has_pace = tpot_s is not None or thinking_s is not None
        token_s = self.least_tpot_s() if has_pace or (e2e_s is not None and rest) else 0.0
        least_tpot_s = token_s if sequence.sampling.max_tokens > 1 else None  # one token has no time per token
        least_ttft_s = 0.0
        if ttft_s is not None or e2e_s is not None:
            tokens = len(sequence.prompt_ids) - cached_tokens
            least_ttft_s = self.least_ttft_s(tokens, scored=sequence.sampling.prompt_logprobs is not None)
        return FeasibilityVerdict(
            True,
            _if_below(tpot_s, least_tpot_s),
            _if_below(ttft_s, least_ttft_s),
            _if_below(thinking_s, least_tpot_s),
            _if_below(e2e_s, least_ttft_s + rest * token_s),
            prompt_s=least_ttft_s,
            token_s=token_s if has_pace else 0.0,
        )

    def least_tpot_s(self) -> float:
        """Return the seconds per token of one sequence alone."""
        if self._least_tpot_s is None:
            rate = self._controller.fastest_alone(self._alone)
            if not (is_finite(rate) and rate > 0):
                raise ConfigError(f"a controller's fastest_alone() must return a finite number above 0, got {rate!r}")
            self._least_tpot_s = 1.0 / float(rate)
        return self._least_tpot_s

    def least_ttft_s(self, prompt_tokens: int, *, scored: bool = False) -> float:
        """Return the seconds to compute a prompt alone, in chunks of the best size; the rest of a step counts as
        free. scored: every token of the prompt is.
        """
        chunks = self._scored_chunks if scored else self._chunks
        verify_s = self._cost.verify_s(1)
        whole, rest = np.divmod(prompt_tokens, chunks)
        rest_s = np.where(rest > 0, verify_s[np.searchsorted(self._edges, rest)], 0.0)
        return float((whole * verify_s[np.searchsorted(self._edges, chunks)] + rest_s).min())


def _if_below(target_s: float | None, least_s: float | None) -> float | None:
    if target_s is None or least_s is None or target_s >= (1 - TOLERANCE) * least_s:
        return None
    return least_s


def _rounded_up_ms(seconds: float) -> float:
    return round(math.ceil(seconds * 1e3 / MESSAGE_STEP_MS) * MESSAGE_STEP_MS, 6)
