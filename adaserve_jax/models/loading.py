"""Weights of a checkpoint folder as the decoder's dict of arrays, from safetensors or from `adaserve convert`.

Nothing is read before every tensor's name and shape has been checked against config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, param_specs
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.quantize import SCALE, Int8Rows
from adaserve_jax.models.tensors import Rows, TensorFiles
from adaserve_jax.types import Progress

# Checkpoints in the engine's own layout: fused weights in an orbax checkpoint beside the usual configuration
# files.
#
# Imports no jax, and orbax only to write.

WEIGHTS_FOLDER = "weights"
CHUNK_BYTES = 1 << 20
_LEVEL = "-"
_MARKER = "_METADATA"  # orbax writes it into every checkpoint
_ARRAY = "zarr.json"


def is_converted(folder: Path) -> bool:
    """Whether `adaserve convert` wrote this folder."""
    return (folder / WEIGHTS_FOLDER / _MARKER).is_file()


class ConvertedFiles:
    """The weights of a converted folder. Construction reads their headers only.

    Read through tensorstore, on which orbax stands: a part of a weight at a time, where orbax reads and copies whole
    ones, and is slow to import.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]):
        """Raises CheckpointError: a weight is missing, not asked for, or of another shape than config.json says."""
        import tensorstore as ts

        paths = sorted(path.parent for path in (folder / WEIGHTS_FOLDER).absolute().glob(f"*/{_ARRAY}"))
        specs = {
            path.name.replace(_LEVEL, "."): {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
            for path in paths
        }
        self._stores: dict[str, Any] = {name: ts.open(spec, open=True).result() for name, spec in specs.items()}
        self._check(folder, shapes)

    def _check(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        found = self._stores
        differing = [
            f"weight {name} has shape {list(found[name].shape)}, expected {list(shape)} by config.json"
            if name in found
            else f"weight {name} is missing, expected with shape {list(shape)}"
            for name, shape in shapes.items()
            if name not in found or tuple(found[name].shape) != tuple(shape)
        ]
        differing += [
            f"weight {name} is not part of a model with this config.json" for name in found if name not in shapes
        ]
        if differing:
            raise CheckpointError(f"{folder}: {differing[0]}; convert the checkpoint again")

    def read_rows(self, name: str, rows: tuple[int, int], columns: slice, out: Rows) -> None:
        """Write rows [start, stop) of a weight into `out`, cast to its type: chunks in parallel into an array, else
        chunk by chunk of rows."""
        import tensorstore as ts

        first, last = rows
        store = self._stores[name]
        part = store[first:last] if store.ndim == 1 else store[first:last, columns]
        if isinstance(out, np.ndarray):
            target = ts.array(out)
            target.write(ts.cast(part[ts.d[:].translate_to[0]], target.dtype)).result()
            return
        step = store.chunk_layout.read_chunk.shape[0]
        for start in range(0, last - first, step):
            stop = min(start + step, last - first)
            out[slice(start, stop)] = part[first + start : first + stop].read().result()


def write_converted(folder: Path, params: Mapping[str, Any]) -> None:
    """Write the weights of `load_params` into a folder that has none."""
    import orbax.checkpoint as ocp

    weights = {_stored(name): weight for name, weight in params.items()}
    chunks = {stored: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for stored in weights}
    # Weights hardly compress, and unpacking costs more than reading.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        path = (folder / WEIGHTS_FOLDER).absolute()
        checkpointer.save(path, args=ocp.args.PyTreeSave(weights, save_args=chunks))


def _stored(name: str) -> str:
    """The name of a weight in the files: orbax takes dots for levels, and a weight cannot stand above its bias."""
    return name.replace(".", _LEVEL)


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


# Weights kept in host memory, so that their device's memory can be lent out and filled again.
#
# Knows neither who lends it nor what for.


class HostCopy:
    """A copy of weights that lie on one device; it stays what it is, whatever becomes of them.

    In pinned memory, from which a GPU or TPU reads at full speed. On a CPU in plain memory of its own: a device array
    made of host memory may share it there, and would not free it.
    """

    def __init__(self, params: Params):
        (self._device,) = next(iter(params.values())).devices()
        self._pinned = has_own_memory(self._device)
        self._held = {name: self._to_host(weight) for name, weight in params.items()}

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())

    def load(self) -> Params:
        """New device arrays. On a CPU they are there; elsewhere the copies may still be under way."""
        return {name: self._to_device(held) for name, held in self._held.items()}

    def _to_host(self, weight: jax.Array) -> np.ndarray | jax.Array:
        if not self._pinned:
            return np.array(weight)
        return jax.device_put(weight, SingleDeviceSharding(self._device, memory_kind="pinned_host"))

    def _to_device(self, held: np.ndarray | jax.Array) -> jax.Array:
        if isinstance(held, jax.Array):
            return jax.device_put(held, SingleDeviceSharding(self._device))
        buffer = aligned_buffer(held.shape, held.dtype)
        np.copyto(buffer, held)
        return jax.device_put(buffer, self._device)


def has_own_memory(device: Any) -> bool:
    """Whether a device's (of jax) memory is another than the host's."""
    return device.platform != "cpu"
