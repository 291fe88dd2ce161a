"""Quantised checkpoints: every format gives the weights that its publisher's tools give, by any rows and columns, and
what is not read is refused by name before a tensor is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models import tensors as tensor_files
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.export import convert, export
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tensors import TensorFiles
from tests.models.checkpoints import CONFIG, write_checkpoint
from tests.models.quantized_checkpoints import FORMATS, KEPT, write_quantized
from tests.models.raw_safetensors import write_raw

CASES = [(name, family) for name, recipe in FORMATS.items() for family in recipe.families]


def load(folder: Path, dtype: Any = jnp.float32, quantize: str = "none") -> dict[str, np.ndarray]:
    params = load_params(folder, ModelConfig.from_folder(folder), dtype, quantize=quantize)
    return {name: np.asarray(value) for name, value in params.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "family"), CASES)
def test_weights_are_the_values_that_are_stored(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In f32, bf16 and int8, bit for bit those of the checkpoint in full precision, whatever the size of a block."""
    quantized, plain = write_quantized(tmp_path, family, name)
    assert_same(load(quantized), load(plain))
    assert_same(load(quantized, jnp.bfloat16), load(plain, jnp.bfloat16))
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 8 * 32 * 3)  # three rows of most weights
    assert_same(load(quantized), load(plain))
    assert_same(load(quantized, quantize="int8"), load(plain, quantize="int8"))


@pytest.mark.torch
@pytest.mark.parametrize("name", FORMATS)
def test_any_rows_and_columns_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    """As the devices of a mesh read them; the parts begin and end inside blocks, groups and words."""
    quantized, plain = write_quantized(tmp_path, "llama", name)
    config = ModelConfig.from_folder(quantized)
    files = TensorFiles(quantized, config.weight_format)
    names = tuple(f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up"))
    shapes = {key: value.shape for key, value in tensors_of(plain).items()}
    files.check(shapes, ())
    whole = np.concatenate([tensors_of(plain)[each] for each in names])
    rng = np.random.default_rng(0)
    for _ in range(30):
        (first, last), (left, right) = (sorted(rng.choice(size + 1, 2, replace=False)) for size in whole.shape)
        out = np.empty((last - first, right - left), np.float32)
        files.read_rows(names, (first, last), slice(left, right), out)
        np.testing.assert_array_equal(out, whole[first:last, left:right])


@pytest.mark.torch
@pytest.mark.parametrize("name", FORMATS)
def test_a_module_that_is_left_out_must_be_in_full_precision(name: str, tmp_path: Path) -> None:
    if not FORMATS[name].kept_key:
        pytest.skip("the files alone say which modules are quantised")
    quantized, _ = write_quantized(tmp_path, "llama", name)
    path = quantized / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][FORMATS[name].kept_key] = ["lm_head", "mlp", KEPT]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.(gate|down|up)_proj\.weight"):
        load(quantized)


@pytest.mark.torch
def test_copies_in_full_precision_name_no_format(tmp_path: Path) -> None:
    quantized, plain = write_quantized(tmp_path, "llama", "fp8_blocks")
    config = convert(quantized, tmp_path / "converted")
    export(load(quantized), quantized, tmp_path / "exported", dtype="f32")
    for copy in ("converted", "exported"):
        assert ModelConfig.from_folder(tmp_path / copy).weight_format is None
        assert_same(load(tmp_path / copy), load(plain))
    assert config.weight_format is not None


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def rewritten(folder: Path, module: str, config: dict[str, Any], parts: dict[str, tuple[str, np.ndarray]]) -> Path:
    """A checkpoint whose one module is stored as these parts, each with safetensors' name of its type."""
    write_checkpoint(folder, quantization_config=config)
    tensors = {name: ("F32", value) for name, value in tensors_of(folder).items()}
    del tensors[f"{module}.weight"]
    write_raw(folder / "model.safetensors", tensors | {f"{module}.{part}": each for part, each in parts.items()})
    return folder


DOWN = "model.layers.1.mlp.down_proj"
"""Stored [32, 48] by CONFIG; loaded as layers.1.down."""


def float8(bytes_: np.ndarray) -> np.ndarray:
    """The values of e4m3 in f64, from sign, exponent and mantissa."""
    sign, exponent, mantissa = bytes_ >> 7, (bytes_ >> 3) & 15, bytes_ & 7
    normal = (8.0 + mantissa) * 2.0 ** (exponent.astype(int) - 10)
    return (1.0 - 2.0 * sign) * np.where(exponent == 0, mantissa * 2.0**-9, normal)


def random_float8(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    given = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where((given & 127) == 127, 0, given).astype(np.uint8)  # no NaN


@pytest.mark.parametrize("kind", ["F32", "BF16", "F8_E8M0", "U8"])
def test_blocks_of_fp8_may_end_inside_the_matrix(kind: str, tmp_path: Path) -> None:
    """Blocks of 20 x 32 in [32, 48]; scales are numbers, or powers of two by their exponents."""
    rng = np.random.default_rng(0)
    values = random_float8(rng, (32, 48))
    if kind in ("F32", "BF16"):
        stored = rng.uniform(0.01, 2, (2, 2)).astype(np.float32 if kind == "F32" else ml_dtypes.bfloat16)
        scales = stored.astype(np.float64)
    else:
        stored = rng.integers(100, 140, (2, 2)).astype(np.uint8)
        scales = 2.0 ** (stored.astype(int) - 127)
    folder = rewritten(
        tmp_path, DOWN, {"quant_method": "fp8", "weight_block_size": [20, 32]},
        {"weight": ("F8_E4M3", values), "weight_scale_inv": (kind, stored)},
    )  # fmt: skip
    expected = np.array([[float8(values[o, i]) * scales[o // 20, i // 32] for i in range(48)] for o in range(32)])
    np.testing.assert_allclose(load(folder)["layers.1.down"], expected, rtol=1e-7)


@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 1)])
def test_scales_of_fp8_are_of_the_matrix_or_of_each_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    """As AutoFP8 and its relatives write them; scales of activations are there, and not read."""
    rng = np.random.default_rng(0)
    values, scales = random_float8(rng, (32, 48)), rng.uniform(0.01, 2, shape).astype(np.float32)
    folder = rewritten(
        tmp_path, DOWN, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        {"weight": ("F8_E4M3", values), "weight_scale": ("F32", scales), "input_scale": ("F32", np.ones((), "f4"))},
    )  # fmt: skip
    expected = float8(values) * scales.astype(np.float64).reshape(-1, 1)
    np.testing.assert_allclose(load(folder)["layers.1.down"], expected, rtol=1e-7)


def test_defects_of_stored_tensors_are_named(tmp_path: Path) -> None:
    values, scales = np.zeros((32, 48), np.uint8), np.ones((2, 2), np.float32)
    config = {"quant_method": "fp8", "weight_block_size": [20, 32]}

    def refusal(parts: dict[str, tuple[str, np.ndarray]]) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(rewritten(tmp_path, DOWN, config, parts))
        return str(caught.value)

    weight = {"weight": ("F8_E4M3", values)}
    assert f"tensor {DOWN}.weight_scale_inv is missing, expected with shape [2, 2]" in refusal(weight)
    wrong = refusal(weight | {"weight_scale_inv": ("F32", scales[:1])})
    assert f"tensor {DOWN}.weight_scale_inv has shape [1, 2], expected [2, 2] by config.json" in wrong
    wrong = refusal({"weight": ("I8", values), "weight_scale_inv": ("F32", scales)})
    assert f"tensor {DOWN}.weight has type I8, expected one of F8_E4M3" in wrong
    wrong = refusal(weight | {"weight_scale_inv": ("F32", scales), "g_idx": ("I32", np.zeros(48, "i4"))})
    assert f"tensor {DOWN}.g_idx is not part of a model with this config.json" in wrong


REFUSED = [
    ({"quant_method": "bitsandbytes"}, r"quantization_config\.quant_method = 'bitsandbytes' is not supported; use a"),
    ({"bits": 4}, r"quantization_config\.quant_method = None is not supported"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, r"quantization_config\.fmt = 'e5m2' is not supported; only 'e4m3' is"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, r"quantization_config\.expert_dtype = 'fp4' is not supported"),
]
MALFORMED = [
    ([1], r"quantization_config must be an object, got \[1\]"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size must be two integers >= 1, got \[128\]"),
    ({"quant_method": "fp8", "ignored_layers": "lm_head"}, r"ignored_layers must be a list of names of modules"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_other_formats_are_refused_by_name(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": given}))
    with pytest.raises(UnsupportedModelError, match=text):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(("given", "text"), MALFORMED)
def test_malformed_formats_are_named(given: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": given}))
    with pytest.raises(CheckpointError, match=text):
        ModelConfig.from_folder(tmp_path)
