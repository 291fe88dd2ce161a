"""Runs a trace through the scheduler that serves, on a simulated machine and a virtual clock; result rows as a bench's.

Nothing is decoded: the executor draws acceptance, the clock passes by the machine's costs. Imports no jax.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

import adaserve_jax
from adaserve_jax.bench.machines import Machine
from adaserve_jax.bench.sim_executor import SimExecutor, VirtualClock
from adaserve_jax.bench.traces import Trace, TraceRequest
from adaserve_jax.config import EngineConfig
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.records import RequestRecord, Status
from adaserve_jax.results.schema import Conditions, Provenance, ResultRow
from adaserve_jax.scheduler.scheduler import Scheduler, build_scheduler
from adaserve_jax.types import CandidateTrees, Request, RequestUpdate, SamplingParams

ALWAYS_WAITS = 1 << 30
"""Waiting places of the simulated queue: a simulation refuses nobody."""


@dataclass(frozen=True)
class SimulationPlan:
    """max_requests: most that run at once, 0 for the machine's own. max_prefill_tokens: as the engine's option.
    drain_s: how long requests are served after the last arrival; what is left then counts as unfinished."""

    policies: tuple[str, ...]
    seed: int = 0
    max_requests: int = 0
    max_prefill_tokens: int = 0
    drain_s: float = 600.0


@dataclass
class Simulated:
    """One policy over one trace. wall_s: of the virtual clock."""

    records: list[RequestRecord]
    wall_s: float


def simulate_all(
    plan: SimulationPlan, machine: Machine, traces: list[Trace],
    on_point: Callable[[Simulated, list[ResultRow]], None] | None = None,
) -> list[ResultRow]:  # fmt: skip
    """Every policy over every trace. Raises ConfigError for an unknown policy."""
    rows: list[ResultRow] = []
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    for trace in traces:
        provenance = _provenance(plan, machine, trace, run_id)
        for policy in plan.policies:
            simulated = simulate(policy, plan, machine, trace, run_id=run_id)
            point = _rows(policy, provenance, trace, simulated)
            rows += point
            if on_point is not None:
                on_point(simulated, point)
    return rows


def simulate(policy: str, plan: SimulationPlan, machine: Machine, trace: Trace, *, run_id: str = "") -> Simulated:
    """One policy over one trace."""
    return _Simulation(policy, plan, machine, trace, run_id).run()


@dataclass
class _Open:
    """What has come of a request so far. times, counts: of the updates that brought tokens."""

    due_s: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def offsets_s(self) -> tuple[float, ...]:
        if not self.times:
            return ()
        return tuple((np.repeat(self.times, self.counts) - self.times[0]).tolist())


class _Simulation:
    def __init__(self, policy: str, plan: SimulationPlan, machine: Machine, trace: Trace, run_id: str):
        self._plan, self._machine, self._trace, self._policy = plan, machine, trace, policy
        self._run_id = run_id
        self._clock = VirtualClock()
        limits = machine.limits(plan.max_requests)
        samples = machine.samples(limits)
        seeds = np.random.default_rng(plan.seed).integers(0, 2**63, len(trace.requests))
        self._seeds = seeds.tolist()
        chance = {s: machine.acceptance_of(r.slo_class) for s, r in zip(self._seeds, trace.requests, strict=True)}

        def acceptance(seed: np.ndarray) -> np.ndarray:
            return np.array([chance[each] for each in seed.tolist()])

        self._executor = SimExecutor(limits, samples, acceptance, self._clock, strict=False)
        config = EngineConfig(
            policy=policy, seed=plan.seed, max_waiting=ALWAYS_WAITS, max_prefill_tokens=plan.max_prefill_tokens,
            eq8_c1=machine.offsets[0], eq9_c2=machine.offsets[1],
        )  # fmt: skip
        self._scheduler: Scheduler = build_scheduler(config, limits, samples)
        self._open: dict[str, _Open] = {}
        self._records: list[RequestRecord] = []

    def run(self) -> Simulated:
        requests, clock, scheduler = self._trace.requests, self._clock, self._scheduler
        arrived, last_due_s = 0, requests[-1].due_s
        while arrived < len(requests) or scheduler.has_work:
            while arrived < len(requests) and requests[arrived].due_s <= clock.now():
                self._arrive(arrived)
                arrived += 1
            if not self._step():
                clock.advance(max(requests[arrived].due_s - clock.now(), 0.0))
            if clock.now() > last_due_s + self._plan.drain_s:
                break
        for request_id in list(self._open):
            update = scheduler.abort(request_id)
            if update is not None:
                self._end(update, "unfinished")
        return Simulated(self._records, clock.now())

    def _arrive(self, index: int) -> None:
        request: TraceRequest = self._trace.requests[index]
        name = f"{self._policy}-{index}"
        self._open[name] = _Open(request.due_s)
        self._scheduler.add(
            Request(
                request_id=name,
                prompt_ids=np.zeros(request.prompt_tokens, np.int32),
                sampling=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
                seed=self._seeds[index],
                arrival_s=request.due_s,
                tpot_slo_s=request.slo.tpot_s(self._machine.baseline_s),
                ttft_slo_s=request.slo.ttft_s,
                slo_class=request.slo_class,
            )
        )

    def _step(self) -> bool:
        """Whether there was one to run."""
        scheduler, clock = self._scheduler, self._clock
        plan = scheduler.plan(clock.now())
        if plan is None:
            return False
        candidates = CandidateTrees.empty(plan.num_decode)
        if plan.draft is not None:
            candidates = self._executor.speculate(plan)
        trees = scheduler.select(plan, candidates, clock.now())
        outcome = self._executor.verify(plan, trees)
        now = clock.now()
        for update in scheduler.commit(plan, trees, candidates, outcome, now):
            open_request = self._open[update.request_id]
            open_request.times.append(now)
            open_request.counts.append(len(update.token_ids))
            if update.finish_reason is not None:
                self._end(update, "finished")
        return True

    def _end(self, update: RequestUpdate, status: Status) -> None:
        open_request = self._open.pop(update.request_id)
        assert update.metrics is not None
        self._records.append(
            RequestRecord.of(
                update.metrics,
                run_id=self._run_id,
                policy=self._policy,
                rate_rps=self._trace.rate_rps,
                request_id=update.request_id,
                status=status,
                due_s=open_request.due_s,
                token_offsets_s=open_request.offsets_s(),
            )
        )


def _rows(policy: str, provenance: Provenance, trace: Trace, simulated: Simulated) -> list[ResultRow]:
    conditions = Conditions(
        policy=policy, arrival_process="trace", rate_rps=trace.rate_rps, duration_s=trace.duration_s,
        wall_s=simulated.wall_s, compiles_after_ready=0, client_late_max_s=0.0, client_late_p99_s=0.0, valid=True,
        invalid_reason=None,
    )  # fmt: skip
    summaries = summarize(simulated.records, wall_s=simulated.wall_s, baseline_s=provenance.baseline_s)
    return [ResultRow.join(provenance, conditions, summary) for summary in summaries]


def _provenance(plan: SimulationPlan, machine: Machine, trace: Trace, run_id: str) -> Provenance:
    limits = machine.limits(plan.max_requests)
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
    )
