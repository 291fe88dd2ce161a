"""Weights of a checkpoint folder as the decoder's dict of arrays, from safetensors or from `adaserve convert`.

Nothing is read before every tensor's name and shape has been checked against config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.converted import ConvertedFiles, is_converted
from adaserve_jax.models.decoder import Params, param_specs
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.quantize import SCALE, Int8Rows
from adaserve_jax.models.tensors import Rows, TensorFiles
from adaserve_jax.types import Progress

ReadRows = Callable[[tuple[int, int], slice, Rows], None]
"""read(rows [start, stop), columns, out): a part of a fused weight of one device, cast to out's type, by blocks."""
_ALIGNMENT = 64  # bytes; what XLA wants of a host buffer that it takes over without copying


def load_params(
    folder: str | Path,
    config: ModelConfig,
    dtype: Any = jnp.float32,
    progress: Progress | None = None,
    placement: Placement | None = None,
    *,
    quantize: str = "none",
) -> Params:
    """Read all weights, cast to dtype, fused as the decoder wants them, each shard straight to its device.

    placement: where the model lies; None: the first device. A process reads the shards of its own devices only. Beside
    the weights themselves, host memory holds one fused weight at most and a few blocks of a file; on a CPU the buffer
    that is read into becomes the weight. quantize: "int8" reads every linear weight as int8, block by block, with a
    scale; dtype is then that of the rest and of the products. progress: called with ("loading", weights read, weights).
    Raises CheckpointError: a file is missing or unreadable; a tensor is missing, not asked for, or of another shape
    than config.json says; a value that is to be int8 is not finite.
    """
    folder, placement, dtype = Path(folder), placement or Placement.on_one(), jnp.dtype(dtype)
    specs = param_specs(placement.partition.whole(config), quantize)
    readers = _readers(folder, config)
    params: Params = {}
    for done, (name, read) in enumerate(readers.items(), 1):
        is_int8 = name + SCALE in specs
        params |= _place(name, read, *specs[name], config, placement, None if is_int8 else dtype)
        if progress is not None:
            progress("loading", done, len(readers))
    return params


def _readers(folder: Path, config: ModelConfig) -> dict[str, ReadRows]:
    """What reads each weight, once all of them are checked."""
    shapes = {name: shape for name, (shape, _) in param_specs(config).items()}
    if is_converted(folder):
        converted = ConvertedFiles(folder, shapes)
        return {name: partial(converted.read_rows, name) for name in shapes}
    sources = {name: hf_tensors(name, config) for name in shapes}
    files = TensorFiles(folder)
    files.check(
        {tensor: shape for one in sources.values() for tensor, shape in one.items()},
        optional=("lm_head.weight",) if config.tie_embeddings else (),
    )
    return {name: partial(files.read_rows, tuple(tensors)) for name, tensors in sources.items()}


def _place(
    name: str,
    read: ReadRows,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    config: ModelConfig,
    placement: Placement,
    dtype: np.dtype | None,
) -> Params:
    """A weight as a global array, each of this process's shards read into a buffer of its own; in int8, with its scale,
    where dtype is None. read: of one device's fused weight. shape, axes: of `param_specs` for the partition's whole
    model."""
    partition = placement.partition
    axis = partition.split_axis(axes)
    scales: dict[int, np.ndarray] = {}

    def number_of(index: Any) -> int:
        """Which shard of the rows an index asks for, 0 where rows are not divided."""
        return (index[0].start or 0) * partition.ways // shape[0] if axis == 0 else 0

    def shard(index: Any) -> np.ndarray:
        number = number_of(index)
        rows = partition.rows_of(axes[0], shape[0], config, number) if axis == 0 else ((0, shape[0]),)
        columns = index[1] if axis == 1 else slice(None)
        local = tuple(size // partition.ways if at == axis else size for at, size in enumerate(shape))
        buffer = aligned_buffer(local, np.dtype(np.int8) if dtype is None else dtype)
        out: Rows = buffer
        if dtype is None:
            scales[number] = aligned_buffer(local[:1], np.dtype(np.float32))
            out, columns = Int8Rows(name, buffer, scales[number], columns), slice(None)  # a scale is of a whole row
        filled = 0
        for first, last in rows:
            read((first, last), columns, out[filled : filled + last - first])
            filled += last - first
        return buffer

    sharding = placement.sharding(placement.spec(axis))
    placed = {name: jax.make_array_from_callback(shape, sharding, shard)}
    if dtype is None:
        by_rows = placement.sharding(placement.spec(0 if axis == 0 else None))
        scale = jax.make_array_from_callback(shape[:1], by_rows, lambda index: scales[number_of(index)])
        placed[name + SCALE] = scale
    return jax.block_until_ready(placed)


def aligned_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Host memory that a CPU's device array takes over as it is, without a copy; not filled."""
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
