"""Runs policies x rates on one engine and writes result rows and request records as each point ends."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import adaserve_jax
from adaserve_jax.bench.arrivals import Arrival, Schedule, make_schedule, parse_arrivals
from adaserve_jax.bench.engine import BenchEngine, OpenEngine
from adaserve_jax.bench.open_loop import DueRequest, LoopResult, drive
from adaserve_jax.bench.recording import AcceptanceRecord
from adaserve_jax.bench.workload import Workload
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.jsonl import append_rows, make_folder
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import Conditions, Provenance, ResultRow
from adaserve_jax.types import SamplingParams

WARMUP_TOKENS = 16


@dataclass(frozen=True)
class BenchPlan:
    """What to measure. rates: requests per second, None for the workload's own times.

    drain_s: longest wait after the last arrival. max_late_s: a run whose client submits later than this at the 99th
    percentile is marked invalid. warmup_requests: sent before each point and left out of its result.
    max_prefill_tokens: the engine's option, for the rows. record: whether acceptance is noted, by an engine that was
    opened to do so; every request then has a seed of its own, whatever the workload says, to be told apart by.
    """

    policies: tuple[str, ...]
    rates: tuple[float | None, ...]
    duration_s: float
    seed: int = 0
    drain_s: float = 30.0
    max_late_s: float = 0.05
    warmup_requests: int = 4
    max_prefill_tokens: int = 0
    record: bool = False

    def __post_init__(self) -> None:
        if not self.policies or not self.rates:
            raise ConfigError("a bench run needs at least one policy and one rate")

    @property
    def points(self) -> list[tuple[str, float | None]]:
        """Policy and rate of each point: rate by rate, the first policy rotating, so that slow drift of the machine
        falls on all policies alike."""
        shifted = ((i % len(self.policies), rate) for i, rate in enumerate(self.rates))
        return [(policy, rate) for i, rate in shifted for policy in self.policies[i:] + self.policies[:i]]


OnPoint = Callable[[int, int, list[ResultRow]], None]
"""on_point(done, total, rows of the point that just ended)."""


def run_bench(
    plan: BenchPlan, workload: Workload, open_engine: OpenEngine, out: Path, on_point: OnPoint | None = None,
    *, close: bool = True,
) -> list[ResultRow]:  # fmt: skip
    """Measure every point of `plan`; returns all rows. Files in `out`: results.jsonl, requests.jsonl, and when it
    records acceptance.jsonl (appended).

    Ctrl-C ends the run after writing what the current point has, marked invalid. close: whether the engine is closed at
    the end.
    """
    schedules = {rate: _schedule(plan, workload, rate) for rate in plan.rates}
    make_folder(out)
    engine = open_engine(plan.points[0][0])
    rows: list[ResultRow] = []
    try:
        for policy in plan.policies:
            engine.set_policy(policy)  # an unknown name is refused before anything is measured
        bench = _Bench(plan, workload, engine, _provenance(plan, workload, engine))
        for done, (policy, rate) in enumerate(plan.points, 1):
            point_rows, records, stop = bench.measure(policy, schedules[rate])
            append_rows(out / "results.jsonl", point_rows)
            append_rows(out / "requests.jsonl", records)
            if plan.record:
                append_rows(out / "acceptance.jsonl", bench.recorded(policy, schedules[rate]))
            rows += point_rows
            if on_point is not None:
                on_point(done, len(plan.points), point_rows)
            if stop:
                break
    finally:
        if close:
            engine.client.close()
    return rows


@dataclass(frozen=True)
class _Bench:
    plan: BenchPlan
    workload: Workload
    engine: BenchEngine
    provenance: Provenance

    def measure(self, policy: str, schedule: Schedule) -> tuple[list[ResultRow], list[RequestRecord], bool]:
        """Rows and records of one point, and whether the whole run must stop."""
        client, info = self.engine.client, self.engine.client.info
        self.engine.set_policy(policy)
        requests = self._requests(policy, schedule)
        self._warm_up(requests)
        if self.plan.record:
            self.recorded(policy, schedule)  # of the warm-up, and dropped
        loop = drive(client, requests, drain_s=self.plan.drain_s)
        records = [
            probe.record(
                run_id=self.provenance.run_id,
                policy=policy,
                rate_rps=schedule.rate_rps,
                start_s=loop.start_s,
                baseline_s=info.baseline_s,
            )
            for probe in loop.probes
        ]
        conditions = self._conditions(policy, schedule, loop)
        summaries = summarize(records, wall_s=loop.wall_s)
        rows = [ResultRow.join(self.provenance, conditions, summary) for summary in summaries]
        return rows, records, loop.interrupted or loop.engine_died

    def recorded(self, policy: str, schedule: Schedule) -> list[AcceptanceRecord]:
        """What was noted since the last call; only while the engine is idle."""
        names = {
            arrival.seed: (_request_id(policy, schedule, number), arrival.item.slo_class)
            for number, arrival in enumerate(schedule.arrivals)
        }
        about = {"run_id": self.provenance.run_id, "policy": policy, "rate_rps": schedule.rate_rps}
        return self.engine.recorder.take(names, **about)

    def _sampling(self, arrival: Arrival) -> SamplingParams:
        sampling = arrival.item.sampling(arrival.seed)
        return replace(sampling, seed=arrival.seed) if self.plan.record else sampling

    def _requests(self, policy: str, schedule: Schedule) -> list[DueRequest]:
        """Tokenised ahead, so that the client does nothing but submit during the run."""
        return [
            DueRequest(
                arrival.due_s,
                GenerateRequest(
                    request_id=_request_id(policy, schedule, number),
                    prompt_ids=self.engine.encode(arrival.item),
                    sampling=self._sampling(arrival),
                    slo=arrival.item.slo,
                    slo_class=arrival.item.slo_class,
                    cache_salt=f"{self.provenance.run_id} {policy} {schedule.rate_rps}",
                ),
            )
            for number, arrival in enumerate(schedule.arrivals)
        ]

    def _warm_up(self, requests: list[DueRequest]) -> None:
        """Send the first few requests, shortened, all at once; their results are dropped."""
        short = [
            DueRequest(
                0.0,
                replace(
                    due.request,
                    request_id=f"warmup-{due.request.request_id}",
                    cache_salt=f"warmup {due.request.cache_salt}",
                    sampling=replace(
                        due.request.sampling, max_tokens=min(WARMUP_TOKENS, due.request.sampling.max_tokens)
                    ),
                ),
            )
            for due in requests[: self.plan.warmup_requests]
        ]
        if drive(self.engine.client, short, drain_s=self.plan.drain_s).interrupted:
            raise KeyboardInterrupt

    def _conditions(self, policy: str, schedule: Schedule, loop: LoopResult) -> Conditions:
        reason = _invalid_reason(loop, self.plan.max_late_s)
        return Conditions(
            policy=policy,
            arrival_process=schedule.process,
            rate_rps=schedule.rate_rps,
            duration_s=schedule.duration_s,
            wall_s=loop.wall_s,
            compiles_after_ready=0 if loop.engine_died else self.engine.client.stats().compiles_after_ready,
            client_late_max_s=loop.late_max_s,
            client_late_p99_s=loop.late_p99_s,
            valid=reason is None,
            invalid_reason=reason,
        )


def _request_id(policy: str, schedule: Schedule, number: int) -> str:
    return f"{policy}@{schedule.rate_rps:g}-{number}"


def _invalid_reason(loop: LoopResult, max_late_s: float) -> str | None:
    if loop.interrupted:
        return "interrupted"
    if loop.engine_died:
        return "engine died"
    if not loop.probes:
        return "no request arrived; raise the rate or the duration"
    if loop.late_p99_s > max_late_s:
        return f"client was late: p99 {loop.late_p99_s * 1e3:.0f} ms, allowed {max_late_s * 1e3:.0f} ms"
    return None


def _schedule(plan: BenchPlan, workload: Workload, rate: float | None) -> Schedule:
    arrivals = parse_arrivals("poisson")
    return make_schedule(workload, arrivals, rate_rps=rate, duration_s=plan.duration_s, seed=plan.seed)


def _provenance(plan: BenchPlan, workload: Workload, engine: BenchEngine) -> Provenance:
    info = engine.client.info
    target_params, draft_params = engine.num_parameters()
    now = datetime.now(UTC)
    return Provenance(
        run_id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        started_at=now.isoformat(timespec="seconds"),
        commit=source_commit(),
        package_version=adaserve_jax.__version__,
        machine=machine_name(),
        device=info.device,
        jax_version=info.jax_version,
        target=info.target,
        draft=info.draft,
        target_params=target_params,
        draft_params=draft_params,
        deterministic=info.deterministic,
        max_requests=info.max_requests,
        max_context=info.max_context,
        baseline_s=info.baseline_s,
        workload=workload.name,
        workload_hash=workload.sha256,
        seed=plan.seed,
        max_prefill_tokens=plan.max_prefill_tokens,
    )
