"""Distances of the draft's distribution from the target's, from the target's K likeliest tokens.

A position has K + 1 categories: those K tokens, and all others as one. With K = V there are no others and the distance
is exact; else it is one from below (data processing). Axes: N rows, K tokens, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

TAIL_FLOOR = 1e-6
"""Least share of all others that a logarithm is taken of: 1 - sum p of f32 knows no smaller one."""
LEAST_LOG_P = -100.0
"""In the place of log 0: exp of it is 0 in f32, and 0 times it is no NaN."""


def row_losses(
    draft_logits: jax.Array, ids: jax.Array, log_p: jax.Array, *, kind: str, beta: float, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """The distance of each row, in nats, and what it says of acceptance.

    draft_logits: f32[N, V], at temperature 1. ids: i32[N, K], different ones. log_p: f32[N, K], the target's
    log-probabilities of these at `temperature`, at which the draft's are taken too; NaN makes the row's loss NaN.
    kind: "kl", KL(p || q); "reverse_kl", KL(q || p); "jsd", beta KL(p || m) + (1 - beta) KL(q || m) with
    m = beta p + (1 - beta) q. Returns (loss f32[N], overlap f32[N]): overlap is the sum of min(p, q) over the K tokens,
    the acceptance rate from below. Source: online speculative decoding eq. 3 and 4, and its acceptance rate.
    """
    log_q = _log_q(draft_logits / temperature, ids)
    log_p = _log_p(log_p, has_tail=ids.shape[1] < draft_logits.shape[1])
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    overlap = jnp.minimum(p, q)[:, : ids.shape[1]].sum(1)
    if kind == "kl":
        return (p * (log_p - log_q)).sum(1), overlap
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(1), overlap
    assert kind == "jsd", kind
    log_m = jnp.logaddexp(jnp.log(beta) + log_p, jnp.log1p(-beta) + log_q)
    return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(1), overlap


def _log_q(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """f32[N, K + 1], or f32[N, V] for K = V. The share of all others is summed from their own scores: 1 - sum q would
    leave nothing of a small one."""
    chosen = jnp.take_along_axis(scores, ids, axis=1)
    if ids.shape[1] < scores.shape[1]:
        rows = jnp.arange(len(ids))[:, None]
        others = jax.nn.logsumexp(scores.at[rows, ids].set(-jnp.inf), axis=1, keepdims=True)
        chosen = jnp.concatenate([chosen, others], axis=1)
    return jax.nn.log_softmax(chosen, axis=1)


def _log_p(log_p: jax.Array, *, has_tail: bool) -> jax.Array:
    """The same categories of the target. Rounded values may add up to more than 1; they are scaled back."""
    log_p = jnp.maximum(log_p.astype(jnp.float32), LEAST_LOG_P)
    total = jnp.exp(log_p).sum(1, keepdims=True)
    if has_tail:
        log_p = jnp.concatenate([log_p, jnp.log(jnp.maximum(1 - total, TAIL_FLOOR))], axis=1)
    return log_p - jnp.log(jnp.maximum(total, 1))
