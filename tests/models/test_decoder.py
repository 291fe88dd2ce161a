"""The decoder's logits equal a float64 oracle and transformers' torch model on the same checkpoint files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.decoder import attend_dense, decode, init_params, logits, param_specs
from adaserve_jax.models.loading import load_params
from tests.models.checkpoints import MIXTRAL, write_checkpoint, write_eagle3, write_mimo
from tests.oracles.llama import oracle_logits

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "all_kv_heads": {"num_key_value_heads": 4, "rope_theta": 5e5},
    "head_dim_from_hidden": {"head_dim": None},
    "sharded_f16": {"shards": 3, "dtype": "f16"},
    "bf16_file": {"dtype": "bf16"},
    "tied_one_kv_head_sharded_f16": {
        "tie_word_embeddings": True, "num_key_value_heads": 1, "shards": 3, "dtype": "f16",
    },
}  # fmt: skip
QUICK = "tied_one_kv_head_sharded_f16"
TOKENS = 24


def model_logits(folder: Path, tokens: np.ndarray, positions: np.ndarray, dtype: Any = jnp.float32) -> np.ndarray:
    config = ModelConfig.from_folder(folder)

    def run(params: dict[str, jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return logits(params, config, decode(params, config, tokens, positions, attend_dense(config)))

    result = jax.jit(run)(load_params(folder, config, dtype), tokens.astype(np.int32), positions.astype(np.int32))
    assert result.dtype == jnp.float32
    return np.asarray(result)


@pytest.mark.parametrize(
    "case", [case if case == QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_logits_equal_the_oracle(tmp_path: Path, case: str) -> None:
    folder = write_checkpoint(tmp_path, **CASES[case])
    tokens = np.random.default_rng(1).integers(0, 320, TOKENS)
    ours = model_logits(folder, tokens, np.arange(TOKENS))
    expected = oracle_logits(folder, tokens)
    assert expected.std() > 0.5
    assert np.abs(ours - expected).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_demo_pair_equals_the_oracle(role: Any) -> None:
    folder = resolve_folder("demo", role)
    config = ModelConfig.from_folder(folder)
    tokens = np.random.default_rng(4).integers(0, config.vocab_size, 96)
    positions = np.concatenate([np.arange(48), config.max_position - 48 + np.arange(48)])
    ours = model_logits(folder, tokens, positions)
    assert np.abs(ours - oracle_logits(folder, tokens, positions)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.torch
def test_the_demo_target_equals_transformers() -> None:
    folder = resolve_folder("demo", "target")
    config = ModelConfig.from_folder(folder)
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, 96)
    _check_against_torch(folder, tokens, start=config.max_position - 96)


def _check_against_torch(folder: Path, tokens: np.ndarray, start: int = 0) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    positions = start + np.arange(len(tokens))
    with torch.no_grad():
        theirs = model(torch.as_tensor(tokens)[None], position_ids=torch.as_tensor(positions)[None]).logits[0].numpy()
    assert np.abs(model_logits(folder, tokens, positions) - theirs).max() < 1e-4


@pytest.mark.slow
def test_bf16_stays_near_the_oracle(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, dtype="bf16")
    tokens = np.random.default_rng(6).integers(0, 320, TOKENS)
    ours = model_logits(folder, tokens, np.arange(TOKENS), jnp.bfloat16)
    error = ours - oracle_logits(folder, tokens)
    assert 1e-4 < np.sqrt((error**2).mean()) < 0.1


RANDOM: dict[str, Callable[[Path], ModelConfig]] = {
    "dense": lambda _: ModelConfig(97, 32, 48, 2, 4, 2, 16, 1e4, 1e-5, False, 128),
    "experts": lambda folder: ModelConfig.from_folder(write_checkpoint(folder, **MIXTRAL)),
    "eagle3": lambda folder: ModelConfig.from_folder(write_eagle3(folder), may_be_head=True),
    "mtp": lambda folder: ModelConfig.of_draft("mtp", write_mimo(folder)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANDOM)
def test_random_parameters_fit_their_specs_and_repeat(tmp_path: Path, kind: str) -> None:
    config = RANDOM[kind](tmp_path)
    params = init_params(config, seed=3, dtype=jnp.bfloat16)
    specs = param_specs(config)
    assert {name: value.shape for name, value in params.items()} == {name: shape for name, (shape, _) in specs.items()}
    assert all(len(shape) == len(axes) for shape, axes in specs.values())
    assert all(value.dtype == jnp.bfloat16 for value in params.values() if jnp.issubdtype(value.dtype, jnp.floating))
    again = init_params(config, 3, jnp.bfloat16)["layers.0.qkv"]
    np.testing.assert_array_equal(params["layers.0.qkv"], again)
    assert config.num_layers == 1 or not np.array_equal(params["layers.1.qkv"], again)


@pytest.mark.slow
def test_products_keep_tokens_last_whatever_their_neighbours_do() -> None:
    """A transpose folded into a product makes it many times slower on a CPU: see layers.keep_layout. So many tokens
    are multiplied by XLA even where there are kernels."""
    config = ModelConfig(512, 128, 256, 1, 4, 2, 32, 1e4, 1e-5, True, 128)

    def token_major(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: None) -> jax.Array:
        rows = [x.reshape(-1, 80).T for x in (q, jnp.concatenate([k, k]), jnp.concatenate([v, v]))]
        return jax.nn.softmax(rows[0] * rows[1] + rows[2], axis=-1).T.reshape(q.shape)

    def run(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        return jax.nn.softmax(logits(params, config, decode(params, config, tokens, tokens, token_major)), axis=-1)

    program = jax.jit(run).lower(init_params(config, seed=0), np.arange(80, dtype=np.int32)).compile().as_text()
    products = re.findall(r"= (f32\[\S+) dot\(", program)
    assert len(products) == 4 * config.num_layers + 1
    assert all(re.fullmatch(r"f32\[\d+,80\]\{1,0\}", product) for product in products), products
