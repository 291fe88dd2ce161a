"""The plan of a bench run: policies x loads x repeats, in an order that is fair on a machine that drifts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.workloads.arrivals import POISSON, TRACE, Schedule, make_schedule, parse_arrivals
from adaserve_jax.workloads.items import Workload
from adaserve_jax.workloads.mixing import with_slo_scale, with_urgent_share

DEFAULT_LOADS = (0.5, 1.5)
"""Offered output tokens, over those of one request served alone without speculation in the same time."""


@dataclass(frozen=True)
class OfferedLoad:
    """The requests that every policy gets alike. rate_rps: None for the workload's own times. urgent_share, slo_scale:
    None for the workload as it is. arrivals: as `--arrivals` has it. repeat: each has arrivals and seeds of its own."""

    rate_rps: float | None
    urgent_share: float | None
    slo_scale: float | None
    arrivals: str
    repeat: int

    def seed(self, plan_seed: int) -> int:
        """Return the seed of arrivals and sampling; the first repeat has the plan's own, so one repeat equals none."""
        if not self.repeat:
            return plan_seed
        return int(np.random.SeedSequence((plan_seed, self.repeat)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class Point:
    """One policy under one load. name: unique in the run, and the same when it is resumed."""

    policy: str
    load: OfferedLoad
    name: str


@dataclass(frozen=True)
class BenchPlan:
    """The points to measure.

    rates: requests per second, None for the workload's own times. urgent_shares, slo_scales: None for the workload as
    it is. arrivals: processes, written as for `--arrivals`. drain_s: longest wait after the last arrival. max_late_s: a
    point whose client submits later than this at the 99th percentile is marked invalid. warmup_requests: sent before
    each point and left out of its result. record: record acceptance, with an engine that was opened for it; every
    request then has its own seed, whatever the workload says, which tells requests apart.
    """

    policies: tuple[str, ...]
    rates: tuple[float | None, ...]
    duration_s: float
    seed: int = 0
    drain_s: float = 30.0
    max_late_s: float = 0.05
    warmup_requests: int = 4
    record: bool = False
    urgent_shares: tuple[float | None, ...] = (None,)
    slo_scales: tuple[float | None, ...] = (None,)
    arrivals: tuple[str, ...] = (POISSON,)
    repeats: int = 1

    def __post_init__(self) -> None:
        self._check_numbers()
        for text in self.arrivals:
            parse_arrivals(text)
        grid = (self.policies, self.rates, self.urgent_shares, self.slo_scales, self.arrivals)
        if not all(grid) or self.repeats < 1:
            raise ConfigError(
                "a bench run needs at least one policy, rate, urgent share, SLO scale, arrival process and repeat"
            )
        twice = [name for name, count in Counter(point.name for point in self.points).items() if count > 1]
        if twice:
            raise ConfigError(f"every point must be measured once, {twice[0]} is there twice")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> BenchPlan:
        """Rebuild a plan from its `settings` in JSON; other keys are ignored."""
        own: dict[str, Any] = {f.name: settings[f.name] for f in fields(cls) if f.name in settings}
        for name, value in own.items():
            own[name] = tuple(value) if isinstance(value, list) else value
        return cls(**own)

    @property
    def loads(self) -> list[OfferedLoad]:
        """Return every load of the grid, one repeat after another."""
        grid = product(range(self.repeats), self.rates, self.urgent_shares, self.slo_scales, self.arrivals)
        return [OfferedLoad(rate, share, scale, arrivals, repeat) for repeat, rate, share, scale, arrivals in grid]

    @property
    def points(self) -> list[Point]:
        """Return the points in the order of measuring.

        The policies of one load are neighbours, and the first of them rotates from load to load and from repeat to
        repeat, so that slow drift of the machine falls on all policies alike.
        """
        points, per_repeat = [], len(self.loads) // self.repeats
        for number, load in enumerate(self.loads):
            first = (number % per_repeat + load.repeat) % len(self.policies)
            policies = self.policies[first:] + self.policies[:first]
            points += [Point(policy, load, self._name(policy, load)) for policy in policies]
        return points

    def settings(self) -> dict[str, Any]:
        """Return the plan by name, for `plan.json`."""
        return asdict(self)

    def _check_numbers(self) -> None:
        for rate in self.rates:
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"rates must be finite and above 0, got {rate!r}")
        if not 0 < self.duration_s < math.inf:
            raise ConfigError(f"duration must be a finite number of seconds above 0, got {self.duration_s!r}")
        for name, value in (("drain", self.drain_s), ("max_late", self.max_late_s)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be a finite time of at least 0, got {value!r} s")
        for name, value in (("warmup_requests", self.warmup_requests), ("seed", self.seed)):
            if value < 0:
                raise ConfigError(f"{name} must be at least 0, got {value!r}")

    def _name(self, policy: str, load: OfferedLoad) -> str:
        parts = [f"{policy}@{TRACE}" if load.rate_rps is None else f"{policy}@{load.rate_rps:g}/s"]
        if len(self.urgent_shares) > 1:
            parts.append(f"urgent={_number(load.urgent_share)}")
        if len(self.slo_scales) > 1:
            parts.append(f"slo={_number(load.slo_scale)}")
        if len(self.arrivals) > 1:
            parts.append(load.arrivals)
        if self.repeats > 1:
            parts.append(f"#{load.repeat}")
        return " ".join(parts)


def _number(value: float | None) -> str:
    return "as-is" if value is None else f"{value:g}"


STEADY = ("poisson", "gamma")
"""Processes whose gaps follow one law throughout."""


@dataclass(frozen=True)
class PreparedLoad:
    """workload: as changed, whose name and hash say so. burstiness: coefficient of variation of the gaps between
    arrivals; None where the process has none that is the same throughout."""

    workload: Workload
    schedule: Schedule
    burstiness: float | None


def load_all(plan: BenchPlan, workload: Workload) -> dict[OfferedLoad, PreparedLoad]:
    """Make the requests of every load of the plan. Raises ConfigError when a load cannot be made of this workload, or
    two would be the same."""
    check_classes(workload.name, (item.slo_class for item in workload.items))
    shaped: dict[tuple[float | None, float | None], Workload] = {}
    for share, scale in product(plan.urgent_shares, plan.slo_scales):
        shared = workload if share is None else with_urgent_share(workload, share)
        shaped[share, scale] = shared if scale is None else with_slo_scale(shared, scale)
    loads = {load: _loaded(plan, load, shaped[load.urgent_share, load.slo_scale]) for load in plan.loads}
    _check_apart(loads)
    return loads


def check_classes(workload: str, classes: Iterable[str]) -> None:
    """Raise ConfigError where a class is called as the rows over all classes are."""
    if ALL_CLASSES in classes:
        raise ConfigError(
            f"{workload}: no SLO class may be called {ALL_CLASSES!r}, as rows over every class are; call it otherwise"
        )


def _check_apart(loads: Mapping[OfferedLoad, PreparedLoad]) -> None:
    """Refuse loads that are the same because a workload's own times ignore rate and process."""
    seen: dict[object, OfferedLoad] = {}
    for load, loaded in loads.items():
        times = tuple((arrival.due_s, arrival.seed) for arrival in loaded.schedule.arrivals)
        first = seen.setdefault((load.urgent_share, load.slo_scale, load.repeat, times), load)
        if times and first is not load:
            raise ConfigError(
                f"{_said(first)} and {_said(load)} are the same requests at the same times; leave one of them out"
            )


def _said(load: OfferedLoad) -> str:
    rate = "the workload's own times" if load.rate_rps is None else f"rate {load.rate_rps:g}"
    return f"{rate} with arrivals {load.arrivals}"


def _loaded(plan: BenchPlan, load: OfferedLoad, workload: Workload) -> PreparedLoad:
    spec = parse_arrivals(load.arrivals)
    schedule = make_schedule(
        workload, spec, rate_rps=load.rate_rps, duration_s=plan.duration_s, seed=load.seed(plan.seed)
    )
    steady = load.rate_rps is not None and spec.process in STEADY
    return PreparedLoad(workload, schedule, spec.cv if steady else None)


def default_rates(workload: Workload, baseline_s: float) -> tuple[float, ...]:
    """Return requests per second at each of DEFAULT_LOADS, with two digits. baseline_s: seconds of one token, alone.
    Raises ConfigError when it is not known."""
    if baseline_s <= 0:
        raise ConfigError("the time of one token alone is not known, and so no rate that fits; give --rates")
    mean_tokens = sum(item.max_tokens for item in workload.items) / len(workload.items)
    return tuple(float(f"{load / (baseline_s * mean_tokens):.2g}") for load in DEFAULT_LOADS)
