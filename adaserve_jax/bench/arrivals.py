"""When which request of a workload arrives: by a process that is drawn from a seed, or at the workload's own times.

Common random numbers: request i of a schedule is the same item with the same seed at every rate, burstiness, step and
sinusoid, only its time differs; a greater rate has the same requests, sooner, and more after them. Of peaks that holds
class by class. So what differs between two points is the load, not the luck of what was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.bench.arrival_spec import PEAKS, POISSON, STEP, TRACE, ArrivalSpec, parse_arrivals
from adaserve_jax.bench.intensity import Constant, Law, Peak, Sine, Steps, draw_times
from adaserve_jax.bench.workload_items import Workload, WorkloadItem
from adaserve_jax.errors import ConfigError

__all__ = ["Arrival", "ArrivalSpec", "Schedule", "make_schedule", "parse_arrivals"]

MOST_ARRIVALS = 10_000_000
_TIMES, _ORDER, _SEEDS, _CLASS = range(4)
"""Streams of one seed: what is drawn of one does not move the others."""


@dataclass(frozen=True)
class Arrival:
    """One request of a run. due_s: seconds since the start. seed: for an item that brings none."""

    due_s: float
    item: WorkloadItem
    seed: int


@dataclass(frozen=True)
class Schedule:
    """All requests of one run in order of due_s. process: the arrival process as it is written. rate_rps: requests per
    second offered over `duration_s`, as expected; of a workload's own times, as counted."""

    process: str
    rate_rps: float
    duration_s: float
    arrivals: tuple[Arrival, ...]
    seed: int = 0


def make_schedule(
    workload: Workload, spec: ArrivalSpec, *, rate_rps: float | None, duration_s: float, seed: int
) -> Schedule:
    """Requests that arrive within `duration_s`, at a mean of `rate_rps` (of steps: until the first), in shuffled passes
    over the workload, so that every pass has its mix. None: at the workload's own times.

    A trace whose own times end sooner is not repeated: the schedule is then as long as it. The same arguments give the
    same schedule, whatever the policy under test. Raises ConfigError.
    """
    for name, value in (("rate", rate_rps), ("duration", duration_s)):
        if value is not None and not 0 < value < np.inf:
            raise ConfigError(f"the {name} must be finite and above 0, got {value!r}")
    if seed < 0:
        raise ConfigError(f"the seed must be at least 0, got {seed}")
    if rate_rps is None or spec.process == TRACE:
        return _own_times(workload, spec, rate_rps, duration_s, seed)
    if spec.process == PEAKS:
        arrivals = _peaks(workload, spec, rate_rps, duration_s, seed)
        return Schedule(spec.text, rate_rps, duration_s, arrivals, seed)
    law = _law(spec, rate_rps)
    mean_rps = rate_rps * float(law.cumulative(np.array(duration_s))) / duration_s
    _check_count(mean_rps, duration_s)
    times = draw_times(law, rate_rps, duration_s, spec.cv, _stream(seed, _TIMES))
    return Schedule(spec.text, mean_rps, duration_s, _assigned(times, workload.items, seed), seed)


def _law(spec: ArrivalSpec, rate_rps: float) -> Law:
    if spec.process == STEP:
        times, rates = zip(*spec.steps, strict=True)
        return Steps(times, tuple(rate / rate_rps for rate in rates))
    return Sine(spec.period_s, spec.swing) if spec.period_s else Constant()


def _assigned(times: np.ndarray, items: tuple[WorkloadItem, ...], seed: int, *within: int) -> tuple[Arrival, ...]:
    """The i-th time goes to the i-th item of shuffled passes, with the i-th seed."""
    order, seeds = _stream(seed, _ORDER, *within), _stream(seed, _SEEDS, *within)
    passes = -(-len(times) // len(items))
    picks = [pick for _ in range(passes) for pick in order.permutation(len(items)).tolist()]
    drawn = seeds.integers(0, 2**63, len(times)).tolist()
    return tuple(
        Arrival(at, items[pick], number) for at, pick, number in zip(times.tolist(), picks, drawn, strict=False)
    )


def _peaks(workload: Workload, spec: ArrivalSpec, rate_rps: float, duration_s: float, seed: int) -> tuple[Arrival, ...]:
    """Each class by its own share of the workload, around its peak; a class without one arrives evenly."""
    peaks = dict(spec.peaks)
    unknown = sorted(peaks.keys() - set(workload.classes))
    if unknown:
        raise ConfigError(
            f"arrivals: peaks: workload {workload.name} has no class {unknown[0]!r}; it has "
            f"{', '.join(workload.classes)}"
        )
    late = [name for name, at_s in spec.peaks if at_s > duration_s]
    if late:
        raise ConfigError(f"arrivals: peaks: {late[0]} peaks after the run's {duration_s:g} s; make it longer")
    _check_count(rate_rps, duration_s)
    arrivals: list[Arrival] = []
    for number, name in enumerate(workload.classes):
        items = tuple(item for item in workload.items if item.slo_class == name)
        share = len(items) / len(workload.items)
        law = Peak(peaks[name], spec.width_s, spec.flat, duration_s) if name in peaks else Constant()
        times = draw_times(law, rate_rps * share, duration_s, spec.cv, _stream(seed, _TIMES, _CLASS, number))
        arrivals += _assigned(times, items, seed, _CLASS, number)
    return tuple(sorted(arrivals, key=lambda arrival: arrival.due_s))


def _own_times(workload: Workload, spec: ArrivalSpec, rate_rps: float | None, duration_s: float, seed: int) -> Schedule:
    """arrival_s counted from the earliest, multiplied by the scale, or so that their mean rate is `rate_rps`."""
    if spec.process not in (TRACE, POISSON):
        raise ConfigError(
            f"arrivals {spec.text} need rates as numbers; the workload's own times go with poisson or trace"
        )
    if not workload.has_arrivals:
        raise ConfigError(
            f"workload {workload.name} says no times of arrival (arrival_s, in its own format); add them, or give "
            "rates as numbers and another process than trace"
        )
    if rate_rps is not None and spec.scale is not None:
        raise ConfigError("arrivals: a trace is scaled by its scale or to a rate, not by both; leave one out")
    items = sorted(workload.items, key=lambda item: item.arrival_s or 0.0)
    own = np.array([item.arrival_s or 0.0 for item in items])
    own -= own[0]
    mean_gap_s = own[-1] / (len(items) - 1) if len(items) > 1 else 0.0
    factor = 1.0 if spec.scale is None else spec.scale
    if rate_rps is not None:
        if not mean_gap_s:
            raise ConfigError(f"workload {workload.name} has all requests at one time, so its rate cannot be changed")
        factor = 1 / (rate_rps * mean_gap_s)
    times = own * factor
    lasts_s = min(duration_s, float(times[-1]) + mean_gap_s * factor or duration_s)
    count = int((times < duration_s).sum())
    drawn = _stream(seed, _SEEDS).integers(0, 2**63, len(items)).tolist()
    arrivals = tuple(Arrival(*each) for each in zip(times.tolist()[:count], items, drawn, strict=False))
    text = spec.text if spec.process == TRACE else TRACE
    return Schedule(text, count / lasts_s if rate_rps is None else rate_rps, lasts_s, arrivals, seed)


def _check_count(rate_rps: float, duration_s: float) -> None:
    if rate_rps * duration_s > MOST_ARRIVALS:
        raise ConfigError(
            f"{rate_rps:g} requests/s for {duration_s:g} s are more than {MOST_ARRIVALS} requests; shorten the run"
        )


def _stream(seed: int, *path: int) -> np.random.Generator:
    return np.random.default_rng([seed, *path])
