"""Measures how well a checkpoint predicts a text, with plain and quantised weights, by the decoder that serves.

The text is cut into windows of W tokens, each predicted from those before it in its window, so that one program is
compiled. Axes: N windows, W tokens of a window, M kinds of weights, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, attend_dense, decode, logits
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.types import Progress


@dataclass(frozen=True)
class Score:
    """Score of one kind of weights, with distributions q; p are those of the first kind.

    nats: sum over the scored tokens of -log q(token). text_bytes: bytes of their text in UTF-8. kl_mean, kl_max:
    KL(p || q) in nats over the tokens. same_likeliest: share of tokens at which p and q have the same argmax.
    """

    quantize: str
    weight_bytes: int
    tokens: int
    text_bytes: int
    nats: float
    kl_mean: float
    kl_max: float
    same_likeliest: float

    @property
    def perplexity(self) -> float:
        """Return exp of the mean nats per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Return bits per byte of text, which vocabularies can be compared by, unlike perplexity."""
        return self.nats / math.log(2) / self.text_bytes


@dataclass(frozen=True)
class Windows:
    """tokens: i32[N, W + 1], each window with the token before it, or BOS. lengths: i32[N], how many of its W are
    scored. text_bytes: bytes of all scored tokens' text."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: int


def measure_perplexity(
    folder: Path, texts: Sequence[str], kinds: Sequence[str], *, window: int = 512, max_tokens: int = 16384,
    dtype: Any = jnp.float32, progress: Progress | None = None,
) -> list[Score]:  # fmt: skip
    """Score texts with each kind of weights; all kinds are in memory at once.

    kinds: values of `quantize` of `load_params`. window: W. max_tokens: most tokens to score.
    Raises ConfigError: a number does not fit, or the texts are too short; CheckpointError: as loading does.
    """
    config = ModelConfig.from_folder(folder)
    if not 1 <= window <= config.max_position:
        raise ConfigError(f"window must be from 1 to {config.max_position}, which the model supports, got {window}")
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be an integer >= 1, got {max_tokens}")
    config = config.for_context(window)
    windows = cut(Tokenizer.from_folder(folder), texts, window, max_tokens)
    if windows.tokens.max() >= config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer gives token {windows.tokens.max()} but the model has only {config.vocab_size}; "
            "use the tokenizer that belongs to the model"
        )
    models = tuple(load_params(folder, config, dtype, progress, quantize=kind) for kind in kinds)
    score = jax.jit(partial(_score_window, config))
    sums = np.zeros((len(models), 3))
    kl_max = np.zeros(len(models))
    for done, (tokens, length) in enumerate(zip(windows.tokens, windows.lengths, strict=True), 1):
        per_token = np.asarray(score(models, tokens), np.float64)[..., :length]
        sums += per_token.sum(-1).T
        kl_max = np.maximum(kl_max, per_token[1].max(-1))
        if progress is not None:
            progress("scoring", done, len(windows.lengths))
    count = int(windows.lengths.sum())
    sizes = [sum(weight.nbytes for weight in params.values()) for params in models]
    return [
        Score(kind, size, count, windows.text_bytes, nats, kl / count, float(most), same / count)
        for kind, size, (nats, kl, same), most in zip(kinds, sizes, sums.tolist(), kl_max, strict=True)
    ]


def cut(tokenizer: Tokenizer, texts: Sequence[str], window: int, max_tokens: int) -> Windows:
    """Cut texts into consecutive windows that overlap by one token, so that all tokens but a text's first are scored.

    Where the tokenizer begins texts with a BOS token, every window begins with it: a model may predict nothing well
    without. If the windows exceed max_tokens, some are chosen evenly over all the text. Raises ConfigError: no text has
    two tokens.
    """
    window = min(window, max_tokens)
    tokens = [tokenizer.encode(text) for text in texts]
    pieces = [(ids[0], ids[start : start + window + 1]) for ids in tokens for start in range(0, len(ids) - 1, window)]
    if not pieces:
        longest = max(map(len, tokens), default=0)
        raise ConfigError(
            f"a text must have at least 2 tokens, so that one can be predicted from another, got {longest}"
        )
    chosen = np.linspace(0, len(pieces) - 1, min(len(pieces), max_tokens // window)).round().astype(int)
    pieces = [pieces[index] for index in chosen]
    padded = np.zeros((len(pieces), window + 1), np.int32)
    for row, (begin, ids) in zip(padded, pieces, strict=True):
        row[: len(ids)] = ids
        if begin == tokenizer.bos_token_id:
            row[0] = begin
    sizes = [_bytes(tokenizer, ids) - _bytes(tokenizer, ids[:1]) for _, ids in pieces]
    return Windows(padded, np.array([len(ids) - 1 for _, ids in pieces], np.int32), sum(sizes))


def _bytes(tokenizer: Tokenizer, ids: list[int]) -> int:
    return len(tokenizer.decode(ids).encode())


def _score_window(config: ModelConfig, models: tuple[Params, ...], tokens: jax.Array) -> jax.Array:
    """Score one window, i32[W + 1]. Returns f32[3, M, W]: -log q of each token, KL(p || q), and 1 where p and q have
    the same argmax; p is the first model's."""
    inputs, labels = tokens[:-1], tokens[1:]
    positions = jnp.arange(len(inputs), dtype=jnp.int32)
    attend = attend_dense(config)
    logs = [jax.nn.log_softmax(logits(p, config, decode(p, config, inputs, positions, attend))) for p in models]
    first = logs[0]
    rows = [
        (
            -jnp.take_along_axis(log, labels[:, None], axis=1)[:, 0],
            jnp.sum(jnp.exp(first) * (first - log), axis=1),
            (first.argmax(1) == log.argmax(1)).astype(jnp.float32),
        )
        for log in logs
    ]
    return jnp.stack([jnp.stack(row) for row in zip(*rows, strict=True)])
