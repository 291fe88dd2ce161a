"""How often the target agrees with the draft in a simulation: by class, from a machine's file or fitted to recordings.

The model: a request's acceptance of the draft's first choice is normal around its class's mean, and inside the request
it varies from block to block of its text, as `sim_executor` draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from adaserve_jax.bench.recording import AcceptanceRecord
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import read_rows

BLOCK_TOKENS = 64
BLOCK_WIDTH = 0.3
"""Within a request, acceptance is uniform over this width around the request's own, drawn per BLOCK_TOKENS."""
LOWEST, HIGHEST = 0.02, 0.98
GRID = np.linspace(LOWEST, HIGHEST, 97)
"""Acceptances of a request that the fit weighs; it finds means to the grid's step."""
SPREADS = np.linspace(0.0, 0.3, 31)
BLOCK_POINTS = 9


@dataclass(frozen=True)
class AcceptanceModel:
    """mean: by class; classes that it lacks have the mean of all. spread: standard deviation between requests of a
    class, 0 where it has none."""

    mean: dict[str, float]
    spread: dict[str, float]

    def draw(self, classes: Sequence[str], seed: int) -> np.ndarray:
        """f64[requests], the acceptance of each request's first choice.

        Of a class with a spread: the middles of as many equal shares of the distribution as it has requests, in an
        order that `seed` draws, so that few requests have the class's mean and spread too.
        """
        others = sum(self.mean.values()) / len(self.mean)
        rng = np.random.default_rng((seed, BLOCK_TOKENS))
        names, member = np.unique(np.asarray(classes), return_inverse=True)
        drawn = np.empty(len(classes))
        for index, name in enumerate(names.tolist()):
            mine = np.flatnonzero(member == index)
            mean, spread = self.mean.get(name, others), self.spread.get(name, 0.0)
            drawn[mine] = mean
            if spread > 0:
                middles = (np.arange(len(mine)) + 0.5) / len(mine)
                values = np.array([NormalDist(mean, spread).inv_cdf(share) for share in middles.tolist()])
                drawn[mine] = rng.permutation(np.clip(values, LOWEST, HIGHEST))
        return drawn


def load_acceptance(path: Path) -> AcceptanceModel:
    """Fit the records of a file that `adaserve bench --record` wrote. Raises ConfigError naming what is wrong."""
    records = read_rows(path, AcceptanceRecord)
    if not any(record.ranks for record in records):
        raise ConfigError(
            f"{path} has no verification with a draft; record a policy that speculates, for example spec:4"
        )
    return fit_acceptance(records)


def fit_acceptance(records: Sequence[AcceptanceRecord]) -> AcceptanceModel:
    """The likeliest mean and spread of each class.

    Where a token was tested depends on what was accepted before and on the policy, but not on what it would be; so the
    likelihood of what was seen needs no correction for it. A plain share of hits weighs requests by how often they
    were tested, which does depend on their acceptance. Source: docs/equations.md, recorded acceptance.
    """
    groups: dict[str, list[AcceptanceRecord]] = {}
    for record in records:
        if record.ranks:
            groups.setdefault(record.slo_class, []).append(record)
    fits = {name: _fit(group) for name, group in sorted(groups.items())}
    return AcceptanceModel({name: fit[0] for name, fit in fits.items()}, {name: fit[1] for name, fit in fits.items()})


def _fit(records: list[AcceptanceRecord]) -> tuple[float, float]:
    """Mean and spread of one class."""
    likelihood = _likelihood(records)  # [requests, GRID]
    best = (-np.inf, 0.0, 0.0)
    for spread in SPREADS:
        weights = _weights(spread)  # [GRID, means]
        total = np.log(np.maximum(likelihood @ weights, np.finfo(np.float64).tiny)).sum(axis=0)
        at = int(total.argmax())
        best = max(best, (float(total[at]), float(GRID[at]), float(spread)))
    return best[1], best[2]


def _likelihood(records: list[AcceptanceRecord]) -> np.ndarray:
    """f64[requests, GRID], of each request's hits given its acceptance, its largest scaled to 1; blocks are integrated
    out."""
    offsets = (np.arange(BLOCK_POINTS) + 0.5) / BLOCK_POINTS - 0.5
    chance = np.clip(GRID[:, None] + BLOCK_WIDTH * offsets, LOWEST, HIGHEST)  # [GRID, points]
    rows = []
    for record in records:
        _, block = np.unique(np.asarray(record.positions) // BLOCK_TOKENS, return_inverse=True)
        tried = np.bincount(block)[:, None, None]
        hits = np.bincount(block, weights=np.asarray(record.ranks) == 0)[:, None, None]
        log_block = hits * np.log(chance) + (tried - hits) * np.log1p(-chance)  # [blocks, GRID, points]
        highest = log_block.max(axis=2, keepdims=True)
        inside = highest[:, :, 0] + np.log(np.exp(log_block - highest).mean(axis=2))
        total = inside.sum(axis=0)
        rows.append(np.exp(total - total.max()))
    return np.array(rows)


def _weights(spread: float) -> np.ndarray:
    """f64[GRID, GRID], column m: the share of requests at each acceptance when the mean is GRID[m]; what lies beyond
    the ends counts at the ends, as `draw` has it."""
    if spread == 0:
        return np.eye(len(GRID))
    between = (GRID[1:] + GRID[:-1]) / 2
    below = np.asarray(_normal_cdf((between[:, None] - GRID[None, :]) / spread), np.float64)
    return np.diff(below, axis=0, prepend=0.0, append=1.0)


_normal_cdf = np.frompyfunc(NormalDist().cdf, 1, 1)
