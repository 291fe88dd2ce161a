"""The decoder's weights as a Hugging Face checkpoint folder: the inverse of `load_params`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.converted import is_converted
from adaserve_jax.models.decoder import param_specs
from adaserve_jax.models.loading import hf_tensors
from adaserve_jax.models.settings import read_json
from adaserve_jax.models.tensors import TensorFiles
from adaserve_jax.models.writing import TORCH_NAMES, TYPES, check_new, copy_all_but_weights, write_shards
from adaserve_jax.types import Progress

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
