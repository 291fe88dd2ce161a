"""The MTP layer of a MiMo checkpoint computes what a float64 oracle does, and GLM's what transformers does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import init_params, param_specs
from adaserve_jax.models.export import convert, export
from adaserve_jax.models.loading import load_params
from tests.models.checkpoints import assert_same, load, write_checkpoint, write_mimo, write_tensors
from tests.models.head_logits import head_logits
from tests.models.torch_checkpoints import torch_mtp_logits, write_glm_mtp
from tests.oracles.mtp import LAYER, MtpLayer

FED, DRAFTED = 9, 4


def _draft(folder: Path, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Logits f[DRAFTED + 1, V] after the fed tokens, and after each of the rest, which read the layer's features."""
    config = ModelConfig.of_draft("mtp", folder)
    params = load_params(folder, config)
    return head_logits(params, config, tokens, features)


def _inputs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 320, FED + DRAFTED), rng.standard_normal((FED, 32)).astype(np.float32)


@pytest.mark.slow
def test_logits_equal_the_oracle_at_every_depth(tmp_path: Path) -> None:
    folder = write_mimo(tmp_path)
    tokens, features = _inputs(1)
    oracle = MtpLayer(folder)
    feature = oracle.read_target(tokens[:FED].tolist(), features)
    expected = [oracle.logits(feature)]
    for token in tokens[FED:].tolist():
        feature = oracle.step(token, feature)
        expected.append(oracle.logits(feature))
    np.testing.assert_allclose(_draft(folder, tokens, features), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.torch
def test_the_layer_of_glm_computes_what_transformers_does(tmp_path: Path) -> None:
    folder = write_glm_mtp(tmp_path / "glm")
    config = ModelConfig.of_draft("mtp", folder)
    assert config.experts is not None and config.experts_of(0) is not None
    tokens, features = _inputs(3)
    theirs = torch_mtp_logits(folder, tokens[:FED], features)
    np.testing.assert_allclose(_draft(folder, tokens[:FED], features)[0], theirs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.torch
def test_the_model_beside_the_layer_of_glm_is_as_without_it(tmp_path: Path) -> None:
    folder, plain = write_glm_mtp(tmp_path / "glm"), tmp_path / "plain"
    plain.mkdir()
    config = ModelConfig.from_folder(folder)
    assert config.mtp is not None and config.mtp.layers == ("model.layers.2.",)
    tensors = load_file(folder / "model.safetensors")
    write_tensors(plain, {name: tensor for name, tensor in tensors.items() if "layers.2." not in name})
    assert_same(load_params(folder, config), load_params(plain, config))


def test_the_model_is_read_as_qwen2(tmp_path: Path) -> None:
    """It has shape and weights of a Qwen 2 checkpoint of the same tensors, and those are compared with transformers."""
    folder = write_mimo(tmp_path / "mimo")
    config = ModelConfig.from_folder(folder)
    plain = tmp_path / "qwen2"
    plain.mkdir()
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": None}
    given = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(given | qwen2))
    tensors = load_file(folder / "model.safetensors")
    write_tensors(plain, {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)})
    assert config.mtp is not None and config.mtp.layers == (LAYER,)
    assert replace(config, mtp=None) == ModelConfig.from_folder(plain)
    assert_same(load(folder), load(plain))


@pytest.mark.slow
def test_random_parameters_fit_their_specs(tmp_path: Path) -> None:
    config = ModelConfig.of_draft("mtp", write_mimo(tmp_path))
    assert {name: weight.shape for name, weight in init_params(config, 0).items()} == {
        name: shape for name, (shape, _) in param_specs(config).items()
    }


def test_an_exported_checkpoint_names_no_layer_that_it_lacks(tmp_path: Path) -> None:
    folder, out = write_mimo(tmp_path / "mimo"), tmp_path / "out"
    export(load(folder), folder, out)
    assert ModelConfig.from_folder(out) == replace(ModelConfig.from_folder(folder), mtp=None)
    assert_same(load(out), load(folder))


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    none = "draft 'mtp' is the MTP layer of the target's own checkpoint, whose config.json names none"
    for folder in (
        write_checkpoint(tmp_path / "llama"), write_mimo(tmp_path / "mimo", num_nextn_predict_layers=0),
    ):  # fmt: skip
        with pytest.raises(UnsupportedModelError, match=re.escape(none)):
            ModelConfig.of_draft("mtp", folder)
    folder = write_mimo(tmp_path / "cut")
    tensors = load_file(folder / "model.safetensors")
    write_tensors(folder, {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)})
    with pytest.raises(CheckpointError, match=r"model\.mtp_layers\.0\.[a-z_.]+ is missing"):
        load_params(folder, ModelConfig.of_draft("mtp", folder))
    converted = tmp_path / "converted"
    convert(folder, converted)
    with pytest.raises(CheckpointError, match="a converted folder has no MTP layers; give the checkpoint as published"):
        load_params(converted, ModelConfig.of_draft("mtp", converted))
