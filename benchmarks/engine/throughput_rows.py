"""Rows of the throughput benchmark: their fields, their file, and the aims that they are judged by.

Imports no jax and runs nothing. A row keeps the figure of every round, so that systems are compared round by round. The
scripts under benchmarks/ use it, and those that make documents of their results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.whole_file import SHARED, write_whole

REFERENCE = "ar"
ASSISTED = "transformers assisted"
"""What the names of all settings of transformers' assisted generation begin with."""
RESAMPLES = 10_000


@dataclass(frozen=True)
class Conditions:
    """Where and with what a row was measured; the same for all rows of a run.

    config: the engine's, without "auto" and without folders. threads: of torch, and the cores that jax sees.
    slo_scale: TPOT target over the baseline latency; None: no target. settle_tokens: generated, and not timed, before
    each measurement.
    """

    commit: str
    machine: str
    device: str
    jax_version: str
    torch_version: str | None
    transformers_version: str | None
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
    new_tokens: int
    settle_tokens: int
    repeats: int
    slo_scale: float | None
    seed: int


@dataclass(frozen=True)
class Figures:
    """One system at one number of requests and one temperature.

    whole_tps: of each round, all new tokens over the whole call, prefill included. decode_tps: of each round, the
    tokens emitted after the last prompt was prefilled over the time from then to the last token; None for
    transformers, which does not say when that was. tokens_per_step: of a request, per forward of the
    target that is not its prefill, the bonus token counted. acceptance_rate: accepted over verified draft nodes.
    drafting_share: of the steps that decode; depth, width: means over those that draft; tree_tokens: verified per
    decode row and step, root included. steps: of a round. step_ms and its parts: means over all steps, prefill too.
    sequences: compared with the reference policy's, and how many of them differ; equal_tokens: the fewest before a
    first difference. others_share: the largest share of the cores' time that other processes took in a timed call.
    """

    system: str
    requests: int
    temperature: float
    whole_tps: list[float]
    decode_tps: list[float] | None
    tokens_per_step: float | None
    acceptance_rate: float | None
    drafting_share: float | None
    depth: float | None
    width: float | None
    tree_tokens: float | None
    steps: float | None
    step_ms: float | None
    draft_ms: float | None
    verify_ms: float | None
    deciding_ms: float | None
    sequences: int
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

    def times(self, reference: ThroughputRow | None) -> tuple[Ratio | None, Ratio | None]:
        """How many times the reference this is, by decode tokens/s and by whole-call tokens/s; None where there is
        nothing to compare."""
        if reference is None or reference.system == self.system:
            return None, None
        decode = None
        if self.decode_tps is not None and reference.decode_tps is not None:
            decode = paired_ratio(self.decode_tps, reference.decode_tps)
        return decode, paired_ratio(self.whole_tps, reference.whole_tps)


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

    The interval is the percentile bootstrap's over rounds. Of five rounds or fewer it reaches from the least to the
    largest ratio.
    """
    assert len(ours) == len(theirs) > 0, "one figure of each system per round"
    ratios = np.array(ours) / np.array(theirs)
    drawn = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))


@dataclass(frozen=True)
class Aim:
    """One aim at one point. against: the system that it compares with. wanted: the least ratio."""

    requests: int
    temperature: float
    against: str
    measure: str
    wanted: float
    found: Ratio

    @property
    def met(self) -> bool:
        return self.found.median >= self.wanted

    @property
    def text(self) -> str:
        return (
            f"{self.requests} at once, temperature {self.temperature:g}: adaserve is {self.found} times "
            f"{self.against} by {self.measure} tokens/s; the aim is {self.wanted:g}"
        )


def aims(rows: Sequence[ThroughputRow]) -> list[Aim]:
    """What `adaserve` is to reach beside what it reached, of the points that were measured."""
    points = dict.fromkeys((row.requests, row.temperature) for row in rows)
    by_point = [{r.system: r for r in rows if (r.requests, r.temperature) == point} for point in points]
    return [aim for systems in by_point if "adaserve" in systems for aim in _aims_of(systems)]


def _aims_of(systems: dict[str, ThroughputRow]) -> Iterator[Aim]:
    ours, plain, chain = (systems.get(name) for name in ("adaserve", REFERENCE, "spec:4"))
    assert ours is not None
    if plain is not None and (wanted := {1: 1.5, 8: 1.15}.get(ours.requests)):
        yield from _decode_aim(ours, [plain], wanted)
    if plain is not None and chain is not None and ours.requests in (16, 32):
        yield from _decode_aim(ours, [plain, chain], 0.98)
    assisted = [row for name, row in systems.items() if name.startswith(ASSISTED)]
    if assisted and ours.requests == 1:
        best = max(assisted, key=lambda row: median(row.whole_tps))
        found = paired_ratio(ours.whole_tps, best.whole_tps)
        yield Aim(ours.requests, ours.temperature, best.system, "whole-call", 2.0, found)


def _decode_aim(ours: ThroughputRow, others: list[ThroughputRow], wanted: float) -> Iterator[Aim]:
    """Against the best of the others, by decode tokens/s."""
    best = max(others, key=lambda row: median(row.decode_tps or [0.0]))
    if ours.decode_tps and best.decode_tps:
        found = paired_ratio(ours.decode_tps, best.decode_tps)
        yield Aim(ours.requests, ours.temperature, best.system, "decode", wanted, found)


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
