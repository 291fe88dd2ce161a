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
from adaserve_jax.models.quantize import SCALE, ZERO
from adaserve_jax.models.tensors import TensorFiles
from tests.conftest import ROOT
from tests.models.checkpoints import CONFIG, assert_same, load, write_checkpoint
from tests.models.quantized_checkpoints import FORMATS, KEPT, write_quantized
from tests.models.raw_safetensors import write_raw
from tests.slow import slow_after

CASES = [(name, family) for name, recipe in FORMATS.items() for family in recipe.families]
QUICK = {
    ("fp8_blocks", "qwen3_window"),
    ("awq", "phi3"),
    ("mxfp4", "gpt_oss"),
}
"""Cases of `make test`: the ways to store weights that differ most, experts among them."""
assert set(CASES) >= QUICK, "an entry that names no case runs nothing"
PARAMS = [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "family"), PARAMS)
def test_weights_are_the_values_that_are_stored(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In f32, bf16, int8 and int4, bit for bit those of the checkpoint in full precision, whatever the size of a
    block; but int8 and int4 hold what the file has in them as it is."""
    quantized, plain = write_quantized(tmp_path, family, name)
    held_as_it_is = {"none": False, "int8": FORMATS[name].as_int8, "int4": FORMATS[name].as_int4}
    expected = {kind: load(plain, quantize=kind) for kind, is_held in held_as_it_is.items() if not is_held}
    assert_same(load(quantized), expected["none"])
    assert_same(load(quantized, jnp.bfloat16), load(plain, jnp.bfloat16))
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 8 * 32 * 3)  # three rows of most weights
    for kind, weights in expected.items():
        assert_same(load(quantized, quantize=kind), weights)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "family"), [case for case in CASES if FORMATS[case[0]].as_int4])
def test_four_bits_in_groups_of_inputs_are_not_rounded_again(name: str, family: str, tmp_path: Path) -> None:
    """int4 stands for the values of the file, at f16 scales, and what the file has in full precision is rounded."""
    quantized, plain = write_quantized(tmp_path, family, name)
    held, expected, rounded = load(quantized, quantize="int4"), load(plain), load(plain, quantize="int4")
    packed = [key.removesuffix(ZERO) for key in held if key.endswith(ZERO)]
    assert len(packed) > 4
    for key in packed:
        if key == "layers.1.out":
            continue
        weight, scale, zero = (held[key + end] for end in ("", SCALE, ZERO))
        both = weight.view(np.uint8)
        values = np.stack([both & 15, both >> 4], axis=2).reshape(*scale.shape, -1).astype(np.float32)
        found = ((values - zero[..., None]) * scale.astype(np.float32)[..., None]).reshape(len(weight), -1)
        np.testing.assert_allclose(found, expected[key], rtol=2**-11 if name.startswith("ct") else 0)
    assert any((rounded[key] != held[key]).any() for key in packed)
    for key in ("embed", "layers.1.out", "layers.1.out.scale", "layers.1.out.zero"):  # KEPT, beside the embedding
        np.testing.assert_array_equal(held[key], rounded[key])


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name, recipe in FORMATS.items() if recipe.as_int8])
def test_int8_with_scales_of_rows_is_not_rounded_again(name: str, tmp_path: Path) -> None:
    """The values are those of the file, which reach to -128; what the file has in full precision is rounded."""
    quantized, plain = write_quantized(tmp_path, "llama", name)
    held, expected = load(quantized, quantize="int8"), load(plain)
    for weight in ("down", "gate_up", "qkv"):
        key = f"layers.0.{weight}"
        np.testing.assert_array_equal(held[key] * held[f"{key}.scale"][:, None], expected[key])
    assert held["layers.0.down"].min() == -128
    rounded = load(plain, quantize="int8")
    for key in ("embed", "layers.1.out", "layers.1.out.scale"):
        np.testing.assert_array_equal(held[key], rounded[key])


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name, recipe in FORMATS.items() if not recipe.stacks])
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
@pytest.mark.parametrize("name", slow_after(4, [name for name, recipe in FORMATS.items() if recipe.kept_key]))
def test_a_module_that_is_left_out_must_be_in_full_precision(name: str, tmp_path: Path) -> None:
    """Of formats without such a list, the files alone say which modules are quantised."""
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


@pytest.mark.torch
def test_modelopt_says_the_format_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Modules that are left out may be named by patterns of their whole names; a copy in full precision lacks it."""
    quantized, plain = write_quantized(tmp_path, "llama", "modelopt_nvfp4")
    path, own = quantized / "config.json", quantized / "hf_quant_config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    about = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": about}))
    assert_same(load(quantized), load(plain))
    convert(quantized, tmp_path / "converted")
    assert not (tmp_path / "converted" / own.name).exists()
    assert_same(load(tmp_path / "converted"), load(plain))
    own.write_text(json.dumps({"quantization": about | {"exclude_modules": ["model.layers.0.mlp*"]}}))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.(gate|down|up)_proj\.weight"):
        load(quantized)


def test_modelopt_may_have_quantised_nothing_but_kv(tmp_path: Path) -> None:
    """The engine keeps KV in its own type, so the scales are not read."""
    plain = write_checkpoint(tmp_path / "plain")
    expected = load(plain)
    tensors = {name: ("F32", value) for name, value in tensors_of(plain).items()}
    scales = {f"model.layers.{layer}.self_attn.{each}_proj.{each}_scale": ("F32", np.float32([0.5]))
              for layer in range(2) for each in "kv"}  # fmt: skip
    write_raw(plain / "model.safetensors", tensors | scales)
    with pytest.raises(CheckpointError, match=r"k_scale"):
        load(plain)
    about = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (plain / "hf_quant_config.json").write_text(json.dumps({"quantization": about}))
    assert_same(load(plain), expected)


@pytest.mark.torch
def test_early_files_of_modelopt_are_known_by_their_producer(tmp_path: Path) -> None:
    quantized, plain = write_quantized(tmp_path, "llama", "modelopt_fp8")
    path = quantized / "config.json"
    text = path.read_text().replace('"quant_method": "modelopt"', '"producer": {"name": "modelopt", "version": "0.31"}')
    path.write_text(text)
    assert "quant_method" not in text
    assert_same(load(quantized), load(plain))


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


def gptq_parts(rng: np.random.Generator) -> tuple[dict[str, tuple[str, np.ndarray]], np.ndarray]:
    """Parts of DOWN in GPTQ's second version, of 4 bits with groups of 32, so that the last one is half as large; and
    its values in f64, from the text of each number."""
    words = rng.integers(-(2**31), 2**31, (6, 32), dtype=np.int64).astype(np.int32)
    zero_words = rng.integers(-(2**31), 2**31, (2, 4), dtype=np.int64).astype(np.int32)
    scales = rng.uniform(0.01, 2, (2, 32)).astype(np.float16)

    def nibble(word: np.int32, place: int) -> int:
        return int(f"{int(word) & 0xFFFFFFFF:08x}"[7 - place], 16)

    expected = np.empty((32, 48))
    for o in range(32):
        for i in range(48):
            zero = nibble(zero_words[i // 32, o // 8], o % 8)
            expected[o, i] = (nibble(words[i // 8, o], i % 8) - zero) * float(scales[i // 32, o])
    parts = {"qweight": ("I32", words), "qzeros": ("I32", zero_words), "scales": ("F16", scales)}
    return parts, expected


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq_v2"}


def test_the_last_group_of_gptq_may_be_smaller(tmp_path: Path) -> None:
    parts, expected = gptq_parts(np.random.default_rng(0))
    folder = rewritten(tmp_path, DOWN, GPTQ, parts)
    np.testing.assert_allclose(load(folder)["layers.1.down"], expected, rtol=1e-6)


def test_the_version_of_gptq_may_stand_under_format_alone(tmp_path: Path) -> None:
    """transformers writes that name; zeros of version 2 are not one too small."""
    parts, expected = gptq_parts(np.random.default_rng(0))
    named = {name: value for name, value in GPTQ.items() if name != "checkpoint_format"} | {"format": "gptq_v2"}
    folder = rewritten(tmp_path, DOWN, named, parts)
    np.testing.assert_allclose(load(folder)["layers.1.down"], expected, rtol=1e-6)


def test_an_index_of_groups_is_checked_as_it_is_read(tmp_path: Path) -> None:
    parts, _ = gptq_parts(np.random.default_rng(0))
    index = np.arange(48, dtype=np.int32) // 32
    index[7] = 2
    folder = rewritten(tmp_path, DOWN, GPTQ | {"desc_act": True}, parts | {"g_idx": ("I32", index)})
    with pytest.raises(CheckpointError, match=rf"tensor {DOWN}\.g_idx must list groups from 0 to 1, got 0 to 2; quant"):
        load(folder)
    index[7] = -1
    folder = rewritten(tmp_path, DOWN, GPTQ | {"desc_act": True}, parts | {"g_idx": ("I32", index)})
    with pytest.raises(CheckpointError, match="got -1 to 1"):
        load(folder)
    with pytest.raises(CheckpointError, match=rf"tensor {DOWN}\.g_idx is missing, expected with shape \[48\]"):
        load(rewritten(tmp_path, DOWN, GPTQ | {"desc_act": True}, parts))


def test_an_index_that_is_not_used_says_nothing(tmp_path: Path) -> None:
    """compressed-tensors once wrote -1 for every input where it did not reorder them."""
    parts, expected = gptq_parts(np.random.default_rng(0))
    folder = rewritten(tmp_path, DOWN, GPTQ, parts | {"g_idx": ("I32", np.full(48, -1, np.int32))})
    np.testing.assert_allclose(load(folder)["layers.1.down"], expected, rtol=1e-6)


def test_biases_that_gptq_adds_must_be_zero(tmp_path: Path) -> None:
    """AutoGPTQ gave every module one, also those of models without biases."""
    parts, expected = gptq_parts(np.random.default_rng(0))
    bias = np.zeros(32, np.float16)
    folder = rewritten(tmp_path, DOWN, GPTQ, parts | {"bias": ("F16", bias)})
    np.testing.assert_allclose(load(folder)["layers.1.down"], expected, rtol=1e-6)
    bias[3] = 0.5
    folder = rewritten(tmp_path, DOWN, GPTQ, parts | {"bias": ("F16", bias)})
    with pytest.raises(CheckpointError, match=rf"tensor {DOWN}\.bias is not part of a model with this config\.json"):
        load(folder)


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
"""Weights of a group of compressed-tensors."""


def compressed(layout: str = "pack-quantized", weights: Any = PACKED, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}} | more


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_compressed_tensors_that_reorder_must_say_how(order: Any, tmp_path: Path) -> None:
    parts = {
        "weight_packed": ("I32", np.zeros((32, 6), "i4")), "weight_scale": ("F32", np.ones((32, 3), "f4")),
        "weight_shape": ("I64", np.array([32, 48])),
    }  # fmt: skip
    folder = rewritten(tmp_path, DOWN, compressed(weights=PACKED | {"actorder": order}), parts)
    with pytest.raises(CheckpointError, match=rf"tensor {DOWN}\.weight_g_idx is missing"):
        load(folder)
    folder = rewritten(tmp_path, DOWN, compressed(weights=PACKED | {"actorder": "weight"}), parts)
    np.testing.assert_array_equal(load(folder)["layers.1.down"], np.full((32, 48), -8.0))


def test_modules_of_compressed_tensors_follow_the_first_group_that_names_them(tmp_path: Path) -> None:
    """Each with its own format; tensors of activations and of the KV cache are not read."""
    rng = np.random.default_rng(0)
    rows = {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None}
    groups = {
        "group_0": {"targets": ["re:.*(gate|up)_proj$"], "weights": PACKED, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*layers.1.*down"], "weights": rows, "format": "int-quantized"},
        "group_2": {"targets": ["Linear"], "weights": PACKED, "format": "pack-quantized"},
    }
    dense = {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}
    values = rng.integers(-128, 128, (32, 48)).astype(np.int8)
    scales = rng.uniform(0.01, 2, (32, 1)).astype(ml_dtypes.bfloat16)
    folder = rewritten(
        tmp_path, DOWN, compressed("mixed-precision", config_groups=groups, sparsity_config=dense, transform_config={}),
        {
            "weight": ("I8", values), "weight_scale": ("BF16", scales),
            "input_scale": ("F32", np.ones(1, "f4")), "k_scale": ("F32", np.ones(1, "f4")),
        },
    )  # fmt: skip
    expected = values.astype(np.float64) * scales.astype(np.float64)
    np.testing.assert_allclose(load(folder)["layers.1.down"], expected, rtol=1e-7)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
REFUSED = [
    ({"quant_method": "bitsandbytes"}, r"quantization_config\.quant_method = 'bitsandbytes' is not supported; use a"),
    ({"bits": 4}, r"quantization_config\.quant_method = None is not supported"),
    (
        {"quant_method": "fp8", "fmt": "e5m2"},
        r"quantization_config\.fmt = 'e5m2' is not supported; only 'e4m3' and 'float8",
    ),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, r"quantization_config\.expert_dtype = 'fp4' is not supported"),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A8"},
        r"quant_algo = 'W4A8' is not supported; only 'FP8' and 'NVFP4'",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        r"quantization_config\.group_size = 32 is not supported; only 16 is",
    ),
    (
        compressed("nvfp4-pack-quantized", PACKED | {"group_size": 32}),
        r"weights\.group_size = 32 is not supported; only 16 is",
    ),
    (
        compressed("nvfp4-pack-quantized", PACKED | {"symmetric": False}),
        r"weights\.symmetric = False is not supported; only True is",
    ),
    (GPTQ | {"bits": 3}, r"quantization_config\.bits = 3 is not supported; only 2 and 4 and 8 are"),
    (
        GPTQ | {"checkpoint_format": "marlin"},
        r"checkpoint_format = 'marlin' is not supported; only 'gptq' and 'gptq_v2'",
    ),
    (GPTQ | {"pack_dtype": "int8"}, r"pack_dtype = 'int8' is not supported; only 'int32' is"),
    (GPTQ | {"dynamic": {"-:.*down.*": {}}}, r"dynamic = .* is not supported; every module must have the same bits"),
    (AWQ | {"bits": 3}, r"quantization_config\.bits = 3 is not supported; only 4 is"),
    (AWQ | {"version": "marlin"}, r"version = 'marlin' is not supported; only 'gemm' is"),
    (AWQ | {"zero_point": False}, r"zero_point = False is not supported; only True is"),
    (compressed(transform_config={"config_groups": {}}), r"transform_config = .* is not supported; only quantised"),
    (compressed(sparsity_config={"format": "sparse-24"}), r"sparsity_config = .* is not supported; only quantised"),
    (
        compressed("marlin-24"),
        r"config_groups\.group_0\.format = 'marlin-24' is not supported; only 'pack-quantized' and",
    ),
    (
        compressed(weights=PACKED | {"strategy": "tensor"}),
        r"config_groups\.group_0\.weights\.strategy = 'tensor' is not supported; only 'channel' and 'group' are",
    ),
    (compressed(weights=PACKED | {"strategy": "token"}), r"strategy = 'token' is not supported; only 'tensor' and"),
    (compressed(weights=PACKED | {"num_bits": 3}), r"num_bits = 3 is not supported; only 4 and 8 are"),
    (compressed("int-quantized"), r"num_bits = 4 is not supported; only 8 is"),
    (compressed(weights=PACKED | {"type": "float"}), r"type = 'float' is not supported; only 'int' is"),
]
MALFORMED = [
    ([1], r"quantization_config must be an object, got \[1\]"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size must be two integers >= 1, got \[128\]"),
    ({"quant_method": "fp8", "ignored_layers": "lm_head"}, r"ignored_layers must be a list of names of modules"),
    (GPTQ | {"group_size": 0}, r"quantization_config\.group_size must be an integer >= 1, or -1 for all inputs, got 0"),
    (AWQ | {"group_size": -2}, r"group_size must be an integer >= 1, or -1 for all inputs, got -2"),
    (compressed(config_groups=[]), r"config_groups must be an object of at least one object, got \[\]"),
    (compressed(config_groups={"group_0": 1}), r"config_groups must be an object of at least one object, got \{'group"),
    (compressed(weights=None), r"config_groups\.group_0\.weights must be an object, got None"),
    (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block"}),
        r"group_0\.weights\.block_structure must be two integers >= 1, got None",
    ),
    (compressed(ignore=["re:(lm_head"]), r"ignore must be a regular expression behind re: \(missing \)"),
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


def test_every_format_that_is_read_is_documented(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "none"}}))
    with pytest.raises(UnsupportedModelError, match="or one of ") as caught:
        ModelConfig.from_folder(tmp_path)
    names = str(caught.value).partition("or one of ")[2].split(", ")
    assert set(names) == {recipe.config["quant_method"] for recipe in FORMATS.values()}
    text = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in names if f"\n| `{name}` | " not in text] == []
