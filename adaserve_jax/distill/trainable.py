"""What of a draft is trained: all its weights, or low-rank updates of its matrices. Pure functions inside programs.

Source of the low-rank form: LoRA (Hu et al.), W + A B, with A = 0 at the start so that nothing changes yet.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, param_specs


class LowRank(NamedTuple):
    """a: f32[out, r]; b: f32[r, in]; they stand for the update a @ b of one weight."""

    a: jax.Array
    b: jax.Array


Trained = dict[str, Any]
"""By name of the weight: f32 of its shape, or a LowRank."""


def begin(params: Params, rank: int) -> tuple[Trained, Params]:
    """(what is trained, what it stands on): all weights in f32 and nothing, or for rank > 0 a LowRank for each matrix
    but the embedding, and all weights as they are."""
    if rank == 0:
        return {name: weight.astype(jnp.float32) for name, weight in params.items()}, {}
    names = [name for name, weight in params.items() if _is_updated(name, weight.shape)]
    keys = jax.random.split(jax.random.key(0), len(names))
    trained = {name: _low_rank(params[name].shape, rank, key) for name, key in zip(names, keys, strict=True)}
    return trained, params


def merged(trained: Trained, base: Params, dtype: Any) -> Params:
    """The draft's weights in the type in which it serves."""
    if not base:
        return {name: weight.astype(dtype) for name, weight in trained.items()}
    return {
        name: (weight.astype(jnp.float32) + _product(trained[name])).astype(dtype) if name in trained else weight
        for name, weight in base.items()
    }


def num_trained(config: ModelConfig, rank: int) -> int:
    """Numbers that are trained."""
    shapes = {name: shape for name, (shape, _) in param_specs(config).items()}
    if rank == 0:
        return sum(math.prod(shape) for shape in shapes.values())
    return sum(rank * sum(shape) for name, shape in shapes.items() if _is_updated(name, shape))


def _is_updated(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name != "embed"


def _low_rank(shape: tuple[int, ...], rank: int, key: jax.Array) -> LowRank:
    outputs, inputs = shape
    return LowRank(
        jnp.zeros((outputs, rank), jnp.float32), jax.random.normal(key, (rank, inputs), jnp.float32) * inputs**-0.5
    )


def _product(update: LowRank) -> jax.Array:
    return jnp.matmul(update.a, update.b, precision=jax.lax.Precision.HIGHEST)
