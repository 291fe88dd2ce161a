"""Frequencies of every scaling equal those of transformers, bit for bit or nearly so, on real models' settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve_jax.models.config_values import ConfigValues
from adaserve_jax.models.rope import plain_frequencies, read_rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CASES: dict[str, tuple[float, int, dict[str, Any]]] = {
    "default": (10000.0, 64, {"rope_type": "default"}),
    "linear": (10000.0, 128, {"rope_type": "linear", "factor": 2.5}),
    "dynamic_up_to_its_length": (10000.0, 64, {"rope_type": "dynamic", "factor": 4.0}),
    "llama_3.1": (500000.0, 128, LLAMA3 | {"original_max_position_embeddings": 8192}),
    "llama_3.2": (500000.0, 64, LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}),
    "qwen_2.5": (1000000.0, 128, YARN),
    "yarn_attention_factor": (1000000.0, 80, YARN | {"attention_factor": 1.25}),
    "yarn_ends": (10000.0, 96, YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
    "yarn_mscale": (10000.0, 64, YARN | {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.4}),
    "yarn_short": (10000.0, 64, YARN | {"original_max_position_embeddings": 16}),
}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta, head_dim, rope = CASES[case]
    values = {"max_position_embeddings": 131072, "rope_parameters": rope | {"rope_theta": theta}}
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, **values)
    theirs = LlamaRotaryEmbedding(config)
    found_theta, scaling = read_rope(ConfigValues(values, Path("config.json")))
    frequencies = (scaling.frequencies if scaling else plain_frequencies)(found_theta, head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=3e-7)
    assert (scaling.magnitude if scaling else 1.0) == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("alpha", [50.0, 1000.0])
def test_frequencies_by_alpha_equal_transformers(alpha: float) -> None:
    from transformers import HunYuanDenseV1Config
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": alpha}
    theirs = HunYuanDenseV1RotaryEmbedding(HunYuanDenseV1Config(head_dim=128, rope_parameters=rope))
    theta, scaling = read_rope(ConfigValues({"rope_parameters": rope}, Path("config.json")), alpha_dim=128)
    assert scaling is None and theirs.attention_scaling == 1
    frequencies = plain_frequencies(theta, 128)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=3e-7)
