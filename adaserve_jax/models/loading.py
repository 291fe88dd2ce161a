"""Loads the weights of a checkpoint folder, from safetensors or from the layout of `adaserve convert`.

Every tensor's name and shape is checked against config.json before anything is read. The converted layout holds the
decoder's fused weights in an orbax checkpoint beside the usual configuration files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.config import MedusaConfig, ModelConfig
from adaserve_jax.models.decoder import HEAD_ROW, Params, param_specs
from adaserve_jax.models.experts import stays_f32
from adaserve_jax.models.partition import Partition
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.quantize import SCALE, ZERO, Int4Groups, Int8Rows
from adaserve_jax.models.tensors import RowBuffer, TensorFiles, first_difference
from adaserve_jax.types import Progress

WEIGHTS_FOLDER = "weights"
CHUNK_BYTES = 1 << 20
_LEVEL = "-"
_MARKER = "_METADATA"  # orbax writes it into every checkpoint
_ARRAY = "zarr.json"
ReadRows = Callable[[tuple[int, int], slice, RowBuffer], None]
"""read(rows [start, stop), columns, out): read a part of a fused weight of one device into out, cast to its type."""
_EMBEDDING_TENSOR, _HEAD_TENSOR = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 1024
_ALIGNMENT = 64
"""Alignment in bytes of a host buffer that XLA takes over without a copy."""


def load_params(
    folder: str | Path, config: ModelConfig, dtype: Any = jnp.float32, progress: Progress | None = None,
    placement: Placement | None = None, *, quantize: str = "none", target: Path | None = None,
    without: Collection[str] = (),
) -> Params:  # fmt: skip
    """Read all weights, fused and cast as the decoder needs them, each shard straight to its device.

    A process reads the shards of its own devices only. Beside the weights themselves, host memory holds at most one
    fused weight and a few blocks of a file; on a CPU the buffer that is read into becomes the weight.

    dtype: of the weights; if they are quantised, of the products and of what is not. progress: called with ("loading",
    weights read, weights). placement: None for the first device. quantize: "int8" or "int4" quantise every linear
    weight, block by block, as `param_specs` has it. target: folder of the target of an EAGLE-3 head; a head without an
    embedding gets a copy of the target's. without: weights that are not read.
    Raises CheckpointError: a file is missing or unreadable; a tensor is missing, unknown, or of another shape than
    config.json says, or tied by it to another; a value to be quantised is not finite; a head's tokens are not those of
    its target.
    """
    folder, placement, dtype = Path(folder), placement or Placement.on_one(), jnp.dtype(dtype)
    specs = param_specs(placement.partition.whole(config), quantize)
    readers = {name: read for name, read in _readers(folder, config, target).items() if name not in without}
    params: Params = {}
    for done, (name, read) in enumerate(readers.items(), 1):
        params |= _place(name, read, specs, config, placement, dtype)
        if progress is not None:
            progress("loading", done, len(readers))
    return params


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Check a model's tensors, reading no more than a tied head. Raises CheckpointError as `load_params` does."""
    _readers(folder, config)


def weight_dtype(name: str, specs: Mapping[str, Any], dtype: np.dtype) -> np.dtype:
    """Return the type that `load_params` gives a weight of `param_specs`; one that has a scale is in bytes."""
    if name.endswith(SCALE):
        return np.dtype(np.float16 if name.removesuffix(SCALE) + ZERO in specs else np.float32)
    if name == HEAD_ROW:
        return np.dtype(np.int32)
    if stays_f32(name, specs):
        return np.dtype(np.float32)
    return np.dtype(np.int8) if name + SCALE in specs or name.endswith(ZERO) else dtype


def _readers(folder: Path, config: ModelConfig, target: Path | None = None) -> dict[str, ReadRows]:
    """Check all weights, and return the function that reads each. target: as for `load_params`."""
    shapes = {name: shape for name, (shape, _) in param_specs(config).items()}
    if is_converted(folder):
        if config.is_mtp:
            raise CheckpointError(f"{folder}: a converted folder has no MTP layers; give the checkpoint as published")
        converted = ConvertedFiles(folder, shapes)
        return {name: partial(converted.read_rows, name) for name in shapes}
    sources = {name: hf_tensors(name, config) for name in shapes if name != HEAD_ROW}
    files = TensorFiles(folder, config.weight_format)
    elsewhere: dict[str, ReadRows] = {}
    optional: tuple[str, ...] = (_HEAD_TENSOR,) if config.tie_embeddings else ()
    if config.eagle3 is not None:
        optional = ("d2t", "t2d")  # whole numbers, which `_head_rows` checks
        if HEAD_ROW in shapes:
            elsewhere[HEAD_ROW] = partial(_read_array, _head_rows(files, config))
        if not set(sources["embed"]) <= files.names:
            elsewhere["embed"] = _target_embedding(folder, config, target)
            del sources["embed"]
    if config.mtp is not None:
        optional += tuple(name for name in files.names if name.startswith(config.mtp.layers))
    if config.is_mtp or config.medusa is not None:  # a head may lie in one checkpoint with its target
        optional = tuple(files.names)
    files.check({tensor: shape for one in sources.values() for tensor, shape in one.items()}, optional=optional)
    if config.tie_embeddings and not config.is_head and _HEAD_TENSOR in files.names:
        _check_tied(files, config)
    return elsewhere | {
        name: partial(_read_stacked, files, next(iter(tensors)), ".gate_up" in name)
        if is_stacked(name, config)
        else partial(files.read_rows, tuple(tensors))
        for name, tensors in sources.items()
    }


def _check_tied(files: TensorFiles, config: ModelConfig) -> None:
    """Raise CheckpointError: the files' weight of the logits, which config.json ties to the embedding, is another one.

    transformers 5 does not tie them then; dropping the weight would give other text.
    """
    rows, columns = config.vocab_size, config.hidden_size
    same = files.shape_of(_HEAD_TENSOR) == (rows, columns)
    for start in range(0, rows, _COMPARED_ROWS) if same else ():
        stop = min(start + _COMPARED_ROWS, rows)
        block = np.empty((2, stop - start, columns), np.float32)
        for tensor, out in zip((_EMBEDDING_TENSOR, _HEAD_TENSOR), block, strict=True):
            files.read_rows((tensor,), (start, stop), slice(None), out)
        same = same and np.array_equal(block[0], block[1])
    if not same:
        raise CheckpointError(
            f"{files.folder}: {_HEAD_TENSOR} differs from {_EMBEDDING_TENSOR}, to which config.json ties it; set "
            "tie_word_embeddings to false"
        )


def has_own_embedding(folder: Path) -> bool:
    """Return whether an EAGLE-3 head's checkpoint has an embedding. Raises CheckpointError: it cannot be read."""
    return is_converted(folder) or "embed_tokens.weight" in TensorFiles(folder).names


def _head_rows(files: TensorFiles, config: ModelConfig) -> np.ndarray:
    """Return the row of each token in an EAGLE-3 head's logits, i32[V], -1 for tokens that it lacks.

    The checkpoint has the inverse: `d2t`, i64[rows], how far each row's token is behind the row.
    """
    assert config.eagle3 is not None
    rows = config.eagle3.draft_vocab_size
    if "d2t" not in files.names or files.shape_of("d2t") != (rows,) or files.dtype_of("d2t") not in ("I32", "I64"):
        raise CheckpointError(
            f"{files.folder}: an EAGLE-3 head with draft_vocab_size {rows} needs a tensor d2t of so many whole numbers"
        )
    behind = np.empty(rows, np.int64)
    files.read_rows(("d2t",), (0, rows), slice(None), behind)
    tokens = np.arange(rows) + behind
    if tokens.min() < 0 or tokens.max() >= config.vocab_size or len(np.unique(tokens)) < rows:
        raise CheckpointError(
            f"{files.folder}: d2t must name {rows} different tokens below vocab_size ({config.vocab_size}), got some "
            "outside or twice"
        )
    found = np.full(config.vocab_size, -1, np.int32)
    found[tokens] = np.arange(rows)
    return found


def _read_array(array: np.ndarray, rows: tuple[int, int], columns: slice, out: RowBuffer) -> None:
    out[: rows[1] - rows[0]] = array[slice(*rows)]


def _target_embedding(folder: Path, config: ModelConfig, target: Path | None) -> ReadRows:
    """Return what reads the target's embedding for a head that brings none."""
    if target is None:
        raise CheckpointError(
            f"{folder}: this EAGLE-3 head has no embed_tokens, and shares its target's; name the target"
        )
    model = ModelConfig.from_folder(target)
    expected = config.vocab_size, config.hidden_size
    if (model.vocab_size, model.hidden_size) != expected:
        raise CheckpointError(
            f"{folder}: this EAGLE-3 head shares an embedding of {list(expected)}, and that of {target} is "
            f"[{model.vocab_size}, {model.hidden_size}]; use a head of this target"
        )
    return _readers(target, model)["embed"]


def is_stacked(name: str, config: ModelConfig) -> bool:
    """Return True for a weight that checkpoints hold as one tensor of all experts (`ExpertNames.stacked`)."""
    stacked = config.experts is not None and config.experts.names.stacked
    return stacked and (".experts.gate_up" in name or ".experts.down" in name)


def _read_stacked(
    files: TensorFiles, tensor: str, in_turns: bool, rows: tuple[int, int], columns: slice, out: RowBuffer
) -> None:
    """Read rows [start, stop) of all experts, one below another, expert by expert. in_turns: gate and up are."""
    start, stop = rows
    count, *_, size = files.shape_of(tensor)
    for expert in range(start // size, min(count, -(-stop // size))):
        entry = files.read_expert(tensor, expert)
        if in_turns:
            entry = np.concatenate([entry[::2], entry[1::2]])
        first = expert * size
        low, high = max(start, first), min(stop, first + size)
        part = entry[low - first : high - first]
        out[low - start : high - start] = part if part.ndim == 1 else part[:, columns]


def stack_experts(rows: np.ndarray, shape: tuple[int, ...], in_turns: bool) -> np.ndarray:
    """Undo `_read_stacked`: return the tensor of that shape from the rows of all experts."""
    count, *inputs, size = shape
    entries = rows.reshape(count, 2, size // 2, *inputs) if in_turns else rows.reshape(count, 1, size, *inputs)
    return np.moveaxis(entries, (2, 1), (-2, -1)).reshape(shape)


def _place(
    name: str, read: ReadRows, specs: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]], config: ModelConfig,
    placement: Placement, dtype: np.dtype,
) -> Params:  # fmt: skip
    """Return a weight as a global array, with its scale, and its zero, if it has them.

    Each shard of this process is read into a buffer of its own. read: reads the fused weight of one device. specs:
    `param_specs` of the partition's whole model. dtype: of a weight that is not quantised.
    """
    partition = placement.partition
    shape, axes = specs[name]
    axis = partition.split_axis(axes)
    is_int4 = name + ZERO in specs
    is_int8 = name + SCALE in specs and not is_int4
    beside: dict[str, dict[int, np.ndarray]] = {SCALE: {}, ZERO: {}}

    def local(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size // partition.ways if at == axis else size for at, size in enumerate(shape))

    def buffer_of(name: str) -> np.ndarray:
        return aligned_buffer(local(specs[name][0]), weight_dtype(name, specs, dtype))

    def buffer_beside(suffix: str, number: int) -> np.ndarray:
        found = beside[suffix][number] = buffer_of(name + suffix)
        return found

    def shard(index: Any) -> np.ndarray:
        number = _shard_number(index, axis, shape, partition)
        rows = partition.rows_of(axes[0], shape[0], config, number) if axis == 0 else ((0, shape[0]),)
        columns = index[1] if axis == 1 else slice(None)
        buffer = buffer_of(name)
        out: RowBuffer = buffer
        if is_int8:  # a scale is of a whole row
            out, columns = Int8Rows(name, buffer, buffer_beside(SCALE, number), columns), slice(None)
        if is_int4:
            out = Int4Groups(name, buffer, buffer_beside(SCALE, number), buffer_beside(ZERO, number))
            if axis == 1:  # two in a byte
                columns = slice(2 * columns.start, 2 * columns.stop)
        filled = 0
        for first, last in rows:
            read((first, last), columns, out[filled : filled + last - first])
            filled += last - first
        return buffer

    placed: Params = {name: jax.make_array_from_callback(shape, placement.sharding(placement.spec(axis)), shard)}
    for suffix, shards in beside.items():
        if name + suffix in specs:
            placed[name + suffix] = _place_shards(shards, *specs[name + suffix], placement)
    return jax.block_until_ready(placed)


def _place_shards(
    shards: Mapping[int, np.ndarray], shape: tuple[int, ...], axes: tuple[str, ...], placement: Placement
) -> jax.Array:
    """Return a global array of shards by their number; of those of any one where it is not divided."""
    axis = placement.partition.split_axis(axes)

    def shard(index: Any) -> np.ndarray:
        if axis is None:
            return next(iter(shards.values()))
        return shards[_shard_number(index, axis, shape, placement.partition)]

    return jax.make_array_from_callback(shape, placement.sharding(placement.spec(axis)), shard)


def _shard_number(index: Any, axis: int | None, shape: tuple[int, ...], partition: Partition) -> int:
    """Return the shard that an index of a global array asks for; 0 where it is not divided."""
    return 0 if axis is None else (index[axis].start or 0) * partition.ways // shape[axis]


def aligned_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return host memory, uninitialised, that a device array of a CPU takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _medusa_tensors(name: str, config: ModelConfig, medusa: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Return the one tensor of a weight of Medusa heads."""
    _, head, part, *rest = name.split(".")
    d = config.hidden_size
    if part == "out":
        return {f"medusa_head.{head}.{medusa.num_blocks}.weight": (config.vocab_size, d)}
    block, *bias = rest
    linear = f"medusa_head.{head}.{block}.linear"
    return {f"{linear}.bias": (d,)} if bias else {f"{linear}.weight": (d, d)}


def hf_tensors(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face's tensors of one fused weight with their shapes, in the order of their rows."""
    if config.medusa is not None:
        return _medusa_tensors(name, config, config.medusa)
    d, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    head = config.eagle3
    model = "model." if head is None else ""
    top = {
        "embed": {f"{model}embed_tokens.weight": (config.vocab_size, d)},
        "norm": {f"{model}norm.weight": (d,)},
        "head": {_HEAD_TENSOR: (config.vocab_size if head is None else head.draft_vocab_size, d)},
        "fc": {"fc.weight": (d, 0 if head is None else head.feature_size)},
    }
    mtp = config.mtp if config.is_mtp else None
    if mtp is not None:
        top |= {
            "norm": {f"{mtp.layers[0]}{mtp.norm}.weight": (d,)},
            "fc": {f"{mtp.layers[0]}{mtp.projection}.weight": (d, 2 * d)},
            "hidden_norm": {f"{mtp.layers[0]}{mtp.hidden_norm}.weight": (d,)},
            "token_norm": {f"{mtp.layers[0]}{mtp.token_norm}.weight": (d,)},
        }
    if name in top:
        return top[name]
    inputs = d if head is None else 2 * d
    before_mlp, behind_attention, behind_mlp = config.post_norms or ("post_attention_layernorm", "", "")
    query_norm, key_norm = config.late_qk_norms or ("q_norm", "k_norm")
    modules: dict[str, dict[str, tuple[int, ...]]] = {
        "attn_norm": {"input_layernorm": (d,)},
        "feature_norm": {"hidden_norm": (d,)},
        "qkv": {f"self_attn.{each}_proj": (size, inputs) for each, size in (("q", q), ("k", kv), ("v", kv))},
        "q_norm": {f"self_attn.{query_norm}": (q if config.joint_qk_norm else config.head_dim,)},
        "k_norm": {f"self_attn.{key_norm}": (kv if config.joint_qk_norm else config.head_dim,)},
        "out": {"self_attn.o_proj": (d, q)},
        "mlp_norm": {before_mlp: (d,)},
        "attn_post_norm": {behind_attention: (d,)},
        "mlp_post_norm": {behind_mlp: (d,)},
        "gate_up": {"mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d)},
        "down": {"mlp.down_proj": (d, inner)},
    }
    fused = {"qkv": {"self_attn.qkv_proj": (q + 2 * kv, d)}, "gate_up": {"mlp.gate_up_proj": (2 * inner, d)}}
    modules |= {name: fused[name] for name in config.fused_tensors}
    _, index, part, *rest = name.split(".")
    layer = f"model.layers.{index}." if head is None else "midlayer."
    if mtp is not None:
        layer = mtp.layers[0]
    if part == "experts":
        return _expert_tensors(layer, rest, config)
    if part == "sinks":
        return {f"{layer}self_attn.sinks": (config.num_heads,)}
    shapes = {module: shape[:1] if rest else shape for module, shape in modules[part].items()}
    suffix = "bias" if rest else "weight"
    return {f"{layer}{module}.{suffix}": shape for module, shape in shapes.items()}


def _expert_tensors(layer: str, path: list[str], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one weight of `models.experts.Experts`. path: its name within the block."""
    experts, d = config.experts, config.hidden_size
    assert experts is not None
    part, inner, names = path[0], experts.intermediate_size, experts.names
    if part == "router":
        return {f"{layer}{names.block}.{names.router}.weight": (experts.count, d)}
    if part == "router_bias":
        return {f"{layer}{names.block}.{names.router}.bias": (experts.count,)}
    if part == "correction":
        return {f"{layer}{names.block}.{names.correction}": (experts.count,)}
    if part == "shared_weight":
        return {f"{layer}{names.block}.{names.shared_gate}.weight": (1, d)}
    if part.startswith("shared_"):
        shapes = {"gate_proj": (experts.shared, d), "up_proj": (experts.shared, d), "down_proj": (d, experts.shared)}
        modules = ("gate_proj", "up_proj") if part == "shared_gate_up" else ("down_proj",)
        return {f"{layer}{names.block}.{names.shared}.{each}.weight": shapes[each] for each in modules}
    if names.stacked:
        name, inputs, outputs = (names.gate, d, 2 * inner) if part == "gate_up" else (names.down, inner, d)
        tensor = f"{layer}{names.block}.experts.{name}"
        if path[1:] == ["bias"]:
            return {f"{tensor}_bias": (experts.count, outputs)}
        return {tensor: (experts.count, inputs, outputs)}
    shapes = {names.gate: (inner, d), names.up: (inner, d)} if part == "gate_up" else {names.down: (d, inner)}
    return {
        f"{layer}{names.block}.experts.{expert}.{name}.weight": shape
        for expert in range(experts.count)
        for name, shape in shapes.items()
    }


def is_converted(folder: Path) -> bool:
    """Return True if `adaserve convert` wrote this folder."""
    return (folder / WEIGHTS_FOLDER / _MARKER).is_file()


class ConvertedFiles:
    """The weights of a converted folder.

    They are read with tensorstore, on which orbax builds: it reads parts of a weight, where orbax reads and copies
    whole ones and is slow to import.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]):
        """Read the headers. Raises CheckpointError: a weight is missing, unknown, or of another shape than `shapes`."""
        import tensorstore as ts

        paths = sorted(path.parent for path in (folder / WEIGHTS_FOLDER).absolute().glob(f"*/{_ARRAY}"))
        specs = {
            path.name.replace(_LEVEL, "."): {
                "driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "fill_missing_data_reads": False,
            }
            for path in paths
        }  # fmt: skip
        self._folder = folder
        with self._readable():
            self._stores: dict[str, Any] = {name: ts.open(spec, open=True).result() for name, spec in specs.items()}
        difference = first_difference({name: store.shape for name, store in self._stores.items()}, shapes)
        if difference:
            raise CheckpointError(f"{folder}: weight {difference}; convert the checkpoint again")

    def read_rows(self, name: str, rows: tuple[int, int], columns: slice, out: RowBuffer) -> None:
        """Write rows [start, stop) of a weight into `out`, cast to its type.

        An array is filled in parallel, another buffer by one chunk of rows after another. Raises CheckpointError: a
        part of the weight is missing or broken.
        """
        with self._readable():
            self._read_rows(name, rows, columns, out)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Raise CheckpointError in place of tensorstore's errors."""
        try:
            yield
        except ValueError as error:
            raise CheckpointError(
                f"{self._folder}: a weight is missing or broken ({error}); convert the checkpoint again"
            ) from error

    def _read_rows(self, name: str, rows: tuple[int, int], columns: slice, out: RowBuffer) -> None:
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
    """Write weights, as `load_params` returns them, into a folder that has none."""
    import orbax.checkpoint as ocp

    # Orbax reads dots as levels, and a weight cannot be above its bias.
    weights = {name.replace(".", _LEVEL): weight for name, weight in params.items()}
    chunks = {stored: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for stored in weights}
    # Weights hardly compress, and unpacking costs more than reading.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        path = (folder / WEIGHTS_FOLDER).absolute()
        checkpointer.save(path, args=ocp.args.PyTreeSave(weights, save_args=chunks))
