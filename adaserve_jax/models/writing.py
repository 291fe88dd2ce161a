"""Writes the files of a checkpoint folder: tensors in shards with an index, and copies of the other files."""

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
from adaserve_jax.models.checkpoint_formats.api import FORMAT_KEY, MODELOPT_FILE
from adaserve_jax.models.config_values import read_json
from adaserve_jax.models.text_model import text_settings
from adaserve_jax.types import Progress

SHARD_BYTES = 1 << 30
TYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
TORCH_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
"""Names of the types in config.json."""
_OF_WEIGHTS = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack",
    MODELOPT_FILE,
)  # fmt: skip
"""Ends of the names of files of weights, and of their format."""
TEMPLATES = "additional_chat_templates"
"""Folder of the named chat templates that transformers 5 writes."""


def with_type(settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json that names this type of weights, f16, bf16 or f32, and no other.

    transformers 5 reads `torch_dtype`, the older key, only where there is no `dtype`.
    """
    key = "dtype" if "dtype" in settings else "torch_dtype"
    rest = {name: value for name, value in settings.items() if name not in ("dtype", "torch_dtype")}
    return rest | {key: TORCH_NAMES[dtype]}


def check_new(folder: Path) -> None:
    """Raise ConfigError unless the folder is empty or missing."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} must be an empty or a new folder")


def copy_all_but_weights(source: Path, out: Path) -> None:
    """Copy configuration, tokenizer and all other files of a checkpoint folder, and its named chat templates.

    The copy's config.json is that of the text model alone, and no file names a quantised format, since weights are
    written in full precision.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_OF_WEIGHTS):
            shutil.copyfile(path, out / path.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, out / TEMPLATES)
    config = out / "config.json"
    if config.is_file():
        given = read_json(config)
        written = {name: value for name, value in text_settings(given, config).items() if name != FORMAT_KEY}
        if written != given:
            config.write_text(json.dumps(written, indent=2) + "\n")


def write_shards(
    out: Path, tensors: Iterable[tuple[str, np.ndarray]], total: int, what: str, progress: Progress | None = None
) -> None:
    """Write tensors in files of about SHARD_BYTES with an index; holds one file in memory.

    progress: called with (what, tensors written, total).
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
        shard[name] = np.ascontiguousarray(tensor)
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
