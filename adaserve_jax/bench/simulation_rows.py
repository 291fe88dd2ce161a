"""Result rows of simulated points: the same columns as a bench's, with what stood in for the machine as the device."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import adaserve_jax
from adaserve_jax.bench.machines import Machine
from adaserve_jax.bench.traces import Trace
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import Conditions, Provenance, ResultRow

if TYPE_CHECKING:
    from adaserve_jax.bench.simulation import SimulationPlan


def result_rows(
    policy: str, plan: SimulationPlan, machine: Machine, trace: Trace, records: Sequence[RequestRecord], *,
    wall_s: float, run_id: str, replicas: int = 1, label: str | None = None,
) -> list[ResultRow]:  # fmt: skip
    """The rows of one simulated point, over all classes and by class. label: what is said of how it was chosen."""
    provenance = _provenance(plan, machine, trace, run_id)
    conditions = Conditions(
        policy=policy, arrival_process="trace", rate_rps=trace.rate_rps, duration_s=trace.duration_s,
        wall_s=wall_s, compiles_after_ready=0, client_late_max_s=0.0, client_late_p99_s=0.0, valid=True,
        invalid_reason=None, replicas=replicas, router=plan.router if replicas > 1 else None, label=label,
    )  # fmt: skip
    summaries = summarize(records, wall_s=wall_s)
    return [ResultRow.join(provenance, conditions, summary) for summary in summaries]


def _provenance(plan: SimulationPlan, machine: Machine, trace: Trace, run_id: str) -> Provenance:
    limits = plan.limits(machine)
    return Provenance(
        run_id=run_id,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=source_commit(),
        package_version=adaserve_jax.__version__,
        machine=machine_name(),
        device=f"simulated: {machine.name}",
        jax_version="none",
        target=machine.name,
        draft=machine.name,
        target_params=None,
        draft_params=None,
        deterministic=False,
        max_requests=limits.max_requests,
        max_context=limits.max_context,
        baseline_s=machine.baseline_s,
        workload=trace.name,
        workload_hash=trace.sha256,
        seed=plan.seed,
        max_prefill_tokens=plan.max_prefill_tokens,
        num_pages=limits.num_pages,
        extension_pages=limits.extension_pages,
        elastic=plan.elastic,
    )
