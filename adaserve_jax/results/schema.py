"""Columns of results.jsonl: one flat row per point and SLO class, with everything needed to repeat it.

docs/metrics.md defines every column.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

SCHEMA_VERSION: Final = 2
ALL_CLASSES = "all"
OWN_SYSTEM = "adaserve_jax"
"""System that served, unless it was another one behind a URL."""
SERVED = "served"
"""Arrival process of rows that are made from a server's records. The engine's limits are unknown in them."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Place, time and means of the measurement; the same for all rows of one bench run.

    plan_hash: hash, in hex, of everything that was to be measured; a resumed run has the same. engine_hash: hash, in
    hex, of the engine's settings without the policy; empty where it was not noted. synthetic_acceptance: chances by
    depth (`rates_text`) by which tokens were accepted instead of by comparison; None: they were compared.
    """

    run_id: str
    started_at: str
    commit: str
    package_version: str
    machine: str
    device: str
    jax_version: str
    target: str
    draft: str | None
    target_params: int | None = None
    draft_params: int | None = None
    deterministic: bool = False
    max_requests: int = 0
    max_context: int = 0
    baseline_s: float
    workload: str
    workload_hash: str
    seed: int
    max_prefill_tokens: int = 0
    num_pages: int | None = None
    extension_pages: int | None = None
    elastic: str | None = None
    plan_hash: str = ""
    engine_hash: str = ""
    synthetic_acceptance: str | None = None


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Varied settings of one point, and whether the client kept up.

    point: readable name of one measured setting and repeat, unique in its run and the same after a resume.
    policy_hash: hash, in hex, of the policy's file; empty for a policy of the package.
    """

    policy: str
    arrival_process: str
    rate_rps: float
    duration_s: float
    wall_s: float
    compiles_after_ready: int = 0
    client_late_max_s: float = 0.0
    client_late_p99_s: float = 0.0
    valid: bool
    invalid_reason: str | None = None
    replicas: int = 1
    router: str | None = None
    label: str | None = None
    system: str = OWN_SYSTEM
    point: str = ""
    repeat: int = 0
    urgent_share: float | None = None
    slo_scale: float | None = None
    burstiness: float | None = None
    token_source: str = "engine"
    policy_hash: str = ""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Measured figures of one SLO class, or of all classes together (slo_class "all").

    Units are seconds, tokens and tokens per second; None where nothing was measured.
    """

    slo_class: str
    requests: int
    requests_with_slo: int
    finished: int
    rejected: int
    failed: int
    unfinished: int
    prompt_tokens: int
    output_tokens: int
    attainment: float | None
    attainment_tpot: float | None
    attainment_ttft: float | None
    attainment_tpot_paper: float | None
    violations: float | None
    goodput_tps: float
    goodput_tpot_tps: float
    throughput_tps: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_mean_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None
    tpot_paper_mean_s: float | None
    itl_p50_s: float | None
    itl_p90_s: float | None
    itl_p99_s: float | None
    queue_p50_s: float | None
    queue_p99_s: float | None
    verify_steps: int
    drafted_tokens: int
    accepted_tokens: int
    mean_accepted: float | None
    acceptance_rate: float | None
    preemptions: int
    fluidity: float | None
    cause_rejected: int
    cause_failed: int
    cause_unfinished: int
    cause_queueing: int
    cause_prefill: int
    cause_infeasible: int
    cause_preemption: int
    cause_low_acceptance: int
    cause_budget: int
    e2e_mean_s: float | None = None
    running_mean: float | None = None
    busy_throughput_tps: float | None = None
    cancelled: int = 0
    attainment_e2e: float | None = None


CAUSE_COLUMNS = tuple(field.name for field in fields(Summary) if field.name.startswith("cause_"))


@dataclass(frozen=True, kw_only=True)
class ResultRow(Summary, Conditions, Provenance):
    """One line of results.jsonl.

    `schema_version` rises when a column changes its meaning or goes away. A column with a default may be absent from
    files that were written before it was added.
    """

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    """In version 1 a violation was infeasible when its TPOT target was below `baseline_s`."""

    @classmethod
    def join(cls, provenance: Provenance, conditions: Conditions, summary: Summary) -> ResultRow:
        """Build a row of its three parts."""
        parts = (provenance, conditions, summary)
        return cls(**{f.name: getattr(part, f.name) for part in parts for f in fields(part)})
