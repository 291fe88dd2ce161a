"""Writes safetensors of any type by hand: the library's writer for NumPy does not know those of 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def write_raw(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write tensors by name, each with the format's name of its type and an array of the same bytes."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        content = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
