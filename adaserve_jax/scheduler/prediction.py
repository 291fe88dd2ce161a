"""How well steps were predicted: predicted beside measured seconds of the latest ones, and their relative errors.

Knows no cost table; imports no jax.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

import numpy as np

LATEST = 4096
"""Steps that are kept."""
KINDS = ("verify", "draft", "step")


@dataclass(frozen=True)
class PredictionError:
    """Absolute relative error, |predicted - measured| / measured, over `steps` steps. None: none was measured."""

    steps: int
    median: float | None
    p90: float | None

    @classmethod
    def of(cls, predicted_s: np.ndarray, measured_s: np.ndarray) -> PredictionError:
        """Steps whose measured time is 0 had nothing to predict."""
        there = measured_s > 0
        if not there.any():
            return cls(0, None, None)
        error = np.abs(predicted_s[there] / measured_s[there] - 1)
        return cls(int(there.sum()), float(np.median(error)), float(np.quantile(error, 0.9)))


@dataclass
class Served:
    """Seconds of steps that were served, summed, beside what the samples say of them; a sample is the least time of a
    program alone. overhead_s: of steps outside draft and verification."""

    steps: int = 0
    verify_s: float = 0.0
    verify_sampled_s: float = 0.0
    draft_s: float = 0.0
    draft_sampled_s: float = 0.0
    overhead_s: float = 0.0

    def __add__(self, other: Served) -> Served:
        return Served(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def factors(self) -> ServingFactors | None:
        """None before anything was served."""
        if not self.steps or not self.verify_sampled_s:
            return None
        draft = self.draft_s / self.draft_sampled_s if self.draft_sampled_s else 1.0
        return ServingFactors(self.verify_s / self.verify_sampled_s, draft, self.overhead_s / self.steps)


@dataclass(frozen=True)
class ServingFactors:
    """What a step takes while serving: its samples times these, and the seconds outside them."""

    verify: float = 1.0
    draft: float = 1.0
    overhead_s: float = 0.0


class PredictionLog:
    """Predicted and measured seconds of the last LATEST steps, as they were before the step was learned from."""

    def __init__(self) -> None:
        self._steps: deque[tuple[tuple[float, float], ...]] = deque(maxlen=LATEST)

    def add(self, *, verify: tuple[float, float], draft: tuple[float, float], step: tuple[float, float]) -> None:
        """One step: (predicted, measured) of each kind; measured 0: there was none."""
        self._steps.append((verify, draft, step))

    def seconds(self) -> np.ndarray:
        """f64[steps, KINDS, 2], predicted and measured, oldest first."""
        return np.array(self._steps, np.float64).reshape(-1, len(KINDS), 2)


def errors_of(seconds: np.ndarray) -> dict[str, PredictionError]:
    """By kind. seconds: f64[steps, KINDS, 2]."""
    return {kind: PredictionError.of(*seconds[:, index].T) for index, kind in enumerate(KINDS)}
