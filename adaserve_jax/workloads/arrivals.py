"""Arrival schedules: which request of a workload arrives when, from a seeded process or at the workload's own times.

Schedules use common random numbers: request i is the same item with the same seed at every rate, burstiness, step and
sinusoid; only its time differs. A higher rate has the same requests, sooner, and more after them. With peaks, that
holds class by class. So two points differ by their load, not by luck.

A law of intensity has a mean of 1. Its `cumulative` says how much of "operational time", in which arrivals are
stationary, has passed at a time. Times are drawn there and carried back, so the expected number of arrivals in a span
is exactly the integral of the law over it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.items import Workload, WorkloadItem

POISSON, GAMMA, TRACE, STEP, SINE, PEAKS = "poisson", "gamma", "trace", "step", "sine", "peaks"
EXAMPLES = (
    "poisson", "gamma:cv=2", "trace", "trace:scale=0.5", "step:at=10,rate=4", "sine:period=60,swing=0.8",
    "peaks:chat=75,code=195,summary=285",
)  # fmt: skip
PEAK_WIDTH_S, FLAT_SHARE = 35.0, 0.25
"""Default shape of peaks: that of `fluctuating`."""
MOST_WIDTH_S = 1e9
"""A wider peak is even within any run, and too even for floating point to integrate."""
LEAST_CV, MOST_CV = 0.05, 20.0
_ALLOWED: Mapping[str, tuple[str, ...]] = {
    POISSON: (),
    GAMMA: ("cv",),
    TRACE: ("scale",),
    STEP: ("at", "rate", "cv"),
    SINE: ("period", "swing", "cv"),
    PEAKS: ("width", "flat", "cv"),
}
_NEEDED = {GAMMA: ("cv",), STEP: ("at", "rate"), SINE: ("period", "swing")}


@dataclass(frozen=True)
class ArrivalSpec:
    """One process; fields that are not of it keep their defaults. text: how it is written.

    cv: standard deviation of gaps over their mean, 1 for Poisson. scale: what a trace's times are multiplied by.
    steps: (time in seconds, requests per second from then on). period_s, swing: of a sinusoid, swing as a share of the
    mean. peaks: (class, time in seconds); width_s: standard deviation of each; flat: share of arrivals in no peak.
    """

    process: str
    text: str
    cv: float = 1.0
    scale: float | None = None
    steps: tuple[tuple[float, float], ...] = ()
    period_s: float = 0.0
    swing: float = 0.0
    peaks: tuple[tuple[str, float], ...] = ()
    width_s: float = PEAK_WIDTH_S
    flat: float = FLAT_SHARE


def parse_arrivals(text: str) -> ArrivalSpec:
    """Read "process" or "process:name=number,...". Raises ConfigError naming the part at fault."""
    process, colon, rest = text.strip().partition(":")
    if process not in _ALLOWED or (colon and not rest.strip()):
        raise ConfigError(f"arrivals: expected one such as {', '.join(EXAMPLES)}, got {text.strip()!r}")
    settings = [_setting(part, process) for part in rest.split(",")] if colon else []
    named = {name for name, _ in settings}
    missing = [name for name in _NEEDED.get(process, ()) if name not in named]
    if missing:
        raise ConfigError(f"arrivals: {process} needs {missing[0]}, such as {_example(process)}")
    repeated = {name for name, _ in settings if sum(name == other for other, _ in settings) > 1}
    if repeated - ({"at", "rate"} if process == STEP else set()):
        raise ConfigError(f"arrivals: {process}: {min(repeated)} is given twice")
    known, values = _ALLOWED[process], dict(settings)
    peaks = tuple((name, at_s) for name, at_s in settings if process == PEAKS and name not in known)
    if process == PEAKS and not peaks:
        raise ConfigError(f"arrivals: peaks needs a class and when it peaks, such as {_example(process)}")
    return ArrivalSpec(
        process,
        _written(process, settings),
        cv=_within(values.get("cv", 1.0), process, "cv", LEAST_CV, MOST_CV),
        scale=None if "scale" not in values else _above(values["scale"], process, "scale"),
        steps=_steps(settings) if process == STEP else (),
        period_s=_above(values["period"], process, "period") if process == SINE else 0.0,
        swing=_within(values.get("swing", 0.0), process, "swing", 0.0, 1.0),
        peaks=tuple((name, _within(at_s, process, name, 0.0, math.inf)) for name, at_s in peaks),
        width_s=_within(
            _above(values.get("width", PEAK_WIDTH_S), process, "width"), process, "width", 0.0, MOST_WIDTH_S
        ),
        flat=_within(values.get("flat", FLAT_SHARE), process, "flat", 0.0, 1.0),
    )


def _setting(part: str, process: str) -> tuple[str, float]:
    name, equals, number = (piece.strip() for piece in part.partition("="))
    known = _ALLOWED[process]
    if not equals or not name or not (name in known or process == PEAKS):
        said = f"its settings are {', '.join(known)}" if known else "it has no settings"
        raise ConfigError(f"arrivals: {process}: {said}, got {part.strip()!r}")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"arrivals: {process}: {name}: expected a finite number, got {number!r}")
    return name, value


def _steps(settings: list[tuple[str, float]]) -> tuple[tuple[float, float], ...]:
    times = [value for name, value in settings if name == "at"]
    rates = [value for name, value in settings if name == "rate"]
    rising = all(a < b for a, b in zip([0.0, *times], times, strict=False))
    if len(times) != len(rates) or not rising or min(rates) < 0:
        raise ConfigError(
            "arrivals: step: expected for each time above 0, in rising order, a rate of at least 0, such as "
            "step:at=30,rate=4,at=60,rate=1"
        )
    return tuple(zip(times, rates, strict=True))


def _written(process: str, settings: list[tuple[str, float]]) -> str:
    said = ",".join(f"{name}={value:g}" for name, value in settings)
    return f"{process}:{said}" if said else process


def _example(process: str) -> str:
    return next(example for example in reversed(EXAMPLES) if example.startswith(process))


def _above(value: float, process: str, name: str) -> float:
    if not value > 0:
        raise ConfigError(f"arrivals: {process}: {name}: expected a number above 0, got {value:g}")
    return value


def _within(value: float, process: str, name: str, low: float, high: float) -> float:
    if not low <= value <= high:
        raise ConfigError(f"arrivals: {process}: {name}: expected a number from {low:g} to {high:g}, got {value:g}")
    return value


STEPS_PER_FEATURE = 512
"""Points per period or peak width at which a law is tabulated before it is inverted."""
MOST_STEPS = 1 << 20
_ERF = np.frompyfunc(math.erf, 1, 1)


class Law(Protocol):
    """A rate over time, as a multiple of a mean."""

    def cumulative(self, at_s: np.ndarray) -> np.ndarray:
        """Return f64, the integral from 0 to `at_s`; never decreasing."""
        ...

    def knots(self, duration_s: float) -> np.ndarray:
        """Return f64, times from 0 to `duration_s` between which the integral is straight, or nearly."""
        ...


@dataclass(frozen=True)
class Constant:
    def cumulative(self, at_s: np.ndarray) -> np.ndarray:
        return at_s

    def knots(self, duration_s: float) -> np.ndarray:
        return np.array([0.0, duration_s])


@dataclass(frozen=True)
class Steps:
    """1 until the first time, then the level that goes with each."""

    times_s: tuple[float, ...]
    levels: tuple[float, ...]

    def cumulative(self, at_s: np.ndarray) -> np.ndarray:
        edges = np.array([0.0, *self.times_s, math.inf])
        spans = np.clip(np.asarray(at_s)[..., None], edges[:-1], edges[1:]) - edges[:-1]
        return spans @ np.array([1.0, *self.levels])

    def knots(self, duration_s: float) -> np.ndarray:
        return np.array([0.0, *(at for at in self.times_s if at < duration_s), duration_s])


@dataclass(frozen=True)
class Sine:
    """1 + swing sin(2 pi t / period): its mean over whole periods is 1."""

    period_s: float
    swing: float

    def cumulative(self, at_s: np.ndarray) -> np.ndarray:
        turn = 2 * math.pi / self.period_s
        return at_s + self.swing / turn * (1 - np.cos(turn * np.asarray(at_s)))

    def knots(self, duration_s: float) -> np.ndarray:
        return _grid(duration_s, self.period_s)


@dataclass(frozen=True)
class Peak:
    """A share `flat` of the arrivals evenly over the whole time, the rest around `at_s`, as a normal distribution of
    standard deviation `width_s` cut off at the ends; its mean over `duration_s` is 1. AdaServe's figure 13."""

    at_s: float
    width_s: float
    flat: float
    duration_s: float

    def intensity(self, at_s: np.ndarray) -> np.ndarray:
        """Return f64, the law itself."""
        scaled = (at_s - self.at_s) / self.width_s
        density = np.exp(-0.5 * scaled**2) / (self.width_s * math.sqrt(2 * math.pi) * self._inside())
        return self.flat + (1 - self.flat) * self.duration_s * density

    def cumulative(self, at_s: np.ndarray) -> np.ndarray:
        at = np.asarray(at_s, np.float64)
        passed = (_normal_cdf((at - self.at_s) / self.width_s) - self._below()) / self._inside()
        return self.flat * at + (1 - self.flat) * self.duration_s * passed

    def knots(self, duration_s: float) -> np.ndarray:
        return _grid(duration_s, self.width_s)

    def _below(self) -> float:
        return float(_normal_cdf(np.array(-self.at_s / self.width_s)))

    def _inside(self) -> float:
        return float(_normal_cdf(np.array((self.duration_s - self.at_s) / self.width_s))) - self._below()


def draw_times(law: Law, rate_rps: float, duration_s: float, cv: float, rng: np.random.Generator) -> np.ndarray:
    """Return times f64[arrivals], increasing, below `duration_s`: gaps in operational time are gamma distributed with
    mean 1 / rate and coefficient of variation `cv` (1: Poisson).

    The process has run for ever when it is first looked at: the first gap is the rest of one that had begun, so it
    is stationary and the expected number of arrivals exact for every cv. The same rng draws the same gaps at every
    rate, so times at another rate are these, scaled.
    """
    knots = law.knots(duration_s)
    passed = law.cumulative(knots) * rate_rps
    times = np.interp(_unit_times(float(passed[-1]), cv, rng), passed, knots)
    return times[times < duration_s]


def _unit_times(end: float, cv: float, rng: np.random.Generator) -> np.ndarray:
    """Return f64, arrivals of mean gap 1 before `end`. A gap that the start falls into is longer than others: its
    length is drawn by length times the density, which for a gamma of shape k is that of shape k + 1."""
    shape = cv**-2
    first, rest = rng.spawn(2)
    now = first.random() * first.gamma(shape + 1, 1 / shape)
    times = []
    while now < end:
        chunk = now + np.concatenate([[0.0], np.cumsum(rest.gamma(shape, 1 / shape, CHUNK))])
        times.append(chunk[:-1])
        now = float(chunk[-1])
    drawn = np.concatenate([np.zeros(0), *times])
    return drawn[drawn < end]


CHUNK = 4096
"""Gaps drawn at once; fixed, so that a longer run has the same beginning."""


def _grid(duration_s: float, feature_s: float) -> np.ndarray:
    steps = duration_s / feature_s * STEPS_PER_FEATURE
    if steps > MOST_STEPS - 1:
        raise ConfigError(
            f"a rate that changes within {feature_s:g} s is too fine for a run of {duration_s:g} s; shorten the run"
        )
    return np.linspace(0.0, duration_s, max(math.ceil(steps) + 1, STEPS_PER_FEATURE))


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.asarray(_ERF(x / math.sqrt(2)), np.float64))


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


def make_schedule(
    workload: Workload, spec: ArrivalSpec, *, rate_rps: float | None, duration_s: float, seed: int
) -> Schedule:
    """Schedule the requests that arrive within `duration_s`, in shuffled passes over the workload, so that every pass
    has its mix.

    rate_rps: mean rate (of steps: until the first step); None: the workload's own times. A trace whose own times end
    sooner is not repeated; the schedule is then shorter. The same arguments give the same schedule under every policy.
    Raises ConfigError.
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
        return Schedule(spec.text, rate_rps, duration_s, arrivals)
    late = [at_s for at_s, _ in spec.steps if at_s >= duration_s]
    if late:
        raise ConfigError(
            f"arrivals: step: the rate changes at {late[0]:g} s, which is not within the run's {duration_s:g} s; make "
            "the run longer"
        )
    law = _law(spec, rate_rps)
    end = np.array(law.knots(duration_s)[-1])  # `knots` refuses a law that is too fine for numbers
    mean_rps = rate_rps * float(law.cumulative(end)) / duration_s
    _check_count(mean_rps, duration_s)
    times = draw_times(law, rate_rps, duration_s, spec.cv, _stream(seed, _TIMES))
    return Schedule(spec.text, mean_rps, duration_s, _assigned(times, workload.items, seed))


def _law(spec: ArrivalSpec, rate_rps: float) -> Law:
    if spec.process == STEP:
        times, rates = zip(*spec.steps, strict=True)
        return Steps(times, tuple(rate / rate_rps for rate in rates))
    return Sine(spec.period_s, spec.swing) if spec.period_s else Constant()


def _assigned(times: np.ndarray, items: tuple[WorkloadItem, ...], seed: int, *within: int) -> tuple[Arrival, ...]:
    """Give the i-th time to the i-th item of shuffled passes, with the i-th seed."""
    order, seeds = _stream(seed, _ORDER, *within), _stream(seed, _SEEDS, *within)
    passes = -(-len(times) // len(items))
    picks = [pick for _ in range(passes) for pick in order.permutation(len(items)).tolist()]
    drawn = seeds.integers(0, 2**63, len(times)).tolist()
    return tuple(
        Arrival(at, items[pick], number) for at, pick, number in zip(times.tolist(), picks, drawn, strict=False)
    )


def _peaks(workload: Workload, spec: ArrivalSpec, rate_rps: float, duration_s: float, seed: int) -> tuple[Arrival, ...]:
    """Draw each class by its own share of the workload, around its peak; a class without one arrives evenly."""
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
    """Schedule the workload's own times, counted from the earliest and multiplied by the scale or to the mean rate
    `rate_rps`."""
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
    return Schedule(text, count / lasts_s, lasts_s, arrivals)


def _check_count(rate_rps: float, duration_s: float) -> None:
    if rate_rps * duration_s > MOST_ARRIVALS:
        raise ConfigError(
            f"{rate_rps:g} requests/s for {duration_s:g} s are more than {MOST_ARRIVALS} requests; shorten the run"
        )


def _stream(seed: int, *path: int) -> np.random.Generator:
    return np.random.default_rng([seed, *path])
