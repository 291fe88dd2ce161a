"""int8 with one scale per row, as a checkpoint of rounded weights that any reader can take. Shares no code with the
package."""

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


def dequantized_checkpoint(folder: Path, out: Path, kept: Container[str] = ()) -> Path:
    """Copy a checkpoint of one file, each of its matrices rounded but routers of experts and tensors that are `kept`;
    return the copy."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {
            name: rounded(value)
            if value.ndim == 2 and not name.endswith(".gate.weight") and name not in kept
            else value
            for name, value in tensors.items()
        },
        out / "model.safetensors",
        {"format": "pt"},
    )
    return out
