"""Writes whole checkpoints: `export` in Hugging Face's layout, `convert` in the engine's, which needs no fusing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import param_specs
from adaserve_jax.models.loading import hf_tensors, is_converted, load_params, write_converted
from adaserve_jax.models.settings import read_json
from adaserve_jax.models.tensors import TensorFiles
from adaserve_jax.models.writing import TORCH_NAMES, TYPES, check_new, copy_all_but_weights, write_shards
from adaserve_jax.types import Progress

_NAME_OF = {"F16": "f16", "BF16": "bf16", "F32": "f32", "F64": "f32"}


def export(
    params: Mapping[str, Any], source: Path, out: Path, *, dtype: str = "auto", progress: Progress | None = None
) -> None:
    """Write weights as a Hugging Face checkpoint, with the configuration and tokenizer of `source`.

    The inverse of `load_params`. Host memory holds one weight and one shard at a time.

    Args:
        params: Weights of the model of `source`, of any float type, on any device.
        source: Checkpoint folder of the same model.
        out: Folder to write, empty or missing.
        dtype: f16, bf16, f32, or auto for that of the source's embedding.
        progress: Called with ("writing", tensors written, total).

    Raises:
        ConfigError: `out` is not empty, or there is no such dtype.
        CheckpointError: The weights are of another model, or a value is not finite in that type. `out` then has no
            index, and loading it fails.
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
    """Return the type of a checkpoint's embedding, f16, bf16 or f32; f32 for one that `adaserve convert` wrote.

    Raises CheckpointError: as `load_params` does.
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
    """Write the weights' type into config.json, under the key that it uses already."""
    given = read_json(path)
    key = "dtype" if "dtype" in given else "torch_dtype"
    path.write_text(json.dumps(given | {key: TORCH_NAMES[dtype]}, indent=2) + "\n")


def _tensors(params: Mapping[str, Any], config: ModelConfig, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Split each fused weight by rows into Hugging Face's tensors."""
    for name, weight in params.items():
        with np.errstate(over="ignore"):
            rows = np.asarray(weight).astype(TYPES[dtype])
        if not np.isfinite(rows).all():
            raise CheckpointError(f"weight {name} has a value that is not finite in {dtype}; write it as f32, or not")
        first = 0
        for tensor, shape in hf_tensors(name, config).items():
            yield tensor, rows[first : first + shape[0]]
            first += shape[0]


def convert(source: Path, out: Path, *, dtype: str = "auto", progress: Progress | None = None) -> ModelConfig:
    """Write a Hugging Face checkpoint in the engine's layout, and copy all files that are not weights.

    dtype: f16, bf16, f32, or auto for that of the source's embedding. Memory holds the whole model once.
    Raises ConfigError: the source is converted already, `out` is not empty, or there is no such dtype; CheckpointError:
    as `load_params` does.
    """
    if dtype not in ("auto", *TYPES):
        raise ConfigError(f"dtype must be one of auto, {', '.join(TYPES)}, got {dtype!r}")
    if is_converted(source):
        raise ConfigError(f"{source} is converted already; give the Hugging Face checkpoint that it was made from")
    check_new(out)
    config = ModelConfig.from_folder(source)
    if dtype == "auto":
        dtype = stored_type(source)
    params = load_params(source, config, TYPES[dtype], progress)
    out.mkdir(parents=True, exist_ok=True)
    write_converted(out, params)
    copy_all_but_weights(source, out)
    return config
