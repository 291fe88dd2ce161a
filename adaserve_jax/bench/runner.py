"""Runs the points of a plan on one engine and writes result rows, request records and samples as each point ends."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import adaserve_jax
from adaserve_jax.bench.engine import Ask, AtPoint, BenchEngine, Due, LoopResult, OpenEngine, RecordingEngine
from adaserve_jax.bench.plan import BenchPlan, OfferedLoad, Point, PreparedLoad, load_all
from adaserve_jax.bench.resume import (
    ACCEPTANCE,
    Begun,
    FolderUse,
    begin_folder,
    check_alike,
    check_baseline,
    drop_unfinished,
)
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.jsonl import append_rows
from adaserve_jax.results.provenance import code_and_machine, settings_hash
from adaserve_jax.results.run_folder import REQUESTS, RESULTS, SAMPLES
from adaserve_jax.results.samples import SAMPLE_S, Sample
from adaserve_jax.results.schema import Conditions, Provenance, ResultRow
from adaserve_jax.scheduler.policies import file_hashes
from adaserve_jax.sim.acceptance import AcceptanceRecord
from adaserve_jax.stats import StepStats
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Workload


class RunObserver:
    """Notified of a run's progress; this one ignores it."""

    def opened(self, todo: Sequence[Point], done: Sequence[ResultRow]) -> None:
        """Note the points to measure, and the rows of those already measured."""

    def begins(self, point: Point) -> None:
        """Note that a point's warm-up begins."""

    def in_flight(self, requests: int) -> None:
        """Note how many requests are in flight. Called often, from any thread: it must be quick."""

    def ended(self, point: Point, rows: Sequence[ResultRow], notes: Sequence[str]) -> None:
        """Note that a point's rows are written. notes: sentences of the engine."""


class Sampler:
    """Reads `stats` when its context begins, every SAMPLE_S in it, and when it ends. Where `stats` gives None it takes
    none. A reading is a copy of some forty numbers, and is made at most ten times a second. What `stats` raises is
    raised when the context ends.

    now: seconds of a clock. wait(seconds): waits, at most until the context ends, and says whether it has.
    """

    def __init__(
        self, stats: Callable[[], StepStats | None], *, now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ):  # fmt: skip
        self._stats, self._now = stats, now
        self._error: BaseException | None = None
        self._since: StepStats | None = None
        self._taken: list[tuple[float, StepStats]] = []
        self._over = threading.Event()
        self._wait = wait or self._over.wait
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._since = self._stats()
        if self._since is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._since is not None:
            self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def samples(self, *, run_id: str, point: str, start_s: float) -> list[Sample]:
        """Return the samples taken since start_s (time.monotonic)."""
        if self._since is None:
            return []
        return [
            Sample.of(stats, self._since, run_id=run_id, point=point, t_s=at_s - start_s)
            for at_s, stats in self._taken
            if at_s >= start_s
        ]

    def _run(self) -> None:
        try:
            due_s = self._now() + SAMPLE_S
            while not self._wait(max(0.0, due_s - self._now())):
                self._take()
                # Late once, on time again: no sample is made up for.
                due_s += SAMPLE_S * max(1, math.ceil((self._now() - due_s) / SAMPLE_S))
            self._take()
        except Exception as error:  # of a thread nobody would see it
            self._error = error

    def _take(self) -> None:
        stats = self._stats()
        if stats is not None:
            self._taken.append((self._now(), stats))


WARMUP_TOKENS = 16
INTERRUPTED = "interrupted"
"""Reason of a point that Ctrl-C ended."""


def run_bench(
    plan: BenchPlan, workload: Workload, open_engine: OpenEngine, out: Path, observer: RunObserver | None = None, *,
    use: FolderUse = "append", about: Mapping[str, Any] | None = None, policy_files: Mapping[str, str] | None = None,
    beside: Sequence[ResultRow] = (),
) -> list[ResultRow]:  # fmt: skip
    """Measure every point of `plan`; returns all rows, first those of points that were there when it was resumed.

    Files in `out`: plan.json, results.jsonl, requests.jsonl, samples.jsonl, and when it records acceptance.jsonl; the
    rows of a point are written last, so that a point with rows is there whole. Ctrl-C while a point is driven ends the
    run after writing what the point has, marked invalid; at other times it is passed on. The engine is opened if there
    is a point to measure, and not closed. use: of a folder that holds rows. about: settings beside the plan's that a
    resumed run must have too. policy_files: hashes of the files that policies are from, which must be the same too.
    beside: rows of other folders, with which those of this run are to be compared.
    Relative targets of a resumed run are multiples of the baseline latency that its rows have. Raises ConfigError:
    among others, a resumed run would go on with another commit, machine, device or model, or at another speed, or a
    policy's file was edited.
    """
    observer = observer or RunObserver()
    loads = load_all(plan, workload)
    settings = {**plan.settings(), "workload": workload.name, "workload_hash": workload.sha256, **(about or {})}
    if policy_files:
        settings["policy_files"] = dict(policy_files)
    begun = begin_folder(out, settings, use)
    rows = list(begun.rows)
    todo = [point for point in plan.points if point.name not in begun.done]
    compared = replace(begun, rows=(*begun.rows, *beside))
    if todo:
        check_alike(out, compared, code_and_machine(adaserve_jax.__version__))
    observer.opened(todo, rows)
    if not todo:
        return rows
    engine = open_engine()
    _check_policies(plan.policies, engine)
    check_alike(out, compared, {**engine.about.columns(), "system": engine.about.system})
    check_baseline(out, compared, engine.about.baseline_s)
    drop_unfinished(out, begun)
    provenance = _provenance(plan, begun, workload, engine, about)
    bench = _Bench(plan, loads, engine, provenance, observer, begun.baseline_s, policy_files or {})
    for point in todo:
        observer.begins(point)
        measured, loop = bench.measure(point, out)
        rows += measured
        observer.ended(point, measured, engine.notes)
        if loop.interrupted or loop.engine_died:
            break
    return rows


def _check_policies(policies: Sequence[str], engine: BenchEngine) -> None:
    """Refuse an unknown name before anything is measured."""
    known = engine.about.policies
    unknown = [name for name in policies if known is not None and name not in known]
    if unknown:
        raise ConfigError(f"{engine.about.system} serves by {', '.join(known or ())}, not by {unknown[0]!r}")
    for policy in policies:
        engine.set_policy(policy)


@dataclass(frozen=True)
class _Bench:
    plan: BenchPlan
    loads: Mapping[OfferedLoad, PreparedLoad]
    engine: BenchEngine
    provenance: Provenance
    observer: RunObserver
    held_baseline_s: float | None
    """Baseline latency of a resumed run, which its relative targets multiply, whatever the engine measured now."""
    policy_files: Mapping[str, str]
    salt: str = field(default_factory=secrets.token_hex)
    """Drawn anew when a run is resumed: a server that outlives a stopped run has cached the answers to its points."""

    def measure(self, point: Point, out: Path) -> tuple[list[ResultRow], LoopResult]:
        """Warm up, drive, sum up, and write: the rows last, so that a point with rows is whole."""
        loaded = self.loads[point.load]
        self._check_file(point.policy)
        self.engine.set_policy(point.policy)
        asks = self._asks(point, loaded)
        due = [Due(arrival.due_s, self.engine.prepare(ask))
               for arrival, ask in zip(loaded.schedule.arrivals, asks, strict=True)]  # fmt: skip
        self._warm_up(asks[: self.plan.warmup_requests])
        if self.plan.record:
            self._recorded(point, loaded)  # of the warm-up, and dropped
        compiled = self.engine.compiles_after_ready()
        with Sampler(self.engine.stats) as sampler:
            loop = self.engine.drive(due, drain_s=self.plan.drain_s, on_progress=self.observer.in_flight)
        run_id, rate_rps = self.provenance.run_id, loaded.schedule.rate_rps
        at = AtPoint(run_id, point.name, point.policy, rate_rps, loop.start_s, self.provenance.baseline_s)
        records = [probe.record(at) for probe in loop.probes]
        workload = loaded.workload
        provenance = replace(self.provenance, workload=workload.name, workload_hash=workload.sha256)
        if not loop.engine_died:
            compiled = self.engine.compiles_after_ready() - compiled
        conditions = self._conditions(point, loaded, loop, compiled)
        rows = [ResultRow.join(provenance, conditions, each) for each in summarize(records, wall_s=loop.wall_s)]
        samples = sampler.samples(run_id=run_id, point=point.name, start_s=loop.start_s)
        acceptance = self._recorded(point, loaded) if self.plan.record else []
        lines = {REQUESTS: records, SAMPLES: samples, ACCEPTANCE: acceptance, RESULTS: rows}
        for name, each in lines.items():
            if each:
                append_rows(out / name, each)
        return rows, loop

    def _check_file(self, policy: str) -> None:
        """Refuse a policy file that changed: it is read again for each point, and all rows must be of one version."""
        if policy in self.policy_files and file_hashes([policy])[policy] != self.policy_files[policy]:
            raise ConfigError(
                f"the file of policy {policy} is not the one that the run began with; put that back and --resume, or "
                "measure all anew in another --out"
            )

    def _recorded(self, point: Point, loaded: PreparedLoad) -> list[AcceptanceRecord]:
        """Return the acceptance recorded since the last call; call it only while the engine is idle."""
        names = {
            arrival.seed: (_request_id(point, number), arrival.item.slo_class)
            for number, arrival in enumerate(loaded.schedule.arrivals)
        }
        about = {"run_id": self.provenance.run_id, "policy": point.policy, "rate_rps": loaded.schedule.rate_rps}
        return cast(RecordingEngine, self.engine).recorder.take(names, **about)

    def _asks(self, point: Point, loaded: PreparedLoad) -> list[Ask]:
        """Return the requests of a point. A text that comes again has another salt each time: a request must not draft
        from the answer to its own copy."""
        times: Counter[object] = Counter()
        asks = []
        for number, arrival in enumerate(loaded.schedule.arrivals):
            item = arrival.item
            text = id(item) if item.by_length else (item.prompt, item.messages)
            asks.append(Ask(
                request_id=_request_id(point, number),
                item=item,
                seed=arrival.seed if self.plan.record or item.seed is None else item.seed,
                slo=self._slo(item.slo),
                cache_salt=sha256(f"{self.salt} {point.name} {times[text]}".encode()).hexdigest(),
                max_tokens=item.max_tokens,
                number=number,
            ))  # fmt: skip
            times[text] += 1
        return asks

    def _slo(self, slo: SLO) -> SLO:
        if slo.relative is None or self.held_baseline_s is None:
            return slo
        return replace(slo, relative=None, tpot_ms=slo.relative * self.held_baseline_s * 1e3)

    def _warm_up(self, asks: Sequence[Ask]) -> None:
        """Send requests, shortened, all at once; their results are dropped."""
        due = [
            Due(0.0, self.engine.prepare(replace(
                ask, request_id=f"warmup-{ask.request_id}", cache_salt=f"warmup {ask.cache_salt}",
                max_tokens=min(WARMUP_TOKENS, ask.max_tokens),
            )))
            for ask in asks
        ]  # fmt: skip
        if self.engine.drive(due, drain_s=self.plan.drain_s).interrupted:
            raise KeyboardInterrupt

    def _conditions(self, point: Point, loaded: PreparedLoad, loop: LoopResult, compiled: int) -> Conditions:
        reason = _invalid_reason(loop, self.plan.max_late_s, compiled)
        schedule, load = loaded.schedule, point.load
        return Conditions(
            policy=point.policy,
            arrival_process=schedule.process,
            rate_rps=schedule.rate_rps,
            duration_s=schedule.duration_s,
            wall_s=loop.wall_s,
            compiles_after_ready=0 if loop.engine_died else compiled,
            client_late_max_s=loop.late_max_s,
            client_late_p99_s=loop.late_p99_s,
            valid=reason is None,
            invalid_reason=reason,
            system=self.engine.about.system,
            point=point.name,
            repeat=load.repeat,
            urgent_share=load.urgent_share,
            slo_scale=load.slo_scale,
            burstiness=loaded.burstiness,
            token_source=self.engine.token_source,
            policy_hash=self.policy_files.get(point.policy, ""),
        )


def _request_id(point: Point, number: int) -> str:
    return f"{point.name}-{number}"


def _invalid_reason(loop: LoopResult, max_late_s: float, compiled: int) -> str | None:
    if loop.interrupted:
        return INTERRUPTED
    if loop.engine_died:
        return "engine died"
    if compiled:
        return f"{compiled} programs were compiled while it was measured"
    if not loop.probes:
        return "no request arrived; raise the rate or the duration"
    if loop.late_p99_s > max_late_s:
        late, allowed = loop.late_p99_s * 1e3, max_late_s * 1e3
        return f"client was late: p99 {late:.0f} ms, allowed {allowed:.0f} ms; end other programs, or lower the rate"
    return None


def _provenance(
    plan: BenchPlan, begun: Begun, workload: Workload, engine: BenchEngine, settings: Mapping[str, Any] | None
) -> Provenance:  # fmt: skip
    held_s = begun.baseline_s
    return Provenance(
        run_id=begun.run_id,
        started_at=begun.started_at or datetime.now(UTC).isoformat(timespec="seconds"),
        **code_and_machine(adaserve_jax.__version__),
        **engine.about.columns(),
        baseline_s=engine.about.baseline_s if held_s is None else held_s,
        workload=workload.name,
        workload_hash=workload.sha256,
        seed=plan.seed,
        plan_hash=begun.plan_hash,
        engine_hash=settings_hash(settings) if settings else "",
    )
