"""The noise: a published generator, keyed as documented, with the distribution it should have."""

from __future__ import annotations

import jax
import numpy as np
from scipy import stats

from adaserve_jax.tree.sampling import gumbel_noise

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
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
