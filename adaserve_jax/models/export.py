"""Writes whole checkpoints: `export` in Hugging Face's layout, `convert` in the engine's, which needs no fusing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.config_values import read_json
from adaserve_jax.models.decoder import HEAD_ROW, param_specs
from adaserve_jax.models.experts import stays_f32
from adaserve_jax.models.loading import (
    has_own_embedding,
    hf_tensors,
    is_converted,
    is_stacked,
    load_params,
    stack_experts,
    write_converted,
)
from adaserve_jax.models.tensors import TensorFiles, first_difference
from adaserve_jax.models.writing import TYPES, check_new, copy_all_but_weights, with_type, write_shards
from adaserve_jax.types import Progress

_NAME_OF = {"F16": "f16", "BF16": "bf16", "F32": "f32", "F64": "f32"}


def export(
    params: Mapping[str, Any], source: Path, out: Path, *, dtype: str = "auto", progress: Progress | None = None
) -> None:
    """Write weights as a Hugging Face checkpoint, with the configuration and tokenizer of `source`.

    The inverse of `load_params`. Host memory holds one weight and one shard at a time.

    params: of the model of `source`, of any float type, on any device. An EAGLE-3 head keeps its format, and shares its
    target's embedding if it did. MTP layers of `source` are left out. dtype: f16, bf16, f32, or auto for that of the
    source's embedding. progress: called with ("writing", tensors written, total).
    Raises ConfigError: `out` is not empty, or there is no such dtype; CheckpointError: the weights are of another
    model, or a value is not finite in that type. `out` then has no index, and loading it fails.
    """
    config = ModelConfig.from_folder(source, may_be_head=True)
    expected = {name: shape for name, (shape, _) in param_specs(config).items()}
    difference = first_difference({name: weight.shape for name, weight in params.items()}, expected)
    if difference:
        raise CheckpointError(f"{source}: weight {difference}; these weights are of another model")
    dtype = _type_to_write(source, dtype)
    check_new(out)
    out.mkdir(parents=True, exist_ok=True)
    copy_all_but_weights(source, out)
    given = read_json(out / "config.json")
    if config.mtp is not None:  # its layers are no part of the model
        given["num_nextn_predict_layers"] = 0
    (out / "config.json").write_text(json.dumps(with_type(given, dtype), indent=2) + "\n")
    shared = config.eagle3 is not None and not has_own_embedding(source)
    _write(params, config, out, dtype, progress, without=("embed",) if shared else ())


def new_head_folder(out: Path, settings: dict[str, Any]) -> ModelConfig:
    """Begin a checkpoint of a head with its config.json, and return what it says.

    Raises ConfigError: `out` is not empty.
    """
    check_new(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return ModelConfig.from_folder(out, may_be_head=True)


def export_head(params: Mapping[str, Any], out: Path, *, own_embedding: bool = False) -> None:
    """Write a head's tensors beside its config.json, in SpecForge's or Medusa's format and f32.

    own_embedding: write that of an EAGLE-3 head too; otherwise it has its target's. Raises CheckpointError: a value is
    not finite.
    """
    config = ModelConfig.from_folder(out, may_be_head=True)
    _write(params, config, out, "f32", None, without=() if own_embedding else ("embed",))


def _write(
    params: Mapping[str, Any], config: ModelConfig, out: Path, dtype: str, progress: Progress | None,
    without: tuple[str, ...],
) -> None:  # fmt: skip
    """Write the tensors of all weights but some."""
    written = {name: weight for name, weight in params.items() if name not in (*without, HEAD_ROW)}
    integers = _token_tensors(np.asarray(params[HEAD_ROW])) if HEAD_ROW in params else {}
    total = sum(len(hf_tensors(name, config)) for name in written) + len(integers)
    tensors = itertools.chain(_tensors(written, config, dtype), integers.items())
    write_shards(out, tensors, total, "writing", progress)


def _token_tensors(head_row: np.ndarray) -> dict[str, np.ndarray]:
    """Return how an EAGLE-3 head's checkpoint says which tokens it has. head_row: i32[V], as the decoder has it."""
    has = head_row >= 0
    tokens = np.flatnonzero(has)[np.argsort(head_row[has])]
    return {"d2t": tokens - np.arange(len(tokens)), "t2d": has}


def _type_to_write(source: Path, dtype: str) -> str:
    """Resolve "auto" to the type of the source's embedding, or of the logits' weight of a head without one; f32 for a
    source that `adaserve convert` wrote, or that has neither."""
    if dtype not in ("auto", *TYPES):
        raise ConfigError(f"dtype must be one of auto, {', '.join(TYPES)}, got {dtype!r}")
    if dtype != "auto":
        return dtype
    if is_converted(source):
        return "f32"
    files = TensorFiles(source)
    candidates = ("model.embed_tokens.weight", "medusa_head.0.0.linear.weight", "lm_head.weight")
    found = next((files.dtype_of(name) for name in candidates if name in files.names), "")
    return _NAME_OF.get(found, "f32")


def _tensors(params: Mapping[str, Any], config: ModelConfig, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Split each fused weight by rows into Hugging Face's tensors, of a type of TYPES or f32 where `stays_f32`."""
    for name, weight in params.items():
        with np.errstate(over="ignore"):
            rows = np.asarray(weight).astype(np.float32 if stays_f32(name, params) else TYPES[dtype])
        if not np.isfinite(rows).all():
            raise CheckpointError(f"weight {name} has a value that is not finite in {dtype}; write it as f32, or not")
        if is_stacked(name, config):
            ((tensor, shape),) = hf_tensors(name, config).items()
            yield tensor, stack_experts(rows, shape, ".gate_up" in name)
            continue
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
    if is_converted(source):
        raise ConfigError(f"{source} is converted already; give the Hugging Face checkpoint that it was made from")
    check_new(out)
    config = ModelConfig.from_folder(source)
    params = load_params(source, config, TYPES[_type_to_write(source, dtype)], progress)
    out.mkdir(parents=True, exist_ok=True)
    write_converted(out, params)
    copy_all_but_weights(source, out)
    return config
