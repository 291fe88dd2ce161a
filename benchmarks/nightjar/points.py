"""What benchmarks/nightjar/tables.py compares: machines, loads, policies, pools of pages. Runs nothing but `capacity`.

A load is a share of the machine's capacity: the requests per second that plain decoding completes when there is always
more to do. Lengths are those of the busiest swing of Azure's conversation trace, fitted to the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.residency import T_PERSIST, TAU_LOW, ElasticRule
from adaserve_jax.sim.machines import Machine, load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace, load_trace
from benchmarks.nightjar.segments import (
    MINUTE_S,
    at_once,
    busiest_swing,
    poisson_arrivals,
    shortened,
    thinned,
    with_lengths,
)

PLAIN, V1, OURS, MAIN = "ar", "nightjar-v1", "nightjar", "adaserve"
METHODS = (
    PLAIN, "spec:3", "dsd", "dsd-probe", "ucbspec", "exp3spec", "tetris:3", "linucb", "lints", "bingreedy",
    V1, OURS, MAIN,
)  # fmt: skip
CONTEXTUAL = ("linucb", "lints", "bingreedy", V1, OURS)
"""Figure 12 of the paper, and the paper's own first version."""
SEGMENT_MINUTES = 20
POISSON, DYNAMIC = "Poisson", "dynamic"
LOW, HIGH = 0.25, 1.25
SHARES = (LOW, 0.5, 0.75, 1.0, HIGH)
"""Of the capacity. LOW and HIGH are the low and the high rate of the tables of methods."""
DYNAMIC_SHARE = 0.75
"""The mean of the dynamic load; its busiest minute is just beyond the capacity."""
REQUESTS = 480
"""Of a Poisson load, as many as the paper takes of each data set."""
SATURATING = 1000
"""Requests at once that the capacity is measured with."""
OFFLOAD_SHARES = (0.75, 1.0, 1.25, 1.5)
THRESHOLD_SHARE = 1.25
TAUS = tuple(sorted({0.02, 0.05, TAU_LOW, 0.2, 0.3}))
PERSISTS = tuple(sorted({8, T_PERSIST, 32, 128}))
SLO_CLASS = "chat"
DRAIN_S = 7200.0
CLASSES = {"low": (POISSON, LOW), "high": (POISSON, HIGH), "dynamic": (DYNAMIC, DYNAMIC_SHARE)}


@dataclass(frozen=True)
class Pool:
    """KV pages of a machine that has few: base pages, those that the draft's memory makes, and the swap rule.

    elastic: "on" or "off".
    """

    num_pages: int
    extension_pages: int
    elastic: str
    tau_low: float = TAU_LOW
    persist_steps: int = T_PERSIST


@dataclass(frozen=True)
class Setup:
    """A machine and how the trace's lengths are fitted to it. prompt_parts: one of so many tokens of a prompt is kept.
    pages: base and extension pages of the tables of elastic memory; None: it is in none. loads: that it is run under.
    """

    name: str
    machine: str
    prompt_parts: float
    most_output: int
    pages: tuple[int, int] | None = None
    loads: tuple[str, ...] = (POISSON, DYNAMIC)


PROFILE = str(Path(__file__).parents[1] / "results" / "profile-110m-cpu.json")
SETUPS = (
    Setup("llama-70b", "llama-70b", 10, 1000),
    Setup("llama-70b-recorded", "llama-70b", 1, 1000, loads=(DYNAMIC,)),
    Setup("grown-110M", PROFILE, 13, 256, pages=(96, 24)),
    Setup("qwen-32b", "qwen-32b", 10, 1000),
)


@dataclass(frozen=True)
class Point:
    """One policy under one load. share: of the capacity, of the load's mean rate."""

    setup: Setup
    load: str
    share: float
    policy: str
    seed: int
    pool: Pool | None = None

    @property
    def plan(self) -> SimulationPlan:
        plan = SimulationPlan((), self.seed, drain_s=DRAIN_S, keep_token_times=False)
        pool = self.pool
        if pool is None:
            return plan
        rule = ElasticRule(pool.tau_low, pool.persist_steps)
        return replace(
            plan,
            num_pages=pool.num_pages,
            extension_pages=pool.extension_pages,
            elastic=pool.elastic,
            elastic_rule=rule,
        )


@dataclass(frozen=True)
class Scale:
    """Sizes of a run: all of it, or a quick one to see it work. loads: names of CLASSES; none: all loads and pools."""

    requests: int = REQUESTS
    saturating: int = SATURATING
    shares: tuple[float, ...] = SHARES
    methods: tuple[str, ...] = METHODS
    seeds: int = 3
    quick: bool = False
    loads: tuple[str, ...] = ()

    def runs(self, policy: str) -> bool:
        return not self.quick or policy in self.methods


QUICK = Scale(requests=12, saturating=24, shares=(LOW, HIGH), methods=(PLAIN, "spec:3", OURS), seeds=1, quick=True)


class Workloads:
    """The traces of one setup, all of the same lengths. capacity_rps: with three digits."""

    def __init__(self, setup: Setup, segment: Trace, scale: Scale):
        self.machine: Machine = load_machine(setup.machine)
        self._scale = scale
        self._lengths = with_lengths(
            segment, prompt_parts=setup.prompt_parts, most_output=setup.most_output,
            max_context=self.machine.limits().max_context,
        )  # fmt: skip
        self.capacity_rps = self._capacity()

    def trace(self, point: Point) -> Trace:
        """Seeded by the point: a Poisson load's arrivals and requests. The dynamic load has those that it has."""
        rate = point.share * self.capacity_rps
        if point.load == POISSON:
            return poisson_arrivals(self._lengths, rate_rps=rate, count=self._scale.requests, seed=point.seed)
        own = self._lengths.rate_rps
        return thinned(self._lengths, rate) if rate <= own else shortened(self._lengths, rate / own)

    def about(self) -> dict[str, float]:
        """Means of the requests, and the capacity."""
        requests = self._lengths.requests
        return {
            "capacity_rps": self.capacity_rps,
            "mean_prompt_tokens": float(np.mean([r.prompt_tokens for r in requests])),
            "mean_output_tokens": float(np.mean([r.output_tokens for r in requests])),
            "max_depth": self.machine.limits().max_depth,
            "max_requests": self.machine.limits().max_requests,
        }

    def _capacity(self) -> float:
        count = min(self._scale.saturating, len(self._lengths.requests))
        plan = SimulationPlan((), drain_s=DRAIN_S, keep_token_times=False)
        done = simulate(PLAIN, plan, self.machine, at_once(self._lengths, count=count, seed=0))
        return float(f"{count / done.wall_s:.3g}")


def segment_of(path: Path) -> Trace:
    """The load's shape and lengths: of a file of Azure's, the minutes in which its rate swings most."""
    return busiest_swing(load_trace(path, format="azure", slo_class=SLO_CLASS), SEGMENT_MINUTES)


def made_segment(seed: int = 0) -> Trace:
    """Instead of Azure's, to see it work: a few requests, in the second minute twice as many as in the first."""
    rng = np.random.default_rng(seed)
    times = np.sort(np.concatenate([rng.uniform(0, MINUTE_S, 15), rng.uniform(MINUTE_S, 2 * MINUTE_S, 30)]))
    requests = (
        TraceRequest(float(at), int(rng.integers(100, 1000)), int(rng.integers(5, 20)), SLO(), SLO_CLASS)
        for at in times
    )
    return Trace("made", "made", tuple(requests))


def points(setups: Sequence[Setup], scale: Scale) -> list[Point]:
    """All points of all tables, each once, seed by seed, so that a run that is stopped has whole seeds."""
    found: dict[Point, None] = {}
    for seed in range(scale.seeds):
        for setup in setups:
            for point in _of_setup(setup, scale, seed):
                found[point] = None
    return list(found)


def chains(setup: Setup) -> list[str]:
    """The fixed lengths of a machine, none included."""
    return [PLAIN, *(f"spec:{k}" for k in range(1, load_machine(setup.machine).limits().max_depth + 1))]


def _of_setup(setup: Setup, scale: Scale, seed: int) -> Iterator[Point]:
    asked = [CLASSES[name] for name in scale.loads]
    for load, share in asked or [(POISSON, share) for share in scale.shares] + [(DYNAMIC, DYNAMIC_SHARE)]:
        if load not in setup.loads:
            continue
        policies = scale.methods if (load, share) in CLASSES.values() else (*CONTEXTUAL, MAIN)
        for policy in dict.fromkeys((*policies, *(chains(setup) if load == POISSON else ()))):
            if scale.runs(policy):
                yield Point(setup, load, share, policy, seed)
    if setup.pages is not None and not asked:
        yield from _elastic(setup, scale, seed)


def _elastic(setup: Setup, scale: Scale, seed: int) -> Iterator[Point]:
    assert setup.pages is not None
    few = slice(-1, None) if scale.quick else slice(None)
    for share in OFFLOAD_SHARES[few]:
        for elastic in ("off", "on"):
            for policy in filter(scale.runs, (OURS, MAIN)):
                yield Point(setup, POISSON, share, policy, seed, Pool(*setup.pages, elastic))
    for tau_low in TAUS[few]:
        for persist in PERSISTS[few]:
            yield Point(setup, POISSON, THRESHOLD_SHARE, OURS, seed, Pool(*setup.pages, "on", tau_low, persist))


def find_setups(names: Sequence[str]) -> list[Setup]:
    """Setups by name; all of none. Raises ConfigError for an unknown one."""
    known = {setup.name: setup for setup in SETUPS}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise ConfigError(f"no setup {unknown[0]!r}; there are {'; '.join(known)}")
    return [known[name] for name in names] or list(SETUPS)
