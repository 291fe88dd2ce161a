"""Records of requests: one line of requests.jsonl, or one row of a server's file.

A record holds numbers and names. It has the request's text only where a server was told to keep it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from adaserve_jax.errors import SLO_INFEASIBLE, AdaServeError, EngineDeadError, EngineRestartingError
from adaserve_jax.request_metrics import RequestMetrics, TpotParts, tpot_parts

Status = Literal["finished", "rejected", "failed", "unfinished", "cancelled"]
Cause = Literal[
    "rejected", "failed", "unfinished", "queueing", "prefill", "infeasible", "preemption", "low_acceptance", "budget"
]  # fmt: skip
"""Reasons why a request missed its target, as far as its own record tells."""
CAUSES: tuple[Cause, ...] = get_args(Cause)
STATUS_OF: dict[str, Status] = {
    "stop": "finished",
    "length": "finished",
    "abort": "failed",
    "cancelled": "cancelled",
    "error": "failed",
    "rejected": "rejected",
}
"""Status by how a choice ended at a server. An abort comes from a server that shuts down, or from a sibling that
failed: the request failed."""
LOST = (EngineDeadError.code, EngineRestartingError.code, AdaServeError.code)
"""Error codes of choices that the engine took and lost by ending or failing. They failed; they were not rejected."""

_COPIED = (
    "slo_class", "prompt_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s", "tpot_slo_s", "ttft_slo_s",
    "slo_feasible", "verify_steps", "drafted_tokens", "accepted_tokens", "preemptions", "thinking_tpot_s",
    "answer_tpot_s", "thinking_tpot_slo_s", "e2e_slo_s",
)  # fmt: skip
"""Fields of a record with the value that the engine's metrics have under the same name."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Timings and counts of one request, in seconds and tokens; definitions: docs/metrics.md.

    A request that did not finish meets none of its targets. Outcomes of a cancelled one are None: nobody knows whether
    it would have met them.

    status: finished (stop or length), rejected (refused, or ended before it began), failed (an error or a foreign
    abort), unfinished (cut off by the end of the run), cancelled (its client closed the connection).
    due_s: when the request was due, since the start of the run; at a server, its arrival in Unix time.
    late_s: how much later than due_s the client submitted it.
    tpot_slo_s: target of all tokens, or of the answer alone where thinking_tpot_slo_s is given.
    token_offsets_s: time of each output token since the first; tokens of one step share their time.
    point: name of the measured point, the same as in results.jsonl.
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
    thinking_tpot_s: float | None = field(default=None, kw_only=True)
    answer_tpot_s: float | None = field(default=None, kw_only=True)
    thinking_tpot_slo_s: float | None = field(default=None, kw_only=True)
    e2e_slo_s: float | None = field(default=None, kw_only=True)
    e2e_met: bool | None = field(default=None, kw_only=True)

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
        """Build the record of a request from the metrics that the engine gave."""
        paper_s = tpot_paper_s(metrics)
        paper_met = None
        if metrics.tpot_slo_s is not None and metrics.thinking_tpot_slo_s is None:  # the papers know one target
            paper_met = paper_s is not None and paper_s <= metrics.tpot_slo_s
        return RequestRecord(
            run_id=run_id,
            policy=policy,
            rate_rps=rate_rps,
            request_id=request_id,
            status=status,
            error_code=error_code,
            due_s=due_s,
            late_s=late_s,
            tpot_paper_s=paper_s,
            tpot_met=judged(metrics.tpot_met, status),
            ttft_met=judged(metrics.ttft_met, status),
            e2e_met=judged(metrics.e2e_met, status),
            slo_met=judged(metrics.slo_met, status),
            tpot_paper_met=judged(paper_met, status),
            token_offsets_s=token_offsets_s,
            replica=replica,
            point=point,
            **{name: getattr(metrics, name) for name in _COPIED},
        )

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the last token; None without a token."""
        return None if self.ttft_s is None else self.ttft_s + (self.tpot_s or 0.0) * (self.output_tokens - 1)

    @property
    def tpot_parts(self) -> TpotParts:
        """Return TPOT targets and measured TPOTs, as `RequestMetrics.tpot_parts`."""
        return tpot_parts(self)

    @property
    def late_tokens(self) -> int:
        """Number of tokens after the first that came later than first token + i * target; 0 without one TPOT target
        of all tokens."""
        if self.tpot_slo_s is None or self.thinking_tpot_slo_s is not None:
            return 0
        return sum(offset > i * self.tpot_slo_s for i, offset in enumerate(self.token_offsets_s) if i)


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One start of an engine behind a server.

    started_unix_s: when the first of its choices ended. model: the model's name in the API. target, draft: checkpoints
    as configured.
    """

    run_id: str
    started_unix_s: float
    package_version: str
    jax_version: str
    device: str
    policy: str
    model: str
    target: str
    draft: str | None
    baseline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRecord(RequestRecord):
    """Record of one choice of one HTTP request, with the fields that only a server has.

    It has no token times, and its due_s is the arrival in Unix time; for a choice that the engine never began, due_s is
    when it ended.

    model: the API's name of the model or adapter that served it. choice: index in the answer. key: name of the API key,
    "" without keys. ending: stop, length, abort, cancelled, error or rejected. cause: why a target was missed, judged
    by the acceptance rate of the server until then. prompt, output: texts, None unless the server keeps them.
    """

    run: ServerRun
    model: str
    choice: int
    key: str
    ending: str
    cause: str | None
    cached_tokens: int
    ended_unix_s: float
    prompt: str | None = None
    output: str | None = None

    @property
    def arrival_unix_s(self) -> float:
        return self.due_s


def served_record(
    metrics: RequestMetrics,
    *,
    run: ServerRun,
    model: str = "",
    request_id: str,
    choice: int,
    key: str,
    ending: str,
    error_code: str | None,
    arrival_unix_s: float,
    ended_unix_s: float,
    acceptance_rate: float,
    prompt: str | None = None,
    output: str | None = None,
) -> ServedRecord:
    """Build the record of a choice from the metrics that the engine gave.

    model: "": the run's. acceptance_rate: accepted / drafted tokens of the server so far; it decides the cause of a
    missed target.
    """
    record = RequestRecord.of(
        metrics,
        run_id=run.run_id,
        policy=run.policy,
        rate_rps=0.0,
        request_id=request_id,
        status=status_of(ending, error_code),
        error_code=error_code,
        due_s=arrival_unix_s,
    )
    return ServedRecord(
        **{column.name: getattr(record, column.name) for column in fields(record)},
        run=run,
        model=model or run.model,
        choice=choice,
        key=key,
        ending=ending,
        cause=violation_cause(record, acceptance_rate=acceptance_rate),
        cached_tokens=metrics.cached_tokens,
        ended_unix_s=ended_unix_s,
        prompt=prompt,
        output=output,
    )


def unstarted_metrics(
    tpot_slo_s: float | None, ttft_slo_s: float | None, slo_class: str, error_code: str | None,
    thinking_tpot_slo_s: float | None = None, e2e_slo_s: float | None = None,
) -> RequestMetrics:  # fmt: skip
    """Return metrics of a choice that the engine never began: its targets, and whether they were infeasible."""
    feasible = False if error_code == SLO_INFEASIBLE else None
    return RequestMetrics(
        arrival_s=0.0, tpot_slo_s=tpot_slo_s, ttft_slo_s=ttft_slo_s, slo_class=slo_class, slo_feasible=feasible,
        thinking_tpot_slo_s=thinking_tpot_slo_s, e2e_slo_s=e2e_slo_s,
    )  # fmt: skip


def status_of(ending: str, error_code: str | None) -> Status:
    """Return the status of a choice that ended so; records, dashboard and metrics all use it."""
    return "failed" if error_code in LOST else STATUS_OF[ending]


def arrival_order(record: RequestRecord) -> tuple[float, int]:
    """Return a sort key for the order in which the client sent requests: due time, then the number that ends the id."""
    number = record.request_id[len(record.request_id.rstrip("0123456789")) :]
    return record.due_s, int(number or 0)


def tpot_paper_s(metrics: RequestMetrics) -> float | None:
    """Return (last token - first token) / N, as the AdaServe authors count TPOT: N includes the prefill's token."""
    if metrics.output_tokens == 0 or metrics.first_token_s is None or metrics.last_token_s is None:
        return None
    return (metrics.last_token_s - metrics.first_token_s) / metrics.output_tokens


def slowest_part(parts: TpotParts) -> tuple[float | None, float | None]:
    """Return target and measured TPOT of the part that took longest for its target; of the last without targets."""
    targeted = [(target_s, tpot_s) for target_s, tpot_s in parts if target_s is not None]
    return max(targeted, key=lambda part: -1.0 if part[1] is None else part[1] / part[0], default=parts[-1])


def violation_cause(record: RequestRecord, *, acceptance_rate: float) -> Cause | None:
    """Return the first cause that applies, in the order of docs/metrics.md; None when no target was missed.

    acceptance_rate: accepted / drafted tokens of the whole run.
    """
    if record.slo_met is not False or record.status == "cancelled":
        return None
    if record.slo_feasible is False and record.status in ("finished", "rejected"):
        return "infeasible"
    if record.status != "finished":
        return record.status
    if record.tpot_met is False:
        target_s, tpot_s = slowest_part(record.tpot_parts)
        return _pace_cause(record, target_s or 0.0, tpot_s or 0.0, acceptance_rate)
    queue_s, ttft_s = record.queue_s or 0.0, record.ttft_s or 0.0
    decode_s = (record.e2e_s or 0.0) - ttft_s
    if record.ttft_met is not False and record.e2e_slo_s is not None and decode_s > ttft_s:
        target_s = (record.e2e_slo_s - ttft_s) / max(record.output_tokens - 1, 1)
        return _pace_cause(record, target_s, record.tpot_s or 0.0, acceptance_rate)
    return "queueing" if queue_s >= ttft_s - queue_s else "prefill"


def _pace_cause(record: RequestRecord, target_s: float, tpot_s: float, acceptance_rate: float) -> Cause:
    """Return why tokens took tpot_s each instead of target_s: low acceptance when the run's mean acceptance would have
    been enough with the tokens drafted here. Steps of a missed part count as having emitted as much as all steps
    did."""
    if record.preemptions:
        return "preemption"
    if record.verify_steps and record.drafted_tokens:
        step_s = tpot_s * (record.output_tokens - 1) / record.verify_steps
        tokens_at_mean = 1 + acceptance_rate * record.drafted_tokens / record.verify_steps
        if tokens_at_mean * target_s >= step_s:
            return "low_acceptance"
    return "budget"


def judged(met: bool | None, status: Status) -> bool | None:
    """Return whether a target counts as met: only what finished met it, and a cancelled request is not counted."""
    if status == "finished" or met is None:
        return met
    return None if status == "cancelled" else False
