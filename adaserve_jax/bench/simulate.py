"""Simulates policies x traces x numbers of replicas, tuned settings among them; result rows as a bench's."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product

import adaserve_jax
from adaserve_jax.bench.plan import check_classes
from adaserve_jax.results.aggregate import RecordColumns, summarize
from adaserve_jax.results.provenance import new_run_id, source_commit
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import Conditions, Provenance, ResultRow
from adaserve_jax.scheduler.policies import file_hashes
from adaserve_jax.sim.machines import Machine
from adaserve_jax.sim.simulation import Simulated, SimulationPlan, check_lengths, simulate
from adaserve_jax.synthetic_acceptance import rates_text
from adaserve_jax.workloads.reshaping import Reshaping
from adaserve_jax.workloads.traces import Trace


@dataclass(frozen=True)
class Varied:
    """Variation of a trace, for the rows; None: unchanged. urgent_share: of the class with the tightest TPOT target.
    slo_scale: relative targets, in baseline latencies."""

    urgent_share: float | None = None
    slo_scale: float | None = None

    @classmethod
    def of(cls, trace: Trace, reshaping: Reshaping, baseline_s: float) -> Varied:
        """Return how `reshaping` varies `trace`, which is not reshaped yet."""
        share = None if reshaping.mix is None else _urgent_share(trace, reshaping.mix, baseline_s)
        return cls(share, reshaping.slo_scale)


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
    """Name each trace for its points: by its rate and by what differs between traces; then by its name, then by its
    number, if those are equal."""
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
    """Return a hash that is the same for the same plan, policy files, machine and traces."""
    files = sorted(file_hashes(plan.policies).items())
    return _hash(plan, files, machine, [(trace.name, trace.sha256) for trace in traces])


def _hash(*described: object) -> str:
    return hashlib.sha256(repr(described).encode()).hexdigest()


def result_rows(
    policy: str, plan: SimulationPlan, machine: Machine, trace: Trace,
    records: Sequence[RequestRecord] | RecordColumns, *,
    wall_s: float, run_id: str, replicas: int = 1, label: str | None = None, point: str = "",
    varied: Varied | None = None, plan_hash: str = "",
) -> list[ResultRow]:  # fmt: skip
    """Return the rows of one simulated point, over all classes and by class. label: how its policy was chosen. point:
    its name. varied: how its trace was varied."""
    limits, varied = plan.limits(machine), varied or Varied()
    provenance = Provenance(
        run_id=run_id,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=source_commit(),
        package_version=adaserve_jax.__version__,
        machine=f"{machine.name}, simulated",
        device=f"simulated: {machine.name}",
        jax_version="none",
        target=machine.name,
        draft=machine.name,
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
        synthetic_acceptance=None if plan.synthetic is None else rates_text(plan.synthetic),
        plan_hash=plan_hash,
        engine_hash=_hash(machine, plan.acceptance, plan.drain_s, plan.elastic_rule, plan.fair_tenants),
    )
    conditions = Conditions(
        policy=policy, arrival_process="trace", rate_rps=trace.rate_rps, duration_s=trace.duration_s,
        wall_s=wall_s, valid=True, replicas=replicas, router=plan.router if replicas > 1 else None, label=label,
        point=point, urgent_share=varied.urgent_share, slo_scale=varied.slo_scale,
        policy_hash=file_hashes([policy]).get(policy, ""),
    )  # fmt: skip
    summaries = summarize(records, wall_s=wall_s)
    return [ResultRow.join(provenance, conditions, summary) for summary in summaries]


Score = tuple[float, float]
"""Joint attainment, then goodput in tokens per second."""


@dataclass(frozen=True, order=True)
class ChainSetting:
    """draft_tokens: k of `spec:<k>`; 0: plain decoding with chunked prefill, as Sarathi-Serve's. prefill_tokens: most
    prompt tokens of a step. max_requests: most that run.
    """

    draft_tokens: int
    prefill_tokens: int
    max_requests: int


@dataclass(frozen=True)
class Grid:
    """Increasing values of each part of a setting."""

    draft_tokens: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    prefill_tokens: tuple[int, ...] = (64, 128, 256, 512)
    max_requests: tuple[int, ...] = (28, 32, 36, 42, 48, 56, 64)

    def settings(self) -> list[ChainSetting]:
        return [ChainSetting(*values) for values in product(self.draft_tokens, self.prefill_tokens, self.max_requests)]


@dataclass(frozen=True)
class Tuned:
    """tried: how many settings were judged."""

    setting: ChainSetting
    score: Score
    tried: int


def tune(evaluate: Callable[[ChainSetting], Score], grid: Grid, *, exhaustive: bool = False) -> Tuned:
    """Return the setting with the highest score; among equals the smallest.

    A fixed policy is only as good as its setting (draft length x prefill chunk x most running requests), and the best
    setting differs from load to load. Without `exhaustive`, score a coarse grid over all three (ends and middle of the
    draft length, ends of the others); then, from its best with the shortest chunk and its best with the longest, try
    every value of one part with the others held, part by part, until a whole round brings nothing better.
    """
    scores: dict[ChainSetting, Score] = {}

    def best_of(settings: Iterable[ChainSetting]) -> ChainSetting:
        tried = list(settings)
        for setting in tried:
            if setting not in scores:
                scores[setting] = evaluate(setting)
        return min(tried, key=lambda setting: (-scores[setting][0], -scores[setting][1], setting))

    if exhaustive:
        best_of(grid.settings())
    else:
        lengths, chunks, caps = grid.draft_tokens, grid.prefill_tokens, grid.max_requests
        coarse_lengths = (lengths[0], lengths[(len(lengths) - 1) // 2], lengths[-1])
        starts = [
            best_of(ChainSetting(*values) for values in product(coarse_lengths, (chunk,), _ends(caps)))
            for chunk in dict.fromkeys(_ends(chunks))
        ]
        for best in starts:
            before = None
            while best != before:
                before = best
                best = best_of(replace(best, max_requests=cap) for cap in caps)
                best = best_of(replace(best, draft_tokens=k) for k in lengths)
                best = best_of(replace(best, prefill_tokens=chunk) for chunk in chunks)
    best = best_of(scores)
    return Tuned(best, scores[best], len(scores))


def _ends(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[-1]


TUNED = "tuned"
"""Label of a row whose setting was chosen for its point."""
OnPoint = Callable[[Simulated, list[ResultRow]], None]


def simulate_all(
    plan: SimulationPlan, machine: Machine, traces: Sequence[Trace], on_point: OnPoint | None = None,
    varied: Sequence[Varied] | None = None,
) -> list[ResultRow]:  # fmt: skip
    """Simulate every policy over every trace, with every number of replicas, and samples of each. varied: what of each
    trace was, for the rows. Raises ConfigError for an unknown policy, and for a trace that the machine cannot
    hold, before anything is simulated."""
    for trace in traces:
        check_classes(trace.name, trace.classes)
        check_lengths(plan.limits(machine), trace)
    rows: list[ResultRow] = []
    run_id, hashed = new_run_id(), plan_hash(plan, machine, traces)
    varied = varied or [Varied()] * len(traces)
    for trace, tag, changed in zip(traces, trace_tags(traces, varied), varied, strict=True):
        for replicas in plan.replicas:
            settings: list[tuple[str, SimulationPlan, str | None]] = [(policy, plan, None) for policy in plan.policies]
            if plan.tune != "no":
                tuned = tune_fixed(plan, machine, trace, replicas=replicas, exhaustive=plan.tune == "grid")
                settings.append((*as_run(tuned.setting, plan), TUNED))
            for policy, as_planned, label in settings:
                point = f"{label or policy}@{tag}" + (f" x{replicas}" if len(plan.replicas) > 1 else "")
                simulated = simulate(
                    policy, as_planned, machine, trace, run_id=run_id, point=point, replicas=replicas, sample=True
                )
                of_point = result_rows(
                    policy, as_planned, machine, trace, simulated.outcomes, wall_s=simulated.wall_s, run_id=run_id,
                    replicas=replicas, label=label, point=point, varied=changed, plan_hash=hashed,
                )  # fmt: skip
                rows += of_point
                if on_point is not None:
                    on_point(simulated, of_point)
    return rows


def tune_fixed(
    plan: SimulationPlan, machine: Machine, trace: Trace, *, replicas: int = 1, exhaustive: bool = False,
    grid: Grid | None = None,
) -> Tuned:  # fmt: skip
    """Find the best chain for this trace, none included, by joint attainment, then goodput.

    It is at most as long as the draft is deep, and keeps the limits of the machine and of the plan. grid: values to
    try; None: those of Grid, and these limits themselves.
    """
    limits = machine.limits()
    most = min(plan.max_requests or limits.max_requests, limits.max_requests)
    chunk = min(plan.max_prefill_tokens or limits.max_tokens, limits.max_tokens)
    whole = grid or Grid()
    if grid is None:
        whole = replace(whole, prefill_tokens=(*whole.prefill_tokens, chunk), max_requests=(*whole.max_requests, most))
    possible = replace(
        whole,
        draft_tokens=tuple(k for k in whole.draft_tokens if k <= limits.max_depth),
        max_requests=tuple(sorted({min(cap, most) for cap in whole.max_requests})),
        prefill_tokens=tuple(sorted({min(each, chunk) for each in whole.prefill_tokens})),
    )

    def evaluate(setting: ChainSetting) -> Score:
        policy, as_planned = as_run(setting, replace(plan, keep_token_times=False, keep_records=False))
        simulated = simulate(policy, as_planned, machine, trace, replicas=replicas)
        overall = summarize(simulated.outcomes, wall_s=simulated.wall_s)[0]
        return overall.attainment or 0.0, overall.goodput_tps

    return tune(evaluate, possible, exhaustive=exhaustive)


def as_run(setting: ChainSetting, plan: SimulationPlan) -> tuple[str, SimulationPlan]:
    """Return the policy and plan that run `setting`."""
    as_planned = replace(plan, max_requests=setting.max_requests, max_prefill_tokens=setting.prefill_tokens)
    return f"spec:{setting.draft_tokens}" if setting.draft_tokens else "ar", as_planned
