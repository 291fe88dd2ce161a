"""The draft's scores and distances at the rows of a packed batch: a pure function, to be differentiated.

Axes: T packed tokens, N rows, K tokens of the target per row, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaserve_jax.distill.losses import row_losses
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, decode, logits
from adaserve_jax.models.dense import attend_dense


class Fields(NamedTuple):
    """The arrays of a `Batch`, in its order."""

    tokens: jax.Array
    position: jax.Array
    segment: jax.Array
    at: jax.Array
    ids: jax.Array
    log_p: jax.Array
    weight: jax.Array


def rows_logits(params: Params, config: ModelConfig, fields: Fields) -> jax.Array:
    """f32[N, V]: the draft's scores for the successor of each row's token, texts side by side not seeing each other."""
    hidden = decode(params, config, fields.tokens, fields.position, attend_dense(config, fields.segment))
    return logits(params, config, hidden[:, fields.at])


def summed(params: Params, config: ModelConfig, learn: LearnConfig, fields: Fields) -> tuple[jax.Array, jax.Array]:
    """Weighted sums over the rows of (loss, overlap), f32 each. A row of weight 0 adds exactly 0 to them and to every
    gradient, whatever it holds."""
    real = fields.weight > 0
    log_p = jnp.where(real[:, None], fields.log_p, -jnp.log(fields.log_p.shape[1] + 1.0))
    loss, overlap = row_losses(
        rows_logits(params, config, fields), jnp.where(real[:, None], fields.ids, 0), log_p,
        kind=learn.learn_loss, beta=learn.learn_beta, temperature=learn.learn_temperature,
    )  # fmt: skip
    return (
        jnp.where(real, fields.weight * loss, 0).sum(),
        jnp.where(real, fields.weight * overlap, 0).sum(),
    )
