"""Tensors of a safetensors checkpoint: checked by their headers, read in small blocks.

Files are mapped into memory for one block at a time, so that pages once read do not stay in the process. Reading needs
two blocks of memory beside its destination.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.quantize import Int8Rows
from adaserve_jax.models.settings import read_json

BLOCK_BYTES = 8 << 20
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F16", "BF16", "F32", "F64")
_ITEM_BYTES = 8  # of the widest type
RowBuffer = np.ndarray | Int8Rows
"""Destination of a read, which takes blocks of rows. A slice is a view."""
# Buffers that old exports carry and that the decoder computes itself.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class _Tensor:
    """Location of a tensor. dtype: safetensors' name of its type."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of a checkpoint folder, in one file or many."""

    def __init__(self, folder: Path):
        """Read the headers of all files. Raises CheckpointError: a file is missing or unreadable."""
        self.folder = folder
        self._tensors: dict[str, _Tensor] = {}
        for path in _weight_files(folder):
            try:
                with safe_open(path, framework="numpy") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dict
                    self._tensors |= {
                        name: _Tensor(path, tuple(found.get_shape()), found.get_dtype())
                        for name, found in slices.items()
                    }
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; expected the checkpoint's weights in it") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: tuple[str, ...]) -> None:
        """Compare names, shapes and types with those of config.json. Raises CheckpointError: the first difference."""
        ignored = {*optional, *(name for name in self._tensors if name.endswith(_COMPUTED_SUFFIX))} - expected.keys()
        found = {name: tensor for name, tensor in self._tensors.items() if name not in ignored}
        difference = first_difference({name: tensor.shape for name, tensor in found.items()}, expected)
        if difference:
            raise CheckpointError(
                f"{self.folder}: tensor {difference}; the files and config.json do not belong together"
            )
        for name, tensor in found.items():
            if tensor.dtype not in _FLOATS:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} has type {tensor.dtype}, expected one of {', '.join(_FLOATS)}"
                )

    def dtype_of(self, name: str) -> str:
        """Return safetensors' name of a tensor's type: F16, BF16, F32 or F64."""
        return self._tensors[name].dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read_entry(self, name: str, index: int) -> np.ndarray:
        """Return one entry of a tensor's first axis, in the file's type."""
        with safe_open(self._tensors[name].path, framework="numpy") as file:
            return file.get_slice(name)[index : index + 1][0]

    def read_rows(self, names: tuple[str, ...], rows: tuple[int, int], columns: slice, out: RowBuffer) -> None:
        """Write rows [start, stop) of the named tensors, one below another, into `out`, block by block.

        Values are cast to the type of `out`. columns: to read of tensors of two axes.
        """
        start, stop = rows
        first = 0
        for name in names:
            last = first + self._tensors[name].shape[0]
            low, high = max(start, first), min(stop, last)
            if low < high:
                self._read(name, low - first, columns, out[low - start : high - start])
            first = last

    def _read(self, name: str, first: int, columns: slice, out: RowBuffer) -> None:
        tensor = self._tensors[name]
        step = max(1, BLOCK_BYTES // (_ITEM_BYTES * math.prod(tensor.shape[1:])))
        for start in range(0, len(out), step):
            stop = min(start + step, len(out))
            rows = slice(first + start, first + stop)
            with safe_open(tensor.path, framework="numpy") as file:
                found = file.get_slice(name)
                out[start:stop] = found[rows] if len(tensor.shape) == 1 else found[rows, columns]


def _weight_files(folder: Path) -> list[Path]:
    """Return the only file, or those that the index names. Raises CheckpointError: a name leaves the folder."""
    if (folder / _SINGLE_FILE).exists():
        return [folder / _SINGLE_FILE]
    index = folder / _INDEX_FILE
    if not index.exists():
        raise CheckpointError(f"{folder}: expected {_SINGLE_FILE} or {_INDEX_FILE}, found neither")
    weight_map = read_json(index).get("weight_map")
    names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index}: expected a weight_map from tensor names to names of files beside it")
    return [folder / name for name in names]


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
