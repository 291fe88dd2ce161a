"""What an arrival process is, from a line such as "gamma:cv=2" or "sine:period=60,swing=0.8". Draws nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from adaserve_jax.errors import ConfigError

POISSON, GAMMA, TRACE, STEP, SINE, PEAKS = "poisson", "gamma", "trace", "step", "sine", "peaks"
EXAMPLES = (
    "poisson", "gamma:cv=2", "trace", "trace:scale=0.5", "step:at=30,rate=4", "sine:period=60,swing=0.8",
    "peaks:chat=75,code=195,summary=285",
)  # fmt: skip
PEAK_WIDTH_S, FLAT_SHARE = 35.0, 0.25
"""Of peaks that do not say: the shape of `fluctuating`."""
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
        width_s=_above(values.get("width", PEAK_WIDTH_S), process, "width"),
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
