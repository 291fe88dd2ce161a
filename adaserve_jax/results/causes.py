"""Why a request missed its target, as far as one request's own record tells."""

from __future__ import annotations

from typing import Literal

from adaserve_jax.results.records import RequestRecord

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
