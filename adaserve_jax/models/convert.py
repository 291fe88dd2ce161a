"""Conversion of a Hugging Face checkpoint into the engine's layout, which needs no fusing and no casting to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.converted import is_converted, write_converted
from adaserve_jax.models.export import stored_type
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.writing import check_new, copy_all_but_weights
from adaserve_jax.types import Progress

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
