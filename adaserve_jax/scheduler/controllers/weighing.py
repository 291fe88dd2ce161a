"""The options of one step as they were weighed, and the best of all or of some of them.

Between the joint choice, which values them, and who picks. Knows no table and no load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adaserve_jax.scheduler.controllers.base import Decision

FINE_SHAPES = 3
"""Shapes that are tried with the edges between the coarse ones."""


@dataclass(frozen=True, eq=False)
class Correction:
    """What a shape really takes and brings beside what the tables say, f64[shapes] each: factors of its step's seconds,
    and of its expected tokens beyond the roots."""

    seconds: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True, eq=False)
class Choices:
    """O shapes x E edges x F shares of prefill. value, on_pace: f64[O, E, F], on_pace being the requests in it; chunk:
    i64[E, F]."""

    value: np.ndarray
    on_pace: np.ndarray
    chunk: np.ndarray

    def best(self) -> tuple[int, int, int]:
        shape, edge, share = np.unravel_index(int(self.value.argmax()), self.value.shape)
        return int(shape), int(edge), int(share)

    def of(self, shape: int) -> Choices:
        """With one shape only."""
        only = slice(shape, shape + 1)
        return Choices(self.value[only], self.on_pace[only], self.chunk)

    def neighbours(self, shapes: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best shapes, and all edges from those next to the best one of any of them."""
        by_edge = self.value.max(axis=2)
        finest = np.argsort(-by_edge.max(axis=1), kind="stable")[:FINE_SHAPES]
        at = by_edge[finest].argmax(axis=1)
        first, last = edges[max(int(at.min()) - 1, 0)], edges[min(int(at.max()) + 1, len(edges) - 1)]
        return shapes[finest], np.arange(first, last + 1)


@dataclass(frozen=True, slots=True)
class Pick:
    """shape: its index. value, on_pace: corrected, as all values are."""

    decision: Decision
    shape: int
    value: float
    on_pace: float


@dataclass(frozen=True, eq=False)
class Weighed:
    """choices: of `shapes` at the coarse `edges`, indices both. look: the choices of some shapes at some edges; None
    where there are no edges between. decide: the decision for a shape and a prefill chunk."""

    shapes: np.ndarray
    edges: np.ndarray
    choices: Choices
    look: Callable[[np.ndarray, np.ndarray], Choices] | None
    decide: Callable[[int, int], Decision]

    def pick(self, shape: int | None = None) -> Pick:
        """The best option, of one shape or of all."""
        shapes, edges, choices = self.shapes, self.edges, self.choices
        if shape is not None:
            shapes, choices = shapes[shape : shape + 1], choices.of(shape)
        if self.look is not None:
            shapes, edges = choices.neighbours(shapes, edges)
            choices = self.look(shapes, edges)
        best, edge, share = choices.best()
        chosen = int(shapes[best])
        return Pick(
            self.decide(chosen, int(choices.chunk[edge, share])), chosen,
            choices.value.item(best, edge, share), choices.on_pace.item(best, edge, share),
        )  # fmt: skip

    def by_shape(self) -> tuple[np.ndarray, np.ndarray]:
        """f64[O], the value of each shape at its best coarse edge, and the requests on pace in it."""
        value = self.choices.value.reshape(len(self.shapes), -1)
        at = value.argmax(axis=1)
        rows = np.arange(len(at))
        return value[rows, at], self.choices.on_pace.reshape(value.shape)[rows, at]
