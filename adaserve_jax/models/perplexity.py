"""How well a checkpoint predicts a text, with its weights as they are and quantised: the same decoder that serves.

The text is cut into windows of W tokens, each predicted from those before it in its window, so that one compiled
program does everything. Axes: N windows, W tokens of a window, M kinds of weights, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator, Sequence
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
    """What one kind of weights predicts. nats: sum over the scored tokens of -log q(token). text_bytes: of the scored
    tokens' text in UTF-8. kl_mean, kl_max: KL(p || q) in nats at each token, p being of the first kind. same_likeliest:
    share of the tokens at which p and q find the same token likeliest."""

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
        """exp of the mean nats per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between vocabularies, as perplexity is not."""
        return self.nats / math.log(2) / self.text_bytes


@dataclass(frozen=True)
class Windows:
    """tokens: i32[N, W + 1], each window with the token before it; lengths: i32[N], how many of its W are scored;
    text_bytes: of all scored tokens."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: int


def measure_perplexity(
    folder: Path,
    texts: Sequence[str],
    kinds: Sequence[str],
    *,
    window: int = 512,
    max_tokens: int = 16384,
    dtype: Any = jnp.float32,
    progress: Progress | None = None,
) -> list[Score]:
    """Score the texts with each kind of weights, `quantize` of `load_params`; all of them are in memory at once.

    window: tokens predicted from one start; max_tokens: most tokens scored. Raises ConfigError: a number does not fit,
    or the texts are too short. CheckpointError: as loading.
    """
    config = ModelConfig.from_folder(folder)
    if not 1 <= window <= config.max_position:
        raise ConfigError(f"window must be from 1 to {config.max_position}, which the model supports, got {window}")
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be an integer >= 1, got {max_tokens}")
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
    """Consecutive windows of each text, which overlap by one token, so that all tokens but a text's first are scored.

    If there are more than max_tokens allow, they are taken evenly from all the text. Raises ConfigError: no text has
    two tokens.
    """
    window = min(window, max_tokens)
    tokens = [tokenizer.encode(text) for text in texts]
    pieces = [ids[start : start + window + 1] for ids in tokens for start in range(0, len(ids) - 1, window)]
    if not pieces:
        longest = max(map(len, tokens), default=0)
        raise ConfigError(
            f"a text must have at least 2 tokens, so that one can be predicted from another, got {longest}"
        )
    chosen = np.linspace(0, len(pieces) - 1, min(len(pieces), max_tokens // window)).round().astype(int)
    pieces = [pieces[index] for index in chosen]
    padded = np.zeros((len(pieces), window + 1), np.int32)
    for row, ids in zip(padded, pieces, strict=True):
        row[: len(ids)] = ids
    sizes = [_bytes(tokenizer, ids) - _bytes(tokenizer, ids[:1]) for ids in pieces]
    return Windows(padded, np.array([len(ids) - 1 for ids in pieces], np.int32), sum(sizes))


def _bytes(tokenizer: Tokenizer, ids: list[int]) -> int:
    return len(tokenizer.decode(ids).encode())


def _score_window(config: ModelConfig, models: tuple[Params, ...], tokens: jax.Array) -> jax.Array:
    """f32[3, M, W]: -log q of each token, KL(p || q) and whether p and q have one argmax, p being of the first model.

    tokens: i32[W + 1].
    """
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


# The Python that the embedded pair was trained on, and the part of it that was held out. Imports no jax.
#
# The text is the running interpreter's own standard library: whoever runs this has it, and nothing needs to be
# shipped.

HELD_OUT_PERCENT = 3
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "idlelib", "turtledemo", "pydoc_data", "encodings", "lib2to3"}
MAX_FILE_CHARS = 400_000


def is_held_out(key: str) -> bool:
    """Whether the document of this key (a path, a question) is held out: decided by its hash alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % 100 < HELD_OUT_PERCENT


def library_files() -> Iterator[tuple[tuple[str, ...], str]]:
    """Each file of the standard library that counts as text: the parts of its path below the library, and its text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and len(text) <= MAX_FILE_CHARS and "\0" not in text:
            yield parts, text


def is_test(parts: tuple[str, ...]) -> bool:
    """Whether a file of the standard library is one of its tests."""
    return bool({"test", "tests"}.intersection(parts))


def held_out_code() -> list[str]:
    """The held-out files of the library proper, which the pair never saw. None where Python has no source files."""
    return [text for parts, text in library_files() if is_held_out("/".join(parts)) and not is_test(parts)]
