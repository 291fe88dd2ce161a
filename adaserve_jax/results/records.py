"""One line of requests.jsonl: what happened to one request. Numbers and names only, never the request's text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from adaserve_jax.types import RequestMetrics

Status = Literal["finished", "rejected", "failed", "unfinished"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Timings and counts of one request, in seconds and tokens; definitions: docs/metrics.md.

    status: finished (stop or length), rejected (refused at submission), failed (an error or a foreign abort),
    unfinished (cut off by the end of the run). due_s, late_s: when it was due since the start of the run, and how
    much later the client submitted it. token_offsets_s: time of each output token since the first one; tokens that
    one step emitted share their time. point: what was measured, as in results.jsonl. A request that did not finish
    meets no target that it carries.
    """

    run_id: str
    policy: str
    rate_rps: float
    request_id: str
    slo_class: str
    status: Status
    error_code: str | None
    due_s: float
    late_s: float
    prompt_tokens: int
    output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    tpot_paper_s: float | None
    tpot_slo_s: float | None
    ttft_slo_s: float | None
    tpot_met: bool | None
    ttft_met: bool | None
    slo_met: bool | None
    slo_feasible: bool | None
    tpot_paper_met: bool | None
    verify_steps: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    token_offsets_s: tuple[float, ...]
    replica: int = 0
    point: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_offsets_s", tuple(self.token_offsets_s))

    @classmethod
    def of(
        cls,
        metrics: RequestMetrics,
        *,
        run_id: str,
        policy: str,
        rate_rps: float,
        request_id: str,
        status: Status,
        error_code: str | None = None,
        due_s: float = 0.0,
        late_s: float = 0.0,
        token_offsets_s: tuple[float, ...] = (),
        replica: int = 0,
        point: str = "",
    ) -> RequestRecord:
        """The record of a request whose engine metrics are `metrics`."""
        finished = status == "finished"
        tpot_met = _met(metrics.tpot_met, finished)
        paper_s = tpot_paper_s(metrics)
        return cls(
            run_id=run_id,
            policy=policy,
            rate_rps=rate_rps,
            request_id=request_id,
            slo_class=metrics.slo_class,
            status=status,
            error_code=error_code,
            due_s=due_s,
            late_s=late_s,
            prompt_tokens=metrics.prompt_tokens,
            output_tokens=metrics.output_tokens,
            queue_s=metrics.queue_s,
            ttft_s=metrics.ttft_s,
            tpot_s=metrics.tpot_s,
            tpot_paper_s=paper_s,
            tpot_slo_s=metrics.tpot_slo_s,
            ttft_slo_s=metrics.ttft_slo_s,
            tpot_met=tpot_met,
            ttft_met=_met(metrics.ttft_met, finished),
            slo_met=_met(metrics.slo_met, finished),
            slo_feasible=metrics.slo_feasible,
            tpot_paper_met=_paper_met(paper_s, metrics.tpot_slo_s, finished),
            verify_steps=metrics.verify_steps,
            drafted_tokens=metrics.drafted_tokens,
            accepted_tokens=metrics.accepted_tokens,
            preemptions=metrics.preemptions,
            token_offsets_s=token_offsets_s,
            replica=replica,
            point=point,
        )

    @property
    def e2e_s(self) -> float | None:
        """Arrival to last token; None without a token."""
        return None if self.ttft_s is None else self.ttft_s + (self.tpot_s or 0.0) * (self.output_tokens - 1)

    @property
    def late_tokens(self) -> int:
        """Tokens after the first that came later than first token + i * target; 0 without a TPOT target."""
        if self.tpot_slo_s is None:
            return 0
        return sum(offset > i * self.tpot_slo_s for i, offset in enumerate(self.token_offsets_s) if i)


def arrival_order(record: RequestRecord) -> tuple[float, int]:
    """Sorts the records of a point as the client sent them: by due time, then by the number that ends the id."""
    number = record.request_id[len(record.request_id.rstrip("0123456789")) :]
    return record.due_s, int(number or 0)


def tpot_paper_s(metrics: RequestMetrics) -> float | None:
    """(last token - first token) / N: the AdaServe authors' count, with the prefill's token inside N."""
    if metrics.output_tokens == 0 or metrics.first_token_s is None or metrics.last_token_s is None:
        return None
    return (metrics.last_token_s - metrics.first_token_s) / metrics.output_tokens


def _met(outcome: bool | None, finished: bool) -> bool | None:
    return outcome if finished or outcome is None else False


def _paper_met(paper_s: float | None, target_s: float | None, finished: bool) -> bool | None:
    if target_s is None:
        return None
    return finished and paper_s is not None and paper_s <= target_s


# Why a request missed its target, as far as one request's own record tells.

Cause = Literal[
    "rejected",
    "failed",
    "unfinished",
    "queueing",
    "prefill",
    "infeasible",
    "preemption",
    "low_acceptance",
    "budget",
]


def violation_cause(record: RequestRecord, *, acceptance_rate: float) -> Cause | None:
    """The first cause that applies, in the order of docs/metrics.md; None when no target was missed.

    acceptance_rate: of the whole run, accepted/drafted.
    """
    if record.slo_met is not False:
        return None
    if record.slo_feasible is False and record.status in ("finished", "rejected"):
        return "infeasible"
    if record.status != "finished":
        return record.status
    if record.tpot_met is False:
        return _tpot_cause(record, acceptance_rate)
    return _ttft_cause(record)


def _ttft_cause(record: RequestRecord) -> Cause:
    """Queueing when the wait to be scheduled was the greater part of the time to the first token."""
    queue_s, ttft_s = record.queue_s or 0.0, record.ttft_s or 0.0
    return "queueing" if queue_s >= ttft_s - queue_s else "prefill"


def _tpot_cause(record: RequestRecord, acceptance_rate: float) -> Cause:
    """Low acceptance when the run's mean acceptance of the tokens drafted here would have met the target."""
    target_s, tpot_s = record.tpot_slo_s or 0.0, record.tpot_s or 0.0
    if record.preemptions:
        return "preemption"
    if record.verify_steps and record.drafted_tokens:
        step_s = tpot_s * (record.output_tokens - 1) / record.verify_steps
        tokens_at_mean = 1 + acceptance_rate * record.drafted_tokens / record.verify_steps
        if tokens_at_mean * target_s >= step_s:
            return "low_acceptance"
    return "budget"
