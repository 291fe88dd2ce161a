"""Bootstrap intervals of measures of requests, of one run or of its repeats.

A resample is given by how often it has each record, so that shares and means are products of matrices and percentiles
are positions in running sums: no record is copied. Axes: S resamples, N records, K statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
SAMPLES = 2000
ENOUGH_REPEATS = 5
"""Number of repeats from which on whole repeats are resampled instead of requests."""
CHUNK = 1 << 21
"""Most counts in memory at once."""

Counted = Callable[[np.ndarray], np.ndarray]
"""Statistic of each resample, f64[S], from how often the resample has each record, f64[S, N]; NaN if undefined."""


@dataclass(frozen=True)
class Interval:
    """Confidence interval; None where it is unknown."""

    low: float | None
    high: float | None


def distributions(
    statistics: Sequence[Counted], sizes: Sequence[int], *, samples: int = SAMPLES, seed: int = 0
) -> np.ndarray:
    """Return f64[K, S], each statistic on the same resamples. sizes: number of records of each repeat, in order.

    With `ENOUGH_REPEATS` repeats or more, whole repeats are drawn: intervals then include what differs from run to run
    (the machine's drift, another warm-up) and what requests of one run have in common. With fewer, requests are drawn
    within each repeat: intervals include only which requests happened to come, take them as independent, and miss what
    all requests of a run share, so that they are too narrow under overload. Neither gives an honest interval for an
    extreme percentile of few requests.

    The draws depend on sizes, samples and seed only: two systems with the same requests and the same seed are drawn in
    pairs.
    """
    ratios = [each for each in statistics if isinstance(each, Ratio)]
    columns = np.concatenate([each.columns for each in ratios], axis=1) if ratios else None
    chunks: list[list[np.ndarray]] = []
    for counts in _resamples(sizes, samples, seed):
        sums = iter(() if columns is None else np.split(counts @ columns, len(ratios), axis=1))
        chunks.append([each.of_sums(next(sums)) if isinstance(each, Ratio) else each(counts) for each in statistics])
    return np.concatenate(chunks, axis=1) if chunks else np.empty((len(statistics), 0))


def between(drawn: np.ndarray) -> Interval:
    """Return the middle LEVEL of the drawn values.

    A bound is infinite if infinity is next to it. The interval is unknown if half of the values or more are NaN.
    """
    known = drawn[~np.isnan(drawn)]
    if 2 * len(known) <= len(drawn):
        return Interval(None, None)
    tail = 100 * (1 - LEVEL) / 2
    if np.isinf(known).any():  # nothing lies between a number and infinity
        low, high = np.percentile(known, tail, method="lower"), np.percentile(known, 100 - tail, method="higher")
    else:
        low, high = np.percentile(known, (tail, 100 - tail))
    return Interval(float(low), float(high))


class Ratio:
    """Sum of one column / sum of another, f64[N] each. `distributions` computes several ratios in one product."""

    def __init__(self, above: np.ndarray, below: np.ndarray):
        self.columns = np.stack([above, below], axis=1)

    def __call__(self, counts: np.ndarray) -> np.ndarray:
        return self.of_sums(counts @ self.columns)

    @staticmethod
    def of_sums(sums: np.ndarray) -> np.ndarray:
        """Divide sums of both columns, f64[S, 2]."""
        return np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] > 0)


def percentile(values: np.ndarray, q: float) -> Counted:
    """Return the statistic of the q-th percentile (0 to 100) of f64[N], linear between the two nearest values.

    NaN is no value; infinity is one.
    """
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    ordered = values[order]

    def of(counts: np.ndarray) -> np.ndarray:
        running = np.cumsum(counts[:, order], axis=1)
        if not len(order):
            return np.full(len(counts), np.nan)
        position = np.maximum(running[:, -1] - 1, 0) * (q / 100)
        below, above = (ordered[_at(running, place)] for place in (np.floor(position), np.ceil(position)))
        share = position - np.floor(position)
        with np.errstate(invalid="ignore"):
            found = np.where((share == 0) | (below == above), below, below + share * (above - below))
        return np.where(running[:, -1] > 0, found, np.nan)

    return of


def sure_share(records: int) -> float:
    """Return the lower bound of a share that all of so many independent records have, by Clopper and Pearson.

    The bootstrap would put it at 1, as it never draws what it has not seen.
    """
    return ((1 - LEVEL) / 2) ** (1 / records)


def _at(running: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return the index of the record at a place, from 0, of each resample: the first with a greater running count."""
    return np.minimum((running <= place[:, None]).sum(axis=1), running.shape[1] - 1)


def _resamples(sizes: Sequence[int], samples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield counts f64[S, N], in chunks of S."""
    total = sum(sizes)
    if not total:
        return
    rng = np.random.default_rng(seed)
    step = max(1, CHUNK // total)
    for start in range(0, samples, step):
        rows = min(step, samples - start)
        if len(sizes) >= ENOUGH_REPEATS:
            yield np.repeat(_draw(rng, rows, len(sizes)), sizes, axis=1)
        else:
            yield np.concatenate([_draw(rng, rows, size) for size in sizes], axis=1)


def _draw(rng: np.random.Generator, rows: int, size: int) -> np.ndarray:
    """Return f64[rows, size], how often each of `size` was drawn in as many draws."""
    cells = rng.integers(0, max(size, 1), (rows, size)) + np.arange(rows)[:, None] * size
    return np.bincount(cells.ravel(), minlength=rows * size).reshape(rows, size).astype(np.float64)


def resamples_for(records: int) -> int:
    """Return the number of resamples of a report: SAMPLES, or fewer of so many records that they would take minutes."""
    return min(SAMPLES, max(SAMPLES // 4, math.floor(2 * CHUNK / max(records, 1))))
