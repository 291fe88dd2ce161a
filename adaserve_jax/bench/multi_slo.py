"""The multi-SLO suite: search for the highest rate at which every SLO class keeps its targets, then overload and burst.

Every load is a bench run of its own below the output folder, so a suite goes on where it ended, and `adaserve report`
reads its folders. Definition and rules: benchmarks/multi_slo/README.md.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adaserve_jax.bench.engine import OpenEngine
from adaserve_jax.bench.plan import POISSON, BenchPlan, default_rates
from adaserve_jax.bench.runner import INTERRUPTED, RunObserver, run_bench
from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.results.jsonl import make_folder, read_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import REQUESTS
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.results.submission import (
    FILE,
    LEVELS,
    ClassTarget,
    Definition,
    Stage,
    Submission,
    SuitePoint,
    System,
    count_classes,
    judge,
    recovery_s,
    write_submission,
)
from adaserve_jax.results.whole_file import SHARED, write_whole
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Workload

DURATION_S = 60.0
CLASS_REQUESTS, LONGEST = 20, 10.0
"""A point takes longer until each class has so many requests on average, at most so many times its duration."""
PRECISION = 1.15
"""The search for a rate ends when the rate that misses a level is at most so many times the one that keeps it."""
MOST, LEAST = 1024.0, 1 / 8
"""The search ends at so many times the first rate, above and below."""
OVERLOAD, CALM = 2.0, 0.7
"""Rates of overload and of the calm before and after a burst, over the highest rate of the first level."""
BEFORE, UNTIL = 1 / 3, 1 / 2
"""Parts of the time after which a burst begins and ends."""
AGAIN_SEED = 1_000_003
"""Added to the seed where a load is measured a second time; far from any seed that a user gives."""
DEFINITION = "definition.json"
OWN = "workload"
ANY = "*"


@dataclass(frozen=True)
class Target:
    """Targets of a class: in times of the baseline latency, or in ms."""

    tpot_x: float | None = None
    ttft_x: float | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None

    def slo(self, baseline_ms: float) -> SLO:
        """Return the targets in ms, of five digits."""
        tpot_ms = self.tpot_ms if self.tpot_x is None else self.tpot_x * baseline_ms
        ttft_ms = self.ttft_ms if self.ttft_x is None else self.ttft_x * baseline_ms
        return SLO(tpot_ms=float(f"{tpot_ms:.5g}"), ttft_ms=float(f"{ttft_ms:.5g}"))


def _limits(ttft_ms: float, tpot_ms: float) -> dict[str, Target]:
    return {ANY: Target(tpot_ms=tpot_ms, ttft_ms=ttft_ms)}


_SUMMARY = Target(tpot_x=5.0, ttft_x=400 / 3)
PRESETS: Mapping[str, Mapping[str, Target]] = {
    "adaserve": {
        "code": Target(tpot_x=1.2, ttft_x=400 / 3),
        "chat": Target(tpot_x=5 / 3, ttft_x=400 / 3),
        "summary": _SUMMARY,
        "summarization": _SUMMARY,
    },
    "mlperf-llama3.1-8b": _limits(500, 30),
    "mlperf-llama2-70b": _limits(450, 40),
    "mlperf-llama3.1-405b": _limits(4500, 80),
    "mlperf-deepseek-r1": _limits(1500, 15),
    "mlperf-gpt-oss-120b": _limits(2000, 20),
}
"""Targets by class; ANY: of every class. `adaserve`: AdaServe's categories (its table 2: 1.2 times the baseline, 50 ms,
150 ms) where a token takes 30 ms alone, as on the machine of its paper, and 4 s to the first token there. `mlperf-*`:
limits of the interactive scenarios of MLPerf Inference (mlcommons/inference_policies, inference_rules.adoc, July
2026)."""


@dataclass(frozen=True)
class SuiteSettings:
    """How the suite is run; see Definition. preset: a name of PRESETS, or OWN: the targets that the workload has."""

    preset: str = "adaserve"
    duration_s: float = DURATION_S
    repeats: int = 1
    seed: int = 0
    drain_s: float = 30.0
    max_late_s: float = 0.05
    warmup_requests: int = 4
    class_requests: int = CLASS_REQUESTS

    def __post_init__(self) -> None:
        if self.class_requests < 1:
            raise ConfigError(f"--class-requests must be at least 1, got {self.class_requests}")
        if self.preset != OWN and self.preset not in PRESETS:
            raise ConfigError(f"--preset must be one of {', '.join((*PRESETS, OWN))}, got {self.preset!r}")


def with_targets(workload: Workload, preset: str, baseline_ms: float) -> Workload:
    """Return the workload with the preset's targets in ms. Raises ConfigError: the preset has none for a class."""
    if preset == OWN:
        items = [
            item if item.slo.relative is None
            else replace(item, slo=replace(item.slo, relative=None, tpot_ms=item.slo.relative * baseline_ms))
            for item in workload.items
        ]  # fmt: skip
        return workload.derived(f"baseline {baseline_ms:.5g} ms", items)
    targets = PRESETS[preset]
    missing = [name for name in workload.classes if name not in targets and ANY not in targets]
    if missing:
        raise ConfigError(
            f"preset {preset} has no targets for class {missing[0]!r} of {workload.name}; it has "
            f"{', '.join(targets)}. Give --slos and --preset {OWN}"
        )
    try:
        slos = {name: targets[name if name in targets else ANY].slo(baseline_ms) for name in workload.classes}
    except RequestError as error:
        raise ConfigError(f"preset {preset} with a baseline of {baseline_ms:g} ms: {error}") from error
    text = ";".join(f"{name}:tpot={slo.tpot_ms:.5g},ttft={slo.ttft_ms:.5g}" for name, slo in slos.items())
    return workload.derived(f"targets {text}", (replace(item, slo=slos[item.slo_class]) for item in workload.items))


def define(settings: SuiteSettings, workload: Workload, baseline_ms: float) -> tuple[Definition, Workload]:
    """Return what is asked of a system, and the workload with its targets. Raises ConfigError: a class has requests
    with different targets, or none."""
    targeted = with_targets(workload, settings.preset, baseline_ms)
    counts = Counter(item.slo_class for item in targeted.items)
    classes = []
    for name in targeted.classes:
        slos = {item.slo for item in targeted.items if item.slo_class == name}
        slo = slos.pop()
        if slos or (slo.tpot_ms, slo.ttft_ms, slo.e2e_ms) == (None, None, None):
            raise ConfigError(
                f"class {name!r} of {workload.name} must have the same targets in every request; give them with --slos"
            )
        share = counts[name] / len(targeted.items)
        classes.append(ClassTarget(name=name, tpot_ms=slo.tpot_ms, ttft_ms=slo.ttft_ms, e2e_ms=slo.e2e_ms, share=share))
    definition = Definition(
        preset=settings.preset, baseline_ms=baseline_ms, classes=tuple(classes), workload=workload.name,
        workload_hash=workload.sha256, duration_s=settings.duration_s, least_requests=settings.class_requests,
        repeats=settings.repeats, seed=settings.seed,
    )  # fmt: skip
    return definition, targeted


def held_definition(out: Path, *, resume: bool) -> dict[str, Any] | None:
    """Return the definition of the suite in a folder; None if there is none. Raises ConfigError if there is one and it
    is not to be resumed, or it cannot be read."""
    path = out / DEFINITION
    if not path.exists():
        return None
    if not resume:
        raise ConfigError(f"{out} holds another suite; give another --out, or --resume to go on with it")
    try:
        held = dict(json.loads(path.read_bytes()))
        float(held["baseline_ms"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not the definition of a suite; give another --out") from error
    return held


def without_place(model: str) -> str:
    """Return a model's name as a submission has it: of a folder by its whole path, the last part."""
    return Path(model).name if Path(model).is_absolute() else model


def next_rate(found: Mapping[float, float], start: float, levels: Sequence[float] = LEVELS) -> float | None:
    """Return the rate to measure next, or None when the highest rate of every level is known to PRECISION.

    found: least attainment of any class, by rate. Rates are doubled until the first level is missed, halved until the
    last one is kept, and bisected between.
    """
    if not found:
        return _rounded(start)
    lowest, highest = min(found), max(found)
    if found[highest] >= levels[0] and highest * PRECISION < start * MOST:
        return _rounded(2 * highest)
    for level in levels:
        missed = min((rate for rate, least in found.items() if least < level), default=None)
        if missed is None:
            continue
        kept = max((rate for rate in found if rate < missed), default=None)
        if kept is None:
            if lowest > start * LEAST:
                return _rounded(lowest / 2)
        elif missed / kept > PRECISION:
            return _rounded(math.sqrt(missed * kept))
    return None


def doubted_rate(
    found: Mapping[float, float], twice: Collection[float], levels: Sequence[float] = LEVELS
) -> float | None:
    """Return the lowest rate that misses a level which a higher rate keeps, as none should; None if there is none.

    found: as for `next_rate`. twice: rates that were measured twice already, which stand as they are.
    """
    for rate, least in sorted(found.items()):
        above = [found[higher] for higher in found if higher > rate]
        if rate not in twice and any(least < level <= other for level in levels for other in above):
            return rate
    return None


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


class Suite:
    """One system under the suite.

    observe: makes the context of a run's progress. about, policy_files: as `run_bench` has them.
    """

    def __init__(
        self, definition: Definition, settings: SuiteSettings, workload: Workload, open_engine: OpenEngine,
        observe: Callable[[BenchPlan], AbstractContextManager[RunObserver]], *, about: Mapping[str, Any],
        policy_files: Mapping[str, str],
    ):  # fmt: skip
        self._definition, self._settings, self._workload = definition, settings, workload
        self._open, self._observe, self._about, self._policy_files = open_engine, observe, about, policy_files
        self._least_share = min(each.share for each in definition.classes)
        self._rows: list[ResultRow] = []  # of all loads so far; those to come must be comparable

    def run(self, policy: str, out: Path) -> Iterator[SuitePoint | Submission]:
        """Measure all loads under a policy; yields each point as it ends, and at last the submission, which is written
        to `out`. Ends without one after a point that is not valid; its folder says why."""
        make_folder(out)
        points: list[SuitePoint] = []
        row: ResultRow | None = None
        for stage, rate in self._loads(points):
            known = next((each for each in points if (each.stage, each.rate_rps) == (stage, rate)), None)
            rows, point = self._measure(policy, stage, rate, out, times=1 if known is None else 2)
            row = next((each for each in rows if each.slo_class == ALL_CLASSES), None)
            if point is None or row is None:
                return
            if known is not None:
                points.remove(known)
            points.append(point)
            yield point
        if row is None:
            return
        system = System(
            name=row.system, policy=policy, target=without_place(row.target),
            draft=None if row.draft is None else without_place(row.draft), device=row.device, machine=row.machine,
            client=f"adaserve bench {row.package_version}", commit=row.commit, measured_at=row.started_at,
        )  # fmt: skip
        submission = Submission(definition=self._definition, system=system, points=tuple(points), verdict=judge(points))
        write_submission(out / FILE, submission)
        yield submission

    def _loads(self, points: Sequence[SuitePoint]) -> Iterator[tuple[Stage, float]]:
        """Yield the loads to measure, a rate that is doubted a second time; `points` grows meanwhile. Where no rate
        keeps the first level, there is none to exceed."""
        start = default_rates(self._workload, self._definition.baseline_ms / 1e3)[0]
        levels = self._definition.searched_levels
        twice: set[float] = set()
        while True:
            found = {point.rate_rps: point.worst.attainment for point in points}
            rate = doubted_rate(found, twice, levels)
            if rate is not None:
                twice.add(rate)
            elif (rate := next_rate(found, start, levels)) is None:
                break
            yield "rate", rate
        highest = judge(points).levels[0].rate_rps
        if highest is not None:
            yield "overload", _rounded(OVERLOAD * highest)
            yield "burst", _rounded(OVERLOAD * highest)

    def _measure(
        self, policy: str, stage: Stage, rate: float, out: Path, *, times: int
    ) -> tuple[list[ResultRow], SuitePoint | None]:
        """Measure one load, in every repeat, so many times with other arrivals, or read what was measured before; the
        point is None if any of it is not valid."""
        rows: list[ResultRow] = []
        records: list[RequestRecord] = []
        wall_s, duration_s, recovered = 0.0, 0.0, None
        for number in range(times):
            plan, ends_s = self._plan(policy, stage, rate, number)
            folder = out / (f"{stage}-{rate:g}" + ("-again" if number else ""))
            rows = self._run(plan, folder)
            total = [row for row in rows if row.slo_class == ALL_CLASSES]
            if len(total) < plan.repeats or not all(row.valid for row in total):
                return rows, None
            own = read_rows(folder / REQUESTS, RequestRecord)
            wall_s += sum(row.wall_s for row in total)
            duration_s += plan.duration_s * plan.repeats
            records += own
            if stage == "burst":
                recovered = recovery_s(((r.due_s, r.slo_met is True) for r in own), ends_s)
        classes = [each.name for each in self._definition.classes]
        return rows, SuitePoint(
            stage=stage, rate_rps=rate, duration_s=duration_s, recovery_s=recovered,
            classes=count_classes(records, classes, wall_s=wall_s),
        )  # fmt: skip

    def _plan(self, policy: str, stage: Stage, rate: float, number: int) -> tuple[BenchPlan, float]:
        """Return the plan of a load, and when its burst ends. number: of the measurement, from 0."""
        settings = self._settings
        calm = _rounded(rate * CALM / OVERLOAD) if stage == "burst" else rate
        enough_s = self._definition.least_requests / (calm * self._least_share)
        duration_s = min(max(settings.duration_s, enough_s), LONGEST * settings.duration_s)
        begins_s, ends_s = (float(f"{part * duration_s:.4g}") for part in (BEFORE, UNTIL))
        arrivals = POISSON
        if stage == "burst":
            arrivals = f"step:at={begins_s:g},rate={rate:g},at={ends_s:g},rate={calm:g}"
        plan = BenchPlan(
            policies=(policy,), rates=(calm,), duration_s=duration_s, seed=settings.seed + number * AGAIN_SEED,
            drain_s=settings.drain_s, max_late_s=settings.max_late_s, warmup_requests=settings.warmup_requests,
            arrivals=(arrivals,), repeats=settings.repeats,
        )  # fmt: skip
        return plan, ends_s

    def _run(self, plan: BenchPlan, folder: Path) -> list[ResultRow]:
        with self._observe(plan) as observer:
            rows = run_bench(
                plan,
                self._workload,
                self._open,
                folder,
                observer,
                use="resume",
                about=self._about,
                policy_files=self._policy_files,
                beside=self._rows,
            )
        self._rows += rows
        if any(row.invalid_reason == INTERRUPTED for row in rows):
            raise KeyboardInterrupt
        return rows


def begin(out: Path, definition: Definition, held: Mapping[str, Any] | None) -> None:
    """Write the definition of a suite, or compare it with the one that is held.

    Raises ConfigError: it differs.
    """
    make_folder(out)
    plain = json.loads(json.dumps(asdict(definition)))
    if held is None:
        write_whole(out / DEFINITION, json.dumps(plain, indent=1) + "\n", mode=SHARED)
        return
    differ = [name for name in plain if plain[name] != held.get(name)]
    if differ:
        raise ConfigError(
            f"cannot resume {out}: {differ[0]} was {held.get(differ[0])!r}, is {plain[differ[0]]!r}; give the options "
            "of that suite, or another --out"
        )
