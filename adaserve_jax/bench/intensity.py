"""How the rate of requests changes over a run: laws with a mean of 1, their integrals, and times drawn by them.

A law says by `cumulative` how much of "operational time", in which arrivals are stationary, has passed at a time. Times
are drawn there and carried back, so the expected number of arrivals in any span is exactly the law's integral over it.
Knows nothing of requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from adaserve_jax.errors import ConfigError

STEPS_PER_FEATURE = 512
"""Points per period or peak width at which a law is tabulated before it is inverted."""
MOST_STEPS = 1 << 20
_ERF = np.frompyfunc(math.erf, 1, 1)


class Law(Protocol):
    """A rate over time, as a multiple of a mean."""

    def cumulative(self, at_s: np.ndarray) -> np.ndarray:
        """f64, the integral from 0 to `at_s`; never decreasing."""
        ...

    def knots(self, duration_s: float) -> np.ndarray:
        """f64, times from 0 to `duration_s` between which the integral is straight, or nearly."""
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
        """f64, the law itself."""
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
    """f64[arrivals], increasing, below `duration_s`: gaps in operational time are gamma distributed with mean 1 / rate
    and coefficient of variation `cv` (1: Poisson).

    The process has run for ever when it is first looked at: the first gap is the rest of one that had begun, so it
    is stationary and the expected number of arrivals exact for every cv. The same rng draws the same gaps at every
    rate, so times at another rate are these, scaled.
    """
    knots = law.knots(duration_s)
    passed = law.cumulative(knots) * rate_rps
    return np.interp(_unit_times(float(passed[-1]), cv, rng), passed, knots)


def _unit_times(end: float, cv: float, rng: np.random.Generator) -> np.ndarray:
    """f64, arrivals of mean gap 1 before `end`. A gap that the start falls into is longer than others: its length is
    drawn by length times the density, which for a gamma of shape k is that of shape k + 1."""
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
    steps = math.ceil(duration_s / feature_s * STEPS_PER_FEATURE) + 1
    if steps > MOST_STEPS:
        raise ConfigError(
            f"a rate that changes within {feature_s:g} s is too fine for a run of {duration_s:g} s; shorten the run"
        )
    return np.linspace(0.0, duration_s, max(steps, STEPS_PER_FEATURE))


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.asarray(_ERF(x / math.sqrt(2)), np.float64))
