"""Sampling as the argmax of perturbed scores, log p' + g; the draft and the target share these functions.

p' is the sampling distribution (temperature, top-k, top-p, min-p), g Gumbel noise that depends on nothing but seed,
choice, position and token id. The noise does not depend on the tree, which makes verification lossless
(docs/architecture/tree.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from adaserve_jax.sampling import RowSampling

MASKED = float("-inf")
"""Score of a token that cannot be drawn."""


def gumbel_noise(seed: jax.Array, choice: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Return standard Gumbel noise f32[N, V]; the entry of a token id is the same for every larger vocabulary.

    seed: u32[N, 2] (low, high word); choice, position: i32[N], the position of the token to draw.
    """
    key = _position_key(seed, choice, position)
    counter = jnp.arange(-(-vocab_size // 2), dtype=jnp.uint32)[None, :]
    even, odd = _threefry((key[0][:, None], key[1][:, None]), jnp.zeros_like(counter), counter)
    bits = jnp.stack([even, odd], axis=-1).reshape(seed.shape[0], -1)[:, :vocab_size]
    return -jnp.log(-jnp.log(_uniform(bits)))


def synthetic_coins(seed: jax.Array, choice: jax.Array, position: jax.Array, token: jax.Array) -> jax.Array:
    """Return a uniform number of (0, 1) for a token at a position, f32[N], independent of `gumbel_noise`.

    Arguments as there; token: i32[N].
    """
    key = _position_key(seed, choice, position)
    bits, _ = _threefry(key, jnp.ones_like(key[0]), token.astype(jnp.uint32))  # the noise has zeros in place of ones
    return _uniform(bits)


def _position_key(seed: jax.Array, choice: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = seed.astype(jnp.uint32)
    return _threefry((words[:, 0], words[:, 1]), choice.astype(jnp.uint32), position.astype(jnp.uint32))


def _uniform(bits: jax.Array) -> jax.Array:
    """Return numbers of (0, 1), f32, from uint32."""
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


def _threefry(key: tuple[jax.Array, jax.Array], high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply Threefry-2x32 elementwise to broadcast uint32 arrays (Salmon et al., Random123)."""
    operands = jnp.broadcast_arrays(*key, high, low)
    first, second = threefry2x32_p.bind(*operands)
    return first, second


DeviceSampling = RowSampling[jax.Array]
"""Sampling parameters of R rows on the device."""


def _filtered(scaled: jax.Array, sampler: DeviceSampling) -> jax.Array:
    """Mask tokens excluded by top-k, then by top-p of the rest, and by min-p. f32[R, W, V]; ties are kept."""
    descending = -jnp.sort(-scaled, axis=-1)
    vocab_size = scaled.shape[-1]
    top_k = jnp.where(sampler.top_k > 0, jnp.minimum(sampler.top_k, vocab_size), vocab_size)
    in_top_k = jnp.arange(vocab_size) < top_k[:, None, None]
    kept = jnp.where(in_top_k, descending, MASKED)
    probs = jax.nn.softmax(kept, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    in_nucleus = in_top_k & (mass_before < sampler.top_p[:, None, None])
    in_nucleus = in_nucleus.at[..., 0].set(True)
    floor = jnp.min(jnp.where(in_nucleus, descending, jnp.inf), axis=-1)
    floor = jnp.maximum(floor, descending[..., 0] + jnp.log(sampler.min_p)[:, None])
    return jnp.where(scaled >= floor[..., None], scaled, MASKED)


def scaled_scores(logits: jax.Array, sampler: DeviceSampling) -> jax.Array:
    """Return log p' up to a constant per distribution; at temperature 0, the logits. f32[R, W, V], W per row.

    A step in which no row uses top-k, top-p or min-p skips their sort.
    """
    greedy = (sampler.temperature <= 0)[:, None, None]
    scaled = jnp.where(greedy, logits, logits / jnp.maximum(sampler.temperature, 1e-6)[:, None, None])
    filters = (sampler.top_k > 0) | (sampler.top_p < 1) | (sampler.min_p > 0)
    filters = filters & (sampler.temperature > 0)
    exact = sampler._replace(
        top_k=jnp.where(filters, sampler.top_k, 0),
        top_p=jnp.where(filters, sampler.top_p, 1.0),
        min_p=jnp.where(filters, sampler.min_p, 0.0),
    )
    return lax.cond(
        jnp.any(filters), lambda s: jnp.where(filters[:, None, None], _filtered(s, exact), s), lambda s: s, scaled
    )


def add_noise(scores: jax.Array, sampler: DeviceSampling, position: jax.Array) -> jax.Array:
    """Add the noise g of position i32[R] to scores f32[R, W, V]; all W distributions of a row share it.

    Greedy rows stay as they are, and a step of greedy rows only draws no noise.
    """
    greedy = (sampler.temperature <= 0)[:, None, None]

    def with_noise(scores: jax.Array) -> jax.Array:
        noise = gumbel_noise(sampler.seed, sampler.choice, position, scores.shape[-1])
        return jnp.where(greedy, scores, scores + noise[:, None, :])

    return lax.cond(jnp.any(~greedy), with_noise, lambda scores: scores, scores)


def perturbed_scores(logits: jax.Array, sampler: DeviceSampling, position: jax.Array) -> jax.Array:
    """Return scores whose argmax is the drawn token: log p' + g up to a constant per distribution, f32[R, W, V]."""
    return add_noise(scaled_scores(logits, sampler), sampler, position)


def draw(logits: jax.Array, sampler: DeviceSampling, position: jax.Array) -> jax.Array:
    """Draw a token for each row of logits f32[R, V]: i32[R]."""
    # top_k is several times faster than argmax at large V.
    return lax.top_k(perturbed_scores(logits[:, None, :], sampler, position)[:, 0], 1)[1][:, 0].astype(jnp.int32)
