"""Result rows of simulated points: the same columns as a bench's, with what stood in for the machine as the device."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import adaserve_jax
from adaserve_jax.bench.machines import Machine
from adaserve_jax.bench.reshaping import Shape
from adaserve_jax.bench.simulation import SimulationPlan
from adaserve_jax.bench.traces import Trace
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.record_columns import RecordColumns
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import Conditions, Provenance, ResultRow
from adaserve_jax.scheduler.policy_files import file_hashes


@dataclass(frozen=True)
class Varied:
    """What of a trace was varied, for the rows; None: it is as it was. urgent_share: of the class with the tightest
    TPOT target. slo_scale: relative targets, in baseline latencies."""

    urgent_share: float | None = None
    slo_scale: float | None = None

    @classmethod
    def of(cls, trace: Trace, shape: Shape, baseline_s: float) -> Varied:
        """How `shape` varies `trace`, which is not reshaped yet."""
        share = None if shape.mix is None else _urgent_share(trace, shape.mix, baseline_s)
        return cls(share, shape.slo_scale)


def _urgent_share(trace: Trace, mix: Mapping[str, float], baseline_s: float) -> float | None:
    targets: dict[str, float] = {}
    for request in trace.requests:
        target_s = request.slo.tpot_s(baseline_s)
        if target_s is not None:
            targets[request.slo_class] = min(target_s, targets.get(request.slo_class, target_s))
    if not targets:
        return None
    return mix.get(min(targets, key=targets.__getitem__), 0.0) / sum(mix.values())


def trace_tags(traces: Sequence[Trace], varied: Sequence[Varied]) -> list[str]:
    """What names each trace in its points: its rate, and of what is varied that which differs; where this is the same
    its name too, and its number where all is."""
    tags = [f"{trace.rate_rps:.4g}/s" for trace in traces]
    shares, scales = [each.urgent_share for each in varied], [each.slo_scale for each in varied]
    for name, values in (("urgent", shares), ("slo", scales)):
        if len(set(values)) > 1:
            told = [f"{name}=as-is" if value is None else f"{name}={value:g}" for value in values]
            tags = [f"{tag} {each}" for tag, each in zip(tags, told, strict=True)]
    for more in ([trace.name for trace in traces], [f"#{number}" for number in range(len(traces))]):
        counts = Counter(tags)
        tags = [f"{tag} {told}" if counts[tag] > 1 else tag for tag, told in zip(tags, more, strict=True)]
    return tags


def plan_hash(plan: SimulationPlan, machine: Machine, traces: Sequence[Trace]) -> str:
    """Of all that is to be simulated: the same for the same plan, files of policies, machine and traces."""
    files = sorted(file_hashes(plan.policies).items())
    described = repr((plan, files, machine, [(trace.name, trace.sha256) for trace in traces]))
    return hashlib.sha256(described.encode()).hexdigest()


def result_rows(
    policy: str, plan: SimulationPlan, machine: Machine, trace: Trace,
    records: Sequence[RequestRecord] | RecordColumns, *,
    wall_s: float, run_id: str, replicas: int = 1, label: str | None = None, point: str = "",
    varied: Varied | None = None, plan_hash: str = "",
) -> list[ResultRow]:  # fmt: skip
    """The rows of one simulated point, over all classes and by class. label: what is said of how it was chosen. point:
    its name. varied: what of the trace was."""
    provenance = _provenance(plan, machine, trace, run_id, plan_hash)
    varied = varied or Varied()
    conditions = Conditions(
        policy=policy, arrival_process="trace", rate_rps=trace.rate_rps, duration_s=trace.duration_s,
        wall_s=wall_s, compiles_after_ready=0, client_late_max_s=0.0, client_late_p99_s=0.0, valid=True,
        invalid_reason=None, replicas=replicas, router=plan.router if replicas > 1 else None, label=label,
        point=point, urgent_share=varied.urgent_share, slo_scale=varied.slo_scale,
        policy_hash=file_hashes([policy]).get(policy, ""),
    )  # fmt: skip
    summaries = summarize(records, wall_s=wall_s)
    return [ResultRow.join(provenance, conditions, summary) for summary in summaries]


def _provenance(plan: SimulationPlan, machine: Machine, trace: Trace, run_id: str, plan_hash: str) -> Provenance:
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
        plan_hash=plan_hash,
    )
