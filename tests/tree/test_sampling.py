"""The sampler: its filters against a token-by-token oracle, its frequencies against the distribution it promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from adaserve_jax.tree.sampling import Sampler, draw, perturbed_scores

VOCAB = 24


def sampler(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Sampler:
    def f32(value: float) -> np.ndarray:
        return np.full(rows, value, np.float32)

    seed = np.stack([np.arange(rows), np.zeros(rows)], axis=-1).astype(np.uint32)
    zeros = np.zeros(rows, np.int32)
    return Sampler(*map(jnp.asarray, (seed, zeros, f32(temperature), zeros + top_k, f32(top_p), f32(min_p))))


def oracle_support(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that may be drawn: top-k, then the nucleus of what is left, then min-p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[:top_k] if top_k else order
    probs = np.exp(np.asarray([logits[i] / temperature for i in kept], np.float64))
    probs /= probs.sum()
    nucleus, mass = [], 0.0
    for token, prob in zip(kept, probs, strict=True):
        if nucleus and mass >= top_p:
            break
        nucleus.append(token)
        mass += prob
    full = np.exp(logits.astype(np.float64) / temperature)
    full /= full.sum()
    return {token for token in nucleus if full[token] >= min_p * full.max() * (1 - 1e-6)}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 5, 1.0, 0.0),
        (0.7, 0, 0.6, 0.0),
        (1.3, 0, 1.0, 0.2),
        (0.9, 7, 0.5, 0.05),
        (1.0, 0, 1e-6, 0.0),
        (1, 99, 1, 0),
    ],
)
def test_filters_equal_the_oracle(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(1).normal(size=(6, VOCAB)).astype(np.float32) * 2
    params = sampler(6, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = np.asarray(jax.jit(perturbed_scores)(logits[:, None], params, np.arange(6, dtype=np.int32)))[:, 0]
    for row in range(6):
        assert set(np.flatnonzero(np.isfinite(scores[row]))) == oracle_support(
            logits[row], temperature, top_k, top_p, min_p
        )


def test_temperature_zero_is_greedy_and_ignores_filters() -> None:
    logits = np.random.default_rng(2).normal(size=(8, VOCAB)).astype(np.float32)
    params = sampler(8, temperature=0.0, top_k=3, top_p=0.2)
    assert jax.jit(draw)(logits, params, np.arange(8, dtype=np.int32)).tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    rows = 20_000
    logits = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32)
    drawn = jax.jit(draw)(
        np.tile(logits, (rows, 1)), sampler(rows, temperature=temperature), np.full(rows, 7, np.int32)
    )
    probs = np.exp(logits.astype(np.float64) / temperature)
    probs /= probs.sum()
    assert stats.chisquare(np.bincount(drawn, minlength=VOCAB), probs * rows).pvalue > 1e-3
