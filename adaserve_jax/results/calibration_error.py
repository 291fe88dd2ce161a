"""Expected calibration error: how far stated chances are from what happened. Defined in docs/metrics.md.

The scripts under benchmarks/ hold it against `honest_error`.
"""

from __future__ import annotations

import numpy as np

NUM_BINS = 15
"""Equal intervals of the stated chance."""


class CalibrationSums:
    """What the error is computed from: f64[3, groups, NUM_BINS], how many, sum of what was stated, how many happened.

    Sums of two times may be subtracted, which gives the error of what lies between them.
    """

    def __init__(self, groups: int):
        self.sums = np.zeros((3, groups, NUM_BINS))

    def add(
        self, group: np.ndarray, stated: np.ndarray, happened: np.ndarray, number: np.ndarray | None = None
    ) -> None:
        """Count in. group: i[N]; stated: f[N], chances in [0, 1]; number: f[N], of how many each was stated, None: of
        one; happened: f[N] or bool[N], of how many it came true."""
        index = group * NUM_BINS + np.minimum((stated * NUM_BINS).astype(np.intp), NUM_BINS - 1)
        size = self.sums[0].size
        weights = (number, stated if number is None else stated * number, happened)
        for total, weight in zip(self.sums, weights, strict=True):
            total += np.bincount(index, weight, size).reshape(total.shape)


def honest_error(sums: np.ndarray) -> np.ndarray:
    """f64[groups], nan likewise: the error that honest chances would show on average over as many, by chance alone."""
    count, stated, _ = sums
    spread = np.sqrt(2 / np.pi * stated * (1 - np.divide(stated, count, out=np.zeros_like(stated), where=count > 0)))
    number = count.sum(axis=-1)
    return np.divide(spread.sum(axis=-1), number, out=np.full(len(number), np.nan), where=number > 0)


def expected_calibration_error(sums: np.ndarray) -> np.ndarray:
    """f64[groups], nan for a group that saw nothing: |stated - happened|, summed by bin, over how many there are."""
    count, stated, happened = sums
    number = count.sum(axis=-1)
    gap = np.abs(stated - happened).sum(axis=-1)
    return np.divide(gap, number, out=np.full(len(number), np.nan), where=number > 0)
