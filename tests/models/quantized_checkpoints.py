"""Quantised twins of tiny checkpoints: each format as the library that defines it writes it, where that runs on a CPU,
else packed here from its published layout; and beside each a checkpoint in full precision of the same values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.models.torch_checkpoints import write_family

KEPT = "model.layers.1.self_attn.o_proj"
"""A module that every format leaves in full precision, beside embedding, head and routers."""
GROUP = 16
Packed = tuple[dict[str, Any], np.ndarray]
"""torch tensors by their names behind the module's, and f32[out, in] that they stand for."""


@dataclass(frozen=True)
class Recipe:
    """config: quantization_config. pack: of a matrix f32[out, in]; of a tensor of all experts f32[experts, in, out], if
    `stacks`. kept_key: its list of modules in full precision, if it has one. families: to try it with. as_int8,
    as_int4: weights in int8, or int4, are those of the file, and are not rounded again."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray], Packed]
    kept_key: str = ""
    families: tuple[str, ...] = ("llama",)
    stacks: bool = False
    as_int8: bool = False
    as_int4: bool = False


def write_quantized(folder: Path, family: str, name: str) -> tuple[Path, Path]:
    """Let transformers write a family, and quantise it; return the folders of both twins, quantised and plain."""
    return quantize(write_family(folder / "plain", family), folder / "quantized", name)


def quantize(plain: Path, quantized: Path, name: str) -> tuple[Path, Path]:
    """Write the quantised twin of a checkpoint of one file, whose values become those of the twin; return both."""
    from safetensors.torch import load_file, save_file

    recipe = FORMATS[name]
    shutil.copytree(plain, quantized)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Any] = {}
    for key, tensor in tensors.items():
        module = key.removesuffix(".weight")
        ndim = 3 if recipe.stacks else 2
        if tensor.ndim != ndim or ".layers." not in key or module == KEPT or module.endswith((".gate", ".router")):
            stored[key] = tensor
            continue
        parts, value = recipe.pack(tensor.numpy())
        between = "_" if recipe.stacks else "."
        stored |= {f"{module}{between}{part}": each.contiguous() for part, each in parts.items()}
        tensor.numpy()[:] = value
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    kept = {recipe.kept_key: ["lm_head", "gate", KEPT]} if recipe.kept_key else {}
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": recipe.config | kept}))
    return quantized, plain


def _fp8_blocks(weight: np.ndarray) -> Packed:
    """By transformers' own quantiser, and back by its own dequantiser."""
    return _transformers_fp8(weight, [16, 16])


def _fp8_matrix(weight: np.ndarray) -> Packed:
    return _transformers_fp8(weight, None)


def _transformers_fp8(weight: np.ndarray, block: list[int] | None) -> Packed:
    import torch
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    asked = SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block))  # type: ignore[arg-type]
    found = Fp8Quantize(asked).convert({"weight": torch.from_numpy(weight)})
    parts = {name.rpartition(".")[2]: tensor for name, tensor in found.items()}
    back = Fp8Dequantize(asked).convert({name: [tensor] for name, tensor in parts.items()})
    return parts, back["weight"].numpy()  # type: ignore[union-attr]


def _rounded(
    weight: np.ndarray, bits: int, group_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Round at a zero and an f16 scale of each group: i64[out, in], zeros i64[out, groups], scales and values.

    group_of: group of each input.
    """
    most, groups = 2**bits - 1, int(group_of.max()) + 1
    members = [weight[:, group_of == group] for group in range(groups)]
    low = np.stack([np.minimum(each.min(axis=1), 0) for each in members], axis=1)
    high = np.stack([np.maximum(each.max(axis=1), 0) for each in members], axis=1)
    scales = ((high - low) / most).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, most).astype(np.int64)
    scale, zero = scales.astype(np.float32)[:, group_of], zeros[:, group_of]
    values = np.clip(np.rint(weight / scale) + zero, 0, most).astype(np.int64)
    return values, zeros, scales, (values - zero).astype(np.float32) * scale


def _words(values: np.ndarray, bits: int, places: tuple[int, ...]) -> Any:
    """torch i32[..., n / places]: value `places[i]` of each word has its i-th bits from the lowest."""
    import torch

    by_word = values.astype(np.uint64).reshape(*values.shape[:-1], -1, len(places))
    words = sum(by_word[..., place] << np.uint64(bits * index) for index, place in enumerate(places))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def _gptq(weight: np.ndarray, *, bits: int, version: int, ordered: bool) -> Packed:
    """As AutoGPTQ (version 1) and GPTQModel (version 2) pack; ordered: groups of GROUP inputs that lie anywhere."""
    import torch

    inputs, in_turn = weight.shape[1], tuple(range(32 // bits))
    group_of = np.zeros(inputs, np.int64)
    if ordered:
        group_of = np.random.default_rng(inputs).permutation(np.arange(inputs) // GROUP)
    values, zeros, scales, dequantized = _rounded(weight, bits, group_of)
    zeros_stored = (zeros - 1) % 2**bits if version == 1 else zeros
    parts = {
        "qweight": _words(values, bits, in_turn).T,
        "qzeros": _words(zeros_stored.T, bits, in_turn),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    if ordered:
        parts |= {"g_idx": torch.from_numpy(group_of.astype(np.int32)), "bias": torch.zeros(len(weight)).half()}
    return parts, dequantized


def _awq(weight: np.ndarray) -> Packed:
    """As AutoAWQ's GEMM packs: words along the outputs, in the order of its kernel."""
    import torch

    places = (0, 2, 4, 6, 1, 3, 5, 7)
    values, zeros, scales, dequantized = _rounded(weight, 4, np.arange(weight.shape[1]) // GROUP)
    parts = {
        "qweight": _words(values.T, 4, places),
        "qzeros": _words(zeros.T, 4, places),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return parts, dequantized


def _compressed(weight: np.ndarray, *, layout: str, args: dict[str, Any], ordered: bool) -> Packed:
    """By the compressors of compressed-tensors, and back by them; scales from the extremes, as its observers take them.

    ordered: inputs of a group lie anywhere (actorder "group", which the library reads no more: it packs the inputs
    group by group here, and they go to their places afterwards).
    """
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    asked = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=asked)
    outputs, inputs = weight.shape
    order = np.arange(inputs)
    if ordered:
        order = np.random.default_rng(inputs).permutation(inputs)
    given = torch.from_numpy(weight[:, order].copy())
    height, width = asked.block_structure or (1, asked.group_size or inputs)
    blocks = given.reshape(outputs // height, height, inputs // width, width)
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), asked)
    by = BaseCompressor.get_value_from_registry(layout)
    parts = by.compress({"weight": given, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    value = np.empty_like(weight)
    value[:, order] = by.decompress(parts, scheme)["weight"].numpy()
    if ordered:
        bits = asked.num_bits
        integers = torch.empty((outputs, inputs), dtype=torch.int8)
        integers[:, order] = unpack_from_int32(parts["weight_packed"], bits, given.shape)
        group_of = np.empty(inputs, np.int32)
        group_of[order] = np.arange(inputs) // width
        parts |= {"weight_packed": pack_to_int32(integers, bits), "weight_g_idx": torch.from_numpy(group_of)}
    return parts, value


def _modelopt_fp8(weight: np.ndarray) -> Packed:
    parts, value = _fp8_matrix(weight)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"].reshape(())}, value


def _nvfp4(weight: np.ndarray) -> Packed:
    """By the compressor of compressed-tensors, and back by its functions, which it calls in bf16."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    asked = QuantizationArgs(**_NVFP4_ARGS)
    scheme = QuantizationScheme(targets=["Linear"], weights=asked)
    given = torch.from_numpy(weight)
    blocks = given.reshape(len(weight), -1, GROUP)
    whole = generate_gparam(given.min(), given.max())
    scale, _ = calculate_qparams(blocks.amin(2), blocks.amax(2), asked, global_scale=whole)
    by = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    parts = by.compress({"weight": given, "weight_scale": scale, "weight_global_scale": whole}, scheme)
    values = unpack_fp4_from_uint8(parts["weight_packed"], *weight.shape, dtype=torch.float32)
    value = dequantize(values, parts["weight_scale"].float(), args=asked, global_scale=whole, dtype=torch.float32)
    return parts, value.numpy()


def _modelopt_nvfp4(weight: np.ndarray) -> Packed:
    """The same bytes, with the scale of the matrix by which values are multiplied; back by the format's definition."""
    import torch
    from transformers.integrations.mxfp4 import FP4_VALUES

    found, _ = _nvfp4(weight)
    whole = 1 / found["weight_global_scale"]
    parts = {
        "weight": found["weight_packed"], "weight_scale": found["weight_scale"], "weight_scale_2": whole.reshape(()),
        "input_scale": torch.ones(()),
    }  # fmt: skip
    both = found["weight_packed"].long()
    values = torch.tensor(FP4_VALUES)[torch.stack([both & 15, both >> 4], dim=2)].reshape(len(weight), -1, GROUP)
    return parts, (values * (found["weight_scale"].float() * whole)[..., None]).reshape(weight.shape).numpy()


def _mxfp4(weight: np.ndarray) -> Packed:
    """To the nearest of the 4-bit floats here, and back by transformers' own dequantiser."""
    import torch
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    blocks = weight.transpose(0, 2, 1).reshape(len(weight), weight.shape[2], -1, 32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(axis=-1) / 6)).astype(np.int64)
    scaled = blocks / 2.0 ** exponents[..., None]
    nearest = np.abs(scaled[..., None] - np.array(FP4_VALUES)).argmin(axis=-1).astype(np.uint8)
    packed = torch.from_numpy(nearest[..., ::2] | nearest[..., 1::2] << 4)
    parts = {"blocks": packed, "scales": torch.from_numpy((exponents + 127).astype(np.uint8))}
    return parts, convert_moe_packed_tensors(**parts, dtype=torch.float32).numpy()


def _compressed_recipe(layout: str, families: tuple[str, ...] = ("llama",), **args: Any) -> Recipe:
    ordered = args.get("actorder") == "group"
    known = {name: value for name, value in args.items() if name != "actorder"}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    pack = partial(_compressed, layout=layout, args=known, ordered=ordered)
    as_int8 = layout == "int-quantized" and args["strategy"] == "channel"
    as_int4 = layout == "pack-quantized" and args["num_bits"] == 4 and not ordered
    return Recipe(config, pack, "ignore", families, as_int8=as_int8, as_int4=as_int4)


_NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP, "symmetric": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
_GPTQ_V2 = {
    "quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "checkpoint_format": "gptq_v2",
    "pack_dtype": "int32", "dynamic": None,
}  # fmt: skip
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FORMATS: dict[str, Recipe] = {
    "fp8_blocks": Recipe(
        _FP8 | {"weight_block_size": [16, 16]}, _fp8_blocks, "modules_to_not_convert", ("mixtral", "qwen3_window")
    ),
    "fp8_matrix": Recipe(
        _FP8 | {"weight_block_size": None, "fmt": "float8_e4m3fn"}, _fp8_matrix, "modules_to_not_convert",
        ("llama_biases", "qwen3_moe"),
    ),
    "gptq": Recipe(_GPTQ, partial(_gptq, bits=4, version=1, ordered=True), families=("llama", "qwen3")),
    "gptq_in_turn": Recipe(
        _GPTQ | {"desc_act": False, "group_size": -1}, partial(_gptq, bits=4, version=1, ordered=False), as_int4=True
    ),
    "gptq_2_bits": Recipe(_GPTQ | {"bits": 2}, partial(_gptq, bits=2, version=1, ordered=True)),
    "gptq_v2": Recipe(_GPTQ_V2, partial(_gptq, bits=8, version=2, ordered=False), families=("llama_biases", "mixtral")),
    "awq": Recipe(_AWQ, _awq, "modules_to_not_convert", ("llama", "phi3"), as_int4=True),
    "ct_int8": _compressed_recipe("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "ct_int8_groups": _compressed_recipe(
        "int-quantized", num_bits=8, type="int", strategy="group", group_size=GROUP, symmetric=False
    ),
    "ct_4_bits": _compressed_recipe(
        "pack-quantized", ("llama", "qwen3_moe"), num_bits=4, type="int", strategy="channel", symmetric=True
    ),
    "ct_4_bits_ordered": _compressed_recipe(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False, actorder="group"
    ),
    "ct_packed_8_bits": _compressed_recipe(
        "pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    ),
    "ct_fp8_blocks": _compressed_recipe(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 16], symmetric=True
    ),
    "ct_fp8_rows": _compressed_recipe(
        "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True
    ),
    "ct_nvfp4": replace(_compressed_recipe("nvfp4-pack-quantized", **_NVFP4_ARGS), pack=_nvfp4),
    "modelopt_fp8": Recipe({"quant_method": "modelopt", "quant_algo": "FP8"}, _modelopt_fp8, "ignore"),
    "modelopt_nvfp4": Recipe(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, _modelopt_nvfp4, "ignore", ("llama", "mixtral")
    ),
    "mxfp4": Recipe({"quant_method": "mxfp4"}, _mxfp4, families=("gpt_oss",), stacks=True),
}  # fmt: skip
