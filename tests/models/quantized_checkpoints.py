"""Quantised twins of tiny checkpoints: each format as the tool that publishes it writes it, where that runs on a CPU,
else packed here from its published layout; and beside each a checkpoint in full precision of the same values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.models.torch_checkpoints import write_family

KEPT = "model.layers.1.self_attn.o_proj"
"""A module that every format leaves in full precision, beside embedding, head and routers."""
Packed = tuple[dict[str, Any], np.ndarray]
"""torch tensors by their names behind the module's, and f32[out, in] that they stand for."""


@dataclass(frozen=True)
class Recipe:
    """config: quantization_config. kept_key: its list of modules in full precision, if it has one. pack: of a matrix
    f32[out, in]. families: to try it with."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray], Packed]
    kept_key: str = ""
    families: tuple[str, ...] = ("llama",)


def write_quantized(folder: Path, family: str, name: str) -> tuple[Path, Path]:
    """Let transformers write a family, and quantise it; return the folders of both twins, quantised and plain."""
    from safetensors.torch import load_file, save_file

    recipe = FORMATS[name]
    plain, quantized = folder / "plain", folder / "quantized"
    write_family(plain, family)
    shutil.copytree(plain, quantized)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Any] = {}
    for key, tensor in tensors.items():
        module = key.removesuffix(".weight")
        if tensor.ndim != 2 or ".layers." not in key or module == KEPT or module.endswith(".gate"):
            stored[key] = tensor
            continue
        parts, value = recipe.pack(tensor.numpy())
        stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
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


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
FORMATS: dict[str, Recipe] = {
    "fp8_blocks": Recipe(
        _FP8 | {"weight_block_size": [16, 16]}, _fp8_blocks, "modules_to_not_convert", ("mixtral", "qwen3_window")
    ),
    "fp8_matrix": Recipe(
        _FP8 | {"weight_block_size": None}, _fp8_matrix, "modules_to_not_convert", ("llama_biases", "qwen3_moe")
    ),
}  # fmt: skip
