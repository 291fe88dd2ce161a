"""The tokens that one choice's penalties and biases concern: those it has seen, how often, and those with a bias."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class Touched:
    """Columns of E tokens, each once, in the order in which they came; they grow as the output does."""

    def __init__(self, biases: Iterable[tuple[int, float]], prompt_ids: Iterable[int], most: int):
        """most: tokens that there can ever be."""
        self._place: dict[int, int] = {}
        self._token = np.zeros(most, np.int32)
        self._output_count = np.zeros(most, np.int32)
        self._in_prompt = np.zeros(most, bool)
        self._bias = np.zeros(most, np.float32)
        for token, bias in biases:
            self._bias[self._place_of(token)] = bias
        for token in prompt_ids:
            self._in_prompt[self._place_of(token)] = True

    def count(self, token_ids: Sequence[int]) -> None:
        """Take in output tokens."""
        for token in token_ids:
            self._output_count[self._place_of(token)] += 1

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """token, output_count: i32[E]; in_prompt: bool[E]; bias: f32[E]. Views: they change with the next token."""
        columns = (self._token, self._output_count, self._in_prompt, self._bias)
        token, output_count, in_prompt, bias = (column[: len(self._place)] for column in columns)
        return token, output_count, in_prompt, bias

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        self._token[place] = token
        return place
