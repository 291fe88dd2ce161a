"""Acceptance in simulations: recorded from real verifications, fitted, and drawn per request.

The model: a request's mean acceptance of the draft's first choice is normal around its class's mean, and inside the
request the chance varies from position to position by a Beta distribution, as `sim/text.py` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import read_good_rows
from adaserve_jax.sim.text import CHOICE_DECAY, CONCENTRATION
from adaserve_jax.types import (
    CandidateTrees,
    CostSamples,
    DraftTrees,
    Executor,
    Limits,
    LogitEdits,
    Progress,
    StepOutcome,
    StepPlan,
)

MISS = -1
"""Rank of a token that was none of the children."""


@dataclass(frozen=True)
class AcceptanceRecord:
    """The tested positions of one request and their results: one line of acceptance.jsonl (docs/metrics.md).

    positions: of the token, the prompt counted. ranks: the accepted child's among its siblings by f, 0 the best; MISS
    for none, so that the rank lies at or beyond children. children: how many were tested. f: of the best of them,
    given its parent.
    """

    run_id: str
    policy: str
    rate_rps: float
    request_id: str
    slo_class: str
    positions: tuple[int, ...]
    ranks: tuple[int, ...]
    children: tuple[int, ...]
    f: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("positions", "ranks", "children", "f"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


class AcceptanceRecorder:
    """Records which of the draft's choices the target took, whatever policy chose the trees (`adaserve bench
    --record`).

    The target's token at a position either was one of the children that the tree had there, or none of them. Trees
    depend on the policy; the rank of the token among the draft's choices does not. Requests are told apart by seed, so
    each needs its own.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, ...]] = []

    def observe(self, plan: StepPlan, trees: DraftTrees, outcome: StepOutcome) -> None:
        """Record every node of the accepted walks that had children."""
        nodes = np.flatnonzero(trees.parent >= 0)
        if not len(nodes):
            return
        parent, prob = trees.parent[nodes], trees.f[nodes]
        order = np.lexsort((trees.candidate[nodes], -prob, parent))
        nodes, parent, prob = nodes[order], parent[order], prob[order]
        parents, first, children = np.unique(parent, return_index=True, return_counts=True)
        taken = np.full(len(parents), MISS)
        hits = np.flatnonzero(outcome.accepted[nodes])
        group = np.searchsorted(parents, parent[hits])
        taken[group] = hits - first[group]
        walked = outcome.accepted[parents]
        at = parents[walked]
        row = trees.row[at]
        f = prob[first[walked]] / np.maximum(trees.f[at], np.finfo(np.float32).tiny)
        position = plan.ctx_len[row] + trees.depth[at] + 1
        self._parts.append((plan.sampling.seed[row], position, taken[walked], children[walked], f))

    def take(
        self, requests: Mapping[int, tuple[str, str]], *, run_id: str, policy: str, rate_rps: float
    ) -> list[AcceptanceRecord]:
        """Return the records of all observed requests and forget them. requests: seed -> (id, class); observations of
        other seeds are dropped."""
        parts, self._parts = self._parts, []
        if not parts:
            return []
        seeds, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(seeds, kind="stable")
        distinct, starts = np.unique(seeds[order], return_index=True)
        records = []
        for seed, rows in zip(distinct.tolist(), np.split(order, starts[1:]), strict=True):
            if seed in requests:
                position, rank, children, f = (column[rows].tolist() for column in columns)
                f = tuple(round(each, 3) for each in f)
                about = (run_id, policy, rate_rps, *requests[seed])
                records.append(AcceptanceRecord(*about, position, rank, children, f))
        return records


class RecordingExecutor:
    """An executor that passes every verification of another one to `recorder`."""

    def __init__(self, executor: Executor, recorder: AcceptanceRecorder):
        self._executor = executor
        self._recorder = recorder

    @property
    def limits(self) -> Limits:
        return self._executor.limits

    @property
    def compiles_after_ready(self) -> int:
        return self._executor.compiles_after_ready

    def warm_up(self, progress: Progress | None = None, samples: CostSamples | None = None) -> CostSamples:
        return self._executor.warm_up(progress, samples)

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        return self._executor.speculate(plan)

    def verify(
        self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepOutcome:  # fmt: skip
        outcome = self._executor.verify(plan, trees, edits, meanwhile)
        self._recorder.observe(plan, trees, outcome)
        return outcome

    def expand(self) -> None:
        self._executor.expand()

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        self._executor.move_pages(from_pages, to_pages)

    def contract(self) -> None:
        self._executor.contract()

    def draft_ready(self) -> bool:
        return self._executor.draft_ready()

    def close(self) -> None:
        self._executor.close()


LOWEST, HIGHEST = 0.02, 0.98
GRID = np.linspace(LOWEST, HIGHEST, 97)
"""Acceptances of a request that the fit weighs; means are found to the step of the grid."""
SPREADS = np.linspace(0.0, 0.3, 31)
LEAST_CONCENTRATION, MOST_CONCENTRATION = 0.5, 50.0
LEAST_TESTED = 100
"""Second choices from which their decay is estimated."""


@dataclass(frozen=True)
class AcceptanceModel:
    """mean: by class; classes that it lacks have the mean of all. spread: standard deviation between requests of a
    class, 0 where it has none. concentration: of the Beta distribution by position. choice_decay: as `decay` of
    `text.search`."""

    mean: dict[str, float]
    spread: dict[str, float]
    concentration: float = CONCENTRATION
    choice_decay: float = CHOICE_DECAY

    def of(self, slo_class: str) -> tuple[float, float]:
        """Return mean and spread of a class."""
        others = sum(self.mean.values()) / len(self.mean)
        return self.mean.get(slo_class, others), self.spread.get(slo_class, 0.0)

    def draw(self, classes: Sequence[str], seed: int) -> np.ndarray:
        """Draw the acceptance of each request's first choice, f64[requests].

        A class with a spread gets the middles of as many equal shares of the distribution as it has requests, in an
        order drawn from `seed`, so that even few requests have the mean and spread of their class.
        """
        rng = np.random.default_rng((seed, 1))
        names, member = np.unique(np.asarray(classes), return_inverse=True)
        drawn = np.empty(len(classes))
        for index, name in enumerate(names.tolist()):
            mine = np.flatnonzero(member == index)
            mean, spread = self.of(name)
            drawn[mine] = mean
            if spread > 0:
                middles = (np.arange(len(mine)) + 0.5) / len(mine)
                values = np.array([NormalDist(mean, spread).inv_cdf(share) for share in middles.tolist()])
                drawn[mine] = rng.permutation(np.clip(values, LOWEST, HIGHEST))
        return drawn


def load_acceptance(path: Path) -> AcceptanceModel:
    """Fit the records of a file that `adaserve bench --record` wrote, but for a last line that was cut off.

    Raises ConfigError naming what is wrong.
    """
    records, _ = read_good_rows(path, AcceptanceRecord)
    if not any(record.ranks for record in records):
        raise ConfigError(
            f"{path} has no verification with a draft; record a policy that speculates, for example spec:4"
        )
    return fit_acceptance(records)


def fit_acceptance(records: Sequence[AcceptanceRecord]) -> AcceptanceModel:
    """Fit the likeliest mean and spread of each class, the concentration of the recorded f, and the decay of choices.

    Record a chain (`spec:<k>`): it tests tokens whatever they will be, so the likelihood needs no correction for what
    was accepted before. A policy that verifies where the draft is sure shows better acceptance than there is, so where
    there are chains nothing else is taken from other policies than the decay, which chains do not show. A plain share
    of hits weighs requests by how often they were tested, which depends on their acceptance. Source:
    docs/equations.md, recorded acceptance.
    """
    chains = [record for record in records if record.policy.startswith("spec:")]
    groups: dict[str, list[AcceptanceRecord]] = {}
    for record in chains if any(record.ranks for record in chains) else records:
        if record.ranks:
            groups.setdefault(record.slo_class, []).append(record)
    fits = {name: _fit(group) for name, group in sorted(groups.items())}
    means, spreads = ({name: fit[part] for name, fit in fits.items()} for part in (0, 1))
    model = AcceptanceModel(means, spreads, _concentration(list(groups.values())))
    return replace(model, choice_decay=_choice_decay(records, model))


def _choice_decay(records: Sequence[AcceptanceRecord], model: AcceptanceModel) -> float:
    """Estimate how often the second choice was right where the first was wrong, over the mean chance of the first
    there; CHOICE_DECAY where too few second choices were tested."""
    tested, hits, expected = 0, 0, 0.0
    for record in records:
        mean, spread = model.of(record.slo_class)
        variance = spread**2 + mean * (1 - mean) / (1 + model.concentration)
        second = [rank for rank, count in zip(record.ranks, record.children, strict=True) if rank != 0 and count > 1]
        tested += len(second)
        hits += second.count(1)
        expected += len(second) * (mean - variance / (1 - mean))  # of a, weighed by 1 - a
    return CHOICE_DECAY if tested < LEAST_TESTED else min(hits / expected, 1.0)


def _concentration(groups: list[list[AcceptanceRecord]]) -> float:
    """Estimate the concentration by moments inside requests: a Beta of mean m has the variance m (1 - m) / (1 +
    concentration)."""
    spread, most = 0.0, 0.0
    for record in (record for group in groups for record in group if len(record.f) > 1):
        f = np.asarray(record.f)
        spread += float(((f - f.mean()) ** 2).sum() * len(f) / (len(f) - 1))
        most += float((f.mean() * (1 - f.mean())) * len(f))
    if spread <= 0:
        return MOST_CONCENTRATION
    return min(max(most / spread - 1, LEAST_CONCENTRATION), MOST_CONCENTRATION)


def _fit(records: list[AcceptanceRecord]) -> tuple[float, float]:
    """Return mean and spread of one class."""
    likelihood = _likelihood(records)  # [requests, GRID]
    best = (-np.inf, 0.0, 0.0)
    for spread in SPREADS:
        weights = _weights(spread)  # [GRID, means]
        total = np.log(np.maximum(likelihood @ weights, np.finfo(np.float64).tiny)).sum(axis=0)
        at = int(total.argmax())
        best = max(best, (float(total[at]), float(GRID[at]), float(spread)))
    return best[1], best[2]


def _likelihood(records: list[AcceptanceRecord]) -> np.ndarray:
    """Return the likelihood of each request's hits by acceptance, f64[requests, GRID], its largest scaled to 1."""
    tested = np.array([len(record.ranks) for record in records], np.float64)[:, None]
    hits = np.array([record.ranks.count(0) for record in records], np.float64)[:, None]
    total = hits * np.log(GRID) + (tested - hits) * np.log1p(-GRID)
    return np.exp(total - total.max(axis=1, keepdims=True))


def _weights(spread: float) -> np.ndarray:
    """Return the share of requests at each acceptance, f64[GRID, GRID]: column m for the mean GRID[m]. What lies
    beyond the ends counts at the ends, as in `draw`."""
    if spread == 0:
        return np.eye(len(GRID))
    between = (GRID[1:] + GRID[:-1]) / 2
    below = np.asarray(_normal_cdf((between[:, None] - GRID[None, :]) / spread), np.float64)
    return np.diff(below, axis=0, prepend=0.0, append=1.0)


_normal_cdf = np.frompyfunc(NormalDist().cdf, 1, 1)
