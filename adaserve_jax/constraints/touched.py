"""The tokens that one choice's penalties and biases concern: those it has seen, how often, and those with a bias."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np


class Touched:
    """Columns of E tokens, each once, in the order in which they came; they grow as the output does."""

    def __init__(self, biases: Sequence[tuple[int, float]], prompt_ids: np.ndarray, most: int):
        """biases: of tokens, each once. prompt_ids: i32[U], each once. most: tokens that there can ever be."""
        first = [token for token, _ in biases]
        tokens = [*first, *np.setdiff1d(prompt_ids, first, assume_unique=True).tolist()]
        self._place = {token: place for place, token in enumerate(tokens)}
        self._token = np.zeros(most, np.int32)
        self._output_count = np.zeros(most, np.int32)
        self._in_prompt = np.zeros(most, bool)
        self._bias = np.zeros(most, np.float32)
        self._token[: len(tokens)] = tokens
        self._bias[: len(first)] = [bias for _, bias in biases]
        self._in_prompt[: len(tokens)] = np.isin(tokens, prompt_ids)

    def copy(self) -> Touched:
        """One that grows by itself."""
        twin = copy(self)
        twin._place = self._place.copy()
        twin._token, twin._output_count = self._token.copy(), self._output_count.copy()
        twin._in_prompt, twin._bias = self._in_prompt.copy(), self._bias.copy()
        return twin

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
