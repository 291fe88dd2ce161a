"""An EAGLE-3 head is read from its published format and computes what a float64 oracle does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import init_params, logits
from adaserve_jax.models.loading import load_params
from tests.models.checkpoints import write_checkpoint, write_eagle3, write_tensors
from tests.models.head_logits import head_logits
from tests.oracles.eagle3 import Head

TARGET_FEATURES = 40
FED, DRAFTED = 9, 4


def _head_config(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder, may_be_head=True)


def _draft(folder: Path, tokens: np.ndarray, features: np.ndarray, target: Path | None = None) -> np.ndarray:
    """Logits f[DRAFTED + 1, V] after the fed tokens, and after each of the rest, which read the head's own features."""
    config = _head_config(folder)
    params = load_params(folder, config, target=target)
    return head_logits(params, config, tokens, features)


def _inputs(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 320, FED + DRAFTED), rng.standard_normal((FED, 3 * TARGET_FEATURES)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["own_vocabulary", "whole_vocabulary", "embedding_of_the_target"])
def test_logits_equal_the_oracle_at_every_depth(tmp_path: Path, case: str) -> None:
    shared = case == "embedding_of_the_target"
    rows = 320 if case == "whole_vocabulary" else 200
    folder = write_eagle3(tmp_path / "head", features=TARGET_FEATURES, draft_vocab_size=rows, own_embedding=not shared)
    target = write_checkpoint(tmp_path / "target", seed=5)
    tokens, features = _inputs()
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"] if shared else None
    oracle = Head(folder, embedding)
    feature = oracle.read_target(tokens[:FED].tolist(), features)
    expected = [oracle.logits(feature)]
    for token in tokens[FED:].tolist():
        feature = oracle.step(token, feature)
        expected.append(oracle.logits(feature))
    ours = _draft(folder, tokens, features, target if shared else None)
    assert (np.isfinite(ours) == np.isfinite(np.array(expected))).all()
    assert np.isfinite(ours).sum() == (DRAFTED + 1) * rows
    possible = np.isfinite(ours)
    assert np.abs(ours[possible] - np.array(expected)[possible]).max() < 1e-4


def test_both_formats_are_recognised(tmp_path: Path) -> None:
    specforge = _head_config(write_eagle3(tmp_path / "a"))
    eagle = _head_config(write_eagle3(tmp_path / "b", architectures=["LlamaForCausalLM"], target_hidden_size=None))
    assert specforge.eagle3 is not None
    assert specforge == eagle
    assert specforge.head_dim == 16
    assert specforge.eagle3.layers_of(36) == (1, 17, 32)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    chosen = _head_config(write_eagle3(tmp_path / "c", eagle_config=layers)).eagle3
    assert chosen is not None
    assert chosen.layers_of(5) == (0, 2, 4)
    assert chosen.layers_of(36) == (0, 2, 4)
    for where in (layers, layers | {"eagle_config": layers}):
        assert _head_config(write_eagle3(tmp_path / "d", **where)).eagle3 == chosen
    alias = _head_config(write_eagle3(tmp_path / "e", architectures=["Eagle3LlamaForCausalLM"], draft_vocab_size=None))
    assert alias.eagle3 is not None and alias.eagle3.draft_vocab_size == 320


@pytest.mark.slow
def test_random_parameters_have_the_rows_of_the_draft_vocabulary(tmp_path: Path) -> None:
    config = _head_config(write_eagle3(tmp_path))
    params = init_params(config, 0)
    rows = np.asarray(params["head_row"])
    assert sorted(rows[rows >= 0]) == list(range(200))
    out = jax.jit(lambda hidden: logits(params, config, hidden))(jnp.ones((32, 1)))
    assert np.isfinite(np.asarray(out)).sum() == 200


def test_a_head_is_no_target(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"is an EAGLE-3 head, which is no model without its target"):
        ModelConfig.from_folder(folder)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2 is not supported; an EAGLE-3 head has one layer"),
        ({"draft_vocab_size": 321}, "draft_vocab_size must be at most vocab_size (320), got 321"),
        ({"architectures": ["MixtralForCausalLMEagle3"]}, "an EAGLE-3 head of architectures ['MixtralForCausalLMEagl"),
        (
            {"architectures": ["Eagle3MixtralForCausalLM"]},
            "an EAGLE-3 head of architectures ['Eagle3MixtralForCausalLM",
        ),
        ({"norm_before_residual": True}, "norm_before_residual = True is not supported"),
        *(
            ({"eagle_config": {name: True}}, f"eagle_config.{name} = True is not supported")
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm")
        ),
        (
            {
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
                "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
            },
            "layer_ids must be that of eagle_config ([0, 2, 4]), or left out, got [0, 2, 3]",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 2, -1]},
            "eagle_aux_hidden_state_layer_ids must be three layers of the target, from 0, got [0, 2, -1]",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "eagle_config.use_aux_hidden_state = False is not supported; a head that reads one layer is no EAGLE-3",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            "eagle_config.eagle_aux_hidden_state_layer_ids must be three layers of the target, from 0, got [1, 2]",
        ),
    ],
)
def test_configurations_that_are_no_head_are_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    folder = write_eagle3(tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | overrides))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=re.escape(message)):
        _head_config(folder)


def test_a_target_without_the_layers_is_refused(tmp_path: Path) -> None:
    head = _head_config(write_eagle3(tmp_path)).eagle3
    assert head is not None
    with pytest.raises(UnsupportedModelError, match=re.escape("reads layers 1, 0, -2 of its target, which has 2; use")):
        head.layers_of(2)


def test_vocabularies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")

    def refusal(**changed: np.ndarray | None) -> str:
        write_tensors(folder, {name: t for name, t in (tensors | changed).items() if t is not None})
        with pytest.raises(CheckpointError) as caught:
            load_params(folder, _head_config(folder))
        return str(caught.value)

    needs = "an EAGLE-3 head with draft_vocab_size 200 needs a tensor d2t of so many whole numbers"
    assert needs in refusal(d2t=None)
    assert needs in refusal(d2t=tensors["d2t"][:10].copy())
    assert needs in refusal(d2t=tensors["d2t"].astype(np.float32))
    outside = "d2t must name 200 different tokens below vocab_size (320), got some outside or twice"
    assert outside in refusal(d2t=tensors["d2t"] + 200)
    assert outside in refusal(d2t=-np.arange(200))


def test_a_head_without_an_embedding_needs_its_target(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", own_embedding=False)
    config = _head_config(folder)
    with pytest.raises(CheckpointError, match="has no embed_tokens, and shares its target's; name the target"):
        load_params(folder, config)
    other = write_checkpoint(tmp_path / "other", vocab_size=300)
    message = re.escape(f"shares an embedding of [320, 32], and that of {other} is [300, 32]; use a head of this")
    with pytest.raises(CheckpointError, match=message):
        load_params(folder, config, target=other)
