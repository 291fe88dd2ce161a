"""Code prompts: cut from sources, which should be of files that the demo pair never saw.

Knows files and a tokenizer's `encode`; nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

MIN_TOKENS, MAX_TOKENS = 64, 128
TRIES = 20


class Prompts:
    """Cuts prompts of MIN_TOKENS to MAX_TOKENS tokens, each from the start of a line that is not empty."""

    def __init__(self, sources: Sequence[str], encode: Callable[[str], list[int]]):
        self._lines = [text.splitlines(keepends=True) for text in sources]
        self._starts = [
            (file, index)
            for file, lines in enumerate(self._lines)
            for index, line in enumerate(lines)
            if line.strip()
        ]  # fmt: skip
        self._encode = encode

    def cut(self, count: int, seed: Sequence[int]) -> list[list[int]]:
        """Token ids of `count` prompts, the same for the same seed."""
        rng = np.random.default_rng(seed)
        prompts: list[list[int]] = []
        while len(prompts) < count:
            file, line = self._starts[rng.integers(len(self._starts))]
            length = int(rng.integers(MIN_TOKENS, MAX_TOKENS + 1))
            ids = self._encode("".join(self._lines[file][line : line + MAX_TOKENS]))[:length]
            if len(ids) == length:
                prompts.append(ids)
        return prompts

    def cut_to(self, lengths: Sequence[int], seed: Sequence[int]) -> list[list[int]]:
        """Token ids of a prompt of each length; shorter where no source is as long from any of TRIES places."""
        rng = np.random.default_rng(seed)
        return [self._longest(length, rng) for length in lengths]

    def _longest(self, length: int, rng: np.random.Generator) -> list[int]:
        found: list[int] = []
        for _ in range(TRIES):
            file, line = self._starts[rng.integers(len(self._starts))]
            ids = self._encode("".join(self._lines[file][line : line + length]))[:length]
            found = max(found, ids, key=len)
            if len(found) == length:
                break
        return found
