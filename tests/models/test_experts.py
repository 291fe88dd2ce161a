"""Experts: each token goes through those that a float64 oracle chooses for it, and through no other."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import attend_dense, decode, logits
from adaserve_jax.models.experts import grouped_product
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.partition import Partition
from tests.models.checkpoints import MIXTRAL, write_checkpoint

TOKENS = np.random.default_rng(1).integers(0, 320, 24)


def run(folder: Path, params: dict[str, jax.Array], used: np.ndarray | None = None) -> np.ndarray:
    """f32[T, V] over TOKENS."""
    config = ModelConfig.from_folder(folder)

    @jax.jit
    def scores(params: dict[str, jax.Array]) -> jax.Array:
        tokens = TOKENS.astype(np.int32)
        hidden = decode(params, config, tokens, jnp.arange(len(tokens)), attend_dense(config), used=used)
        return logits(params, config, hidden)

    return np.asarray(scores(params))


@pytest.mark.slow
def test_only_experts_that_a_token_chose_are_read(tmp_path: Path) -> None:
    """An expert of NaN is in the result of the tokens that go through it, each through two of six; padding is not
    routed."""
    folder = write_checkpoint(tmp_path, **MIXTRAL, num_hidden_layers=1)
    params = load_params(folder, ModelConfig.from_folder(folder))
    down = params["layers.0.experts.down"].reshape(6, -1)
    used = np.arange(len(TOKENS)) < 3
    touched, touched_by_used = [], []
    for expert in range(6):
        broken = params | {"layers.0.experts.down": down.at[expert].set(jnp.nan).reshape(6 * 32, -1)}
        touched.append(np.isnan(run(folder, broken)).any(axis=1))
        touched_by_used.append(np.isnan(run(folder, broken, used)).any(axis=1))
    assert (np.sum(touched, axis=0) == 2).all()
    assert 0 < np.sum(touched, axis=1).min() < len(TOKENS)
    np.testing.assert_array_equal(np.array(touched_by_used), np.array(touched) & used)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_product_is_the_same_through_xla_and_through_the_kernel(dtype: type) -> None:
    """f16 has no kernel."""
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((3, 40, 64)).astype(dtype), rng.standard_normal((64, 9)).astype(dtype)
    found = jax.jit(grouped_product)(weight, x, np.array([4, 0, 5], np.int32))
    both = [weight[group].astype(np.float64) @ x.astype(np.float64) for group in (0, 2)]
    np.testing.assert_allclose(found, np.concatenate([both[0][:, :4], both[1][:, 4:]], axis=1), atol=1e-4)


def test_experts_that_divide_neither_way_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **MIXTRAL | {"num_local_experts": 3, "intermediate_size": 65})
    message = r"tp must divide the number of the target's experts \(3\) or their inner features \(65\), got 2"
    with pytest.raises(ConfigError, match=message):
        Partition.of(ModelConfig.from_folder(folder), 2, exact=False)
