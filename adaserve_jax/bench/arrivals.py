"""When which request of a workload arrives: Poisson by seed, or the times that the workload recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.bench.workload import Workload, WorkloadItem
from adaserve_jax.errors import ConfigError

POISSON, TRACE = "poisson", "trace"


@dataclass(frozen=True)
class Arrival:
    """One request of a run. due_s: seconds since the start. seed: for an item that brings none."""

    due_s: float
    item: WorkloadItem
    seed: int


@dataclass(frozen=True)
class Schedule:
    """All requests of one run in order of due_s. rate_rps: offered requests per second."""

    process: str
    rate_rps: float
    duration_s: float
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True)
class ArrivalSpec:
    """A process of arrivals. text: as it is written. cv: coefficient of variation of the gaps."""

    process: str
    text: str
    cv: float = 1.0


def parse_arrivals(text: str) -> ArrivalSpec:
    """The process that `text` names. Raises ConfigError naming those that there are."""
    if text not in (POISSON, TRACE):
        raise ConfigError(f"arrivals must be {POISSON} or {TRACE}, got {text!r}")
    return ArrivalSpec(text, text)


def make_schedule(
    workload: Workload, spec: ArrivalSpec, *, rate_rps: float | None, duration_s: float, seed: int
) -> Schedule:
    """All requests of one run. rate_rps None: the workload's own times."""
    if rate_rps is None or spec.process == TRACE:
        return trace_schedule(workload, duration_s=duration_s, seed=seed)
    return poisson_schedule(workload, rate_rps=rate_rps, duration_s=duration_s, seed=seed)


def poisson_schedule(workload: Workload, *, rate_rps: float, duration_s: float, seed: int) -> Schedule:
    """Exponential gaps of mean 1/rate until `duration_s`; items in shuffled passes over the workload, so that every
    pass has the workload's mix. The same arguments give the same schedule, whatever the policy under test.
    """
    if not 0 < rate_rps < np.inf or not 0 < duration_s < np.inf:
        raise ConfigError(f"rate and duration must be finite and above 0, got {rate_rps!r} and {duration_s!r}")
    rng = np.random.default_rng(seed)
    times = []
    now = rng.exponential(1 / rate_rps)
    while now < duration_s:
        times.append(float(now))
        now += rng.exponential(1 / rate_rps)
    passes = -(-len(times) // len(workload.items))
    order = [int(i) for _ in range(passes) for i in rng.permutation(len(workload.items))]
    seeds = rng.integers(0, 2**63, len(times))
    arrivals = (Arrival(t, workload.items[i], int(s)) for t, i, s in zip(times, order, seeds, strict=False))
    return Schedule(POISSON, rate_rps, duration_s, tuple(arrivals))


def trace_schedule(workload: Workload, *, duration_s: float, seed: int) -> Schedule:
    """The workload's own arrival_s, counted from the earliest, up to `duration_s`."""
    if not workload.has_arrivals:
        raise ConfigError(
            f"rate 'trace' needs arrival_s on every line of workload {workload.name}; add it, or give rates as numbers"
        )
    items = sorted(workload.items, key=lambda item: item.arrival_s or 0.0)
    first = items[0].arrival_s or 0.0
    seeds = np.random.default_rng(seed).integers(0, 2**63, len(items))
    arrivals = tuple(
        Arrival((item.arrival_s or 0.0) - first, item, int(s))
        for item, s in zip(items, seeds, strict=True)
        if (item.arrival_s or 0.0) - first < duration_s
    )
    return Schedule(TRACE, len(arrivals) / duration_s, duration_s, arrivals)
