"""Simulates policies x traces x numbers of replicas, tuned settings among them; result rows as a bench's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from adaserve_jax.bench.loads import check_classes
from adaserve_jax.bench.machines import Machine
from adaserve_jax.bench.simulation import Simulated, SimulationPlan, simulate
from adaserve_jax.bench.simulation_rows import Varied, plan_hash, result_rows, trace_tags
from adaserve_jax.bench.traces import Trace
from adaserve_jax.bench.tuning import Grid, Score, Setting, Tuned, tune
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.provenance import new_run_id
from adaserve_jax.results.schema import ResultRow

TUNED = "tuned"
"""Label of a row whose setting was chosen for its point."""
OnPoint = Callable[[Simulated, list[ResultRow]], None]


def simulate_all(
    plan: SimulationPlan, machine: Machine, traces: Sequence[Trace], on_point: OnPoint | None = None,
    varied: Sequence[Varied] | None = None,
) -> list[ResultRow]:  # fmt: skip
    """Every policy over every trace, with every number of replicas, and samples of each. varied: what of each trace
    was, for the rows. Raises ConfigError for an unknown policy."""
    for trace in traces:
        check_classes(trace.name, trace.classes)
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
    """The best `spec:<k>` for this trace, by joint attainment, then goodput; k no deeper than the machine's draft."""
    whole = grid or Grid()
    limits = machine.limits()
    possible = replace(
        whole,
        draft_tokens=tuple(k for k in whole.draft_tokens if k <= limits.max_depth),
        max_requests=tuple(sorted({min(cap, machine.limits(cap).max_requests) for cap in whole.max_requests})),
    )
    if not possible.draft_tokens:
        raise ConfigError(f"machine {machine.name} has no draft, so that no chain can be tuned; leave out --tune")

    def evaluate(setting: Setting) -> Score:
        policy, as_planned = as_run(setting, replace(plan, keep_token_times=False, keep_records=False))
        simulated = simulate(policy, as_planned, machine, trace, replicas=replicas)
        overall = summarize(simulated.outcomes, wall_s=simulated.wall_s)[0]
        return overall.attainment or 0.0, overall.goodput_tps

    return tune(evaluate, possible, exhaustive=exhaustive)


def as_run(setting: Setting, plan: SimulationPlan) -> tuple[str, SimulationPlan]:
    """The policy and plan that run `setting`."""
    as_planned = replace(plan, max_requests=setting.max_requests, max_prefill_tokens=setting.prefill_tokens)
    return f"spec:{setting.draft_tokens}", as_planned
