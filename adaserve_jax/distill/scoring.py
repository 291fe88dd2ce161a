"""What the target says at every position of finished texts, as records to learn from.

Axes: T packed tokens, K likeliest tokens of the target, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.distill.batches import PADDING
from adaserve_jax.distill.records import LOG_ZERO, Record
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, decode, logits
from adaserve_jax.models.dense import attend_dense

LEAST_TOKENS = 512
"""Texts share a forward of at least so many tokens."""
COLUMNS = 64
"""Positions whose scores over the vocabulary are in memory at once."""


class Scorer:
    """Scores texts with one model. top_k: tokens kept for each position; vocab_size: those that both models have;
    temperature: of the distribution. Compiles on first use, for each power of two of tokens."""

    def __init__(self, config: ModelConfig, *, top_k: int, vocab_size: int, temperature: float):
        self._program = jax.jit(partial(_top, config, min(top_k, vocab_size), vocab_size, temperature))

    def records(
        self,
        params: Params,
        texts: Sequence[np.ndarray],
        first: Sequence[int],
        on_done: Callable[[int], None] | None = None,
    ) -> list[Record]:
        """One record per text, in order, with a row for each position from `first` to the last but one token.

        texts: i32[tokens], each longer than its first + 1. on_done: called with the number of texts that are scored.
        """
        size = LEAST_TOKENS
        while size < max(map(len, texts)):
            size *= 2
        records: list[Record] = []
        for begin, end in _shared(texts, size):
            records += self._scored(params, texts[begin:end], first[begin:end], size)
            if on_done is not None:
                on_done(end)
        return records

    def _scored(self, params: Params, texts: Sequence[np.ndarray], first: Sequence[int], size: int) -> list[Record]:
        tokens, position = np.zeros(size, np.int32), np.zeros(size, np.int32)
        segment = np.full(size, PADDING, np.int32)
        starts = np.cumsum([0, *map(len, texts)])
        for number, (text, start) in enumerate(zip(texts, starts[:-1], strict=True)):
            here = slice(start, start + len(text))
            tokens[here], position[here], segment[here] = text, np.arange(len(text)), number
        ids, log_p = (np.asarray(part) for part in self._program(params, tokens, position, segment))
        found = []
        for text, start, row in zip(texts, starts[:-1].tolist(), first, strict=True):
            rows = slice(start + row, start + len(text) - 1)
            at = np.arange(row, len(text) - 1, dtype=np.int32)
            found.append(Record(text, at, ids[rows].copy(), log_p[rows].copy()))
        return found


def _shared(texts: Sequence[np.ndarray], size: int) -> list[tuple[int, int]]:
    """Runs [begin, end) of texts that have `size` tokens together at most."""
    runs, begin, filled = [], 0, 0
    for index, text in enumerate(texts):
        if filled + len(text) > size:
            runs.append((begin, index))
            begin, filled = index, 0
        filled += len(text)
    return [*runs, (begin, len(texts))]


def _top(
    config: ModelConfig, top_k: int, vocab_size: int, temperature: float, params: Params, tokens: jax.Array,
    position: jax.Array, segment: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(ids i32[T, K], natural logs of their probabilities f32[T, K]), likeliest first."""
    hidden = decode(params, config, tokens, position, attend_dense(config, segment))

    def top(columns: jax.Array) -> tuple[Any, Any]:
        scores = logits(params, config, columns)[:, :vocab_size] / temperature
        log_p, ids = jax.lax.top_k(jax.nn.log_softmax(scores), top_k)
        return ids.astype(jnp.int32), jnp.maximum(log_p, LOG_ZERO)

    blocks = hidden.reshape(hidden.shape[0], -1, COLUMNS).transpose(1, 0, 2)
    ids, log_p = jax.lax.map(top, blocks)
    return ids.reshape(-1, top_k), log_p.reshape(-1, top_k)
