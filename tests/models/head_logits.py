"""What a head says after a text, one program for all of its lengths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, attend_dense, decode_head, logits, reduce_features


def head_logits(params: Params, config: ModelConfig, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Return logits f[T - F + 1, V] after the first F of T tokens, whose features of the target [F, D] are given, and
    after each of the rest, which read the head's own."""
    fed, length = len(features), len(tokens)
    ids, positions = jnp.asarray(tokens, jnp.int32), jnp.arange(length)

    @jax.jit
    def forward(params: Params, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = decode_head(params, config, ids, positions, before, attend_dense(config))
        return out, logits(params, config, out)

    before = reduce_features(params, config, jnp.asarray(features.T))
    before = jnp.pad(before, ((0, 0), (0, length - fed)))
    found = []
    for count in range(fed, length + 1):
        out, scores = forward(params, before)
        found.append(np.asarray(scores)[count - 1])
        if count < length:
            before = before.at[:, count].set(out[:, count - 1])
    return np.array(found)
