"""Sampling: its noise, filters and frequencies against independent oracles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

from adaserve_jax.tree.sampling import DeviceSampling, draw, gumbel_noise, perturbed_scores

VOCAB = 24


def sampler(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> DeviceSampling:
    def f32(value: float) -> np.ndarray:
        return np.full(rows, value, np.float32)

    seed = np.stack([np.arange(rows), np.zeros(rows)], axis=-1).astype(np.uint32)
    zeros = np.zeros(rows, np.int32)
    return DeviceSampling(*map(jnp.asarray, (seed, zeros, f32(temperature), zeros + top_k, f32(top_p), f32(min_p))))


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
    assert scipy.stats.chisquare(np.bincount(drawn, minlength=VOCAB), probs * rows).pvalue > 1e-3


ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32-20 in Python integers, from the Random123 paper."""
    mask = 0xFFFFFFFF
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for block in range(5):
        for rotation in ROTATIONS[block % 2]:
            x = (x + y) & mask
            y = ((y << rotation) | (y >> (32 - rotation))) & mask
            y ^= x
        x = (x + keys[(block + 1) % 3]) & mask
        y = (y + keys[(block + 2) % 3] + block + 1) & mask
    return x, y


def noise(seed: int, choice: int, position: int, vocab_size: int) -> np.ndarray:
    words = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32)
    draw = jax.jit(gumbel_noise, static_argnums=3)
    return np.asarray(draw(words, np.array([choice], np.int32), np.array([position], np.int32), vocab_size))[0]


def test_known_answer_of_the_generator() -> None:
    assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)  # Random123's published test vector


def test_equals_threefry_keyed_by_seed_choice_position_and_id() -> None:
    seed, choice, position = 0x123456789ABCDEF0, 3, 77
    key = threefry((seed & 0xFFFFFFFF, seed >> 32), (choice, position))
    bits = np.array([threefry(key, (0, token // 2))[token % 2] for token in range(11)], np.uint64)
    expected = -np.log(-np.log(((bits >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23))
    np.testing.assert_allclose(noise(seed, choice, position, 11), expected, rtol=2e-5, atol=1e-5)


def test_every_part_of_the_key_matters_and_the_vocabulary_size_does_not() -> None:
    base = noise(5, 0, 9, 64)
    for other in (noise(6, 0, 9, 64), noise(5 + 2**32, 0, 9, 64), noise(5, 1, 9, 64), noise(5, 0, 10, 64)):
        assert not np.isclose(base, other).any()
    np.testing.assert_array_equal(noise(5, 0, 9, 33), base[:33])


def test_is_standard_gumbel() -> None:
    sample = np.concatenate([noise(seed, 0, seed, 4096) for seed in range(5)])
    assert np.isfinite(sample).all()
    assert scipy.stats.kstest(sample, "gumbel_r").pvalue > 1e-3
