"""Weights of a checkpoint folder as the decoder's dict of arrays, from safetensors or from `adaserve convert`.

Nothing is read before every tensor's name and shape has been checked against config.json.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.converted import is_converted, read_converted
from adaserve_jax.models.decoder import Params, param_specs
from adaserve_jax.models.quantize import SCALE, Int8Rows
from adaserve_jax.models.tensors import TensorFiles
from adaserve_jax.types import Progress

_ALIGNMENT = 64  # bytes; what XLA wants of a host buffer that it takes over without copying


def load_params(
    folder: str | Path,
    config: ModelConfig,
    dtype: Any = jnp.float32,
    progress: Progress | None = None,
    *,
    quantize: str = "none",
) -> Params:
    """Read all weights, cast to dtype, fused as the decoder wants them.

    Beside the weights themselves, host memory holds one fused weight at most and a few blocks of a file; on a CPU the
    buffer that is read into becomes the weight. A converted folder needs about two weights: orbax copies what it reads.
    quantize: "int8" reads every linear weight as int8, block by block, with a scale; dtype is then that of the rest and
    of the products. progress: called with ("loading", weights read, weights).
    Raises CheckpointError: a file is missing or unreadable; a tensor is missing, not asked for, or of another shape
    than config.json says; a value that is to be int8 is not finite.
    """
    folder = Path(folder)
    specs = param_specs(config, quantize)
    shapes = {name: shape for name, (shape, _) in specs.items() if not name.endswith(SCALE)}
    int8 = frozenset(name for name in shapes if name + SCALE in specs)
    if is_converted(folder):
        return read_converted(folder, shapes, dtype, progress, int8)
    sources = {name: hf_tensors(name, config) for name in shapes}
    files = TensorFiles(folder)
    files.check(
        {tensor: shape for one in sources.values() for tensor, shape in one.items()},
        optional=("lm_head.weight",) if config.tie_embeddings else (),
    )
    params: Params = {}
    for done, (name, shape) in enumerate(shapes.items(), 1):
        read = _int8_to_device if name in int8 else _to_device
        params |= read(files, name, tuple(sources[name]), shape, dtype)
        if progress is not None:
            progress("loading", done, len(shapes))
    return params


def _to_device(
    files: TensorFiles, name: str, tensors: tuple[str, ...], shape: tuple[int, ...], dtype: Any
) -> dict[str, jax.Array]:
    buffer = _aligned_buffer(shape, jnp.dtype(dtype))
    files.read_fused(tensors, buffer)
    return {name: jax.block_until_ready(jax.device_put(buffer))}


def _int8_to_device(
    files: TensorFiles, name: str, tensors: tuple[str, ...], shape: tuple[int, ...], dtype: Any
) -> dict[str, jax.Array]:
    weight, scale = _aligned_buffer(shape, np.dtype(np.int8)), _aligned_buffer(shape[:1], np.dtype(np.float32))
    rows = Int8Rows(name, weight, scale)
    files.read_fused(tensors, rows)
    return rows.to_device()


def _aligned_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def hf_tensors(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensors behind one weight, in the order of their rows, with shapes."""
    d = config.hidden_size
    top = {
        "embed": {"model.embed_tokens.weight": (config.vocab_size, d)},
        "norm": {"model.norm.weight": (d,)},
        "head": {"lm_head.weight": (config.vocab_size, d)},
    }
    if name in top:
        return top[name]
    _, index, part, *bias = name.split(".")
    modules = _layer_modules(config)[part]
    if bias:
        return {f"model.layers.{index}.{module}.bias": shape[:1] for module, shape in modules.items()}
    return {f"model.layers.{index}.{module}.weight": shape for module, shape in modules.items()}


def _layer_modules(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Hugging Face's modules behind each part of a layer, with the shapes of their weights."""
    d, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    return {
        "attn_norm": {"input_layernorm": (d,)},
        "qkv": {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)},
        "q_norm": {"self_attn.q_norm": (config.head_dim,)},
        "k_norm": {"self_attn.k_norm": (config.head_dim,)},
        "out": {"self_attn.o_proj": (d, q)},
        "mlp_norm": {"post_attention_layernorm": (d,)},
        "gate_up": {"mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d)},
        "down": {"mlp.down_proj": (d, inner)},
    }
