"""What benchmarks/adaserve/sweeps.py compares: the points of the sweeps, and who runs at each with which setting."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from adaserve_jax.bench.simulate import TUNED
from adaserve_jax.cli.options import comma_list
from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.policies import POLICIES
from adaserve_jax.sim.machines import Machine
from adaserve_jax.types import SLO
from adaserve_jax.workloads.reshaping import at_rate, with_mix, with_requests
from adaserve_jax.workloads.traces import DURATION_S, OUTPUT_TOKENS, Trace, fluctuating_trace, load_trace

OURS, PAPER = "adaserve", "adaserve-paper"
OURS_GROUP, AUTHORS_GROUP, BASELINE_GROUP, TUNED_GROUP = "ours", "authors", "baseline", "tuned"
BASELINE_CHUNK, BASELINE_RUNNING = 128, 64
"""Prefill chunk and most running requests of the baselines in AdaServe's evaluation."""
OWN_CHUNKS = ("niyama", "slidingserve", "jitserve")
"""Policies whose published mechanism is the size of the chunk, or includes it."""
CHAINS = (4, 6, 8)
DEEPEST = max(CHAINS)
OTHER_K = 4
"""k of a policy `<name>:<k>` that the paper gives no k for."""
TTFT_SLO_S = 4.0
TARGETS = {"tpot": None, "joint": TTFT_SLO_S}
"""Kinds of runs: with TPOT targets only, as in the paper, and with a TTFT target beside them."""
FLUCTUATING_RATES = (2.4, 3.0, 3.6)
QUICK_RATES, QUICK_REQUESTS = (3.0, 8.0), 40
"""Of the generated traces without a folder: rates, and about how many requests each has."""
DEADLINES_S = (8.0, 12.0, 16.0, 24.0, 32.0)
DEADLINE_RATE = 3.6
"""Requests per second of the trace whose requests get deadlines."""
LENGTH_SD, LIMIT_TOKENS = 0.6, 1024
"""Of the lengths drawn for them: deviation of the logarithm around OUTPUT_TOKENS / 2, and the limit that is sent."""
OVERLOADED_RATES = (2.0, 2.5, 3.0, 3.5)
OVERLOAD_FROM_S, OVERLOAD_S = 90.0, 60.0
MIXED_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
OVERLOAD = "overload"
SWEEPS = {"rate": "requests per second", "urgent": "share of urgent requests",
          "mix": "share of urgent requests, drawn anew", "scale": "SLO scale of the urgent",
          "fluctuating": "mean requests per second, fluctuating",
          "deadline": "deadline of those not urgent, s",
          OVERLOAD: "requests per second, doubled for 60 s"}  # fmt: skip
_PATTERNS = {
    "rate": r"rate_rps[\d.]+_ol\d+",
    "urgent": r"urgent_prop([\d.]+)",
    "scale": r"scale_slo([\d.]+)_ol\d+",
}
_PUBLISHED_SCALE = ("urgent_prop0.6", 1.2)
"""The trace of the urgent sweep that is also a point of the scale sweep, and its scale; other mixes are drawn from it.
"""
_URGENT = "code"


@dataclass(frozen=True)
class Contender:
    """One line of a comparison. policy: None for the best `spec:<k>` of each point. deep: whether the machine's limit
    of depth, which is AdaServe's setting, is lifted to DEEPEST. 0: the machine's own, and what the policy finds room
    for."""

    name: str
    group: str
    policy: str | None
    max_requests: int = 0
    max_prefill_tokens: int = 0
    deep: bool = False

    def runs_at(self, point: Point, machine: Machine) -> bool:
        """The tuned one only where a TTFT target counts too; a chain only where the machine can draft it."""
        if self.policy is None:
            return point.trace.requests[0].slo.ttft_s is not None
        k = self.policy.partition(":")[2]
        return not k or int(k) <= self.machine(machine).limits().max_depth

    def machine(self, machine: Machine) -> Machine:
        return replace(machine, max_depth=max(machine.max_depth, DEEPEST)) if self.deep else machine


@dataclass(frozen=True)
class Point:
    """One trace under one kind of targets; value: where it stands in its sweep."""

    sweep: str
    value: float
    targets: str
    trace: Trace


def contenders(*, quick: bool = False) -> list[Contender]:
    """Ours and the authors' with one setting for all points, every baseline at the paper's setting, the tuned one.

    quick: a few of them.
    """
    ours = [Contender(OURS, OURS_GROUP, OURS)]
    authors = [Contender(name, AUTHORS_GROUP, name) for name in (PAPER, "adaserve-code")]
    taken = {OURS, *(contender.name for contender in authors)}
    baselines = [f"spec:{k}" for k in CHAINS]
    for name in POLICIES:
        family = name.partition(":")[0]
        if name not in taken and family != "spec":
            baselines.append(name if family == name else f"{family}:{OTHER_K}")
    if quick:
        authors, baselines = authors[:1], ["spec:4", "ar"]
    fixed = [
        Contender(name, BASELINE_GROUP, name, BASELINE_RUNNING, 0 if name in OWN_CHUNKS else BASELINE_CHUNK, deep=True)
        for name in baselines
    ]
    return [*ours, *authors, *fixed, Contender(TUNED, TUNED_GROUP, None, deep=True)]


def named_contenders(option: str, text: str, chosen: list[Contender]) -> list[Contender]:
    """Return the contenders that an option names, separated by commas. Raises ConfigError: there is none of a name."""
    wanted, known = comma_list(option, text, str), {contender.name: contender for contender in chosen}
    if unknown := sorted(set(wanted) - set(known)):
        raise ConfigError(f"--{option}: no contender {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in wanted]


def points(folder: Path | None, *, requests: int, seed: int) -> list[Point]:
    """Every trace of `folder` that belongs to a sweep, and fluctuating ones, under both kinds of targets.

    folder: None for generated traces only, short ones in which the peaks follow each other quickly. requests: of each
    trace the first so many; 0: all. Raises ConfigError for a folder without a trace of the sweeps.
    """
    of_targets = _quick_points if folder is None else partial(_points, folder)
    found = [point for targets in TARGETS for point in of_targets(targets, seed)]
    return [replace(p, trace=with_requests(p.trace, requests, seed)) for p in found] if requests else found


def _quick_points(targets: str, seed: int) -> list[Point]:
    slow = fluctuating_trace(seed=seed, rate_rps=QUICK_REQUESTS / DURATION_S, ttft_slo_s=TARGETS[targets])
    return [Point("fluctuating", rate, targets, at_rate(slow, rate)) for rate in QUICK_RATES]


def _points(folder: Path, targets: str, seed: int) -> list[Point]:
    ttft_slo_s = TARGETS[targets]
    found: list[Point] = []
    for path in sorted(folder.glob("*.jsonl*")):
        name = path.name.partition(".jsonl")[0]
        for sweep, pattern in _PATTERNS.items():
            match = re.fullmatch(pattern, name)
            if match:
                trace = load_trace(path, ttft_slo_s=ttft_slo_s)
                value = float(match.group(1)) if match.groups() else round(trace.rate_rps, 3)
                found.append(Point(sweep, value, targets, trace))
                if name == _PUBLISHED_SCALE[0]:
                    found.append(Point("scale", _PUBLISHED_SCALE[1], targets, trace))
                    found += [Point("mix", share, targets, _mixed(trace, share, seed)) for share in MIXED_SHARES]
    if not found:
        raise ConfigError(f"{folder} has no trace named as AdaServe's are, such as rate_rps3.6_ol256.jsonl.gz")
    like = next((point.trace for point in found if point.sweep == "rate"), None)
    for rate in FLUCTUATING_RATES:
        trace = fluctuating_trace(seed=seed, rate_rps=rate, like=like, ttft_slo_s=ttft_slo_s)
        found.append(Point("fluctuating", rate, targets, trace))
    if like is not None:
        found += [Point(OVERLOAD, rate, targets, _overloaded(at_rate(like, rate))) for rate in OVERLOADED_RATES]
        steady = at_rate(like, DEADLINE_RATE)
        found += [Point("deadline", s, targets, _with_deadlines(steady, s, seed)) for s in DEADLINES_S]
    return sorted(found, key=lambda point: (list(SWEEPS).index(point.sweep), point.value))


def _overloaded(trace: Trace) -> Trace:
    """Return the trace with the requests of 2 x OVERLOAD_S seconds, from OVERLOAD_FROM_S on, in half the time."""
    end_s = OVERLOAD_FROM_S + 2 * OVERLOAD_S

    def sooner(due_s: float) -> float:
        return due_s - (min(due_s, end_s) - OVERLOAD_FROM_S) / 2 if due_s > OVERLOAD_FROM_S else due_s

    requests = (replace(request, due_s=sooner(request.due_s)) for request in trace.requests)
    return trace.derived(f"doubled for {OVERLOAD_S:g} s", requests)


def _with_deadlines(trace: Trace, deadline_s: float, seed: int) -> Trace:
    """Return the trace with lengths drawn anew, which no scheduler is told, and with deadlines in place of the TPOT
    targets of requests that are not urgent."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(np.log(OUTPUT_TOKENS / 2), LENGTH_SD, len(trace.requests)))
    requests = []
    for request, tokens in zip(trace.requests, np.clip(drawn, 8, LIMIT_TOKENS).astype(int).tolist(), strict=True):
        slo = request.slo if request.slo_class == _URGENT else SLO(ttft_ms=request.slo.ttft_ms, e2e_ms=1e3 * deadline_s)
        requests.append(replace(request, output_tokens=tokens, max_tokens=LIMIT_TOKENS, slo=slo))
    return trace.derived(f"deadlines {deadline_s:g} s seed {seed}", requests)


def _mixed(trace: Trace, urgent_share: float, seed: int) -> Trace:
    """Return the trace with this share of urgent requests, the other classes in the proportion that they have."""
    others = Counter(request.slo_class for request in trace.requests if request.slo_class != _URGENT)
    rest = {name: (1 - urgent_share) * count / others.total() for name, count in others.items()}
    return with_mix(trace, {_URGENT: urgent_share, **rest}, seed)
