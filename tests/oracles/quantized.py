"""Weights in int8 with one scale per row, and in int4 with a scale and a zero per group of inputs, as a checkpoint of
rounded weights that any reader can take. Shares no code with the package."""

from __future__ import annotations

import shutil
from collections.abc import Container
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def rounded(weight: np.ndarray) -> np.ndarray:
    """f64[out, in] on the grid of 127 steps either side of zero that each row's largest value spans."""
    result = np.zeros(weight.shape)
    for row, values in enumerate(weight.astype(np.float32)):
        step = np.float32(abs(values).max() / np.float32(127))
        if step > 0:
            result[row] = [round(float(value / step)) * float(step) for value in values]
    return result


def group_size(inputs: int) -> int:
    """Inputs that share a scale in int4: the most of 32, 16, ... 2 that divide them, and four devices' shares."""
    return next(size for size in (32, 16, 8, 4, 2) if inputs % size == 0 and (inputs // 4 % size == 0 or size == 2))


def rounded_in_groups(weight: np.ndarray) -> np.ndarray:
    """f64[out, in] on the grid of 16 values that each group's extremes, and zero, span at an f16 step."""
    result, size = np.zeros(weight.shape), group_size(weight.shape[1])
    for row, values in enumerate(weight.astype(np.float32)):
        for start in range(0, len(values), size):
            group = values[start : start + size]
            low, high = min(group.min(), np.float32(0)), max(group.max(), np.float32(0))
            step = np.float32(np.float16((high - low) / np.float32(15)))
            if step > 0:
                zero = round(float(-low / step))
                places = [min(max(round(float(value / step)) + zero, 0), 15) for value in group]
                result[row, start : start + size] = [(place - zero) * float(step) for place in places]
    return result


def dequantized_checkpoint(folder: Path, out: Path, kept: Container[str] = (), kind: str = "int8") -> Path:
    """Copy a checkpoint of one file, each of its matrices rounded but routers of experts and tensors that are `kept`;
    return the copy. kind: "int4" is for the matrices of layers."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if value.ndim == 2 and not name.endswith(".gate.weight") and name not in kept:
            tensors[name] = rounded_in_groups(value) if kind == "int4" and ".layers." in name else rounded(value)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out
