"""What is known of a figure or table: its statements, the commands that measure it at each size, and how it is judged.

Runs nothing and reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from adaserve_jax.report.document import Figure, Table

SIZES = ("cpu", "engine", "gpu")
"""cpu: minutes on a CPU, most of it simulated; engine: in miniature on the real engine, on a CPU; gpu: the real engine
on a GPU, with a large target."""
Side = Literal["above", "at least", "at most"]
NOISE = 1e-9
"""Numbers nearer than this are equal: sums of floats are."""
Folders = Mapping[str, Path]
"""The folder of each step, by the step's name."""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, as a number that decides it.

    value: name of the number among those that a run finds. side, line: the statement is true of numbers on that side of
    `line`, itself included except by `above`. paper: the paper's own number; None where it is only drawn. unit: what
    the numbers are.
    """

    text: str
    value: str
    side: Side
    line: float
    paper: float | None = None
    unit: str = "times"

    def holds(self, ours: float | None) -> bool | None:
        """Whether ours is on the side of the line that the paper states; None where ours is not known."""
        if ours is None:
            return None
        if self.side == "above":
            return ours > self.line + NOISE
        return ours <= self.line + NOISE if self.side == "at most" else ours >= self.line - NOISE

    def ratio(self, ours: float | None) -> float | None:
        """Ours over the paper's; None where one of them is not known or the paper's is 0."""
        return None if ours is None or not self.paper else ours / self.paper


@dataclass(frozen=True)
class Step:
    """One command, whose results are in a folder of its own: figures that name the same step share its results.

    argv: {here} stands for that folder, {traces}, {azure} and {gsm8k} for data, {<name of a step>} for the folder of
    an earlier one. minutes: that it takes, about. gpu: whether it needs one. anew: whether it begins in an empty
    folder, rather than going on where it was stopped.
    """

    name: str
    argv: tuple[str, ...]
    minutes: float
    gpu: bool = False
    anew: bool = False


@dataclass(frozen=True)
class Found:
    """What a run found. values: numbers that claims are decided by, None where one cannot be had. shown: tables and
    figures of it. about: name and value of what it ran on, as its results say."""

    values: Mapping[str, float | None]
    shown: tuple[Figure | Table, ...] = ()
    about: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """How a figure is measured at one size. read: from the folders of the steps. writes: the files that hold the
    results, below the folders of the steps. differs: from the paper."""

    steps: tuple[Step, ...]
    read: Callable[[Folders], Found]
    claims: tuple[Claim, ...]
    workload: str
    writes: str
    differs: str = ""

    @property
    def minutes(self) -> float:
        return sum(step.minutes for step in self.steps)


@dataclass(frozen=True)
class NotYet:
    """A form that cannot be run. needs: what is missing, to be read after "needs"."""

    needs: str


@dataclass(frozen=True)
class Entry:
    """One figure or table. name: as it is asked for. item: as the paper numbers it. shows: what it shows there.
    here: what is measured here. forms: by size."""

    name: str
    paper: str
    item: str
    shows: str
    here: str
    forms: Mapping[str, Form | NotYet]

    @property
    def title(self) -> str:
        return f"{self.paper}, {self.item}"
