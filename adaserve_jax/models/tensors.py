"""Tensors of a safetensors checkpoint: checked by their headers, read in small blocks, dequantised while they are read.

Files are mapped into memory for one block at a time, so that pages once read do not stay in the process. Reading needs
a few blocks of memory beside its destination.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.checkpoint_formats.encoding import FLOATS, WEIGHT, Encoding, Part, StackEncoding, WeightFormat
from adaserve_jax.models.checkpoint_formats.packed import Packed
from adaserve_jax.models.checkpoint_formats.scaled import Scaled
from adaserve_jax.models.config_values import read_json
from adaserve_jax.models.quantize import Int4Groups, Int8Rows
from adaserve_jax.models.text_model import text_name

BLOCK_BYTES = 8 << 20
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ADVICE = {
    ".safetensors": f"it takes {_INDEX_FILE} beside it, or Hugging Face's names of files",
    ".bin": "save the model with safe_serialization=True", ".gguf": "GGUF is not read, use Hugging Face's format",
}  # fmt: skip
"""Tell what to do about weights in other files, by the ends of their names."""
_LFS = b"version https://git-lfs"
_ITEM_BYTES = 8  # of the widest type
_TYPES = {
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "I8": np.int8, "U8": np.uint8,
    "I32": np.int32, "I64": np.int64, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
"""Types by safetensors' names. Its own reader for NumPy does not know those of 8 bits."""
RowBuffer = np.ndarray | Int8Rows | Int4Groups
"""Destination of a read, which takes blocks of rows. A slice is a view."""
# Buffers that old exports carry and that the decoder computes itself.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class _Tensor:
    """Location of a tensor. dtype: safetensors' name of its type. start: its first byte in the file."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str
    start: int

    def read(self, *index: slice) -> np.ndarray:
        """Return a copy of a part."""
        dtype = np.dtype(_TYPES[self.dtype])
        mapped = np.memmap(self.path, np.uint8, "r", self.start, (math.prod(self.shape) * dtype.itemsize,))
        return np.array(mapped.view(dtype).reshape(self.shape)[index])


@dataclass(frozen=True)
class _Stored:
    """Tensors that stand for one weight together, by the ends of their names."""

    tensors: Mapping[str, _Tensor]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, *index: slice) -> np.ndarray:
        return self.tensors[name].read(*index)

    def location(self, name: str) -> str:
        return f"{self.tensors[name].path}: tensor {self.tensors[name].name}"


@dataclass(frozen=True)
class _Matrix(_Stored):
    shape: tuple[int, int]


@dataclass(frozen=True)
class _Stack(_Stored):
    shape: tuple[int, int, int]


class TensorFiles:
    """The tensors of a checkpoint folder, in one file or many, by their names in one of text alone (`text_name`).
    weight_format: of a quantised one."""

    def __init__(self, folder: Path, weight_format: WeightFormat | None = None):
        """Read the headers of all files. Raises CheckpointError: a file is missing or unreadable."""
        self.folder = folder
        self._format = weight_format
        self._tensors: dict[str, _Tensor] = {}
        self._encoded: dict[str, tuple[_Matrix, Encoding]] = {}
        self._stacks: dict[str, tuple[_Stack, StackEncoding]] = {}
        for path in _weight_files(folder):
            try:
                with safe_open(path, framework="numpy"):  # checks that what the header says lies in the file
                    self._tensors |= dict(_read_header(path))
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; expected the checkpoint's weights in it") from None
            except (SafetensorError, OSError) as error:
                advice = "it is a pointer of Git LFS, run git lfs pull" if _is_pointer(path) else "download it again"
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}; {advice}") from None

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: tuple[str, ...]) -> None:
        """Compare names, shapes and types with those of config.json. Raises CheckpointError: the first difference.

        A matrix of a quantised module, or of all experts, is expected in its encoding, unless its file has it in full
        precision.
        """
        modules = self._by_module()
        parts: dict[str, Part] = {}
        unread = {*optional, *(name for name in self._tensors if name.endswith(_COMPUTED_SUFFIX))}
        if self._format is not None:
            ends = {name: name.rpartition(".")[2] for name in self._tensors}
            unread |= {name for name, end in ends.items() if end in self._format.unread}
            unread |= {
                name for name, end in ends.items() if end in self._format.zeros and not self._tensors[name].read().any()
            }
        for name, shape in expected.items():
            parts |= self._parts(name, shape, modules)
        self._check_parts(parts, unread)

    def _parts(
        self, name: str, shape: tuple[int, ...], modules: Mapping[str, Mapping[str, _Tensor]]
    ) -> dict[str, Part]:
        """Return the tensors that must be there for one weight, and note how it is stored."""
        module, _, last = name.rpartition(".")
        tensors = modules.get(module, {})
        if self._format is None or (last in tensors and tensors[last].dtype in FLOATS):
            return {name: Part((shape,), FLOATS)}
        if len(shape) == 3 and self._format.stacks is not None:
            ends = {each.removeprefix(f"{last}_"): tensor for each, tensor in tensors.items()}
            stack = _Stack(ends, (shape[0], shape[1], shape[2]))
            self._stacks[name] = stack, self._format.stacks
            return {f"{name}_{end}": part for end, part in self._format.stacks.parts(stack).items()}
        encoding = self._format.encoding_of(module) if last == WEIGHT and len(shape) == 2 else None
        if encoding is None:
            return {name: Part((shape,), FLOATS)}
        matrix = _Matrix(tensors, (shape[0], shape[1]))
        self._encoded[name] = matrix, encoding
        return {f"{module}.{end}": part for end, part in encoding.parts(matrix).items()}

    def _check_parts(self, parts: Mapping[str, Part], unread: set[str]) -> None:
        found = {name: tensor for name, tensor in self._tensors.items() if name not in unread - parts.keys()}
        shapes = {name: tensor.shape for name, tensor in found.items()}
        expected = {
            name: shapes[name] if shapes.get(name) in part.shapes else part.shapes[0] for name, part in parts.items()
        }
        difference = first_difference(shapes, expected)
        if difference:
            raise CheckpointError(
                f"{self.folder}: tensor {difference}; the files and config.json do not belong together"
            )
        for name, part in parts.items():
            if found[name].dtype not in part.types:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} has type {found[name].dtype}, expected one of "
                    f"{', '.join(part.types)}"
                )

    def _by_module(self) -> dict[str, dict[str, _Tensor]]:
        modules: dict[str, dict[str, _Tensor]] = {}
        for name, tensor in self._tensors.items():
            module, _, last = name.rpartition(".")
            modules.setdefault(module, {})[last] = tensor
        return modules

    @property
    def names(self) -> set[str]:
        """Names of all tensors in the files."""
        return set(self._tensors)

    def dtype_of(self, name: str) -> str:
        """Return safetensors' name of a tensor's type, such as F16, BF16 or F32."""
        return self._tensors[name].dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, or of what several stand for under its name; call `check` first for these."""
        return self._stacks[name][0].shape if name in self._stacks else self._tensors[name].shape

    def read_expert(self, name: str, expert: int) -> np.ndarray:
        """Return one expert of a tensor that holds them all: f[out, in], or f[out] of biases."""
        if name in self._stacks:
            stack, encoding = self._stacks[name]
            return encoding.decode(stack, expert)
        return self._tensors[name].read(slice(expert, expert + 1))[0].T

    def read_rows(self, names: tuple[str, ...], rows: tuple[int, int], columns: slice, out: RowBuffer) -> None:
        """Write rows [start, stop) of the named tensors, one below another, into `out`, block by block.

        Values are cast to the type of `out`. columns: to read of tensors of two axes. Quantised matrices count as the
        one that they stand for, under its name; call `check` first.
        """
        start, stop = rows
        first = 0
        for name in names:
            encoded = self._encoded.get(name)
            shape = self._tensors[name].shape if encoded is None else encoded[0].shape
            last = first + shape[0]
            low, high = max(start, first), min(stop, last)
            step = max(1, BLOCK_BYTES // (_ITEM_BYTES * math.prod(shape[1:])))
            for at in range(low, high, step):
                end = min(at + step, high)
                part, target = slice(at - first, end - first), slice(at - start, end - start)
                if encoded is None:
                    tensor = self._tensors[name]
                    out[target] = tensor.read(part) if len(shape) == 1 else tensor.read(part, columns)
                else:
                    _decode(*encoded, part, slice(*columns.indices(shape[-1])[:2]), target, out)
            first = last


def _decode(matrix: _Matrix, encoding: Encoding, rows: slice, columns: slice, target: slice, out: RowBuffer) -> None:
    """Write rows of a quantised matrix into `out`: as they are if it holds such, int8 with a scale per row or 4 bits in
    groups."""
    if isinstance(out, Int8Rows) and isinstance(encoding, Scaled):
        scales = encoding.row_scales(matrix, rows)
        if scales is not None:
            out.put(target, matrix.read(WEIGHT, rows, columns), scales)
            return
    if isinstance(out, Int4Groups) and isinstance(encoding, Packed) and encoding.bits <= 4:
        found = encoding.read(matrix, rows, columns)
        regrouped = found.regrouped(out.group)
        if regrouped is not None:
            out.put(target, *regrouped)
        else:
            out[target] = found.decoded()
        return
    out[target] = encoding.decode(matrix, rows, columns)


def _read_header(path: Path) -> Iterator[tuple[str, _Tensor]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    for name, found in header.items():
        if name != "__metadata__" and (known := text_name(name)) is not None:
            yield known, _Tensor(name, path, tuple(found["shape"]), found["dtype"], 8 + size + found["data_offsets"][0])


def _weight_files(folder: Path) -> list[Path]:
    """Return the only file, or those that the index names. Raises CheckpointError: a name leaves the folder."""
    if (folder / _SINGLE_FILE).exists():
        return [folder / _SINGLE_FILE]
    index = folder / _INDEX_FILE
    if not index.exists():
        others = sorted(path.name for path in folder.glob("*") if path.suffix in _ADVICE)
        found = f"found {others[0]}; {_ADVICE[Path(others[0]).suffix]}" if others else "found neither"
        raise CheckpointError(f"{folder}: expected {_SINGLE_FILE} or {_INDEX_FILE}, {found}")
    weight_map = read_json(index).get("weight_map")
    names = sorted({*map(str, weight_map.values())}) if isinstance(weight_map, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index}: expected a weight_map from tensor names to names of files beside it")
    return [folder / name for name in names]


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS


def first_difference(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> str:
    """Describe how the shapes of found weights differ from those that config.json asks for; "" if they do not."""
    missing = [name for name in expected if name not in found]
    extra = sorted(found.keys() - expected.keys())
    names = missing or extra
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    if missing:
        return f"{missing[0]} is missing, expected with shape {list(expected[missing[0]])}{more}"
    if extra:
        return f"{extra[0]} is not part of a model with this config.json{more}"
    for name, shape in expected.items():
        if found[name] != shape:
            return f"{name} has shape {list(found[name])}, expected {list(shape)} by config.json"
    return ""
