"""Lines of nightjar.jsonl, and the arithmetic of the tables: means over seeds, ratios within seeds, the best chain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

PLAIN, OURS = "ar", "nightjar"
FIGURES = (
    "throughput_tps", "busy_throughput_tps", "e2e_mean_s", "ttft_p50_s", "tpot_mean_s", "running_mean",
    "acceptance_rate", "preemptions", "finished", "unfinished",
)  # fmt: skip
"""Columns of a result row that are kept."""
THROUGHPUT, BUSY, LATENCY = "throughput_tps", "busy_throughput_tps", "e2e_mean_s"
FEWER_IS_BETTER = (LATENCY,)


@dataclass(frozen=True)
class Line:
    """One policy under one load with one seed. pool: of `points.Pool`; None: pages that never run out.
    figures: FIGURES. about: rate, wall time, workload, commit. swaps: by kind, of a pool."""

    key: str
    setup: str
    load: str
    share: float
    policy: str
    seed: int
    pool: dict[str, Any] | None
    figures: dict[str, Any]
    about: dict[str, Any]
    swaps: dict[str, int] | None


class View:
    """The lines of one load of one setup, of one pool: by policy, seeds in order."""

    def __init__(self, lines: Iterable[Line]):
        self.by_policy: dict[str, list[Line]] = {}
        for line in sorted(lines, key=lambda line: line.seed):
            self.by_policy.setdefault(line.policy, []).append(line)

    def __contains__(self, policy: str) -> bool:
        return policy in self.by_policy

    def mean(self, policy: str, figure: str) -> float:
        """Over seeds."""
        return fmean(line.figures[figure] for line in self.by_policy[policy])

    def times(self, policy: str, figure: str, other: str = PLAIN) -> float:
        """How many times `other` a policy is: the mean over the seeds that both have of the ratio within a seed."""
        return ratio(self.by_policy[policy], self.by_policy[other], figure)

    def best(self, policies: Iterable[str], figure: str) -> str:
        """The policy, of those that are there, whose mean over seeds is best; of equals the first."""
        sign = -1 if figure in FEWER_IS_BETTER else 1
        return max((p for p in policies if p in self), key=lambda policy: sign * self.mean(policy, figure))

    @cached_property
    def fixed(self) -> list[str]:
        """Fixed lengths, none included, the shortest first."""
        chains = [policy for policy in self.by_policy if policy.startswith("spec:")]
        return [*([PLAIN] if PLAIN in self else []), *sorted(chains, key=lambda policy: int(policy[5:]))]

    @property
    def rate_rps(self) -> float:
        return fmean(line.about["rate_rps"] for lines in self.by_policy.values() for line in lines)


@dataclass(frozen=True)
class AgainstFixed:
    """Our figures at one rate over those of the best fixed length for each."""

    share: float
    best_throughput: str
    throughput_times: float
    best_latency: str
    latency_times: float


class Tables:
    """All lines of a run."""

    def __init__(self, lines: Sequence[Line]):
        self.lines = lines
        self.setups = list(dict.fromkeys(line.setup for line in lines))

    def view(self, setup: str, load: str, share: float) -> View:
        """Of one load, of the pages that never run out."""
        wanted = (setup, load, share, None)
        return View(line for line in self.lines if (line.setup, line.load, line.share, line.pool) == wanted)

    def shares(self, setup: str, load: str) -> list[float]:
        """Loads that were run without a pool, the lowest first."""
        return sorted({x.share for x in self.lines if (x.setup, x.load) == (setup, load) and x.pool is None})

    def against_fixed(self, setup: str, load: str) -> list[AgainstFixed]:
        """At every rate where chains and ours were run."""
        found = []
        for share in self.shares(setup, load):
            view = self.view(setup, load, share)
            if OURS not in view or len(view.fixed) < 2:
                continue
            throughput, latency = (view.best(view.fixed, figure) for figure in (THROUGHPUT, LATENCY))
            found.append(
                AgainstFixed(
                    share, throughput, view.times(OURS, THROUGHPUT, throughput),
                    latency, view.times(OURS, LATENCY, latency),
                )
            )  # fmt: skip
        return found

    def pools(self, setup: str) -> list[Line]:
        """Lines of a pool that runs out."""
        return [line for line in self.lines if line.setup == setup and line.pool is not None]


def ratio(ours: Sequence[Line], theirs: Sequence[Line], figure: str) -> float:
    """Ours over theirs: the mean, over the seeds that both have, of the ratio within a seed."""
    other = {line.seed: line.figures[figure] for line in theirs}
    return fmean(line.figures[figure] / other[line.seed] for line in ours if line.seed in other)


def pages_of(pool: dict[str, Any] | None) -> str:
    """How a pool is named after a policy."""
    if pool is None:
        return ""
    size = f"{pool['num_pages']}+{pool['extension_pages']}"
    return f", {size} pages, elastic {pool['elastic']}, tau {pool['tau_low']:g}, T {pool['persist_steps']}"
