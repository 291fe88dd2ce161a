"""Writes a checkpoint folder in Hugging Face's layout: tensors in shards with an index, and files of another folder
beside them. Imports no jax."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import Progress

SHARD_BYTES = 1 << 30
TYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
TORCH_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
"""The types as config.json spells them."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth", ".gguf")


def check_new(folder: Path) -> None:
    """Raises ConfigError unless the folder is empty or not there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} must be an empty or a new folder")


def copy_all_but_weights(source: Path, out: Path) -> None:
    """Copy configuration, tokenizer and whatever else lies in a checkpoint folder; no folders in it."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, out / path.name)


def write_shards(
    out: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype: Any,
    total: int,
    what: str,
    progress: Progress | None = None,
) -> None:
    """Files of about SHARD_BYTES and the index that names them; one shard is in memory at a time.

    dtype: of numpy, that tensors are cast to. progress: called with (what, tensors written, total).
    """
    shard: dict[str, np.ndarray] = {}
    weight_map: dict[str, str] = {}
    files, size, total_bytes = 0, 0, 0

    def flush() -> None:
        nonlocal shard, files, size
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard, size = {}, 0

    for done, (name, tensor) in enumerate(tensors, 1):
        shard[name] = np.ascontiguousarray(tensor.astype(dtype))
        size += shard[name].nbytes
        total_bytes += shard[name].nbytes
        if size >= SHARD_BYTES:
            flush()
        if progress is not None:
            progress(what, done, total)
    if shard:
        flush()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    path = out / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=1) + "\n")
    for name in set(weight_map.values()):
        (out / name).chmod(path.stat().st_mode)  # safetensors writes for the owner alone
