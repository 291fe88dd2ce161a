"""Rows of the throughput benchmark: their fields, their file, and the aims that they are judged by.

Imports no jax and runs nothing. A row keeps the figure of every round, so that systems are compared round by round. The
scripts under benchmarks/ use it, and those that make documents of their results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.whole_file import SHARED, write_whole

FEW_ROUNDS = 5
REFERENCE = "ar"
CHAIN = "spec:"
"""What the names of policies with a fixed chain begin with."""
WANTED = {"adaserve": 0.99, "nightjar": 0.98}
"""By policy: the least ratio to the best of REFERENCE and every chain, between which `nightjar` chooses."""
RESAMPLES = 10_000


@dataclass(frozen=True)
class Conditions:
    """Where and with what a row was measured; the same for all rows of a run.

    config: the engine's, without "auto" and without folders. texts: that end in the measured part of a loop, at least;
    so many at once end before it. slo_scale: TPOT target over the baseline latency; None: no target.
    """

    commit: str
    machine: str
    device: str
    jax_version: str
    threads: int
    target: str
    target_params: int | None
    draft: str
    draft_params: int | None
    dtype: str
    config: dict[str, Any]
    prompts: str
    min_prompt_tokens: int
    max_prompt_tokens: int
    min_new_tokens: int
    max_new_tokens: int
    texts: int
    repeats: int
    slo_scale: float | None
    seed: int


@dataclass(frozen=True)
class Figures:
    """One system at one number of requests and one temperature.

    tps: of each round, tokens of all requests over the time, prefill included. tokens_per_step: of a request that
    decodes, the bonus token counted. acceptance_rate: accepted over verified draft nodes. drafting_share: of the steps
    that decode; depth, width: means over those that draft; tree_tokens: verified per decode row and step with the root.
    steps: of a round. step_ms and its parts: means over all steps, prefill too. texts_compared: with the reference
    policy's, and how many of them differ; equal_tokens: the fewest before a first difference. others_share: the largest
    share of the cores' time that other processes took meanwhile.
    """

    system: str
    requests: int
    temperature: float
    tps: list[float]
    tokens_per_step: float
    acceptance_rate: float | None
    drafting_share: float
    depth: float | None
    width: float | None
    tree_tokens: float
    steps: float
    step_ms: float
    draft_ms: float
    verify_ms: float
    deciding_ms: float
    texts_compared: int
    differing: int
    equal_tokens: int | None
    others_share: float | None


@dataclass(frozen=True)
class ThroughputRow(Figures, Conditions):
    """One line of a throughput file."""

    @classmethod
    def join(cls, conditions: Conditions, figures: Figures) -> ThroughputRow:
        return cls(**{f.name: getattr(part, f.name) for part in (conditions, figures) for f in fields(part)})

    @property
    def conditions(self) -> Conditions:
        return Conditions(**{f.name: getattr(self, f.name) for f in fields(Conditions)})

    @property
    def point(self) -> tuple[int, float]:
        return self.requests, self.temperature


@dataclass(frozen=True)
class Ratio:
    """Median over rounds, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """How many times one system is another, measured in the same rounds: the median of the rounds' ratios.

    The interval is the percentile bootstrap's over rounds. Of FEW_ROUNDS or fewer it reaches from the least to
    the largest ratio.
    """
    assert len(ours) == len(theirs) > 0, "one figure of each system per round"
    ratios = np.array(ours) / np.array(theirs)
    drawn = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def interval_of(rounds: int) -> str:
    """Return what the interval of a `paired_ratio` of so many rounds holds."""
    few = f"least and largest ratio of the {rounds} rounds in brackets"
    return few if rounds <= FEW_ROUNDS else "95 % bootstrap intervals in brackets"


@dataclass(frozen=True)
class Aim:
    """One policy's aim at one point. against: the best of REFERENCE and every chain. wanted: the least ratio to it."""

    requests: int
    temperature: float
    system: str
    against: str
    wanted: float
    found: Ratio

    @property
    def met(self) -> bool:
        return self.found.median >= self.wanted

    @property
    def text(self) -> str:
        return (
            f"{self.requests} at once, temperature {self.temperature:g}: {self.system} is {self.found} times "
            f"{self.against}; the aim is {self.wanted:g}"
        )


def aims(rows: Sequence[ThroughputRow]) -> list[Aim]:
    """Return what policies are to reach beside what they reached, of the points that were measured."""
    found: list[Aim] = []
    for point in dict.fromkeys(row.point for row in rows):
        here = [row for row in rows if row.point == point]
        choices = [row for row in here if row.system == REFERENCE or row.system.startswith(CHAIN)]
        if not choices:
            continue
        best = max(choices, key=lambda row: median(row.tps))
        found += [
            Aim(*point, row.system, best.system, WANTED[row.system], paired_ratio(row.tps, best.tps))
            for row in here
            if row.system in WANTED
        ]
    return found


def write_rows(path: Path, rows: Sequence[ThroughputRow]) -> None:
    """A JSON list with one row per line. The file is replaced at once, so that a stop leaves the old one."""
    lines = ",\n".join(json.dumps(asdict(row), allow_nan=False) for row in rows)
    write_whole(path, f"[\n{lines}\n]\n", mode=SHARED)


def read_rows(path: Path) -> list[ThroughputRow]:
    """The rows of a file that `write_rows` wrote. Raises ConfigError: it is no such file."""
    try:
        return [ThroughputRow(**values) for values in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} must be a file that benchmarks/engine/throughput.py wrote: {error}") from error
