"""Simulation of a trace: the scheduler that serves, on simulated machines and a virtual clock.

Nothing is decoded: the executor draws acceptance, and the clock advances by the machine's costs.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from adaserve_jax.config import Elastic, EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.residency import ElasticRule
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.aggregate import RecordColumns
from adaserve_jax.results.records import RequestRecord, Status, arrival_order
from adaserve_jax.results.run_folder import PointKey
from adaserve_jax.results.samples import SAMPLE_S, Sample
from adaserve_jax.routing.fleet import Assigned, Fleet
from adaserve_jax.routing.routers import find_router
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.acceptance import AcceptanceModel, AcceptanceRecorder, RecordingExecutor
from adaserve_jax.sim.executor import SimExecutor, VirtualClock
from adaserve_jax.sim.machines import Machine
from adaserve_jax.sim.replica import Replica, run_cluster
from adaserve_jax.sim.text import CONCENTRATION
from adaserve_jax.stats import StepStats
from adaserve_jax.types import Limits, SamplingParams, Sequence
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace

ADDED = (
    "steps", "spec_steps", "generation_tokens", "draft_tokens", "accepted_tokens", "preemptions", "draft_s", "verify_s",
    "wait_s", "running", "waiting", "pages_used", "pages_total", "extension_used", "extension_total",
    "last_verified_tree_tokens",
)  # fmt: skip
MOST_SAMPLES = 36_000
"""Samples of one point; those of a point longer than an hour are further apart."""
MOST_READ = 1_000_000
"""Totals of replicas that the samples of one point add up, at most: of many replicas samples are further apart."""
NOTHING = StepStats()


class SimSampler:
    """Call `note` at the end of every step, and `end` after the last. totals: of each replica, asked for only when a
    sample is due. duration_s: of the simulation, at most. replicas: how many totals there are."""

    def __init__(
        self, totals: Callable[[], abc.Sequence[StepStats]], *, run_id: str, point: str, duration_s: float = 0.0,
        replicas: int = 1,
    ):  # fmt: skip
        self.samples: list[Sample] = []
        self._totals = totals
        self._run_id, self._point = run_id, point
        self._every_s = max(SAMPLE_S, duration_s / min(MOST_SAMPLES, MOST_READ / replicas))
        self._due_s = self._every_s
        self._taken_s = -math.inf

    def note(self, now_s: float) -> None:
        """Take a sample if one is due. The host's phases are 0: the virtual clock stands still meanwhile."""
        if now_s < self._due_s:
            return
        self._due_s = self._every_s * (math.floor(now_s / self._every_s) + 1)
        self._take(now_s)

    def end(self, now_s: float) -> None:
        """Take the last sample, which has what came since the one before, unless that one was taken just now."""
        if self._taken_s < now_s:
            self._take(now_s)

    def _take(self, now_s: float) -> None:
        self._taken_s = now_s
        stats = together(self._totals())
        self.samples.append(Sample.of(stats, NOTHING, run_id=self._run_id, point=self._point, t_s=now_s, host=False))


def together(replicas: abc.Sequence[StepStats]) -> StepStats:
    """Combine the statistics of all replicas: counts, requests, pages and tree tokens add up; depth and width are the
    greatest."""
    if len(replicas) == 1:
        return replicas[0]
    every = StepStats(
        last_depth=max(each.last_depth for each in replicas),
        last_width=max(each.last_width for each in replicas),
        draft_resident=all(each.draft_resident for each in replicas),
        elastic_moves={str(number): sum(each.elastic_moves.values()) for number, each in enumerate(replicas)},
    )
    for name in ADDED:
        setattr(every, name, sum(getattr(each, name) for each in replicas))
    return every


ALWAYS_WAITS = 1 << 30
"""Waiting places of the simulated queue: a simulation refuses nobody."""


@dataclass(frozen=True)
class SimulationPlan:
    """max_requests: most that run at once on a replica, 0 for the machine's own. max_prefill_tokens: as the engine's
    option. drain_s: how long requests are served after the last arrival; what is left then counts as unfinished.
    replicas: numbers of replicas to compare, each with `router` in front. acceptance: instead of the machine's.
    synthetic: `acceptance_rates`, instead of both; None: no synthetic acceptance. tune: whether the best fixed policy
    of each point is found and added, by search or over the whole grid.
    keep_token_times: without them records have no token times, so rows no gaps and no fluidity, and take less memory.
    keep_records: without them there are rows alone, and no token times, and a request takes some 200 bytes.
    num_pages: of a replica, 0: the machine's own, or without any so many that they never run out. extension_pages:
    those that the draft's memory makes beside them, 0: the draft stays.
    elastic, fair_tenants: as the engine's options. elastic_rule: when draft and pages change places.
    """

    policies: tuple[str, ...]
    seed: int = 0
    max_requests: int = 0
    max_prefill_tokens: int = 0
    drain_s: float = 600.0
    replicas: tuple[int, ...] = (1,)
    router: str = "slo-aware"
    acceptance: AcceptanceModel | None = None
    keep_token_times: bool = True
    tune: Literal["no", "search", "grid"] = "no"
    num_pages: int = 0
    extension_pages: int = 0
    elastic: Elastic = "auto"
    elastic_rule: ElasticRule = field(default_factory=ElasticRule)
    keep_records: bool = True
    fair_tenants: bool = False
    synthetic: tuple[float, ...] | None = None

    def limits(self, machine: Machine) -> Limits:
        """Limits of one replica. There are no texts to draft from."""
        own = machine.limits(self.max_requests)
        pages = self.num_pages or own.num_pages
        return replace(own, num_pages=pages, extension_pages=self.extension_pages, suffix_depth=0)


@dataclass
class Simulated:
    """One policy over one trace. records: in the order of arrival, where they are kept. wall_s: of the virtual clock.
    stats: the totals of each replica's scheduler. samples: where they were asked for. columns: of all requests, for
    `summarize`, where records are not kept."""

    records: list[RequestRecord]
    wall_s: float
    stats: list[StepStats]
    samples: list[Sample] = field(default_factory=list)
    columns: RecordColumns | None = None

    @property
    def outcomes(self) -> abc.Sequence[RequestRecord] | RecordColumns:
        """The columns that `summarize` makes rows from."""
        return self.records if self.columns is None else self.columns


def simulate(
    policy: str, plan: SimulationPlan, machine: Machine, trace: Trace, *,
    run_id: str = "", point: str = "", replicas: int = 1, recorder: AcceptanceRecorder | None = None,
    sample: bool = False,
) -> Simulated:  # fmt: skip
    """Serve one trace by one policy on `replicas` replicas, and return what happened. run_id, point: for the records.
    recorder: notes what verifications reveal of acceptance. sample: whether samples are taken."""
    return _Simulation(policy, plan, machine, trace, (run_id, point), replicas, recorder, sample).run()


class _Simulation:
    def __init__(
        self, policy: str, plan: SimulationPlan, machine: Machine, trace: Trace, key: PointKey, replicas: int,
        recorder: AcceptanceRecorder | None, sample: bool,
    ):  # fmt: skip
        self._plan, self._machine, self._trace, self._policy = plan, machine, trace, policy
        (self._run_id, self._point), self._recorder = key, recorder
        known = plan.acceptance
        self._concentration = CONCENTRATION if known is None else known.concentration
        self._choice_decay = machine.choice_decay if known is None else known.choice_decay
        self._limits = plan.limits(machine)
        check_lengths(self._limits, trace)
        self._samples = machine.samples(self._limits)
        seeds = np.random.default_rng(plan.seed).integers(0, 2**63, len(trace.requests))
        self._seeds = seeds
        order = np.argsort(seeds)
        self._sorted_seeds, self._chance = seeds[order].astype(np.uint64), self._chances()[order]
        self._router = find_router(plan.router)(CostTable(self._samples, self._limits), self._limits)
        self._sampler = None
        if sample:
            duration_s = trace.duration_s + plan.drain_s
            self._sampler = SimSampler(
                lambda: [replica.totals for replica in self._replicas],
                run_id=self._run_id, point=self._point, duration_s=duration_s, replicas=replicas,
            )  # fmt: skip
        self._fleet = Fleet(replicas)
        self._replicas = [self._replica(index, replicas > 1) for index in range(replicas)]
        self._records: list[RequestRecord] = []
        self._columns = None if plan.keep_records else RecordColumns()

    def run(self) -> Simulated:
        baseline_s = self._machine.baseline_s
        arrivals = (
            Assigned(
                asked.slo_class,
                asked.prompt_tokens,
                asked.due_s,
                asked.slo.tpot_s(baseline_s),
                asked.slo.ttft_s,
                e2e_slo_s=asked.slo.e2e_s,
            )
            for asked in self._trace.requests
        )

        def deliver(number: int, known: Assigned, replica: Replica) -> None:
            request = self._trace.requests[number]
            ends_after = request.output_tokens if request.max_tokens > request.output_tokens else None
            replica.add(self._request(number, known), known, ends_after)

        drain_s = self._plan.drain_s
        wall_s = run_cluster(self._replicas, self._router, self._fleet, arrivals, deliver, drain_s=drain_s)
        if self._sampler is not None:
            self._sampler.end(wall_s)
        samples = [] if self._sampler is None else self._sampler.samples
        records = sorted(self._records, key=arrival_order)  # they ended in an order that every policy has of its own
        return Simulated(records, wall_s, [replica.stats for replica in self._replicas], samples, self._columns)

    def _replica(self, index: int, is_routed: bool) -> Replica:
        """Replicas differ in what their policies draw at random, and in nothing else."""
        clock, plan = VirtualClock(), self._plan
        executor = SimExecutor(
            self._limits, self._samples, self._acceptance, clock, concentration=self._concentration,
            choice_decay=self._choice_decay,
            synthetic=plan.synthetic, overhead_s=self._machine.overhead_s,
            elastic_times=self._machine.elastic_times,
        )  # fmt: skip
        config = EngineConfig(
            policy=self._policy, seed=plan.seed + index, max_waiting=ALWAYS_WAITS,
            max_prefill_tokens=plan.max_prefill_tokens, eq8_c1=self._machine.offsets[0],
            eq9_c2=self._machine.offsets[1], elastic=plan.elastic, fair_tenants=plan.fair_tenants,
            prefix_cache=False,  # prompts are all zeros: nothing is known of what they share
        )  # fmt: skip
        scheduler = Scheduler(config, self._limits, self._samples, elastic_rule=plan.elastic_rule)
        observed = executor if self._recorder is None else RecordingExecutor(executor, self._recorder)
        return Replica(
            index, scheduler, observed, clock, self._ended, fleet=self._fleet if is_routed else None,
            keep_token_times=plan.keep_token_times and plan.keep_records,
            on_step=None if self._sampler is None else self._sampler.note,
        )  # fmt: skip

    def _chances(self) -> np.ndarray:
        """f64[requests], acceptance of the draft's first choice."""
        classes = [request.slo_class for request in self._trace.requests]
        if self._plan.acceptance is not None:
            return self._plan.acceptance.draw(classes, self._plan.seed)
        return np.array([self._machine.acceptance_of(name) for name in classes])

    def _acceptance(self, seeds: np.ndarray) -> np.ndarray:
        return self._chance.take(np.searchsorted(self._sorted_seeds, seeds))

    def _request(self, number: int, known: Assigned) -> Sequence:
        return Sequence(
            sequence_id=f"{self._policy}-{number}",
            prompt_ids=np.zeros(known.prompt_tokens, np.int32),
            sampling=_sampling(_most_tokens(self._trace.requests[number])),
            seed=int(self._seeds[number]),
            arrival_s=known.arrival_s,
            tpot_slo_s=known.tpot_slo_s,
            ttft_slo_s=known.ttft_slo_s,
            e2e_slo_s=known.e2e_slo_s,
            slo_class=known.slo_class,
            tenant=self._trace.requests[number].tenant,
        )

    def _ended(
        self, replica: Replica, request_id: str, known: Assigned, metrics: RequestMetrics, status: Status,
        token_offsets_s: tuple[float, ...],
    ) -> None:  # fmt: skip
        self._router.ended(known)
        keep = self._records.append if self._columns is None else self._columns.add
        keep(
            RequestRecord.of(
                metrics,
                run_id=self._run_id,
                policy=self._policy,
                rate_rps=self._trace.rate_rps,
                request_id=request_id,
                status=status,
                due_s=known.arrival_s,
                token_offsets_s=token_offsets_s,
                replica=replica.index,
                point=self._point,
            )
        )


def check_lengths(limits: Limits, trace: Trace) -> None:
    """Raise ConfigError if a request of the trace does not fit the machine's context or its KV pages."""
    most = max(r.prompt_tokens for r in trace.requests)
    if most >= limits.max_context:
        raise ConfigError(
            f"{trace.name} has a prompt of {most} tokens, but the machine's context holds {limits.max_context}, and an "
            f"output needs one; cut prompts with --lengths context={limits.max_context}, or use another trace"
        )
    longest = max(r.prompt_tokens + _most_tokens(r) for r in trace.requests)
    needed = -(-min(longest, limits.max_context) // limits.page_size)
    if limits.num_pages < needed:
        raise ConfigError(
            f"num_pages must hold the longest request of {trace.name}, which takes {needed} pages of "
            f"{limits.page_size} tokens, got {limits.num_pages}"
        )


def _most_tokens(request: TraceRequest) -> int:
    return max(request.output_tokens, request.max_tokens)


@cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
