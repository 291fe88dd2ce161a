"""Requests that are typed on and on, for tests of the remote drafter."""

from __future__ import annotations

import numpy as np

from tests.star.scripted import VOCABULARY, Row, Scene


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


class Typist:
    """Requests that grow by two tokens each step; the same plans whatever the drafter brings."""

    def __init__(self, scene: Scene, rows: int = 2, seed: int = 0, due_s: float = np.inf) -> None:
        self.scene = scene
        self._due_s = due_s
        self._drawn = np.random.default_rng(seed)
        self._texts = [self._drawn.integers(0, VOCABULARY, 10).tolist() for _ in range(rows)]
        self._known = [0] * rows

    def step(self) -> list[bool]:
        rows = [
            Row(slot, text, known, due_s=self._due_s)
            for slot, (text, known) in enumerate(zip(self._texts, self._known, strict=True))
        ]
        got = self.scene.propose(rows)
        self._known = [len(text) for text in self._texts]
        self._texts = [[*text, *self._drawn.integers(0, VOCABULARY, 2).tolist()] for text in self._texts]
        return got

    def steps(self, count: int) -> list[list[bool]]:
        return [self.step() for _ in range(count)]
