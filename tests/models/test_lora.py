"""Adapters in PEFT's format: the matrices that are read give B A, and folders that cannot be served are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.lora import Matrices, read_adapter
from tests.models.adapters import write_adapter
from tests.models.checkpoints import CONFIG, MIXTRAL, write_checkpoint

MAX_RANK = 8
HIDDEN, INNER = CONFIG["hidden_size"], CONFIG["intermediate_size"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"))


def read(base: Path, adapter: Path, max_rank: int = MAX_RANK) -> Matrices:
    return read_adapter(adapter, ModelConfig.from_folder(base), max_rank)


def change(matrices: Matrices, weight: str) -> np.ndarray:
    """What the matrices add to a fused weight."""
    return matrices[f"{weight}.lora_b"] @ matrices[f"{weight}.lora_a"]


def expected(adapter: Path, module: str, scale: float) -> np.ndarray:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = f"base_model.model.model.layers.1.{module}"
    a, b = (tensors[f"{name}.lora_{part}.weight"].astype(np.float32) for part in "AB")
    return scale * (b @ a)


@pytest.mark.parametrize(("said", "scale"), [({}, 8.0 / 4), ({"use_rslora": True}, 8.0 / 2), ({"lora_alpha": 2}, 0.5)])
def test_fused_weights_change_by_the_product_of_each_projection(
    base: Path, tmp_path: Path, said: dict[str, Any], scale: float
) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, **said)
    matrices = read(base, adapter)
    parts = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    for weight, modules in parts.items():
        whole = np.concatenate([expected(adapter, module, scale) for module in modules])
        np.testing.assert_allclose(change(matrices, f"layers.1.{weight}"), whole, atol=1e-5)


def test_weights_without_an_adapter_do_not_change(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, modules=("v_proj",), dtype=ml_dtypes.bfloat16)
    matrices = read(base, adapter)
    changed = change(matrices, "layers.1.qkv")
    q_size = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    kv_size = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    assert not changed[: q_size + kv_size].any()
    np.testing.assert_allclose(changed[q_size + kv_size :], expected(adapter, "self_attn.v_proj", 2.0), atol=1e-5)
    assert not change(matrices, "layers.1.down").any()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"kasa_config": {"beta": 1e-4, "gamma": 1e-3}}, "kasa_config"),
        *(
            ({"init_lora_weights": name}, "such an adapter belongs to base weights that PEFT changes; save it again")
            for name in ("pissa", "pissa_niter_16", "OLoRA", "corda", "loftq")
        ),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(
    base: Path, tmp_path: Path, said: dict[str, Any], words: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, **said)
    with pytest.raises(UnsupportedModelError, match=words):
        read(base, adapter)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_initial_values_that_keep_the_base_weights_are_served(base: Path, tmp_path: Path, init: bool | str) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, init_lora_weights=init, kasa_config=None)
    np.testing.assert_allclose(
        change(read(base, adapter), "layers.1.down"), expected(adapter, "mlp.down_proj", 2.0), atol=1e-5
    )


def test_a_rank_above_the_largest_is_refused_with_the_option(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, rank=16)
    with pytest.raises(CheckpointError, match=r"at most 8.*got 16; start it with max_lora_rank 16"):
        read(base, adapter)
    assert read(base, adapter, max_rank=16)


@pytest.mark.parametrize("said", [{"r": 0}, {"r": "4"}, {"lora_alpha": 0}, {"lora_alpha": None}, {"r": None}])
def test_settings_that_are_no_numbers_are_refused(base: Path, tmp_path: Path, said: dict[str, Any]) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, **said)
    with pytest.raises(CheckpointError, match=next(iter(said))):
        read(base, adapter)


A_TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ODD_TENSORS = {
    "model.embed_tokens.lora_embedding_A": r"is not supported; expected .*MODULE\.lora_A\.weight and lora_B\.weight",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector": "lora_magnitude_vector is not supported",
    "model.layers.0.self_attn.q_proj.base_layer.bias": "base_layer.bias is not supported",
    "model.layers.2.self_attn.q_proj.lora_A.weight": "the model has no such layer",
    "lm_head.lora_A.weight": "that can be adapted are down_proj, gate_proj, k_proj",
    "model.layers.0.mlp.experts.0.down_proj.lora_A.weight": "experts cannot be adapted",
}


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_tensors_of_other_modules_are_refused_by_name(base: Path, tmp_path: Path, name: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(tensors | {f"base_model.model.{name}": tensors[A_TENSOR]}, adapter / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match=ODD_TENSORS[name]):
        read(base, adapter)


def test_an_adapter_of_another_model_is_refused_by_its_shapes(base: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", hidden_size=64)
    adapter = write_adapter(tmp_path / "adapter", other, seed=1)
    with pytest.raises(CheckpointError, match=r"for this model and r = 4, got .*64.*; the adapter is of another model"):
        read(base, adapter)


def test_experts_are_refused_and_the_attention_beside_them_is_read(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "experts", **MIXTRAL)
    adapter = write_adapter(tmp_path / "attention", base, seed=1, modules=("q_proj", "o_proj"))
    assert set(read(base, adapter)) == {
        f"layers.{layer}.{weight}.lora_{part}" for layer in (0, 1) for weight in ("qkv", "out") for part in "ab"
    }
    with pytest.raises(UnsupportedModelError, match="experts cannot be adapted"):
        read(base, write_adapter(tmp_path / "experts_too", base, seed=1, modules=("q_proj", "w1")))


def test_missing_halves_layers_and_files_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1)
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: each for name, each in tensors.items() if name != A_TENSOR}, weights)
    with pytest.raises(CheckpointError, match=f"{A_TENSOR} is missing; save the adapter again"):
        read(base, adapter)
    save_file({name: each for name, each in tensors.items() if ".layers.1." not in name}, weights)
    with pytest.raises(CheckpointError, match=r"has nothing for model\.layers\.1\..*; save the adapter again"):
        read(base, adapter)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layers_to_transform": [0]}))
    assert not change(read(base, adapter), "layers.1.qkv").any()
    save_file({}, weights)
    with pytest.raises(CheckpointError, match="holds no tensor; expected at least one adapted module"):
        read(base, adapter)
    weights.write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        read(base, adapter)
    weights.unlink()
    with pytest.raises(
        CheckpointError, match=r"adapter_model\.safetensors is missing; expected an adapter that PEFT saved"
    ):
        read(base, adapter)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        read(base, adapter)


@pytest.mark.parametrize("excluded", [["layers.1.self_attn.q_proj"], r".*layers\.1\..*", [], None])
def test_what_exclude_modules_leaves_out_is_not_missed(base: Path, tmp_path: Path, excluded: list[str] | str | None):
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, modules=("q_proj",), exclude_modules=excluded)
    weights = adapter / "adapter_model.safetensors"
    save_file({name: each for name, each in load_file(weights).items() if ".layers.1." not in name}, weights)
    if not excluded:
        with pytest.raises(CheckpointError, match=r"has nothing for model\.layers\.1\.self_attn\.q_proj"):
            read(base, adapter)
        return
    matrices = read(base, adapter)
    assert change(matrices, "layers.0.qkv").any() and not change(matrices, "layers.1.qkv").any()


@pytest.mark.parametrize(("said", "lacks"), [
    ({"exclude_modules": ["lm_head"]}, True),
    ({"target_modules": r".*\.self_attn\.q_proj"}, True),
    ({"target_modules": "all-linear"}, False),
    ({"layers_to_transform": [0]}, False),
    ({"layers_to_transform": 0}, False),
    ({"layers_to_transform": [0, 1]}, True),
    ({"target_modules": ["self_attn.q_proj"]}, True),
])  # fmt: skip
def test_what_an_adapter_says_that_it_adapts_is_missed(base: Path, tmp_path: Path, said: dict[str, Any], lacks: bool):
    """Of two layers the file has one."""
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, modules=("q_proj",), **said)
    weights = adapter / "adapter_model.safetensors"
    save_file({name: each for name, each in load_file(weights).items() if ".layers.1." not in name}, weights)
    if lacks:
        with pytest.raises(CheckpointError, match=r"has nothing for model\.layers\.1\.self_attn\.q_proj"):
            read(base, adapter)
    else:
        assert change(read(base, adapter), "layers.0.qkv").any()


def test_a_setting_that_is_no_regular_expression_is_told(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, target_modules="(q_proj")
    with pytest.raises(CheckpointError, match="target_modules must be a regular expression or a list of names, got"):
        read(base, adapter)


def test_values_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[A_TENSOR][0, 3] = np.nan
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="must be finite, got a value that is not"):
        read(base, adapter)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.bool_, np.int8])
def test_tensors_of_other_types_are_refused(base: Path, tmp_path: Path, dtype: Any) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, dtype=dtype)
    with pytest.raises(UnsupportedModelError, match="is not supported; save the adapter as one of F16, BF16"):
        read(base, adapter)
