"""LoRA adapters in PEFT's format for a test's checkpoint, and the checkpoint that merging one gives, by numpy alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, checkpoint: Path, *, seed: int, rank: int = 4, alpha: float = 8.0, modules: tuple[str, ...] = ALL,
    dtype: Any = np.float32, **config: Any,
) -> Path:  # fmt: skip
    """Write an adapter of random matrices for the modules of these names in a checkpoint; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    weights = {
        name: each for file in sorted(checkpoint.glob("*.safetensors")) for name, each in load_file(file).items()
    }
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules and name.endswith(".weight"):
            outputs, inputs = weight.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((rank, inputs)) / inputs**0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((outputs, rank)) * 0.3
    save_file({name: each.astype(dtype) for name, each in tensors.items()}, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    return folder


def write_merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Write the checkpoint with W + scale B A in place of each adapted W; return the folder."""
    shutil.copytree(checkpoint, folder)
    said = json.loads((adapter / "adapter_config.json").read_text())
    scale = said["lora_alpha"] / (said["r"] ** 0.5 if said.get("use_rslora") else said["r"])
    weights = load_file(checkpoint / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, b in parts.items():
        if name.endswith(".lora_B.weight"):
            a = parts[name.replace("lora_B", "lora_A")].astype(np.float64)
            module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight") + ".weight"
            weights[module] = (weights[module] + scale * (b.astype(np.float64) @ a)).astype(weights[module].dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
