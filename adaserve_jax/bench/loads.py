"""The requests of each load: a workload, changed as the load says, and when which of its items arrives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaserve_jax.bench.arrivals import Schedule, make_schedule, parse_arrivals
from adaserve_jax.bench.mixing import with_slo_scale, with_urgent_share
from adaserve_jax.bench.plan import BenchPlan, Load
from adaserve_jax.bench.workload import Workload
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.schema import ALL_CLASSES

STEADY = ("poisson", "gamma")
"""Processes whose gaps follow one law throughout."""


@dataclass(frozen=True)
class Loaded:
    """workload: as changed, whose name and hash say so. burstiness: coefficient of variation of the gaps between
    arrivals; None where the process has none that is the same throughout."""

    workload: Workload
    schedule: Schedule
    burstiness: float | None


def load_all(plan: BenchPlan, workload: Workload) -> dict[Load, Loaded]:
    """Of every load of the plan. Raises ConfigError: a load cannot be made of this workload, or two would be the
    same."""
    check_classes(workload.name, (item.slo_class for item in workload.items))
    shaped = {
        (share, scale): _shaped(workload, share, scale) for share in plan.urgent_shares for scale in plan.slo_scales
    }
    loads = {load: _loaded(plan, load, shaped[load.urgent_share, load.slo_scale]) for load in plan.loads}
    _check_apart(loads)
    return loads


def check_classes(workload: str, classes: Iterable[str]) -> None:
    """Raise ConfigError where a class is called as the rows over all classes are."""
    if ALL_CLASSES in classes:
        raise ConfigError(
            f"{workload}: no SLO class may be called {ALL_CLASSES!r}, as rows over every class are; call it otherwise"
        )


def _check_apart(loads: Mapping[Load, Loaded]) -> None:
    """A workload's own times may be the same whatever rate or process is asked for."""
    seen: dict[object, Load] = {}
    for load, loaded in loads.items():
        times = tuple((arrival.due_s, arrival.seed) for arrival in loaded.schedule.arrivals)
        first = seen.setdefault((load.urgent_share, load.slo_scale, load.repeat, times), load)
        if times and first is not load:
            raise ConfigError(
                f"{_said(first)} and {_said(load)} are the same requests at the same times; leave one of them out"
            )


def _said(load: Load) -> str:
    rate = "the workload's own times" if load.rate_rps is None else f"rate {load.rate_rps:g}"
    return f"{rate} with arrivals {load.arrivals}"


def _shaped(workload: Workload, urgent_share: float | None, slo_scale: float | None) -> Workload:
    shared = workload if urgent_share is None else with_urgent_share(workload, urgent_share)
    return shared if slo_scale is None else with_slo_scale(shared, slo_scale)


def _loaded(plan: BenchPlan, load: Load, workload: Workload) -> Loaded:
    spec = parse_arrivals(load.arrivals)
    schedule = make_schedule(
        workload, spec, rate_rps=load.rate_rps, duration_s=plan.duration_s, seed=load.seed(plan.seed)
    )
    steady = load.rate_rps is not None and spec.process in STEADY
    return Loaded(workload, schedule, spec.cv if steady else None)
