"""What a server keeps of each choice that ended: a request record, and what only a server knows. No storage here.

Numbers and names; text only where the server was told to keep it.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.errors import SLO_INFEASIBLE, AdaServeError, EngineDeadError, EngineRestartingError
from adaserve_jax.results.causes import violation_cause
from adaserve_jax.results.records import RequestRecord, Status
from adaserve_jax.types import RequestMetrics

STATUS_OF: dict[str, Status] = {
    "stop": "finished",
    "length": "finished",
    "abort": "failed",
    "error": "failed",
    "rejected": "rejected",
}
"""How an ending counts. An abort is the client's, or that of a server that shuts down: the request failed."""
LOST = (EngineDeadError.code, EngineRestartingError.code, AdaServeError.code)
"""Codes of choices that were not refused: the engine ended, or failed, while it had them."""


@dataclass(frozen=True)
class ServerRun:
    """One start of an engine behind a server, the same for all its choices. started_unix_s: the first end of them.

    model: the name in the API. target, draft: as configured.
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


@dataclass(frozen=True, slots=True)
class ServedChoice:
    """One choice of one HTTP request, and how it ended.

    record: its due_s is the arrival in Unix time, and it has no times of tokens. choice: index in the answer. key: name
    of the API key, "" without keys. cause: why a target was missed, by the acceptance of the server so far. prompt,
    output: texts, None unless the server keeps them.
    """

    run: ServerRun
    record: RequestRecord
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
        """When it came; of a choice that the engine never began, when it ended."""
        return self.record.due_s


def status_of(ending: str, error_code: str | None) -> Status:
    """How a choice counts that ended so, for records, dashboard and metrics alike."""
    return "failed" if error_code in LOST else STATUS_OF[ending]


def served_choice(
    metrics: RequestMetrics,
    *,
    run: ServerRun,
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
) -> ServedChoice:
    """What is kept of a choice with these metrics. acceptance_rate: accepted/drafted of the server so far."""
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
    cause = violation_cause(record, acceptance_rate=acceptance_rate)
    return ServedChoice(run, record, choice, key, ending, cause, metrics.cached_tokens, ended_unix_s, prompt, output)


def unbegun(
    tpot_slo_s: float | None, ttft_slo_s: float | None, slo_class: str, error_code: str | None
) -> RequestMetrics:
    """Metrics of a choice that the engine never began: its targets, and whether they were the reason."""
    feasible = False if error_code == SLO_INFEASIBLE else None
    return RequestMetrics(
        arrival_s=0.0, tpot_slo_s=tpot_slo_s, ttft_slo_s=ttft_slo_s, slo_class=slo_class, slo_feasible=feasible
    )
