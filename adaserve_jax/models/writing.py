"""Writes a checkpoint folder in Hugging Face's layout: tensors in shards with an index, and files of another folder
beside them. Imports no jax.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import param_specs
from adaserve_jax.models.loading import hf_tensors, is_converted, load_params, write_converted
from adaserve_jax.models.settings import read_json
from adaserve_jax.models.tensors import TensorFiles
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


# The decoder's weights as a Hugging Face checkpoint folder: the inverse of `load_params`.

_NAME_OF = {"F16": "f16", "BF16": "bf16", "F32": "f32", "F64": "f32"}


def export(
    params: Mapping[str, Any], source: Path, out: Path, *, dtype: str = "auto", progress: Progress | None = None
) -> None:
    """Write weights at `out` as Hugging Face names and lays them out, with the configuration and tokenizer of `source`.

    params: as `load_params` gives them for the model of `source`, of any float type, on any device. dtype: f16, bf16,
    f32, or auto (that of the source's embedding). One weight and one shard are in host memory at a time. Raises
    ConfigError: `out` is not empty, or there is no such dtype. CheckpointError: the weights are not of this model, or
    one has a value that is not finite in that type; then `out` has no index and is refused when it is loaded.
    """
    config = ModelConfig.from_folder(source)
    _check(params, source, config)
    dtype = stored_type(source) if dtype == "auto" else dtype
    if dtype not in TYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(TYPES)}, got {dtype!r}")
    check_new(out)
    out.mkdir(parents=True, exist_ok=True)
    copy_all_but_weights(source, out)
    _name_type(out / "config.json", dtype)
    total = sum(len(hf_tensors(name, config)) for name in params)
    write_shards(out, _tensors(params, config, dtype), TYPES[dtype], total, "writing", progress)


def stored_type(source: Path) -> str:
    """f16, bf16 or f32: what the checkpoint's embedding is stored in; f32 for one that `adaserve convert` wrote.

    Raises CheckpointError: as loading.
    """
    if is_converted(source):
        return "f32"
    return _NAME_OF.get(TensorFiles(source).dtype_of("model.embed_tokens.weight"), "f32")


def _check(params: Mapping[str, Any], source: Path, config: ModelConfig) -> None:
    expected = {name: shape for name, (shape, _) in param_specs(config).items()}
    for name in expected.keys() | params.keys():
        found = tuple(params[name].shape) if name in params else None
        if found != expected.get(name):
            raise CheckpointError(
                f"weight {name} has shape {_shown(found)}, expected {_shown(expected.get(name))} by "
                f"{source / 'config.json'}; these weights are of another model"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def _name_type(path: Path, dtype: str) -> None:
    """Say the weights' type in config.json, under the name that it has there already."""
    given = read_json(path)
    key = "dtype" if "dtype" in given else "torch_dtype"
    path.write_text(json.dumps(given | {key: TORCH_NAMES[dtype]}, indent=2) + "\n")


def _tensors(params: Mapping[str, Any], config: ModelConfig, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Each fused weight as the tensors that it is made of, which are its rows in order."""
    for name, weight in params.items():
        with np.errstate(over="ignore"):
            rows = np.asarray(weight).astype(TYPES[dtype])
        if not np.isfinite(rows).all():
            raise CheckpointError(f"weight {name} has a value that is not finite in {dtype}; write it as f32, or not")
        first = 0
        for tensor, shape in hf_tensors(name, config).items():
            yield tensor, rows[first : first + shape[0]]
            first += shape[0]


# Conversion of a Hugging Face checkpoint into the engine's layout, which needs no fusing and no casting to
# load.

DTYPES: dict[str, Any] = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32}


def convert(source: Path, out: Path, *, dtype: str = "auto", progress: Progress | None = None) -> ModelConfig:
    """Write `source` at `out` in the engine's layout, with every file that is not weights copied beside it.

    dtype: f16, bf16, f32, or auto (that of the source's embedding). The whole model is in memory once. Raises
    ConfigError: the source is converted already, `out` is not empty, or there is no such dtype. CheckpointError: as
    loading.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    if is_converted(source):
        raise ConfigError(f"{source} is converted already; give the Hugging Face checkpoint that it was made from")
    check_new(out)
    config = ModelConfig.from_folder(source)
    if dtype == "auto":
        dtype = stored_type(source)
    params = load_params(source, config, DTYPES[dtype], progress)
    out.mkdir(parents=True, exist_ok=True)
    write_converted(out, params)
    copy_all_but_weights(source, out)
    return config
