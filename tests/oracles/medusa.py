"""Medusa heads in NumPy float64 from a folder in their published format. Shares no code with the package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def medusa_scores(folder: Path, hidden: np.ndarray) -> np.ndarray:
    """Return each head's scores, f64[heads, V]. hidden: f[d], the target's output after its last norm."""
    config = json.loads((folder / "config.json").read_text())
    (path,) = folder.glob("*.safetensors")
    weights = {name: tensor.astype(np.float64) for name, tensor in load_file(path).items()}
    found = []
    for head in range(config["medusa_num_heads"]):
        x = hidden.astype(np.float64)
        for block in range(config["medusa_num_layers"]):
            linear = f"medusa_head.{head}.{block}.linear"
            inner = weights[f"{linear}.weight"] @ x + weights[f"{linear}.bias"]
            x = x + inner / (1 + np.exp(-inner))
        found.append(weights[f"medusa_head.{head}.{config['medusa_num_layers']}.weight"] @ x)
    return np.array(found)
