"""A submission to the multi-SLO benchmark: one JSON file with what a system did at each load, and the verdict.

The verdict follows from the points alone (`judge`), so the figures of any load generator can become a submission.
Definition of the benchmark: benchmarks/multi_slo/README.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.whole_file import SHARED, write_whole

SUITE: Literal["multi-slo"] = "multi-slo"
FILE = "multi-slo.json"
LEVELS = (0.9, 0.95, 0.99)
Z = 1.959964
"""Standard normal quantile of a 95% interval."""
RECOVERED, LEAST_AFTER, LEAST_SPAN = 0.9, 10, 0.25
"""A system has recovered at the first moment after which this share of the requests that follow meets its targets, with
at least so many of them left to tell."""
Stage = Literal["rate", "overload", "burst"]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class ClassTarget:
    """Targets of one SLO class in ms, None without one. share: expected share of the requests."""

    name: str
    tpot_ms: float | None
    ttft_ms: float | None
    e2e_ms: float | None = None
    share: float


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What was asked of every system that is compared.

    baseline_ms: time of one token, alone and without speculation, that the preset's targets multiply. duration_s:
    shortest time in which the requests of a point arrive; it grows, up to tenfold, until each class has least_requests
    on average.
    """

    suite: Literal["multi-slo"] = SUITE
    version: Literal[1] = 1
    preset: str
    baseline_ms: float
    classes: tuple[ClassTarget, ...]
    workload: str
    workload_hash: str
    duration_s: float
    least_requests: int
    repeats: int
    seed: int

    @property
    def searched_levels(self) -> tuple[float, ...]:
        """Return the levels that a class of so many requests can keep although one of them misses its targets.

        A higher level would be missed by a single request at any rate, so that a search for it measures chance.
        """
        requests = self.least_requests * self.repeats
        return tuple(level for level in LEVELS if round(requests * (1 - level), 9) >= 1) or LEVELS[:1]


@dataclass(frozen=True, kw_only=True)
class System:
    """What was measured, and by what. client: the load generator."""

    name: str
    policy: str
    target: str
    draft: str | None
    device: str
    machine: str
    client: str
    commit: str
    measured_at: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClassCount:
    """Requests of one class at a point, and those among them that met all of their targets.

    lost: rejected, failed or cut off; they met none. Times are percentiles in ms of requests that have them.
    """

    name: str
    requests: Count
    met: Count
    lost: Count
    goodput_tps: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None

    def __post_init__(self) -> None:
        if self.met > self.requests:
            raise ValueError(f"met must be at most requests, got {self.met} of {self.requests}")

    @property
    def attainment(self) -> float:
        """Return the share of requests that met their targets; 1 without a request, as none missed them."""
        return self.met / self.requests if self.requests else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95% interval of the attainment, by Wilson's score."""
        n, p = self.requests, self.attainment
        if not n:
            return 0.0, 1.0
        middle, half = p + Z**2 / (2 * n), Z * math.sqrt(p * (1 - p) / n + (Z / (2 * n)) ** 2)
        return max(0.0, (middle - half) / (1 + Z**2 / n)), min(1.0, (middle + half) / (1 + Z**2 / n))


@dataclass(frozen=True, kw_only=True)
class SuitePoint:
    """One load. rate_rps: mean of a steady load, or the rate of a burst while it lasts. duration_s: in which requests
    arrived, of all repeats and measurements. recovery_s: of a burst, from its end; None where the system did not
    recover while requests came."""

    stage: Stage
    rate_rps: Above0
    duration_s: Above0
    classes: Annotated[tuple[ClassCount, ...], Field(min_length=1)]
    recovery_s: float | None = None

    @property
    def worst(self) -> ClassCount:
        """Return the class with the least attainment."""
        return min(self.classes, key=lambda each: each.attainment)

    @property
    def attainment(self) -> float:
        """Return the share of all requests."""
        total = sum(each.requests for each in self.classes)
        return sum(each.met for each in self.classes) / total if total else 0.0

    @property
    def goodput_tps(self) -> float:
        return sum(each.goodput_tps for each in self.classes)

    @property
    def fairness(self) -> float | None:
        """Return Jain's index of the attainments of the classes: 1 if all are alike, 1 / classes if one has all; None
        if no request met its targets."""
        shares = [each.attainment for each in self.classes if each.requests]
        squares = sum(share**2 for share in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if squares else None


@dataclass(frozen=True, kw_only=True)
class AtLevel:
    """The highest rate at which every class has an attainment of at least `level`, as at all lower measured rates.

    rate_rps: None if the lowest measured rate misses it. missed_rps: the lowest measured rate above it, which misses
    the level, so that the limit lies between the two; None if no rate missed it. sure_rps: the same as rate_rps by the
    lower ends of the intervals. goodput_tps, fairness: at rate_rps.
    """

    level: float
    rate_rps: float | None
    missed_rps: float | None
    sure_rps: float | None
    goodput_tps: float | None
    fairness: float | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The figures that systems are compared by. overload_*: at twice the rate of the first level; recovery_s: after a
    burst."""

    levels: tuple[AtLevel, ...]
    overload_rps: float | None
    overload_attainment: float | None
    overload_worst: float | None
    overload_goodput_tps: float | None
    overload_fairness: float | None
    recovery_s: float | None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The whole file."""

    definition: Definition
    system: System
    points: tuple[SuitePoint, ...]
    verdict: Verdict


@cache
def _adapter() -> TypeAdapter[Submission]:
    return TypeAdapter(Submission)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a submission."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_adapter().json_schema()}


def write_submission(path: Path, submission: Submission) -> None:
    write_whole(path, json.dumps(asdict(submission), indent=1, allow_nan=False) + "\n", mode=SHARED)


def read_submission(path: Path) -> Submission:
    """Read a submission. Raises ConfigError: it cannot be read, has other fields, or a verdict that its points do not
    give."""
    try:
        found = _adapter().validate_json(path.read_bytes(), strict=True, extra="forbid")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a {FILE}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path} is not a submission to {SUITE}: {where}: {first['msg']}") from error
    if not _alike(asdict(found.verdict), asdict(judge(found.points))):
        raise ConfigError(f"{path}: the verdict does not follow from the points; write it anew from them")
    return found


def _alike(given: Any, computed: Any) -> bool:
    """Return whether two values are equal, numbers but for rounding, in which versions of Python differ."""
    if isinstance(computed, dict):
        return all(_alike(given[name], value) for name, value in cast("dict[str, Any]", computed).items())
    if isinstance(computed, tuple):
        parts = cast("tuple[Any, ...]", computed)
        return len(given) == len(parts) and all(map(_alike, given, parts))
    if isinstance(computed, float) and isinstance(given, float):
        return math.isclose(given, computed, rel_tol=1e-9)
    return given == computed


def count_classes(records: Sequence[RequestRecord], classes: Iterable[str], *, wall_s: float) -> tuple[ClassCount, ...]:
    """Count what requests of each class met. wall_s: of all repeats together."""
    return tuple(_count(name, [r for r in records if r.slo_class == name], wall_s) for name in classes)


def _count(name: str, records: Sequence[RequestRecord], wall_s: float) -> ClassCount:
    judged = [record for record in records if record.slo_met is not None]

    def percentile(value: Callable[[RequestRecord], float | None], q: float) -> float | None:
        known = [each for record in judged if (each := value(record)) is not None]
        return float(np.percentile(known, q)) * 1e3 if known else None

    return ClassCount(
        name=name,
        requests=len(judged),
        met=sum(record.slo_met is True for record in judged),
        lost=sum(record.status != "finished" for record in judged),
        goodput_tps=sum(record.output_tokens for record in judged if record.slo_met) / wall_s if wall_s > 0 else 0.0,
        ttft_p50_ms=percentile(lambda r: r.ttft_s, 50),
        ttft_p99_ms=percentile(lambda r: r.ttft_s, 99),
        tpot_p50_ms=percentile(lambda r: r.tpot_s, 50),
        tpot_p99_ms=percentile(lambda r: r.tpot_s, 99),
    )


def recovery_s(outcomes: Iterable[tuple[float, bool]], burst_end_s: float) -> float | None:
    """Return the seconds from the end of a burst to the first moment after which RECOVERED of the requests that follow
    meet their targets.

    outcomes: time at which a request was due, and whether it met its targets. None if there is no such moment with at
    least LEAST_AFTER requests after it, over LEAST_SPAN of the time after the burst: the last requests are met because
    none come after them.
    """
    after = sorted((due_s, met) for due_s, met in outcomes if due_s >= burst_end_s)
    met = sum(each for _, each in after)
    for number, (due_s, each) in enumerate(after):
        left = len(after) - number
        if left < LEAST_AFTER or after[-1][0] - due_s < LEAST_SPAN * (after[-1][0] - burst_end_s):
            return None
        if met >= RECOVERED * left:
            return due_s - burst_end_s if number else 0.0
        met -= each
    return None


def judge(points: Sequence[SuitePoint]) -> Verdict:
    """Return the figures that follow from the points. Raises ConfigError without a point of a steady load."""
    steady = sorted((point for point in points if point.stage == "rate"), key=lambda point: point.rate_rps)
    if not steady:
        raise ConfigError(f"a submission to {SUITE} needs points of the stage 'rate', got none")
    overload = next((point for point in points if point.stage == "overload"), None)
    burst = next((point for point in points if point.stage == "burst"), None)
    return Verdict(
        levels=tuple(_at_level(level, steady) for level in LEVELS),
        overload_rps=overload and overload.rate_rps,
        overload_attainment=overload and overload.attainment,
        overload_worst=overload and overload.worst.attainment,
        overload_goodput_tps=overload and overload.goodput_tps,
        overload_fairness=overload and overload.fairness,
        recovery_s=burst and burst.recovery_s,
    )


def _at_level(level: float, steady: Sequence[SuitePoint]) -> AtLevel:
    held = _while_all(steady, lambda each: each.attainment >= level)
    sure = _while_all(steady, lambda each: each.interval[0] >= level)
    best = steady[held - 1] if held else None
    return AtLevel(
        level=level,
        rate_rps=best and best.rate_rps,
        missed_rps=steady[held].rate_rps if held < len(steady) else None,
        sure_rps=steady[sure - 1].rate_rps if sure else None,
        goodput_tps=best and best.goodput_tps,
        fairness=best and best.fairness,
    )


def _while_all(steady: Sequence[SuitePoint], met: Callable[[ClassCount], bool]) -> int:
    """Return how many of the lowest rates in a row have every class meet the condition."""
    for number, point in enumerate(steady):
        if not all(map(met, point.classes)):
            return number
    return len(steady)
