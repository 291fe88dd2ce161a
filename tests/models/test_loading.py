"""Loading: files of every layout and type give the same weights, and each defect is named with what was expected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import param_specs
from adaserve_jax.models.export import convert
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tensors import BLOCK_BYTES
from tests.conftest import ROOT
from tests.models.checkpoints import CONFIG, random_tensors, write_checkpoint, write_tensors
from tests.models.quantized_checkpoints import quantize


def _load(folder: Path, dtype: type = jnp.float32) -> dict[str, np.ndarray]:
    params = load_params(folder, ModelConfig.from_folder(folder), dtype)
    return {name: np.asarray(value) for name, value in params.items()}


def test_weights_are_fused_by_rows(tmp_path: Path) -> None:
    params = _load(write_checkpoint(tmp_path))
    tensors = random_tensors(CONFIG, seed=0)
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    np.testing.assert_array_equal(params["layers.1.qkv"], np.concatenate(parts).astype(np.float32))
    parts = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(params["layers.0.gate_up"], np.concatenate(parts).astype(np.float32))
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"].astype(np.float32))


@pytest.mark.parametrize("stored", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_types_are_cast_once(tmp_path: Path, stored: str, dtype: type) -> None:
    params = _load(write_checkpoint(tmp_path, dtype=stored), dtype)
    numpy_type = {"f16": np.float16, "bf16": jnp.bfloat16, "f32": np.float32}[stored]
    expected = random_tensors(CONFIG, seed=0)["model.layers.0.mlp.down_proj.weight"].astype(numpy_type).astype(dtype)
    assert params["layers.0.down"].dtype == dtype
    np.testing.assert_array_equal(params["layers.0.down"], expected)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    whole = _load(write_checkpoint(tmp_path / "one"))
    sharded = _load(write_checkpoint(tmp_path / "three", shards=3))
    assert whole.keys() == sharded.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(value, sharded[name])


def test_specs_are_what_is_loaded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
    specs = param_specs(ModelConfig.from_folder(folder))
    assert {name: shape for name, (shape, _) in specs.items()} == {n: v.shape for n, v in _load(folder).items()}
    assert "head" not in specs
    assert specs["layers.0.qkv"] == ((128, 32), ("qkv", "embed"))


def test_tied_checkpoints_may_repeat_the_head_and_carry_rotary_buffers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(CONFIG, seed=0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8)
    write_tensors(folder, tensors)
    assert "head" not in _load(folder)


@pytest.mark.parametrize("rows", [320, 300])
def test_a_head_that_is_tied_and_differs_is_refused(tmp_path: Path, rows: int) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(CONFIG, seed=0)
    head = tensors["model.embed_tokens.weight"][:rows].copy()
    head[-1, -1] += 1
    expected = r"lm_head\.weight differs from model\.embed_tokens\.weight, to which config\.json ties it; set tie_word_"
    write_tensors(folder, tensors | {"lm_head.weight": head})
    with pytest.raises(CheckpointError, match=expected):
        _load(folder)


def _refusal(folder: Path, tensors: dict[str, np.ndarray]) -> str:
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        _load(folder)
    return str(caught.value)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tensors = random_tensors(CONFIG, seed=0)
    name = "model.layers.1.self_attn.k_proj.weight"
    without = {key: value for key, value in tensors.items() if key != name}
    refusal = _refusal(folder, without)
    assert f"tensor {name} is missing, expected with shape [32, 32]; the files and config.json do not belong" in refusal
    assert f"tensor {name} has shape [32, 31], expected [32, 32] by config.json" in _refusal(
        folder, tensors | {name: np.ones((32, 31))}
    )
    assert "tensor model.extra is not part of a model with this config.json (and 1 more)" in _refusal(
        folder, tensors | {"model.extra": np.ones(1), "model.more": np.ones(1)}
    )
    assert f"tensor {name} has type I8, expected one of F16, BF16, F32, F64" in _refusal(
        folder, tensors | {name: np.ones((32, 32), np.int8)}
    )
    del tensors["lm_head.weight"]
    assert "tensor lm_head.weight is missing, expected with shape [320, 32]" in _refusal(folder, tensors)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        _load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": 5}}))
    with pytest.raises(CheckpointError, match="5 is missing; expected the checkpoint's weights in it"):
        _load(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="expected a weight_map from tensor names to names of files beside it"):
        _load(folder)
    index.unlink()
    expected = (
        r"expected model\.safetensors or model\.safetensors\.index\.json, found model-00001-of-00002\.safetensors; it "
    )
    with pytest.raises(CheckpointError, match=expected):
        _load(folder)
    (folder / "model-00001-of-00002.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin; save the model with safe_serialization=True"):
        _load(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.gguf")
    with pytest.raises(CheckpointError, match=r"found model\.gguf; GGUF is not read"):
        _load(folder)
    (folder / "model.gguf").unlink()
    with pytest.raises(CheckpointError, match="found neither"):
        _load(folder)
    whole = folder / "model.safetensors"
    for held, advice in (
        (b"no header", "download it again"),
        (b"version https://git-lfs.x/spec/v1\noid", "git lfs pull"),
    ):
        whole.write_bytes(held)
        with pytest.raises(
            CheckpointError, match=rf"model\.safetensors is not a readable safetensors file: .*{advice}"
        ):
            _load(folder)


def test_biases_and_head_norms_are_loaded(tmp_path: Path) -> None:
    """Qwen3 with biases has every kind of weight that a plain Llama lacks, but for those of the MLP."""
    config = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True}
    folder = write_checkpoint(tmp_path, **config)
    tensors = random_tensors(CONFIG, seed=0)
    rng = np.random.default_rng(1)
    added = {"q_proj.bias": 64, "k_proj.bias": 32, "v_proj.bias": 32, "o_proj.bias": 32}
    added |= {"q_norm.weight": 16, "k_norm.weight": 16}
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": rng.random(size) for name, size in added.items()}
    write_tensors(folder, tensors)
    params = _load(folder)
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.bias"] for name in "qkv"]
    np.testing.assert_array_equal(params["layers.1.qkv.bias"], np.concatenate(parts).astype(np.float32))
    for ours, theirs in {"out.bias": "o_proj.bias", "q_norm": "q_norm.weight", "k_norm": "k_norm.weight"}.items():
        expected = tensors[f"model.layers.0.self_attn.{theirs}"].astype(np.float32)
        np.testing.assert_array_equal(params[f"layers.0.{ours}"], expected)
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith("1.self_attn.k_proj.bias")}
    assert "tensor model.layers.1.self_attn.k_proj.bias is missing" in _refusal(folder, without)


def test_progress_counts_the_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    calls: list[tuple[str, int, int]] = []
    params = load_params(folder, ModelConfig.from_folder(folder), progress=lambda *call: calls.append(call))
    assert calls == [("loading", done, len(params)) for done in range(1, len(params) + 1)]


LARGE = {"hidden_size": 1024, "intermediate_size": 6144, "num_hidden_layers": 2}
LARGEST = 2 * LARGE["hidden_size"] * LARGE["intermediate_size"]
"""Elements of the largest weight."""


def beside_the_weights(folder: Path, quantize: str = "none") -> float:
    """Measured in a process of its own, as the growth of its largest resident set without the weights; bytes."""
    command = [sys.executable, "-m", "benchmarks.engine.load_time", "one", folder, "--quantize", quantize]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    load = json.loads(done.stdout.splitlines()[-1])
    assert load["largest_bytes"] == LARGEST * (1 if quantize == "int8" else 4)
    assert load["peak_bytes"] >= load["weight_bytes"]
    return load["peak_bytes"] - load["weight_bytes"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("form", ["source", pytest.param("converted", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_host_memory_holds_one_weight_beside_the_model(tmp_path: Path, form: str) -> None:
    source = write_checkpoint(tmp_path / "source", **LARGE, dtype="bf16", shards=2)
    if form == "converted":
        convert(source, tmp_path / form, dtype="f32")
    assert beside_the_weights(tmp_path / form) <= (1.2 if form == "source" else 2.5) * 4 * LARGEST


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", ["fp8_blocks", "gptq", "awq", "ct_4_bits_ordered"])
def test_host_memory_holds_blocks_beside_a_quantised_model(tmp_path: Path, name: str) -> None:
    """Three blocks at most, which is half the largest weight in f32."""
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", **LARGE), tmp_path / "quantized", name)
    assert 3 * BLOCK_BYTES <= LARGEST * 4 / 2
    assert beside_the_weights(quantized) <= 3 * BLOCK_BYTES
    assert beside_the_weights(quantized, "int8") <= 3 * BLOCK_BYTES
